"""Zoo: trained networks in a folder, one safetensors file per seed and a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
    Networks = Sequence  # whoever checks annotations while a program runs would read a network to see its type

#: What to do where a training was stopped early.
UNFINISHED = "no network is finished yet; the same `intertwine zoo train` goes on where it stopped"


@dataclass(frozen=True, eq=False)
class Zoo(Networks):
    """Networks in the order of their seeds: `zoo[3]` is the fourth, a model in eval mode, `zoo.records[3]` its record.

    `zoo.seed(3)` is the network of seed 3, which the command line names `FOLDER:3`.
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
            raise IndexError(f"network {index} of {self.folder} was asked for, which holds {len(self)}: {self.seeds}")
        record = self.records[index]
        file = self.folder / record.file
        if not file.is_file():
            raise InputError(
                f"The network of seed {record.seed} was asked for, but its weights {file} are not there. "
                "Copy them again from where the zoo came from, or delete the zoo and train it again."
            )
        if sha256(file) != record.sha256:
            raise MismatchError(
                f"{file} is not the file that was written when seed {record.seed} was trained: its sha256 differs from "
                "the manifest's. Copy it again from where the zoo came from, or delete the zoo and train it again."
            )
        with torch.random.fork_rng(devices=[]):  # its start is overwritten; it must not use up the user's numbers
            model = self.factory()
        if self.manifest.plan.precision == "float64":
            model.double()
        fill(model, read_checkpoint(file), str(file))
        return model.eval()

    def seed(self, seed: int) -> nn.Module:
        """The network of a seed."""
        if not self.records:
            raise InputError(f"The network of seed {seed} was asked for, but in {self.folder} {UNFINISHED}.")
        if seed not in self.seeds:
            raise InputError(f"{self.folder} holds no network of seed {seed}; it holds {self.seeds}.")
        return self[self.seeds.index(seed)]

    def dataset(self, folder: str | Path | None = None) -> Dataset:
        """The data the networks were trained on, seen as they saw it; refused when its contents differ.

        Args:
            folder: where its files are; for a folder of images, where it is now.

        Raises:
            InputError: it is not there, or only the user has it. MismatchError: its contents are others.
        """
        plan = self.manifest.plan.data
        moved = folder is not None and plan["name"].startswith(FOLDER)
        found = data("imagefolder" if moved else self._known_data(), folder)
        if found.checksum != plan["checksum"]:
            raise MismatchError(
                f"{plan['name']} is not what {self.folder} was trained on: its checksum is {found.checksum[:12]}…, the "
                f"manifest says {plan['checksum'][:12]}…. Give the folder of the same data."
            )
        return found.normalised(plan["mean"], plan["std"])

    def _known_data(self) -> str:
        """The name of the data set, where it can be read by its name."""
        name = self.manifest.plan.data["name"]
        if not name.startswith(FOLDER):
            try:
                known_name(name)
            except InputError as error:
                raise InputError(
                    f"The data of {self.folder} was asked for, but it was trained on a Dataset of your own, "
                    f"{name!r}, which intertwine cannot read by its name. Pass it: zoo.evaluate(data)."
                ) from error
        return name

    def evaluate(self, data: Dataset | None = None, device: str | None = None, together: int = 8) -> StackScore:
        """Accuracy and loss of every network on the test part, in single precision, so many networks at once."""
        if not self.records:
            raise InputError(f"{self.folder} was to be tested, but there {UNFINISHED}.")
        how = precision("float32", find_device(device))
        own = (self.dataset() if data is None else data).to(how.device)
        parts = [self[i : i + together] for i in range(0, len(self), together)]
        scores = [score(Stack(part, how.device), own, how) for part in parts]
        return StackScore(torch.cat([s.accuracy for s in scores]), torch.cat([s.loss for s in scores]))

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per network, as plain data: its record without the history and the versions."""
        left_out = ("history", "versions")
        return [{k: v for k, v in asdict(record).items() if k not in left_out} for record in self.records]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def words(self) -> str:
        """What there is, in words."""
        plan, size = self.manifest.plan, len(self)
        accuracies = [r.accuracy for r in self.records]
        span = f", accuracy {min(accuracies):.1%} to {max(accuracies):.1%}" if accuracies else ""
        named = f"{plan.architecture['name']} on {plan.data['name']} by {plan.recipe['name']}"
        left = "" if size else f": {UNFINISHED}"
        return f"{size} network{'s' * (size != 1)}: {named}{span}, in {self.folder}{left}"

    def __repr__(self) -> str:
        return f"Zoo({self.words()})"


def load(folder: str | Path, factory: Callable[[], nn.Module] | None = None) -> Zoo:
    """A zoo from its folder.

    Args:
        folder: what `train` wrote. factory: makes the architecture, where it is not one of intertwine's own.

    Raises:
        InputError: no manifest, a damaged one, or an architecture that only its factory can make.
    """
    place = Path(folder)
    manifest = read_manifest(place)
    return Zoo(place, manifest, factory or _factory(place, manifest))


def _factory(folder: Path, manifest: Manifest) -> Callable[[], nn.Module]:
    architecture = manifest.plan.architecture
    if architecture.get("own"):
        raise InputError(
            f"{folder} holds networks made by {architecture['name']}, which intertwine does not know. "
            "Load it with that function: zoo.load(folder, factory)."
        )
    return lambda: build(architecture["name"], **architecture["options"])
