"""Data order and augmentation for all networks of a stack on the device, and training batches for one network.

The random numbers of an epoch are drawn before it begins (`draw`); every step then gathers and augments its images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.randomness import Purpose, drawn, orders, uniform
from intertwine.lab.zoo.recipe import Recipe

#: The largest data set that is kept normalised: 2^29 floats are 2 GiB.
MOST_NORMALISED = 2**29


@dataclass(frozen=True)
class Draws:
    """The random numbers of one epoch, per network and sample in its order, or per network and step."""

    order: Int[Tensor, "networks samples"]
    down: Int[Tensor, "networks samples"]
    right: Int[Tensor, "networks samples"]
    flip: Int[Tensor, "networks samples"]
    cut: Int[Tensor, "networks steps"]  # 1: CutMix, 0: mixup
    share: Float[Tensor, "networks steps"]  # weight of the partner's image and label
    box_down: Float[Tensor, "networks steps"]
    box_right: Float[Tensor, "networks steps"]

    def copy_(self, other: Draws) -> None:
        """Copy the numbers of another epoch in place, because a recorded CUDA graph always reads the same memory."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))


def draw(recipe: Recipe, seeds: Int[Tensor, " networks"], epoch: int, samples: int) -> Draws:
    """The random numbers of one epoch."""

    def per_sample(purpose: Purpose) -> Tensor:
        return uniform(drawn(seeds, epoch, purpose, samples))

    def per_step(purpose: Purpose) -> Tensor:
        return uniform(drawn(seeds, epoch, purpose, -(-samples // recipe.batch)))

    reach = recipe.shift or recipe.crop
    zeros = torch.zeros(len(seeds), samples, dtype=torch.int64, device=seeds.device)
    down, right = (
        (per_sample(purpose) * (2 * reach + 1)).long() - reach if reach else zeros
        for purpose in (Purpose.SHIFT_DOWN, Purpose.SHIFT_RIGHT)
    )
    flip = (per_sample(Purpose.FLIP) < 0.5).long() if recipe.flip else zeros
    kind, share = per_step(Purpose.MIX_KIND), per_step(Purpose.MIX_SHARE)
    cut = kind < {(True, True): 0.5, (False, True): 1.0}.get((recipe.mixup > 0, recipe.cutmix > 0), 0.0)
    if recipe.mixup or recipe.cutmix:  # the share is a quantile of the Beta distribution
        shape = np.where(cut.cpu().numpy(), recipe.cutmix, recipe.mixup)
        share = torch.as_tensor(beta.ppf(share.cpu().numpy(), shape, shape)).to(share)
    else:
        share = torch.zeros_like(share)
    box = per_step(Purpose.BOX_DOWN), per_step(Purpose.BOX_RIGHT)
    return Draws(orders(seeds, epoch, samples), down, right, flip, cut.long(), share, *box)


@dataclass(frozen=True)
class StackBatch:
    """Inputs (networks, batch, channels, height, width), two labels for each, and the weight of the second one."""

    inputs: Tensor
    labels: Int[Tensor, "networks batch"]
    partners: Int[Tensor, "networks batch"]
    share: Float[Tensor, " networks"]


class BatchMaker:
    """Makes the batches of a recipe on the device of the data set."""

    def __init__(self, recipe: Recipe, data: Dataset, dtype: torch.dtype) -> None:
        self.recipe, self.data, self.dtype = recipe, data, dtype
        self.exact = torch.float64 if dtype == torch.float64 else torch.float32  # half precision rounds the result only
        options = {"dtype": self.exact, "device": data.images.device}
        self.mean, self.std = torch.tensor(data.mean, **options), torch.tensor(data.std, **options)
        self.fill = torch.zeros_like(self.mean) if recipe.shift else -self.mean / self.std
        self.images = data.images
        if data.images.numel() <= MOST_NORMALISED:  # normalised once instead of in every step
            self.images = self._normalised(data.images)

    def __call__(self, draws: Draws, at: slice | Tensor, step: slice | Tensor) -> StackBatch:
        """The batch of one step.

        Args:
            draws: the random numbers of the epoch.
            at, step: the positions of the samples in the epoch, and the number of the step in it: slices, or tensors on
                the device of shape (batch,) and (1,), which a recorded step reads at every replay.
        """
        which = draws.order[:, at]
        labels = self.data.labels[which]
        inputs = self._inputs(draws, which, at)
        partners, share = labels, self.mean.new_zeros(len(which))
        if self.recipe.mixup or self.recipe.cutmix:
            inputs, share = _mixed(inputs, draws, step)
            partners = labels.flip(1)
        return StackBatch(inputs.to(self.dtype).permute(0, 1, 4, 2, 3), labels, partners, share)

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.to(self.exact) - self.mean) / self.std if images.dtype == torch.uint8 else images

    def _inputs(self, draws: Draws, which: Tensor, at: slice | Tensor) -> Tensor:
        """The images (networks, batch, height, width, channels), normalised, translated and mirrored."""
        if not (self.recipe.shift or self.recipe.crop or self.recipe.flip):
            return self._normalised(self.images[which])
        height, width = self.images.shape[1:3]
        down, right, flip = (t[:, at, None] for t in (draws.down, draws.right, draws.flip))
        rows = torch.arange(height, device=which.device) - down
        columns = torch.arange(width, device=which.device) - right
        inside = ((rows >= 0) & (rows < height))[..., :, None] & ((columns >= 0) & (columns < width))[..., None, :]
        columns = torch.where(flip.bool(), width - 1 - columns, columns)
        rows, columns = rows.clamp(0, height - 1)[..., :, None], columns.clamp(0, width - 1)[..., None, :]
        moved = self._normalised(self.images[which[..., None, None], rows, columns])
        return torch.where(inside[..., None], moved, self.fill)


def _mixed(inputs: Tensor, draws: Draws, step: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Mix each image with its partner, the batch in reverse order: by a weighted sum (mixup), or in a box (CutMix)."""
    cut, share, down, right = (
        t[:, step][:, 0].to(inputs.dtype) for t in (draws.cut, draws.share, draws.box_down, draws.box_right)
    )
    height, width = inputs.shape[2:4]
    rows = _within(down, share, height, inputs)
    columns = _within(right, share, width, inputs)
    box = (rows[:, :, None] & columns[:, None, :]).to(inputs.dtype)  # (networks, h, w)
    cut = cut.bool()
    share = torch.where(cut, box.mean((1, 2)), share)  # the box may be cut off at the edge
    weight = torch.where(cut[:, None, None], box, share[:, None, None])[:, None, :, :, None]
    return inputs + weight * (inputs.flip(1) - inputs), share


def _within(centre: Tensor, share: Tensor, size: int, like: Tensor) -> Tensor:
    """The rows or columns of a box with this share of the area."""
    positions = torch.arange(size, device=like.device)
    middle, half = (centre * size).floor()[:, None], (share.sqrt() * size / 2)[:, None]
    return (positions >= (middle - half).round()) & (positions < (middle + half).round())


class TrainingBatches:
    """Batches (inputs, targets), shuffled and augmented by a recipe; one pass is one epoch.

    Every epoch has its own order and augmentation; the last batch may be smaller. Mixup and CutMix do not apply.

    Args:
        data: on the device of the batches. recipe: its batch size, shifts, crops and flips are used.
        seed: of order and augmentation. dtype: of the inputs.

    >>> from intertwine.lab.zoo.datasets.loading import data
    >>> batches = TrainingBatches(data("digits"), Recipe("short", "sgd", rate=0.1, epochs=1, batch=512))
    >>> len(batches), [tuple(inputs.shape) for inputs, _ in batches][-1]
    (3, (413, 1, 8, 8))
    """

    def __init__(self, data: Dataset, recipe: Recipe, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.data, self.recipe, self.epoch = data, recipe, 0
        self._batches = BatchMaker(recipe, data, dtype)
        self._seeds = torch.tensor([seed], dtype=torch.int64, device=data.images.device)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, counted from 0, when a run is resumed."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.data.labels) // self.recipe.batch)

    def __iter__(self) -> Iterator[tuple[Float[Tensor, "n c h w"], Int[Tensor, " n"]]]:
        samples = len(self.data.labels)
        draws = draw(self.recipe, self._seeds, self.epoch, samples)
        self.epoch += 1
        for step in range(len(self)):
            at = slice(step * self.recipe.batch, min((step + 1) * self.recipe.batch, samples))
            batch = self._batches(draws, at, slice(step, step + 1))
            yield batch.inputs[0], batch.labels[0]


def shuffled(data: Dataset, batch: int) -> TrainingBatches:
    """The training images without augmentation, in a new order in every epoch.

    >>> from intertwine.lab.zoo.datasets.loading import data
    >>> batches = shuffled(data("digits"), 500)
    >>> [len(labels) for _, labels in batches]
    [500, 500, 437]
    """
    return TrainingBatches(data, Recipe("shuffled", epochs=1, batch=batch, optimizer="sgd", rate=1.0))
