"""Scales: where a number lies on an axis, and which round numbers are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from intertwine.report.svg import Length

LEAST, SHARE = 1e-300, 1e-12  # a range below LEAST, or below this share of its numbers, has no steps to tell apart


@dataclass(frozen=True)
class Scale:
    """Numbers from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: Length
    end: Length

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def step(low: float, high: float, count: int = 5) -> float:
    """The round distance (1, 2 or 5 times a power of ten) that cuts an interval into about `count` parts.

    >>> step(0.0, 1.0), step(0.0, 37.0), step(0.0, 0.3)
    (0.2, 10.0, 0.1)
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(float(f"{m * power:.3g}") for m in (1, 2, 5, 10) if m * power >= 0.999 * rough)


def around(values: Iterable[float], zero: bool = True, count: int = 10) -> tuple[float, float]:
    """Round ends for an axis that shows the values, and 0 if `zero`. More parts leave less room at the ends.

    >>> around([0.13, 0.92]), around([5.0]), around([])
    ((0.0, 1.0), (0.0, 5.0), (0.0, 1.0))
    >>> around([1e-14, 2.1e-15]), around([-3.3e-16])
    ((0.0, 1e-14), (-3.5e-16, 0.0))
    """
    found = [*values, *([0.0] if zero else [])]
    low, high = min(found, default=0.0), max(found, default=1.0)
    if high - low <= max(LEAST, SHARE * max(abs(low), abs(high))):
        high = low + max(1.0, abs(low) / 1000)  # a large number is the same with 1 added
    size = step(low, high, count)
    return multiple(math.floor(low / size + 1e-9), size), multiple(math.ceil(high / size - 1e-9), size)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """The round numbers within an interval.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(0.0, 1e-15)
    [0.0, 2e-16, 4e-16, 6e-16, 8e-16, 1e-15]
    """
    size = step(low, high, count)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [multiple(n, size) for n in range(first, last + 1)]


def multiple(count: int, size: float) -> float:
    """So many steps of a round size, without digits that only rounding made: as many decimals as the size has.

    >>> 3 * 0.1, multiple(3, 0.1), multiple(7, 2e-17), multiple(12, 500.0)
    (0.30000000000000004, 0.3, 1.4e-16, 6000.0)
    """
    return round(count * size, -math.floor(math.log10(size))) + 0.0  # and not -0.0
