"""`train`: networks of one architecture from many seeds, many at once, into a folder that can be handed on.

Seeds are trained in groups. After every few epochs a group's state is written; a run that is killed begins again at the
last state and ends with the same weights. Seeds that are finished are not trained again.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.files import only_writer, write_tensors
from intertwine.version import VERSION
from intertwine.zoo.datasets import Dataset
from intertwine.zoo.datasets import data as find_data
from intertwine.zoo.fitting import check_fits, checked_factory, fitted_options, plain_options
from intertwine.zoo.folder import Zoo
from intertwine.zoo.group import Group, Settings
from intertwine.zoo.manifest import FILE, Manifest, Plan, Record, check_same, read_manifest
from intertwine.zoo.precision import find_device, precision
from intertwine.zoo.progress import Clock, Progress, Report
from intertwine.zoo.recipe import Recipe
from intertwine.zoo.recipe import recipe as find_recipe

SELECT = ("last", "best-on-test")


def train(
    architecture: str | Callable[[], nn.Module],
    *,
    seeds: Iterable[int],
    data: str | Dataset,
    out: str | Path,
    recipe: str | Recipe | None = None,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    precision: str | None = None,
    together: int | None = None,
    save_every: int | None = None,
    score_every: int = 1,
    select: str = "last",
    data_folder: str | Path | None = None,
    report: Report = lambda progress: None,
    **changes: Any,
) -> Zoo:
    """Train one network per seed, and write them into a folder.

    Every network has its own start, data order and augmentation, which its seed alone decides: it comes out as if it
    had been trained alone, up to the order of rounding.

    Args:
        architecture: a name of `zoo.architectures()`, or a function that builds a network.
        seeds: of the networks; those the folder already holds are kept as they are.
        data: "digits", "mnist", "fashion-mnist", "cifar10" or a `Dataset`. data_folder: where its files are.
        out: the folder. recipe: "godfrey", "csiszarik", "chen", "zhou", "fast", "plain", … or a `Recipe`; without one,
            "fast" for colour images and "plain" for others. `changes` to it are such as `epochs=10` or `rate=0.05`.
        options: of the architecture; channels and classes are taken from the data.
        device: a GPU if there is one. precision: "bfloat16" on a GPU and "float32" elsewhere; "tf32", "float64".
        together: networks trained at once (32 on a GPU, 8 elsewhere).
        save_every: epochs between two states (a tenth of the training). score_every: epochs between two tests.
        select: keep the weights of the "last" epoch, or "best-on-test": of the best epoch on the test part, as some
            papers do; the accuracy is then optimistic.
        report: called with a `Progress` during the work.

    Example:
        >>> import tempfile, intertwine as it
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     zoo = it.zoo.train("mlp", seeds=range(2), data="digits", out=folder, epochs=4)
        ...     len(zoo), zoo[0](torch.zeros(1, 1, 8, 8)).shape, zoo.records[0].accuracy > 0.8
        (2, torch.Size([1, 10]), True)
    """
    checked = prepare(
        architecture, seeds=seeds, data=data, out=out, recipe=recipe, options=options, device=device,
        precision=precision, together=together, save_every=save_every, score_every=score_every, select=select,
        data_folder=data_folder, changes=changes,
    )  # fmt: skip
    return checked.run(report)


def prepare(
    architecture: str | Callable[[], nn.Module],
    *,
    seeds: Iterable[int],
    data: str | Dataset,
    out: str | Path,
    recipe: str | Recipe | None = None,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    precision: str | None = None,
    together: int | None = None,
    save_every: int | None = None,
    score_every: int = 1,
    select: str = "last",
    data_folder: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Training:
    """What `train` was asked for, read and checked; nothing is written before it runs.

    Raises:
        InputError: an unknown name, an entry of the recipe that makes no sense, data that the network cannot read.
    """
    found = find_data(data, data_folder) if isinstance(data, str) else data
    how = find_recipe(recipe or ("fast" if found.shape[0] == 3 else "plain"), **(changes or {}))
    if how.normalise == "unit":
        found = found.normalised([0] * found.shape[0], [255] * found.shape[0])
    _check_counts(together=together, save_every=save_every, score_every=score_every)
    settings = _settings(how, found, device, precision, save_every, score_every, select, Path(out))
    described, factory = _architecture(architecture, options or {}, found)
    settings = replace(settings, architecture=described)
    at_once = together or (32 if settings.precision.device.type == "cuda" else 8)
    return Training(Path(out), _plan(described, settings, found, select), factory, settings, _wanted(seeds), at_once)


@dataclass(frozen=True)
class Training:
    """Networks to be trained into a folder, so many of them together."""

    folder: Path
    plan: Plan
    factory: Callable[[], nn.Module]
    settings: Settings
    seeds: Sequence[int]
    together: int

    def run(self, report: Report) -> Zoo:
        """Train those that the folder does not hold."""
        epochs = self.settings.recipe.epochs
        with only_writer(self.folder):
            manifest = _manifest(self.folder, self.plan)
            groups = _groups(list(self.seeds), manifest, self.together)
            run = Run(self.folder, manifest, self.factory, self.settings, Clock(len(self.seeds) * epochs), report)
            run.clock.done = (len(self.seeds) - sum(map(len, groups))) * epochs
            for group in groups:
                run.train(group)
        return Zoo(self.folder, run.manifest, self.factory)


@dataclass
class Run:
    """One call of `train`: the manifest grows as groups are finished."""

    folder: Path
    manifest: Manifest
    factory: Callable[[], nn.Module]
    settings: Settings
    clock: Clock
    report: Report

    def train(self, seeds: list[int]) -> None:
        """Train a group, or the rest of it, and write its networks."""
        start = time.monotonic()
        group = Group(seeds, self.factory, self.settings)
        epochs = self.settings.recipe.epochs
        self.clock.done += group.epoch * len(seeds)
        while group.epoch < epochs:
            before, ticked = group.epoch, 0.0

            def tick(part: float, before: int = before) -> None:
                nonlocal ticked
                if time.monotonic() - self._told > 0.5 and part < 1:
                    self.clock.advance((part - ticked) * len(seeds))
                    ticked = part
                    self._tell(group, before)

            group.run_epoch(tick)
            self.clock.advance((1 - ticked) * len(seeds))
            self._tell(group, group.epoch)
        self._write(group, time.monotonic() - start)

    _told = 0.0

    def _tell(self, group: Group, epoch: int) -> None:
        self._told = time.monotonic()
        done, left = self.clock.done / self.clock.total, self.clock.left()
        epochs = self.settings.recipe.epochs
        self.report(Progress(tuple(group.seeds), epoch, epochs, done, group.mean_accuracy, left))

    def _write(self, group: Group, seconds: float) -> None:
        """Weights first, then the manifest that names them, then the state nobody needs any more."""
        records = []
        for i, seed in enumerate(group.seeds):
            name = f"seed{seed}.safetensors"
            tensors = group.weights(i)
            digest = write_tensors(self.folder / name, tensors, {"seed": str(seed)})
            records.append(self._record(group, i, name, digest, seconds))
        self.manifest = self.manifest.with_records(records)
        self.manifest.write(self.folder)
        group.forget()

    def _record(self, group: Group, i: int, name: str, digest: str, seconds: float) -> Record:
        chosen, best = group.chosen_epoch(i), group.best_epoch(i)
        history = group.history
        return Record(
            seed=group.seeds[i], file=name, sha256=digest,
            accuracy=history.accuracy_at(chosen, i), loss=history.loss_at(chosen, i), epoch=chosen,
            best_accuracy=history.accuracy_at(best, i), best_epoch=best,
            together=len(group.seeds), seconds=round((group.earlier_seconds + seconds) / len(group.seeds), 3),
            device=_device_name(self.settings.precision.device),
            finished=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions(), history=history.of(i),
        )  # fmt: skip


def _settings(
    recipe: Recipe, data: Dataset, device: str | None, name: str | None, save_every: int | None, score_every: int,
    select: str, folder: Path,
) -> Settings:  # fmt: skip
    if select not in SELECT:
        raise InputError(f"select={select!r} was asked for; it is one of {', '.join(SELECT)}.")
    how = precision(name, find_device(device))
    every = save_every or max(1, recipe.epochs // 10)
    return Settings(recipe, data, how, every, score_every, select, folder / "training")


def _check_counts(**counts: int | None) -> None:
    for name, number in counts.items():
        if number is not None and number < 1:
            raise InputError(f"{name}={number} was asked for; give 1 or more.")


def _architecture(
    which: str | Callable[[], nn.Module], options: Mapping[str, Any], data: Dataset
) -> tuple[dict[str, Any], Callable[[], nn.Module]]:
    if isinstance(which, str):
        chosen = fitted_options(which, options, data)
        return {"name": which, "options": chosen}, checked_factory(which, chosen, data)
    if options:
        raise InputError("Options were given beside a function that builds the network; let the function use them.")
    name, chosen = _described(which)
    check_fits(which, name, data)
    return {"name": name, "options": chosen, "own": True}, which


def _described(which: Callable[..., nn.Module]) -> tuple[str, dict[str, Any]]:
    """A name for a user's own function that is the same in every process, and what `partial` gives to it."""
    if isinstance(which, partial):
        name, chosen = _described(which.func)
        return name, chosen | plain_options({str(i): value for i, value in enumerate(which.args)} | which.keywords)
    named = which if hasattr(which, "__qualname__") else type(which)
    return f"{named.__module__}.{named.__qualname__}", {}


