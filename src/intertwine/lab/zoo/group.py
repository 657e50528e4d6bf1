"""Seeds that are trained together: their history, their checkpoint on disk, and their shared start (spawning)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

# ----------------------------------------------------------------------------------------------------
# History: what was measured of a group of networks after every epoch.


EpochValues = list[float]
#: What is written for a loss that is no number any more: JSON has none for it.
DIVERGED = 1e30


@dataclass
class History:
    """Per epoch one number per network; None where no test was taken."""

    train_loss: list[EpochValues] = field(default_factory=list)
    accuracy: list[EpochValues | None] = field(default_factory=list)
    loss: list[EpochValues | None] = field(default_factory=list)

    def add(self, train_loss: Tensor, score: StackScore | None) -> None:
        """One more epoch."""
        self.train_loss.append([round(x, 6) for x in train_loss.nan_to_num(DIVERGED, DIVERGED).tolist()])
        self.accuracy.append(None if score is None else score.accuracy.tolist())
        self.loss.append(None if score is None else score.loss.nan_to_num(DIVERGED, DIVERGED).tolist())

    def accuracy_at(self, epoch: int, i: int) -> float:
        """Test accuracy of a network after an epoch, counted from 1."""
        row = self.accuracy[epoch - 1]
        return float("nan") if row is None else row[i]

    def loss_at(self, epoch: int, i: int) -> float:
        """Test loss of a network after an epoch, counted from 1."""
        row = self.loss[epoch - 1]
        return float("nan") if row is None else row[i]

    def best_epoch(self, i: int) -> int:
        """The first epoch, counted from 1, after which a network did best on the test part."""
        rows = [(row[i], -epoch) for epoch, row in enumerate(self.accuracy, 1) if row is not None]
        return -max(rows)[1]

    def of(self, i: int) -> dict[str, list[float | None]]:
        """The history of one network."""
        return {
            "train_loss": [row[i] for row in self.train_loss],
            "accuracy": [None if row is None else round(row[i], 6) for row in self.accuracy],
        }

    def to_json(self) -> str:
        """As text."""
        return json.dumps({"train_loss": self.train_loss, "accuracy": self.accuracy, "loss": self.loss})

    @classmethod
    def from_json(cls, text: str) -> History:
        """From `to_json`."""
        return cls(**json.loads(text))


# ----------------------------------------------------------------------------------------------------
# Group: seeds that are trained together, with their state on disk.


@dataclass(frozen=True)
class GroupSettings:
    """What all groups of a run share. `states` is the folder of unfinished groups, `architecture` what they are of."""

    recipe: Recipe
    data: Dataset
    precision: Precision
    save_every: int
    score_every: int
    select: str
    states: Path
    architecture: Mapping[str, Any] = field(default_factory=dict)


class TrainingGroup:
    """Networks in training: taken up where their state on disk says, or begun.

    With `recipe.spawn`, the first epochs are those of one network alone, the parent, and all others are copies of it.
    """

    def __init__(self, seeds: list[int], factory: Callable[[], nn.Module], settings: GroupSettings) -> None:
        self.seeds, self.settings = seeds, settings
        self.history, self.earlier_seconds, self._start = History(), 0.0, time.monotonic()
        models = [initial(factory, settings.recipe.spawn_seed if settings.recipe.spawn else s) for s in seeds]
        self.trainer = StackTrainer(models, seeds, settings.data, settings.recipe, settings.precision)
        self._kept = models[0].state_dict().keys()  # a stack also holds buffers that no file does
        self._best: dict[str, Tensor] = {}
        self._path = settings.states / f"{_digest(seeds, settings)}.safetensors"
        if self._path.is_file():
            self._take_up(self._path)
        elif settings.recipe.spawn:
            self._spawn(factory)

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return self.trainer.epoch

    @property
    def mean_accuracy(self) -> float | None:
        """On the test part, the last time it was taken."""
        rows = [row for row in self.history.accuracy if row is not None]
        return sum(rows[-1]) / len(rows[-1]) if rows else None

    def run_epoch(self, tick: Callable[[float], None]) -> None:
        """Train one epoch, test, and write the state when it is time."""
        loss = self.trainer.run_epoch(tick)
        last = self.epoch == self.settings.recipe.epochs
        score = self.trainer.score() if last or self.epoch % self.settings.score_every == 0 else None
        self.history.add(loss, score)
        if score is not None and self.settings.select == "best-on-test":
            self._keep_best()
        if last or self.epoch % self.settings.save_every == 0:
            self.save()

    def chosen_epoch(self, i: int) -> int:
        """The epoch whose weights are kept."""
        return self.best_epoch(i) if self.settings.select == "best-on-test" else self.epoch

    def best_epoch(self, i: int) -> int:
        """The best epoch on the test part."""
        return self.history.best_epoch(i)

    def weights(self, i: int) -> dict[str, Tensor]:
        """The state dict of one network that is kept."""
        state = {n: t[i].cpu().clone() for n, t in self._best.items()} if self._best else self.trainer.stack.state(i)
        return {name: t for name, t in state.items() if name in self._kept}

    def _keep_best(self) -> None:
        tensors = self.trainer.stack.tensors
        if not self._best:
            self._best = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
        for i in range(len(self.seeds)):
            if self.history.best_epoch(i) == self.epoch:
                for name, t in tensors.items():
                    self._best[name][i] = t.detach()[i]

    # -- the state on disk ---------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write everything the rest of the training depends on."""
        seconds = self.earlier_seconds + time.monotonic() - self._start
        about = {"epoch": str(self.epoch), "history": self.history.to_json(), "seconds": str(seconds)}
        best = {f"best:{name}": t for name, t in self._best.items()}
        write_tensors(self._path, self.trainer.state() | best, about)

    def forget(self) -> None:
        """The networks are in the zoo: the state is not needed any more."""
        self._path.unlink(missing_ok=True)
        if self._path.parent.is_dir() and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()

    def _take_up(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(
                f"The state of the seeds {self.seeds} in training, {path}, cannot be read ({error}). "
                "Delete it, and their training begins anew."
            ) from error
        self.trainer.restore(tensors, int(about["epoch"]))
        self.history, self.earlier_seconds = History.from_json(about["history"]), float(about["seconds"])
        device = self.settings.precision.device
        self._best = {n.removeprefix("best:"): t.to(device) for n, t in tensors.items() if n.startswith("best:")}

    def _spawn(self, factory: Callable[[], nn.Module]) -> None:
        """Train the parent for the shared epochs, and make every network a copy of it, optimizer and all."""
        recipe, count = self.settings.recipe, len(self.seeds)
        parent = [recipe.spawn_seed]
        trainer = StackTrainer(
            [initial(factory, parent[0])], parent, self.settings.data, recipe, self.settings.precision
        )
        for _ in range(recipe.spawn):
            loss = trainer.run_epoch()
            score = trainer.score()
            wide = type(score)(score.accuracy.expand(count), score.loss.expand(count))
            self.history.add(loss.expand(count), wide)
            if self.settings.select == "best-on-test" and self.history.best_epoch(0) == trainer.epoch:
                tensors = trainer.stack.tensors
                self._best = {n: t.detach().expand(count, *t.shape[1:]).clone() for n, t in tensors.items()}
        state = {n: t.expand(count, *t.shape[1:]) if t.dim() else t for n, t in trainer.state().items()}
        self.trainer.restore(state, recipe.spawn)


def initial(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network as it is before training; its seed alone decides, not what was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def _digest(seeds: list[int], settings: GroupSettings) -> str:
    """A name for what a state belongs to: another training does not take it up."""
    data = [settings.data.checksum, settings.data.mean, settings.data.std]
    made = [seeds, settings.architecture, settings.recipe.to_dict(), data, settings.precision.name, settings.select]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]
