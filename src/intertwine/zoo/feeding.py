"""Training batches of a data set for anything that reads (inputs, targets): shuffled and augmented as a recipe says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from intertwine.shapes import Float, Int
from intertwine.zoo.augment import Feeder, draw
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.recipe import Recipe


class TrainingBatches:
    """One pass is one epoch, in an order and with an augmentation of its own; the last batch may be smaller.

    Args:
        data: on any device, where the batches are made. recipe: its batch size, shifts, crops and flips are used.
        seed: of order and augmentation. dtype: of the inputs.

    Mixed labels are left out: mixup and CutMix of the recipe do not apply.

    >>> from intertwine.zoo.datasets.find import data
    >>> batches = TrainingBatches(data("digits"), Recipe("short", "sgd", rate=0.1, epochs=1, batch=512))
    >>> len(batches), [tuple(inputs.shape) for inputs, _ in batches][-1]
    (3, (413, 1, 8, 8))
    """

    def __init__(self, data: Dataset, recipe: Recipe, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.data, self.recipe, self.epoch = data, recipe, 0
        self._feeder = Feeder(recipe, data, dtype)
        self._seeds = torch.tensor([seed], dtype=torch.int64, device=data.images.device)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass gives, counted from 0; a run that is taken up again asks for it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.data.labels) // self.recipe.batch)

    def __iter__(self) -> Iterator[tuple[Float[Tensor, "n c h w"], Int[Tensor, " n"]]]:
        samples = len(self.data.labels)
        draws = draw(self.recipe, self._seeds, self.epoch, samples)
        self.epoch += 1
        for step in range(len(self)):
            at = slice(step * self.recipe.batch, min((step + 1) * self.recipe.batch, samples))
            batch = self._feeder(draws, at, slice(step, step + 1))
            yield batch.inputs[0], batch.labels[0]


def shuffled(data: Dataset, batch: int) -> TrainingBatches:
    """The training images as they are, in another order in every epoch: folders of images are sorted by class.

    >>> from intertwine.zoo.datasets.find import data
    >>> batches = shuffled(data("digits"), 500)
    >>> [len(labels) for _, labels in batches]
    [500, 500, 437]
    """
    return TrainingBatches(data, Recipe("in another order", epochs=1, batch=batch, optimizer="sgd", rate=1.0))