def _plan(architecture: dict[str, Any], settings: Settings, data: Dataset, select: str) -> Plan:
    seen = {"mean": list(data.mean), "std": list(data.std), "classes": list(data.classes), "shape": list(data.shape)}
    about = {"name": data.name, "checksum": data.checksum, **seen}
    return Plan(architecture, settings.recipe.to_dict(), about, settings.precision.name, select)


def _manifest(folder: Path, plan: Plan) -> Manifest:
    """The folder's manifest, which must be of the same plan; a new one is written at once."""
    if (folder / FILE).exists():
        manifest = read_manifest(folder)
        check_same(folder, manifest.plan, plan)
        return manifest
    manifest = Manifest(plan)
    manifest.write(folder)
    return manifest


def _wanted(seeds: Iterable[int]) -> list[int]:
    try:
        wanted = [index(seed) for seed in seeds]
    except TypeError as error:
        raise InputError(f"Seeds are whole numbers from 0, each given once; found something else ({error}).") from error
    if not wanted:
        raise InputError("A zoo of no seeds was asked for. Give at least one, such as seeds=range(8).")
    if len(set(wanted)) != len(wanted) or min(wanted) < 0 or max(wanted) >= 2**63:
        raise InputError(f"Seeds are whole numbers from 0 to below 2^63, each given once; found {wanted}.")
    return wanted


def _groups(wanted: list[int], manifest: Manifest, size: int) -> list[list[int]]:
    """Seeds trained together; finished ones keep their place, so that a killed run is cut as it was before."""
    done = {record.seed for record in manifest.records}
    cut = [wanted[i : i + size] for i in range(0, len(wanted), size)]
    return [left for group in cut if (left := [seed for seed in group if seed not in done])]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions() -> dict[str, str]:
    """What the weights were made with."""
    return {
        "python": platform.python_version(), "intertwine": VERSION, "torch": str(torch.__version__),
        "numpy": numpy.__version__,
    }  # fmt: skip
