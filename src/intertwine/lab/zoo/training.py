"""`train`: networks of one architecture from many seeds, trained many at once, into a folder.

Seeds are trained in groups. A group writes its state every few epochs; a run that was killed resumes at the last state
and ends with the same weights. Finished seeds are not trained again.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import prod
from operator import index
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from intertwine.errors import InputError, unknown_name
from intertwine.files import folder_lock, write_tensors
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.loading import data as find_data
from intertwine.lab.zoo.folder import Zoo
from intertwine.lab.zoo.group import GroupSettings, TrainingGroup
from intertwine.lab.zoo.manifest import MANIFEST_FILE, Manifest, Record, TrainingPlan, check_same, read_manifest
from intertwine.lab.zoo.networks.registry import architecture, build
from intertwine.lab.zoo.precision import find_device
from intertwine.lab.zoo.precision import precision as find_precision
from intertwine.lab.zoo.recipe import Recipe
from intertwine.lab.zoo.recipe import recipe as find_recipe
from intertwine.version import VERSION

HIDDEN = 512  # default width of the hidden layer of a perceptron
SELECT = ("last", "best-on-test")


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training.

    Attributes:
        seeds: the networks in training. epoch: number of their finished epochs, of `epochs`.
        done: the finished share of the whole work, from 0 to 1.
        accuracy: mean test accuracy of these networks at their last test. left: estimated seconds to the end.
    """

    seeds: tuple[int, ...]
    epoch: int
    epochs: int
    done: float
    accuracy: float | None
    left: float | None


ProgressCallback = Callable[[TrainingProgress], None]


def train(
    architecture: str | Callable[[], nn.Module], *, seeds: Iterable[int], data: str | Dataset, out: str | Path,
    recipe: str | Recipe | None = None, options: Mapping[str, Any] | None = None, device: str | None = None,
    precision: str | None = None, together: int | None = None, save_every: int | None = None, score_every: int = 1,
    select: str = "last", data_folder: str | Path | None = None,
    progress: ProgressCallback = lambda progress: None, **changes: Any,
) -> Zoo:  # fmt: skip
    """Train one network per seed and write them into a folder.

    The seed alone decides the initial weights, data order and augmentation of a network: up to rounding, it comes out
    as if it had been trained alone.

    Args:
        architecture: a name of `zoo.architectures()`, or a function that builds a network.
        seeds: of the networks; those that the folder already holds are not trained again.
        data: "digits", "mnist", "fashion-mnist", "cifar10" or a `Dataset`. data_folder: of its files.
        out: the folder. recipe: "godfrey", "csiszarik", "chen", "zhou", "fast", "plain", … or a `Recipe`; by default
            "fast" for colour images and "plain" for others. changes: of its entries, such as `epochs=10`.
        options: of the architecture; channels and classes follow from the data.
        device: a GPU if there is one. precision: "bfloat16" on a GPU and "float32" elsewhere; "tf32", "float64".
        together: number of networks trained at once (32 on a GPU, 8 elsewhere).
        save_every: epochs between two states (a tenth of the training). score_every: epochs between two tests.
        select: store the weights of the "last" epoch, or "best-on-test": of the epoch with the best test accuracy, as
            some papers do; that accuracy is optimistic.
        progress: called with a `TrainingProgress` during the training.

    Example:
        >>> import tempfile, intertwine as it
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     zoo = it.zoo.train("mlp", seeds=range(2), data="digits", out=folder, epochs=4)
        ...     len(zoo), zoo[0](torch.zeros(1, 1, 8, 8)).shape, zoo.records[0].accuracy > 0.8
        (2, torch.Size([1, 10]), True)
    """
    return prepare(
        architecture, seeds=seeds, data=data, out=out, recipe=recipe, options=options, device=device,
        precision=precision, together=together, save_every=save_every, score_every=score_every, select=select,
        data_folder=data_folder, changes=changes,
    ).run(progress)  # fmt: skip


