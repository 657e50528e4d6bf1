"""Zoo: trained networks in a folder, with one safetensors file per seed and a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intertwine.checkpoints.weights import fill, read_checkpoint
from intertwine.errors import InputError, MismatchError
from intertwine.files import sha256
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.downloads import known_name
from intertwine.lab.zoo.datasets.loading import FOLDER, data
from intertwine.lab.zoo.manifest import Manifest, Record, read_manifest
from intertwine.lab.zoo.networks.registry import build
from intertwine.lab.zoo.precision import find_device, precision
from intertwine.lab.zoo.stacking.stack import Stack
from intertwine.lab.zoo.trainer import StackScore, score
from intertwine.lazy import data_frame

if TYPE_CHECKING:
    Networks = Sequence[nn.Module]
else:
    Networks = Sequence  # a run-time check of `Sequence[nn.Module]` would load a network

UNFINISHED = "no network is finished yet; run the same `intertwine zoo train` again to continue"


@dataclass(frozen=True, eq=False)
class Zoo(Networks):
    """Networks in the order of their seeds: `zoo[3]` is the fourth, in eval mode, and `zoo.records[3]` its record.

    `zoo.seed(3)` is the network of seed 3, `FOLDER:3` on the command line.
    """

    folder: Path
    manifest: Manifest
    factory: Callable[[], nn.Module]

    @property
    def records(self) -> tuple[Record, ...]:
        """One per network, in the order of `zoo[i]`."""
        return self.manifest.records

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of every network."""
        return tuple(r.seed for r in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"Network {index} is out of range: {self.folder} holds {len(self)} of the seeds {self.seeds}."
            )
        record = self.records[index]
        file = self.folder / record.file
        if not file.is_file():
            raise InputError(
                f"The weights of seed {record.seed} are missing: {file}. Copy them from the source of the zoo, or "
                "delete the zoo and train it again."
            )
        if sha256(file) != record.sha256:
            raise MismatchError(
                f"{file} has changed since seed {record.seed} was trained: its sha256 differs from the manifest. Copy "
                "it from the source of the zoo, or delete the zoo and train it again."
            )
        with torch.random.fork_rng(devices=[]):  # initial weights are replaced below
            model = self.factory()
        if self.manifest.plan.precision == "float64":
            model.double()
        fill(model, read_checkpoint(file), str(file))
        return model.eval()

    def seed(self, seed: int) -> nn.Module:
        """The network of a seed."""
        if not self.records:
            raise InputError(f"There is no network of seed {seed}: in {self.folder}, {UNFINISHED}.")
        if seed not in self.seeds:
            raise InputError(f"{self.folder} holds no network of seed {seed}; it holds {self.seeds}.")
        return self[self.seeds.index(seed)]

    def dataset(self, folder: str | Path | None = None) -> Dataset:
        """The data that the networks were trained on, with their normalisation.

        Args:
            folder: of its files; for a folder of images, its present path.

        Raises:
            InputError: it is missing, or it is the user's own `Dataset`. MismatchError: its contents have changed.
        """
        plan = self.manifest.plan.data
        moved = folder is not None and plan["name"].startswith(FOLDER)
        if not plan["name"].startswith(FOLDER):
            try:
                known_name(plan["name"])
            except InputError as error:
                raise InputError(
                    f"{self.folder} was trained on a Dataset of your own, {plan['name']!r}, which cannot be read by "
                    "its name. Pass it: zoo.evaluate(data)."
                ) from error
        found = data("imagefolder" if moved else plan["name"], folder)
        if found.checksum != plan["checksum"]:
            raise MismatchError(
                f"{plan['name']} is not the data that {self.folder} was trained on: its checksum "
                f"is {found.checksum[:12]}…, but the manifest has {plan['checksum'][:12]}…. "
                "Give the folder of the same data."
            )
        return found.normalised(plan["mean"], plan["std"])

    def evaluate(self, data: Dataset | None = None, device: str | None = None, together: int = 8) -> StackScore:
        """Accuracy and loss of every network on the test split, in single precision.

        Args:
            data: with its test split; by default the data of the training.
            device: a GPU if there is one. together: number of networks evaluated at once.
        """
        if not self.records:
            raise InputError(f"There is nothing to evaluate: in {self.folder}, {UNFINISHED}.")
        how = precision("float32", find_device(device))
        found = (self.dataset() if data is None else data).to(how.device)
        parts = [self[i : i + together] for i in range(0, len(self), together)]
        scores = [score(Stack(part, how.device), found, how) for part in parts]
        return StackScore(torch.cat([s.accuracy for s in scores]), torch.cat([s.loss for s in scores]))

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per network, as plain data: its record without the history and the versions."""
        omitted = ("history", "versions")
        return [{k: v for k, v in asdict(record).items() if k not in omitted} for record in self.records]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def words(self) -> str:
        """A one-line summary."""
        plan, size = self.manifest.plan, len(self)
        accuracies = [r.accuracy for r in self.records]
        span = f", accuracy {min(accuracies):.1%} to {max(accuracies):.1%}" if accuracies else ""
        named = f"{plan.architecture['name']} on {plan.data['name']} by {plan.recipe['name']}"
        left = "" if size else f": {UNFINISHED}"
        return f"{size} network{'s' * (size != 1)}: {named}{span}, in {self.folder}{left}"

    def __repr__(self) -> str:
        return f"Zoo({self.words()})"


def load(folder: str | Path, factory: Callable[[], nn.Module] | None = None) -> Zoo:
    """Load a zoo.

    Args:
        folder: that `train` wrote. factory: builds the network, if it is not one of `zoo.architectures()`.

    Raises:
        InputError: no manifest, a damaged one, or networks of the user's own function without a factory.
    """
    manifest = read_manifest(Path(folder))
    architecture = manifest.plan.architecture
    if factory is None:
        if architecture.get("own"):
            raise InputError(
                f"{folder} holds networks of your own function {architecture['name']}. Load it with that function: "
                "zoo.load(folder, factory)."
            )
        factory = partial(build, architecture["name"], **architecture["options"])
    return Zoo(Path(folder), manifest, factory)
