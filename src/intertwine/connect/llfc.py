"""Layerwise linear feature connectivity: is the feature of the mix the mix of the features, but for a factor?

Zhou et al. (2023) compare f(α·A + (1 − α)·B) with α·f(A) + (1 − α)·f(B), sample by sample, by the cosine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from intertwine.connect.statistics import Moments
from intertwine.shapes import Float

Rows = Float[Tensor, "samples features"]
NEAR = 1e-4  # distances below it are worked out again, without cancellation


@dataclass(frozen=True)
class Llfc:
    """One layer at one α, the weight of the first network.

    Attributes:
        distance: the mean over samples of 1 − cos between the feature of the mix and the mix of the features, with its
            sign: 2 where they are opposite. None where no sample has both.
        c: the factor with the feature of the mix ≈ c · the mix of the features, by least squares over all samples. The
            printed definition has its c on the other side of the equation, where it is 1/c.
        c_mean, c_std: of the same factor, sample by sample.
    """

    alpha: float
    distance: float | None
    c: float | None
    c_mean: float | None
    c_std: float | None


@dataclass(frozen=True)
class Dots:
    """Sample by sample: the squared lengths of two features and their inner product."""

    first: Tensor
    second: Tensor
    product: Tensor

    @property
    def finite(self) -> Tensor:
        return (self.first + self.second).isfinite()


def dot(x: Rows, y: Rows) -> Float[Tensor, " samples"]:
    """Inner products, row by row, without a copy of the rows."""
    return (x[:, None] @ y[..., None])[:, 0, 0]


@dataclass
class Angles:
    """The mean of 1 − cos between two features of the same sample; counts the samples that have no angle."""

    total: float = 0.0
    count: int = 0
    zero: int = 0
    infinite: int = 0

    def add(self, x: Rows, y: Rows) -> Dots:
        """Take in some samples; the products of their features come back."""
        dots = Dots(dot(x, x), dot(y, y), dot(x, y))
        good = dots.finite & (dots.first > 0) & (dots.second > 0)
        distances = 1 - dots.product / dots.first.sqrt() / dots.second.sqrt()
        near = good & (distances < NEAR)
        if bool(near.any()):  # 1 − cos cancels; half the squared chord does not
            u, v = x[near] / dots.first[near, None].sqrt(), y[near] / dots.second[near, None].sqrt()
            distances[near] = (u - v).square().sum(1) / 2
        self.total += float(distances[good].sum())
        self.count += int(good.sum())
        self.zero += int((dots.finite & ~good).sum())
        self.infinite += int((~dots.finite).sum())
        return dots

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def words(self, what: str) -> str:
        """Which samples had to be left out, and why; empty where none."""
        samples = self.count + self.zero + self.infinite
        reasons = {"are zero": self.zero, "are not finite": self.infinite}
        found = [f"on {n:,} of {samples:,} samples features {why}" for why, n in reasons.items() if n]
        return f"{what}: {' and '.join(found)}; these samples are left out" if found else ""


@dataclass
class LlfcMeter:
    """Adds up what `Llfc` needs, batch by batch."""

    alpha: float
    angles: Angles = field(default_factory=Angles)
    products: float = 0.0
    squares: float = 0.0
    factors: Moments = field(default_factory=Moments)

    def add(self, a: Rows, b: Rows, mixed: Rows) -> None:
        """Take in the features of both ends and of the mix."""
        dots = self.angles.add(mixed, torch.lerp(b, a, self.alpha))
        products, squares = dots.product[dots.finite], dots.second[dots.finite]
        self.products += float(products.sum())
        self.squares += float(squares.sum())
        known = squares > 0
        if bool(known.any()):
            self.factors.add((products[known] / squares[known])[None], channels=0)

    def result(self) -> Llfc:
        known = self.factors.count > 0
        mean, std = (float(x) for x in (self.factors.mean, self.factors.variance().sqrt())) if known else (None, None)
        return Llfc(self.alpha, self.angles.mean, self.products / self.squares if known else None, mean, std)