def prepare(
    architecture: str | Callable[[], nn.Module], *, seeds: Iterable[int], data: str | Dataset, out: str | Path,
    recipe: str | Recipe | None = None, options: Mapping[str, Any] | None = None, device: str | None = None,
    precision: str | None = None, together: int | None = None, save_every: int | None = None, score_every: int = 1,
    select: str = "last", data_folder: str | Path | None = None, changes: Mapping[str, Any] | None = None,
) -> Training:  # fmt: skip
    """Check the arguments of `train` before anything is written.

    Raises:
        InputError: an unknown name, an invalid entry of the recipe, or data that the network cannot read.
    """
    found = find_data(data, data_folder) if isinstance(data, str) else data
    chosen = find_recipe(recipe or ("fast" if found.shape[0] == 3 else "plain"), **(changes or {}))
    if chosen.normalise == "unit":
        found = found.normalised([0] * found.shape[0], [255] * found.shape[0])
    for name, number in (("together", together), ("save_every", save_every), ("score_every", score_every)):
        if number is not None and number < 1:
            raise InputError(f"{name} must be at least 1, but is {number}.")
    if select not in SELECT:
        raise InputError(unknown_name("value of select", select, SELECT))
    numeric = find_precision(precision, find_device(device))
    if isinstance(architecture, str):
        fitted = fitted_options(architecture, options or {}, found)
        described: dict[str, Any] = {"name": architecture, "options": fitted}
        factory: Callable[[], nn.Module] = partial(build, architecture, **fitted)
    elif options:
        raise InputError(
            "options apply to a named architecture only. Set them in the function that builds the network."
        )
    else:
        name, own = _described(architecture)
        described, factory = {"name": name, "options": own, "own": True}, architecture
    check_fits(factory, str(described["name"]), found)
    settings = GroupSettings(
        chosen, found, numeric, save_every or max(1, chosen.epochs // 10), score_every, select, Path(out) / "training",
        described,
    )  # fmt: skip
    about = {
        "name": found.name, "checksum": found.checksum, "mean": list(found.mean), "std": list(found.std),
        "classes": list(found.classes), "shape": list(found.shape),
    }  # fmt: skip
    plan = TrainingPlan(described, chosen.to_dict(), about, numeric.name, select)
    at_once = together or (32 if numeric.device.type == "cuda" else 8)
    return Training(Path(out), plan, factory, settings, _checked_seeds(seeds), at_once)


# -- Fitting an architecture to a data set -----------------------------------------------------------------------------


def fitted_options(name: str, options: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
    """The options of a network for a data set: its channels, classes and image size, unless they are given.

    >>> import numpy as np
    >>> pair = np.zeros((5, 8, 8, 1), np.uint8), np.zeros(5, np.int64)
    >>> blank = Dataset.of("blank", pair, pair, [0], [255], ["nothing", "something"])
    >>> fitted_options("mlp", {}, blank)
    {'widths': [64, 512, 2]}
    """
    entry = architecture(name)
    fitted: dict[str, Any] = {}
    if "widths" in entry.options and "in_channels" not in entry.options:
        fitted["widths"] = [prod(data.shape), HIDDEN, len(data.classes)]
    if data.shape[0] != entry.input_shape[0]:
        fitted["in_channels"] = data.shape[0]
    if len(data.classes) != 10:
        fitted["classes"] = len(data.classes)
    if data.shape[1:] != entry.input_shape[1:] and data.shape[1] == data.shape[2]:
        fitted["side"] = data.shape[1]
    return {k: v for k, v in fitted.items() if k in entry.options} | _plain_options(options)


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they are stored in a manifest."""
    plain: dict[str, Any] = {}
    for key, value in options.items():
        try:
            plain[key] = json.loads(json.dumps(value))  # as it will be read: tuples become lists
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The option {key}={value!r} cannot be written into a manifest. Give a name, numbers or lists of them, "
                "or pass a function that builds the whole network instead of an architecture's name."
            ) from error
    return plain


def check_fits(factory: Callable[[], nn.Module], name: str, data: Dataset) -> None:
    """Run two images through a network, which must return one number per class."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = factory().eval()
        inputs = data.inputs(data.images[:2].cpu())
        size = "×".join(map(str, data.shape))
        try:
            logits = model(inputs)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise InputError(
                f"{name} cannot read the images of {data.name} ({size}): its forward raised {type(error).__name__}: "
                f"{first}. Give it options that fit, or choose another architecture or data set."
            ) from error
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, len(data.classes)):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(
            f"{name} does not fit the {len(data.classes)} classes of {data.name}: for two images it returns {found} "
            f"instead of (2, {len(data.classes)}). Give it the number of classes, or another data set."
        )


def _described(function: Callable[..., nn.Module]) -> tuple[str, dict[str, Any]]:
    """The name of a user's function, the same in every process, and the arguments of a `partial`."""
    if isinstance(function, partial):
        name, options = _described(function.func)
        return name, options | _plain_options({str(i): v for i, v in enumerate(function.args)} | function.keywords)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}", {}


def _checked_seeds(seeds: Iterable[int]) -> list[int]:
    try:
        checked = [index(seed) for seed in seeds]
    except TypeError as error:
        raise InputError(f"Seeds must be integers ({error}).") from error
    if not checked:
        raise InputError("There are no seeds. Give at least one, such as seeds=range(8).")
    if len(set(checked)) != len(checked) or min(checked) < 0 or max(checked) >= 2**63:
        raise InputError(f"Seeds must be different integers from 0 to below 2^63, but are {checked}.")
    return checked


