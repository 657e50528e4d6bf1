"""How healthy the layers of a mixed network are: what varies, and whether the units of both ends belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.connect.statistics import Moments
from intertwine.shapes import Float

WIDEST = 1024  # units; for wider layers only unit i is compared with unit i, not every unit with every other
HALF = 0.5  # a unit that keeps less of its variance than this has collapsed
CONSTANT = 1e-12  # of its own size: a unit that varies less does not vary

Units = Float[Tensor, "rows units"]


@dataclass(frozen=True)
class Health:
    """One layer of a mixed network, beside both ends.

    Attributes:
        variance: of all units of the mix, over the mean of both ends; None where the ends do not vary.
        collapsed: the fraction of units with less than half the variance of the ends.
        matched: the mean correlation of unit i of one end with unit i of the other. possible: the same in the best
            order of units; None for layers wider than `WIDEST`. Units that never vary are left out of both.
        dead: how many units never vary, in both ends together.
        statistics: what a BatchNorm layer of the mix finds in its input, over the variance it divides by, both relative
            to the same at the ends: 1 where its statistics fit.
    """

    variance: float | None
    collapsed: float | None
    matched: float | None
    possible: float | None
    dead: int
    statistics: float | None = None


@dataclass
class Together:
    """Means, variances and the products of units of both ends, joined batch by batch in float64."""

    a: Moments = field(default_factory=Moments)
    b: Moments = field(default_factory=Moments)
    cross: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, a: Units, b: Units) -> None:
        """Take in the features of the same samples in both networks."""
        old, new = self.a.count, a.shape[0]
        means = a.mean(0), b.mean(0)
        shifts = means[0] - self.a.mean.to(a.device), means[1] - self.b.mean.to(a.device)
        share = old * new / (old + new)
        x, y = a - means[0], b - means[1]
        if a.shape[1] > WIDEST:
            cross = (x * y).sum(0) + share * shifts[0] * shifts[1]
        else:
            cross = x.T @ y + share * torch.outer(shifts[0].expand_as(means[0]), shifts[1].expand_as(means[1]))
        self.cross = self.cross.to(a.device) + cross
        self.a.join(new, means[0], x.square().sum(0))
        self.b.join(new, means[1], y.square().sum(0))

    def correlations(self) -> tuple[float | None, float | None]:
        """Of units of the same number; and in the best order, where the layer is not too wide for it."""
        alive = _alive(self.a), _alive(self.b)
        both = alive[0] & alive[1]
        lengths = self.a.squares.sqrt(), self.b.squares.sqrt()
        own = self.cross if self.cross.dim() == 1 else self.cross.diagonal()
        matched = float((own / lengths[0] / lengths[1])[both].mean()) if bool(both.any()) else None
        if self.cross.dim() == 1 or not (bool(alive[0].any()) and bool(alive[1].any())):
            return matched, None
        table = (self.cross / lengths[0][:, None] / lengths[1])[alive[0]][:, alive[1]].cpu().numpy()
        best = table[linear_sum_assignment(table, maximize=True)]
        return matched, float(np.mean(best))


def _alive(moments: Moments) -> Tensor:
    """Units that vary by more than rounding."""
    variance = moments.variance()
    return variance > CONSTANT**2 * (variance + moments.mean.square())


@dataclass
class Divided:
    """What a BatchNorm layer divides by in one network, beside the variance it finds."""

    running: Tensor
    found: Moments = field(default_factory=Moments)

    def ratio(self) -> float | None:
        """Found over divided by, the geometric mean over channels that have both."""
        found, running = self.found.variance(), self.running.double()
        known = (found > 0) & (running > 0)
        return float((found[known] / running[known]).log().mean().exp()) if bool(known.any()) else None


@dataclass
class HealthMeter:
    """Adds up what `Health` needs for one layer; `running` are the three running variances of a BatchNorm layer."""

    running: Sequence[Tensor] = ()
    ends: Together = field(default_factory=Together)
    mixed: Moments = field(default_factory=Moments)
    divided: tuple[Divided, ...] = ()

    def __post_init__(self) -> None:
        self.divided = tuple(map(Divided, self.running))

    def add(self, a: Units, b: Units, mixed: Units) -> None:
        """Take in what the layer gives out in both ends and the mix."""
        self.ends.add(a, b)
        self.mixed.add(mixed, channels=1)

    def hear(self, *inputs: Tensor) -> None:
        """Take in what goes into a BatchNorm layer in both ends and the mix."""
        for one, x in zip(self.divided, inputs, strict=True):
            one.found.add(x, channels=1)

    def result(self) -> Health:
        wanted = (self.ends.a.variance() + self.ends.b.variance()) / 2
        found, alive = self.mixed.variance(), (_alive(self.ends.a), _alive(self.ends.b))
        varies = alive[0] | alive[1]
        known = bool(varies.any())
        return Health(
            float(found[varies].sum() / wanted[varies].sum()) if known else None,
            float((found < HALF * wanted)[varies].double().mean()) if known else None,
            *self.ends.correlations(),
            int((~alive[0]).sum() + (~alive[1]).sum()),
            self._statistics(),
        )

    def _statistics(self) -> float | None:
        ratios = [one.ratio() for one in self.divided]
        if not ratios or any(ratio is None for ratio in ratios):
            return None
        a, b, mixed = (ratio or 0.0 for ratio in ratios)
        return mixed / (a * b) ** 0.5
