"""`train`: networks of one architecture from many seeds into a folder; checks of architecture and data, and progress."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from math import prod
from operator import index
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.files import folder_lock, write_tensors
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.loading import data as find_data
from intertwine.lab.zoo.folder import Zoo
from intertwine.lab.zoo.group import GroupSettings, TrainingGroup
from intertwine.lab.zoo.manifest import MANIFEST_FILE, Manifest, Record, TrainingPlan, check_same, read_manifest
from intertwine.lab.zoo.networks.registry import architecture, build
from intertwine.lab.zoo.precision import find_device, precision
from intertwine.lab.zoo.recipe import Recipe
from intertwine.lab.zoo.recipe import recipe as find_recipe
from intertwine.version import VERSION

# ----------------------------------------------------------------------------------------------------
# Progress: what a training tells whoever watches it. Only the command line draws a bar from it.


@dataclass(frozen=True)
class TrainingProgress:
    """Where a training stands.

    Attributes:
        seeds: the networks in training. epoch: epochs they have finished, of `epochs`.
        done: the fraction of the whole work that is finished, from 0 to 1.
        accuracy: mean test accuracy of these networks, where it was taken. left: seconds, as far as can be told.
    """

    seeds: tuple[int, ...]
    epoch: int
    epochs: int
    done: float
    accuracy: float | None
    left: float | None


ProgressReport = Callable[[TrainingProgress], None]


@dataclass
class TrainingClock:
    """Counts the work of a run in epochs of networks, and estimates the time left from what this run has done."""

    total: int | float
    done: int | float = 0.0  # with what earlier runs did
    start: float = field(default_factory=time.monotonic)
    own: float = 0.0  # what this run did

    def advance(self, amount: float) -> None:
        """So many epochs of networks are done."""
        self.done += amount
        self.own += amount

    def left(self) -> float | None:
        """Seconds until the end, if the rest goes as fast."""
        if not self.own:
            return None
        return (time.monotonic() - self.start) / self.own * (self.total - self.done)


# ----------------------------------------------------------------------------------------------------
# Fitting an architecture to a data set: the options that its images decide, and a check that it takes them.


HIDDEN = 512  # units of a perceptron whose widths nobody chose


def fitted_options(name: str, options: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
    """The options of a network for these images: channels, classes and size, unless they were given.

    >>> import numpy as np
    >>> pair = np.zeros((5, 8, 8, 1), np.uint8), np.zeros(5, np.int64)
    >>> blank = Dataset.of("blank", pair, pair, [0], [255], ["nothing", "something"])
    >>> fitted_options("mlp", {}, blank)
    {'widths': [64, 512, 2]}
    """
    entry = architecture(name)
    decided: dict[str, Any] = {}
    if "widths" in entry.options and "in_channels" not in entry.options:
        decided["widths"] = [prod(data.shape), HIDDEN, len(data.classes)]
    if data.shape[0] != entry.input_shape[0]:
        decided["in_channels"] = data.shape[0]
    if len(data.classes) != 10:
        decided["classes"] = len(data.classes)
    if data.shape[1:] != entry.input_shape[1:] and data.shape[1] == data.shape[2]:
        decided["side"] = data.shape[1]
    return {k: v for k, v in decided.items() if k in entry.options} | plain_options(options)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they are written into a manifest; an activation is given by its name there."""
    plain: dict[str, Any] = {}
    for key, value in options.items():
        try:
            plain[key] = json.loads(json.dumps(value))  # as it will be read again: tuples are lists
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The option {key} was given as {value!r}, which cannot be written into a manifest. Give a name, "
                "numbers or lists of them, or pass a function that builds the whole network instead of an "
                "architecture's name."
            ) from error
    return plain


def checked_factory(name: str, options: Mapping[str, Any], data: Dataset) -> Callable[[], nn.Module]:
    """A function that builds the network, once it was seen to take the images of the data set."""
    factory = lambda: build(name, **options)  # noqa: E731
    check_fits(factory, name, data)
    return factory


