"""Absorbing: a feature that the others can express is taken out, and the layers that read it read those instead.

Of the features a layer reads, a = (a_1 … a_n), one is replaced by its best linear prediction from those that stay and
a constant. The layer's columns change by the coefficients, its bias by the constant, and nothing else changes. With
the second moments C of the features, leaving out feature i and predicting it from the rest costs ‖v_i‖²/(C⁻¹)_ii in
the mean square of what the layer gives, v_i its column: the step of the optimal brain surgeon, for whole features.
Features go in the order of that cost, a few at a time, and C⁻¹ and the columns are kept up to date.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.shapes import Float

#: Added to the diagonal of second moments, as a share of it: they come from few samples, and copies make them singular.
RIDGE = 1e-4
#: Features go in steps of one in so many of those that are left: costs change little within a step.
STEPS = 64


@dataclass(frozen=True)
class Read:
    """What absorbing knows of one reader. The last row of `moments` is that of the constant.

    `gram`: inner products of its columns. `shift`: whether it has a bias that a constant can go into.
    """

    moments: Float[Tensor, "ones ones"]
    gram: Float[Tensor, "features features"]
    shift: bool

    @property
    def used(self) -> Float[Tensor, "used used"]:
        """The moments of the features, and of the constant if it can be used; a ridge on the features."""
        n = len(self.gram)
        moments = self.moments[: n + self.shift, : n + self.shift].clone()
        spread = self._about().diagonal()
        moments.diagonal()[:n] += RIDGE * spread + 1e-9 * spread.max().clamp(min=1e-30)
        return moments

    def _about(self) -> Float[Tensor, "features features"]:
        """Second moments of the features; about their means where a constant can be added."""
        n = len(self.gram)
        mean = self.moments[:n, n] if self.shift else torch.zeros(n, dtype=torch.float64)
        return self.moments[:n, :n] - torch.outer(mean, mean)

    @property
    def energy(self) -> float:
        """The mean square of what the reader gives; about its mean where a constant can be added to it."""
        return float((self._about() * self.gram).sum())


@dataclass(frozen=True)
class Trace:
    """The order in which the features of a wire go, and what it costs once the first k are gone, for k = 0, 1, …"""

    order: tuple[int, ...]
    costs: tuple[float, ...]

    def kept(self, width: int) -> list[int]:
        """The features that stay when so many are to stay."""
        return sorted(self.order[len(self.order) - width :])


def lost(share: float) -> float:
    """What losing a share of a variance costs: little at first, and no end of it for the last."""
    return -math.log(max(1 - share, 1e-3))


def absorb(reads: Sequence[Read]) -> Trace:
    """The order in which the features of a wire are best absorbed, all of its readers taken together."""
    parts = [_Part(read) for read in reads if read.energy > 0]
    alive = torch.arange(len(reads[0].gram))
    order, costs = [], [0.0]
    while len(alive) > 1 and parts:
        errors = torch.stack([part.errors() for part in parts]).sum(0)
        step = max(1, len(alive) // STEPS)
        gone = errors.argsort(stable=True)[:step]
        for part in parts:
            part.remove(gone)
        after = sum(lost(part.error) for part in parts)
        costs += torch.linspace(costs[-1], max(after, costs[-1]), step + 1)[1:].tolist()
        order += alive[gone].tolist()
        alive = alive[_others(len(alive), gone)]
    missing = len(reads[0].gram) - len(costs)  # a wire that gives only constants
    return Trace((*order, *alive.tolist()), (*costs, *costs[-1:] * missing))


class _Part:
    """One reader while features go: the inverse moments and the columns' inner products of those that are left."""

    def __init__(self, read: Read) -> None:
        self.scale = 1 / read.energy
        self.inverse = torch.linalg.inv(read.used)
        self.gram = torch.zeros_like(self.inverse)  # the constant's column starts at zero
        n = len(read.gram)
        self.gram[:n, :n] = read.gram
        self.shift = int(read.shift)
        self.error = 0.0  # of all that is gone, as a share of what the reader gives

    def errors(self) -> Float[Tensor, " left"]:
        """What each feature alone would add to the error."""
        n = len(self.inverse) - self.shift
        return self.scale * (self.gram.diagonal() / self.inverse.diagonal())[:n].clamp(min=0)

    def remove(self, gone: Tensor) -> None:
        """Take features out."""
        block, cross = self.inverse[gone][:, gone], self.inverse[:, gone]
        share = torch.linalg.solve(block, cross.T).T  # how the columns of those that go are spread over the rest
        inner = self.gram[gone][:, gone]
        self.error += self.scale * max(float(torch.linalg.solve(block, inner).trace()), 0.0)
        stay = _others(len(self.inverse), gone)
        share = share[stay]
        across = self.gram[stay][:, gone]
        self.inverse = self.inverse[stay][:, stay] - share @ cross[stay].T
        moved = across @ share.T
        self.gram = self.gram[stay][:, stay] - moved - moved.T + share @ inner @ share.T


def _others(size: int, gone: Tensor) -> Tensor:
    stay = torch.ones(size, dtype=torch.bool)
    stay[gone] = False
    return stay.nonzero().flatten()


def coefficients(read: Read, kept: Sequence[int]) -> tuple[Float[Tensor, "features kept"], Float[Tensor, " features"]]:
    """How the features of a reader are expressed by those that stay, and the constants that are left over."""
    n, moments, index = len(read.gram), read.used, torch.tensor(kept)
    known = torch.cat([index, torch.tensor([n])]) if read.shift else index
    found = torch.linalg.solve(moments[known][:, known], moments[known][:, :n]).T
    found[index] = 0.0
    found[index, torch.arange(len(kept))] = 1.0  # a feature that stays is itself
    constant = found[:, -1] if read.shift else torch.zeros(n, dtype=torch.float64)
    return found[:, : len(kept)], constant