# -- Training groups of seeds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """Networks to be trained into a folder, `together` of them at once."""

    folder: Path
    plan: TrainingPlan
    factory: Callable[[], nn.Module]
    settings: GroupSettings
    seeds: Sequence[int]
    together: int

    def run(self, progress: ProgressCallback) -> Zoo:
        """Train the networks that the folder does not hold yet."""
        epochs = self.settings.recipe.epochs
        with folder_lock(self.folder):
            if (self.folder / MANIFEST_FILE).exists():
                manifest = read_manifest(self.folder)
                check_same(self.folder, manifest.plan, self.plan)
            else:
                manifest = Manifest(self.plan)
                manifest.write(self.folder)
            finished = {record.seed for record in manifest.records}
            # Groups are formed before finished seeds are left out, so that a resumed run finds the same groups.
            groups = [self.seeds[i : i + self.together] for i in range(0, len(self.seeds), self.together)]
            groups = [rest for group in groups if (rest := [seed for seed in group if seed not in finished])]
            clock = TrainingClock(len(self.seeds) * epochs, (len(self.seeds) - sum(map(len, groups))) * epochs)
            run = TrainingRun(self.folder, manifest, self.factory, self.settings, clock, progress)
            for group in groups:
                run.train(group)
        return Zoo(self.folder, run.manifest, self.factory)


@dataclass
class TrainingClock:
    """Counts the work of a run, in epochs × networks, and estimates the time left from the speed of this run."""

    total: int | float
    done: int | float = 0.0  # including the work of earlier runs
    start: float = field(default_factory=time.monotonic)
    own: float = 0.0  # the work of this run

    def advance(self, amount: float) -> None:
        """Add work of this run."""
        self.done += amount
        self.own += amount

    def left(self) -> float | None:
        """Estimated seconds to the end."""
        return (time.monotonic() - self.start) / self.own * (self.total - self.done) if self.own else None


@dataclass
class TrainingRun:
    """One call of `train`; its manifest grows with every finished group."""

    folder: Path
    manifest: Manifest
    factory: Callable[[], nn.Module]
    settings: GroupSettings
    clock: TrainingClock
    progress: ProgressCallback
    reported: float = 0.0  # time of the last report

    def train(self, seeds: list[int]) -> None:
        """Train a group, or the rest of it, and write its networks."""
        start = time.monotonic()
        group = TrainingGroup(seeds, self.factory, self.settings)
        self.clock.done += group.epoch * len(seeds)
        while group.epoch < self.settings.recipe.epochs:
            epoch, counted = group.epoch, 0.0

            def progress(share: float, epoch: int = epoch) -> None:
                nonlocal counted
                if time.monotonic() - self.reported > 0.5 and share < 1:
                    self.clock.advance((share - counted) * len(seeds))
                    counted = share
                    self._report(group, epoch)

            group.run_epoch(progress)
            self.clock.advance((1 - counted) * len(seeds))
            self._report(group, group.epoch)
        # Weights first, then the manifest that names them, then the state is deleted: a kill in between loses nothing.
        seconds = round((group.earlier_seconds + time.monotonic() - start) / len(seeds), 3)
        self.manifest = self.manifest.with_records([self._write(group, i, seconds) for i in range(len(seeds))])
        self.manifest.write(self.folder)
        group.delete_state()

    def _report(self, group: TrainingGroup, epoch: int) -> None:
        self.reported = time.monotonic()
        done, left = self.clock.done / self.clock.total, self.clock.left()
        epochs = self.settings.recipe.epochs
        self.progress(TrainingProgress(tuple(group.seeds), epoch, epochs, done, group.mean_accuracy, left))

    def _write(self, group: TrainingGroup, i: int, seconds: float) -> Record:
        """Write the weights of one network and return its record."""
        seed, device, history = group.seeds[i], self.settings.precision.device, group.history
        file = f"seed{seed}.safetensors"
        digest = write_tensors(self.folder / file, group.weights(i), {"seed": str(seed)})
        chosen, best = group.chosen_epoch(i), history.best_epoch(i)
        accuracy, loss = history.test_at(chosen, i)
        versions = {"python": platform.python_version(), "intertwine": VERSION}
        return Record(
            seed=seed, file=file, sha256=digest, accuracy=accuracy, loss=loss, epoch=chosen,
            best_accuracy=history.test_at(best, i)[0], best_epoch=best, together=len(group.seeds), seconds=seconds,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions | {"torch": str(torch.__version__), "numpy": numpy.__version__}, history=history.of(i),
        )  # fmt: skip