def check_fits(factory: Callable[[], nn.Module], name: str, data: Dataset) -> None:
    """Run two images through a network: it must answer with one number per class."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = factory().eval()
        inputs = data.inputs(data.images[:2].cpu())
        size = "×".join(map(str, data.shape))
        try:
            logits = model(inputs)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise InputError(
                f"{name} cannot take the images of {data.name} ({size}): its forward raised {type(error).__name__}: "
                f"{first}. Give it options that fit, or choose another architecture or data set."
            ) from error
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, len(data.classes)):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(
            f"{name} was asked to tell the {len(data.classes)} classes of {data.name} apart, but answers two images "
            f"with {found} instead of (2, {len(data.classes)}). Give it the number of classes, or another data set."
        )


# ----------------------------------------------------------------------------------------------------
# `train`: networks of one architecture from many seeds, many at once, into a folder that can be handed on.
#
# Seeds are trained in groups. After every few epochs a group's state is written; a run that is killed begins again at the
# last state and ends with the same weights. Seeds that are finished are not trained again.


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
    report: ProgressReport = lambda progress: None,
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
        report: called with a `TrainingProgress` during the work.

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
    plan: TrainingPlan
    factory: Callable[[], nn.Module]
    settings: GroupSettings
    seeds: Sequence[int]
    together: int

    def run(self, report: ProgressReport) -> Zoo:
        """Train those that the folder does not hold."""
        epochs = self.settings.recipe.epochs
        with folder_lock(self.folder):
            manifest = _manifest(self.folder, self.plan)
            groups = _groups(list(self.seeds), manifest, self.together)
            run = TrainingRun(
                self.folder, manifest, self.factory, self.settings, TrainingClock(len(self.seeds) * epochs), report
            )
            run.clock.done = (len(self.seeds) - sum(map(len, groups))) * epochs
            for group in groups:
                run.train(group)
        return Zoo(self.folder, run.manifest, self.factory)


@dataclass
class TrainingRun:
    """One call of `train`: the manifest grows as groups are finished."""

    folder: Path
    manifest: Manifest
    factory: Callable[[], nn.Module]
    settings: GroupSettings
    clock: TrainingClock
    report: ProgressReport

    def train(self, seeds: list[int]) -> None:
        """Train a group, or the rest of it, and write its networks."""
        start = time.monotonic()
        group = TrainingGroup(seeds, self.factory, self.settings)
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

    def _tell(self, group: TrainingGroup, epoch: int) -> None:
        self._told = time.monotonic()
        done, left = self.clock.done / self.clock.total, self.clock.left()
        epochs = self.settings.recipe.epochs
        self.report(TrainingProgress(tuple(group.seeds), epoch, epochs, done, group.mean_accuracy, left))

    def _write(self, group: TrainingGroup, seconds: float) -> None:
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

    def _record(self, group: TrainingGroup, i: int, name: str, digest: str, seconds: float) -> Record:
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
) -> GroupSettings:  # fmt: skip
    if select not in SELECT:
        raise InputError(f"select={select!r} was asked for; it is one of {', '.join(SELECT)}.")
    how = precision(name, find_device(device))
    every = save_every or max(1, recipe.epochs // 10)
    return GroupSettings(recipe, data, how, every, score_every, select, folder / "training")


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


def _plan(architecture: dict[str, Any], settings: GroupSettings, data: Dataset, select: str) -> TrainingPlan:
    seen = {"mean": list(data.mean), "std": list(data.std), "classes": list(data.classes), "shape": list(data.shape)}
    about = {"name": data.name, "checksum": data.checksum, **seen}
    return TrainingPlan(architecture, settings.recipe.to_dict(), about, settings.precision.name, select)


def _manifest(folder: Path, plan: TrainingPlan) -> Manifest:
    """The folder's manifest, which must be of the same plan; a new one is written at once."""
    if (folder / MANIFEST_FILE).exists():
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
