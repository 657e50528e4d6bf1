"""Weak additivity for activations: does the activation of a mix equal the mix of the activations? (Condition I)

For a ReLU and two numbers it holds at every α exactly where the numbers do not have opposite signs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from intertwine.connect.llfc import Angles, Rows, dot


@dataclass(frozen=True)
class Additivity:
    """One activation σ at one α, the weight of the first network; H̃ are its inputs.

    Attributes:
        distance: the mean over samples of 1 − cos between σ(αH̃_A + (1 − α)H̃_B) and ασ(H̃_A) + (1 − α)σ(H̃_B).
        residual: the length of their difference over the length of the second, all samples together.
    """

    alpha: float
    distance: float | None
    residual: float | None


@dataclass
class _Sums:
    alpha: float
    angles: Angles = field(default_factory=Angles)
    apart: float = 0.0
    whole: float = 0.0

    def add(self, left: Rows, right: Rows) -> None:
        dots = self.angles.add(left, right)
        apart = left - right
        self.apart += float(dot(apart, apart)[dots.finite].sum())
        self.whole += float(dots.second[dots.finite].sum())

    def result(self) -> Additivity:
        residual = sqrt(self.apart / self.whole) if self.whole > 0 else None
        return Additivity(self.alpha, self.angles.mean, residual)


@dataclass
class AdditivityMeter:
    """Adds up what `Additivity` needs for one activation, and how often both inputs have the same sign."""

    activation: Callable[[Tensor], Tensor]
    alphas: Sequence[float]
    same: int = 0
    entries: int = 0
    sums: list[_Sums] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sums = [_Sums(alpha) for alpha in self.alphas]

    def add(self, a: Rows, b: Rows) -> None:
        """Take in the inputs of the activation in both networks."""
        self.same += int((a.sign().mul_(b.sign()) >= 0).sum())  # signs first: a product of tiny numbers is zero
        self.entries += a.numel()
        first, second = self.activation(a.clone()), self.activation(b.clone())  # it may work in place
        for one in self.sums:
            left = self.activation(torch.lerp(b, a, one.alpha))
            one.add(left, torch.lerp(second, first, one.alpha))

    def results(self) -> tuple[Additivity, ...]:
        return tuple(one.result() for one in self.sums)

    @property
    def agreement(self) -> float | None:
        """The fraction of entries where both inputs have the same sign, or one is zero."""
        return self.same / self.entries if self.entries else None
