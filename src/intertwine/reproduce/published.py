"""Networks that others trained and published: the ten Tiny-10 of Csiszárik et al. 2021, seen with their own colours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from intertwine.checkpoint import fill, read_checkpoint
from intertwine.errors import InputError
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.datasets.places import places
from intertwine.zoo.networks.registry import build

#: Mean and deviation of the three colours, as the networks saw them in training.
COLOURS = {"tiny10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))}


@dataclass(frozen=True)
class Published:
    """The networks of one architecture, in the folder of the data or wherever data sets are looked for."""

    name: str
    folder: Path | None = None

    @property
    def files(self) -> dict[int, Path]:
        """Seed → its file, from the first folder that has any; empty where none has.

        >>> Published("nothing").files
        {}
        """
        for place in places(self.folder):
            files = (place / self.name).glob("seed[0-9]*.safetensors")
            if found := {int(file.stem.removeprefix("seed")): file for file in files}:
                return dict(sorted(found.items()))
        return {}

    def seed(self, seed: int) -> nn.Module:
        """The network of a seed, in eval mode."""
        file = self.files.get(seed)
        if file is None:
            raise InputError(
                f"The published network {self.name} of seed {seed} was asked for, but there is no "
                f"{self.name}/seed{seed}.safetensors in {', '.join(map(str, places(self.folder)))}. Set "
                f"INTERTWINE_DATA to the folder that holds {self.name}/seed0.safetensors and so on."
            )
        with torch.random.fork_rng(devices=[]):
            model = build(self.name)
        fill(model, read_checkpoint(file), str(file))
        return model.eval()

    def seen(self, data: Dataset) -> Dataset:
        """The data with the colours the networks know."""
        mean, deviation = COLOURS[self.name]
        return data.normalised([255 * value for value in mean], [255 * value for value in deviation])
