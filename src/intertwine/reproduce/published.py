"""Networks that others trained and published: the ten Tiny-10 of Csiszárik et al. 2021, seen with their own colours."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from intertwine.checkpoint import fill, read_checkpoint
from intertwine.errors import InputError
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.networks.registry import build

#: Mean and deviation of the three colours, as the networks saw them in training.
COLOURS = {"tiny10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))}


@dataclass(frozen=True)
class Published:
    """The networks of one architecture in the folder of the data, or of the environment variable INTERTWINE_DATA."""

    name: str
    folder: Path | None = None

    def seed(self, seed: int) -> nn.Module:
        """The network of a seed, in eval mode."""
        file = (self.folder or Path(os.environ.get("INTERTWINE_DATA", "."))) / self.name / f"seed{seed}.safetensors"
        if not file.is_file():
            raise InputError(
                f"The published network {self.name} of seed {seed} was asked for, but {file} does not exist. Set "
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
