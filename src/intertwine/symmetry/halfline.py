"""One half-line of an activation, sampled over many orders of magnitude: is it a power law, and where can it be read?

σ(a·x) = b·σ(x) for all a > 0 says that σ is κ₊·x^p on x > 0 and κ₋·|x|^p on x < 0, so the question whether every
positive factor passes is answered by the values of σ alone. Numbers too large or too small for the format are no
evidence for or against a law; a power law is allowed to run into them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: How far the samples reach, in powers of ten: at the ends every usual activation has become a power law.
REACH = 18
#: Largest generator of a discrete group that is looked for, in powers of ten.
WIDEST = 6


@dataclass(frozen=True)
class PowerLaw:
    """κ·m^p on a whole half-line; `exponent` is None where any will do (σ is zero, or not defined there)."""

    coefficient: float
    exponent: float | None


@dataclass(frozen=True)
class HalfLine:
    """Values of σ at the points sign·magnitudes, magnitudes ascending. `limits`: the number format σ answers in."""

    sign: int
    magnitudes: Tensor
    values: Tensor
    limits: torch.finfo

    @property
    def tolerance(self) -> float:
        return max(1e-9, 64 * self.limits.eps)

    @property
    def readable(self) -> Tensor:
        """The values, with a NaN wherever the format may have spoiled them."""
        size = self.values.abs()
        clear = (size > self.limits.tiny / self.limits.eps) & (size < self.limits.max * self.limits.eps)
        return torch.where(clear, self.values, torch.nan)

    def law(self) -> PowerLaw | None:
        """The power law that holds on the whole half-line, or None."""
        if not bool(self.values.any()):
            return PowerLaw(0.0, None)
        if bool(self.values.isnan().all()):
            return PowerLaw(math.nan, None)
        if bool(self.values.isinf().all()) and bool((self.values == self.values[0]).all()):
            return PowerLaw(float(self.values[0]), 0.0)
        return self._fit(0, len(self.values))

    def _fit(self, start: int, stop: int) -> PowerLaw | None:
        m, v = self.magnitudes[start:stop].log(), self.values[start:stop]
        clear = (~self.readable[start:stop].isnan()).nonzero().flatten()
        if len(clear) < 2:
            return None
        i, j = int(clear[0]), int(clear[-1])
        if float(v[i]) * float(v[j].sign()) <= 0:
            return None
        exponent = float((v[j].abs().log() - v[i].abs().log()) / (m[j] - m[i]))
        predicted = v[i].sign() * (v[i].abs().log() + exponent * (m - m[i])).exp()
        if not agree(v, predicted, 1.0, self.limits, self.tolerance):
            return None
        return PowerLaw(float(v[i].sign() * (v[i].abs().log() - exponent * m[i]).exp()), exponent)

    def span(self) -> tuple[int, int] | None:
        """First and last (exclusive) sample between underflow and overflow; None if σ is no number in between."""
        size = self.values.abs()
        low, high = self.limits.tiny * 1e30, self.limits.max * 1e-30
        clear = ((size > low) & (size < high)).nonzero().flatten()
        if len(clear) < 2:
            return None
        start, stop = int(clear[0]), int(clear[-1]) + 1
        # zeros that do not follow after values about to underflow are zeros of σ, and belong to it
        if not bool((size[:start] > 0).any()):
            start = 0
        if not bool((size[stop:] > 0).any()):
            stop = len(size)
        return (start, stop) if bool(torch.isfinite(self.values[start:stop]).all()) else None

    def cannot_repeat(self) -> bool:
        """Whether the ends of a half-line that is no power law show that σ(a·x) = b·σ(x) for no a up to 10^WIDEST.

        Such a σ repeats itself, up to a factor, from one period to the next. So it is no power law (nor zero) over a
        whole period anywhere, and its slope takes the same values at both ends.
        """
        span = self.span()
        if span is None:
            return True
        start, stop = span
        decade = (len(self.values) - 1) / (2 * REACH)
        width = round(min(WIDEST * decade, (stop - start) / 3))
        if width < 8:
            return True
        ends = [(start, start + width), (stop - width, stop)]
        if any(self._fit(*end) is not None or not bool(self.values[slice(*end)].any()) for end in ends):
            return True
        left, right = (self._slopes(*end) for end in ends)
        return bool((left.min() > right.max()) | (right.min() > left.max()))

    def _slopes(self, start: int, stop: int) -> Tensor:
        """d log|σ| / d log|x| from sample to sample; NaN where σ is zero or changes sign."""
        m, v = self.magnitudes[start:stop], self.values[start:stop]
        return (v[1:] / v[:-1]).log() / (m[1:] / m[:-1]).log()


def agree(
    scaled: Tensor, y: Tensor, b: float, limits: torch.finfo, tolerance: float, slack: Tensor | float = 0.0
) -> bool:
    """Whether scaled = b·y at every point, each judged by its own size, so that no deviation hides behind a large one.

    A number that has left the format agrees with every number that had to leave it; NaN agrees with NaN.
    """
    expected = b * y
    error, size = (scaled - expected).abs(), scaled.abs() + expected.abs()
    close = error <= tolerance * size + slack + (1 + abs(b)) * limits.tiny
    edge = limits.max * (1 - tolerance)
    over = (y.isinf() & (scaled.abs() >= abs(b) * edge)) | (scaled.isinf() & (expected.abs() >= edge))
    over &= scaled.sign() == expected.sign()
    return bool((close | over | (scaled.isnan() & y.isnan())).all())
