"""Seeds that are trained together: their history, their checkpoint on disk, and shared first epochs (spawning)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.files import write_tensors
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.precision import Precision
from intertwine.lab.zoo.recipe import Recipe
from intertwine.lab.zoo.trainer import StackScore, StackTrainer

EpochValues = list[float]
#: Stands for NaN and infinity in losses, which JSON cannot hold.
DIVERGED = 1e30


@dataclass
class History:
    """Per epoch one number per network; None without a test."""

    train_loss: list[EpochValues] = field(default_factory=list)
    accuracy: list[EpochValues | None] = field(default_factory=list)
    loss: list[EpochValues | None] = field(default_factory=list)

    def add(self, train_loss: Tensor, score: StackScore | None) -> None:
        """One more epoch."""
        self.train_loss.append([round(x, 6) for x in train_loss.nan_to_num(DIVERGED, DIVERGED).tolist()])
        self.accuracy.append(None if score is None else score.accuracy.tolist())
        self.loss.append(None if score is None else score.loss.nan_to_num(DIVERGED, DIVERGED).tolist())

    def test_at(self, epoch: int, i: int) -> tuple[float, float]:
        """Test accuracy and loss of a network after an epoch, counted from 1; NaN without a test."""
        accuracy, loss = self.accuracy[epoch - 1], self.loss[epoch - 1]
        return float("nan") if accuracy is None else accuracy[i], float("nan") if loss is None else loss[i]

    def best_epoch(self, i: int) -> int:
        """The first epoch, counted from 1, with the best test accuracy of a network."""
        rows = [(row[i], -epoch) for epoch, row in enumerate(self.accuracy, 1) if row is not None]
        return -max(rows)[1]

    def of(self, i: int) -> dict[str, list[float | None]]:
        """The history of one network."""
        return {
            "train_loss": [row[i] for row in self.train_loss],
            "accuracy": [None if row is None else round(row[i], 6) for row in self.accuracy],
        }


@dataclass(frozen=True)
class GroupSettings:
    """What all groups of a run share; `states` is the folder of unfinished groups."""

    recipe: Recipe
    data: Dataset
    precision: Precision
    save_every: int
    score_every: int
    select: str
    states: Path
    architecture: Mapping[str, Any] = field(default_factory=dict)


class TrainingGroup:
    """Networks in training, resumed from their state on disk if there is one.

    With `recipe.spawn`, the first epochs train a single network, the parent, and all networks begin as copies of it.
    """

    def __init__(self, seeds: list[int], factory: Callable[[], nn.Module], settings: GroupSettings) -> None:
        self.seeds, self.settings = seeds, settings
        self.history, self.earlier_seconds, self._start = History(), 0.0, time.monotonic()
        models = [initial(factory, settings.recipe.spawn_seed if settings.recipe.spawn else s) for s in seeds]
        self.trainer = StackTrainer(models, seeds, settings.data, settings.recipe, settings.precision)
        self._saved = models[0].state_dict().keys()  # a stack also holds non-persistent buffers
        self._best: dict[str, Tensor] = {}
        self._path = settings.states / f"{_digest(seeds, settings)}.safetensors"
        if self._path.is_file():
            self._resume()
        elif settings.recipe.spawn:
            self._spawn(factory)

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self.trainer.epoch

    @property
    def mean_accuracy(self) -> float | None:
        """Of the last test."""
        rows = [row for row in self.history.accuracy if row is not None]
        return sum(rows[-1]) / len(rows[-1]) if rows else None

    def run_epoch(self, progress: Callable[[float], None]) -> None:
        """Train one epoch, then test and save if they are due."""
        loss = self.trainer.run_epoch(progress)
        last = self.epoch == self.settings.recipe.epochs
        score = self.trainer.score() if last or self.epoch % self.settings.score_every == 0 else None
        self.history.add(loss, score)
        if score is not None and self.settings.select == "best-on-test":
            self._store_best()
        if last or self.epoch % self.settings.save_every == 0:
            self.save()

    def chosen_epoch(self, i: int) -> int:
        """The epoch whose weights are written."""
        return self.history.best_epoch(i) if self.settings.select == "best-on-test" else self.epoch

    def weights(self, i: int) -> dict[str, Tensor]:
        """The state dict of one network in its chosen epoch."""
        state = {n: t[i].cpu().clone() for n, t in self._best.items()} if self._best else self.trainer.stack.state(i)
        return {name: t for name, t in state.items() if name in self._saved}

    def _store_best(self) -> None:
        tensors = self.trainer.stack.tensors
        if not self._best:
            self._best = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
        for i in range(len(self.seeds)):
            if self.history.best_epoch(i) == self.epoch:
                for name, t in tensors.items():
                    self._best[name][i] = t.detach()[i]

    # -- the state on disk ---------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write everything that the rest of the training depends on."""
        seconds = self.earlier_seconds + time.monotonic() - self._start
        history = json.dumps(asdict(self.history))
        about = {"epoch": str(self.epoch), "history": history, "seconds": str(seconds)}
        best = {f"best:{name}": t for name, t in self._best.items()}
        write_tensors(self._path, self.trainer.state() | best, about)

    def delete_state(self) -> None:
        """Delete the state on disk, once the networks are in the zoo."""
        self._path.unlink(missing_ok=True)
        if self._path.parent.is_dir() and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()

    def _resume(self) -> None:
        try:
            with safe_open(self._path, "pt") as file:
                tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(
                f"The training state of the seeds {self.seeds} in {self._path} cannot be read ({error}). Delete it to "
                "train them from the start."
            ) from error
        self.trainer.restore(tensors, int(about["epoch"]))
        self.history, self.earlier_seconds = History(**json.loads(about["history"])), float(about["seconds"])
        device = self.settings.precision.device
        self._best = {n.removeprefix("best:"): t.to(device) for n, t in tensors.items() if n.startswith("best:")}

    def _spawn(self, factory: Callable[[], nn.Module]) -> None:
        """Train the parent for the shared epochs, and copy its weights and optimizer state to every network."""
        recipe, count = self.settings.recipe, len(self.seeds)
        parent = initial(factory, recipe.spawn_seed)
        trainer = StackTrainer([parent], [recipe.spawn_seed], self.settings.data, recipe, self.settings.precision)
        for _ in range(recipe.spawn):
            loss = trainer.run_epoch()
            score = trainer.score()
            self.history.add(loss.expand(count), StackScore(score.accuracy.expand(count), score.loss.expand(count)))
            if self.settings.select == "best-on-test" and self.history.best_epoch(0) == trainer.epoch:
                tensors = trainer.stack.tensors
                self._best = {n: t.detach().expand(count, *t.shape[1:]).clone() for n, t in tensors.items()}
        state = {n: t.expand(count, *t.shape[1:]) if t.dim() else t for n, t in trainer.state().items()}
        self.trainer.restore(state, recipe.spawn)


def initial(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network with the initial weights of a seed; torch's global generator is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def _digest(seeds: list[int], settings: GroupSettings) -> str:
    """A file name for the state that identifies the training, so that no other training resumes it."""
    data = [settings.data.checksum, settings.data.mean, settings.data.std]
    parts = [seeds, settings.architecture, settings.recipe.to_dict(), data, settings.precision.name, settings.select]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
