"""The scalar intertwiner group of an activation: the factors a with σ(a·x) = b·σ(x) for all x, and b = φ(a).

By Theorem E.14 of Godfrey et al. (2022) the whole group of a non-linear σ on n units is permutations times diagonal
matrices with entries from this scalar group, so it decides which scales and signs a layer may carry. It is found
numerically for any elementwise function. All positive factors pass if σ is κ₊·x^p on x > 0 and κ₋·|x|^p on x < 0, which
is read off samples over many orders of magnitude; values that overflow or underflow are no evidence for or against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.symmetry.elementwise import Elementwise, elementwise

#: How far the samples reach, in powers of ten: at the ends every usual activation has become a power law.
SAMPLE_RANGE = 18
#: Largest generator of a discrete group that is looked for, in powers of ten.
LARGEST_GENERATOR = 6


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
        """First and last (exclusive) sample between underflow and overflow; None if σ is not finite in between."""
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
        """Whether the ends of a half-line that is not a power law rule out a generator up to 10^LARGEST_GENERATOR.

        A σ with a generator repeats itself, up to a factor, from one period to the next: it is nowhere a power law (or
        zero) over a whole period, and its slope takes the same values at both ends.
        """
        span = self.span()
        if span is None:
            return True
        start, stop = span
        decade = (len(self.values) - 1) / (2 * SAMPLE_RANGE)
        width = round(min(LARGEST_GENERATOR * decade, (stop - start) / 3))
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
    """Whether scaled = b·y at every point, each relative to its own size.

    An infinity agrees with every number that overflows; NaN agrees with NaN.
    """
    expected = b * y
    error, size = (scaled - expected).abs(), scaled.abs() + expected.abs()
    close = error <= tolerance * size + slack + (1 + abs(b)) * limits.tiny
    edge = limits.max * (1 - tolerance)
    over = (y.isinf() & (scaled.abs() >= abs(b) * edge)) | (scaled.isinf() & (expected.abs() >= edge))
    over &= scaled.sign() == expected.sign()
    return bool((close | over | (scaled.isnan() & y.isnan())).all())


# -- Discrete groups of factors: x·(2 + sin(2π·log₂|x|)) passes x → 2·x ------------------------------------------------


_STEP = 0.01
_SMALLEST = math.log(1.01)
#: Whether a factor passes: its b, or None.
Passes = Callable[[float], float | None]


@dataclass(frozen=True)
class _Track:
    """σ on one half-line over t = log|x|, with the power |x|^q divided out."""

    sigma: Elementwise
    sign: int
    start: float
    stop: float
    power: float

    def __call__(self, t: np.ndarray) -> np.ndarray:
        y = self.sigma(torch.from_numpy(self.sign * np.exp(t))).numpy()
        with np.errstate(divide="ignore"):
            return np.sign(y) * np.exp(np.log(np.abs(y)) - self.power * t)


def find_generator(
    sigma: Elementwise, irregular: Sequence[HalfLine], passes: Passes, signs: bool
) -> tuple[float, float] | None:
    """The (a, b) with |a| > 1 that generates all factors of a discrete group (besides −1 where `signs`), or None.

    With t = log|x|, σ divided by a power of |x| has the period log a in t, or changes sign after it. Candidates for the
    period come from the autocorrelation over t; they are made exact by Gauss–Newton steps (or by bisection, where σ
    jumps) and count only if the equation then holds at every sample. A closed group of factors that is neither finite
    nor continuous is generated by one number: c, c together with −1, or −c.

    Args:
        sigma: the function. irregular: its half-lines that are not a power law. passes: the test of a factor.
        signs: whether −1 is a factor.
    """
    tracks = _tracks(sigma, irregular)
    exact = (_exact_period(tracks, guess) for guess in _candidates(tracks)) if tracks else ()
    period = next((p for p in exact if p is not None and passes(math.exp(p)) is not None), None)
    if period is None:
        return None
    period = _shortest(period, passes)
    c = _simple(math.exp(period), passes)
    if not signs:  # −√c is the only negative number whose square is the generator
        root = -_simple(math.exp(period / 2), lambda a: passes(-a))
        if (b := passes(root)) is not None:
            return root, _rounded(b)
    b = passes(c)
    return None if b is None else (c, _rounded(b))


def _tracks(sigma: Elementwise, irregular: Sequence[HalfLine]) -> list[_Track]:
    found = []
    for half in irregular:
        span = half.span()
        if span is None:
            return []
        m, v = (part[slice(*span)] for part in (half.magnitudes.log(), half.values.abs()))
        slope = np.polyfit(m[v > 0].numpy(), v[v > 0].log().numpy(), 1)[0]
        found.append(_Track(sigma, half.sign, float(m[0]), float(m[-1]), float(slope)))
    power = sum(track.power for track in found) / max(len(found), 1)
    return [_Track(sigma, t.sign, t.start, t.stop, power) for t in found]


def _exact_period(tracks: Sequence[_Track], guess: float) -> float | None:
    exact = _between_jumps(tracks, guess)
    return _refine(tracks, guess) if exact is None else exact


def _candidates(tracks: Sequence[_Track], most: int = 8) -> list[float]:
    """Shifts of t at which the tracks are most like themselves, best first."""
    waves = [track(np.arange(track.start, track.stop, _STEP)) for track in tracks]
    longest = min(round(LARGEST_GENERATOR * math.log(10) / _STEP), *(len(w) * 2 // 3 for w in waves))
    alike = np.zeros(longest)
    for shift in range(1, longest):  # track by track: products of joined tracks are so long that BLAS starts threads
        pairs = [(w[shift:], w[:-shift]) for w in waves]
        product, after, before = (sum(terms) for terms in zip(*((a @ b, a @ a, b @ b) for a, b in pairs), strict=True))
        alike[shift] = abs(product) / math.sqrt(after * before)
    peaks = [k for k in range(2, longest - 1) if alike[k - 1] <= alike[k] >= alike[k + 1] and alike[k] > 0.5]
    return [k * _STEP for k in sorted(peaks, key=lambda k: -alike[k])[:most]]


def _between_jumps(tracks: Sequence[_Track], period: float) -> float | None:
    """The distance between two jumps of σ that are about one period apart; None if σ does not jump."""
    for track in tracks:
        t = np.arange(track.start, track.stop - period - 3 * _STEP, _STEP)
        steps = np.abs(np.diff(track(t)))
        first = _jump(track, float(t[steps.argmax()]), float(t[steps.argmax() + 1]))
        if first is not None:
            second = _jump(track, first + period - 2 * _STEP, first + period + 2 * _STEP)
            return None if second is None else second - first
    return None


def _jump(track: _Track, left: float, right: float) -> float | None:
    """Where the track jumps between two places, by bisection; None if it is only steep there."""
    low, high = track(np.array([left, right]))
    height = abs(high - low)
    while right - left > 1e-14 * max(1.0, abs(left)):
        middle = (left + right) / 2
        value = track(np.array([middle]))[0]
        if abs(value - low) < abs(value - high):
            left, low = middle, value
        else:
            right, high = middle, value
    return (left + right) / 2 if abs(high - low) > 0.5 * height else None


def _refine(tracks: Sequence[_Track], period: float, steps: int = 20, delta: float = 1e-5) -> float | None:
    """Gauss–Newton on the period and the factor together."""
    points = [np.linspace(t.start, t.stop - 1.1 * period, 331) + 0.003 for t in tracks]
    now = np.concatenate([t(p) for t, p in zip(tracks, points, strict=True)])

    def later(shift: float) -> np.ndarray:
        return np.concatenate([t(p + shift) for t, p in zip(tracks, points, strict=True)])

    start = period
    for _ in range(steps):
        there = later(period)
        slope = (later(period + delta) - later(period - delta)) / (2 * delta)
        factor = (there @ now) / (now @ now)
        system, gap = np.stack([slope, -now], 1), factor * now - there
        if not (np.isfinite(system).all() and np.isfinite(gap).all()):
            return None
        change = float(np.linalg.lstsq(system, gap, rcond=None)[0][0])
        period += change
        if abs(period - start) > 2 * _STEP:
            return None
        if abs(change) < 1e-15:
            break
    return period


def _shortest(period: float, passes: Passes) -> float:
    """The smallest period of which the given one is a multiple: divided by primes as often as they divide."""
    for prime in range(2, int(period / _SMALLEST) + 1):
        if all(prime % k for k in range(2, math.isqrt(prime) + 1)):
            while period / prime > _SMALLEST and passes(math.exp(period / prime)) is not None:
                period /= prime
    return period


def _simple(a: float, passes: Passes) -> float:
    """A nearby fraction in place of a number, if the fraction passes too."""
    near = _rounded(a)
    return near if passes(near) is not None else a


def _rounded(b: float) -> float:
    near = float(Fraction(b).limit_denominator(1000))
    return near if abs(near - b) < 1e-11 * abs(b) else b


# -- The scalar intertwiner group --------------------------------------------------------------------------------------


_PER_DECADE = 20
#: Factors at which a power law is tried once more, at points between the samples.
_FACTORS = (0.3, 1.7)


@dataclass(frozen=True)
class ActivationGroup:
    """The scales that pass an activation.

    `kind`: "trivial" {1}, "sign" {±1}, "positive" (0, ∞), "nonzero" (all a ≠ 0), "all" (σ is linear: any matrix).
    `degree`: φ(a) = a**degree for a > 0 (None where not all positive factors pass, or where the exponent is no fraction
    with a denominator up to 64). `exponent`: the same as a float, whatever number it is.
    `parity`: φ(−1) = parity, +1 for an even and −1 for an odd function (None where −1 does not pass).
    `discrete`: (a, φ(a)) for the generator a of a discrete group of factors besides `kind`: a**k passes for whole k.
    Generators from 1.01 to 10⁶ are looked for. It is negative where, say, −2 passes and neither −1 nor 2 does.
    """

    kind: str
    degree: Fraction | None
    parity: int | None
    discrete: tuple[float, float] | None = None
    exponent: float | None = None

    def phi(self, a: float) -> float:
        """φ(a): the factor on the output for the factor a on the input.

        Example:
            >>> import torch, intertwine
            >>> intertwine.activation_group(torch.square).phi(-3.0)
            9.0
        """
        if a == 1:
            return 1.0
        power = self._power(a)
        if power is None:
            members = f" and of the powers of {self.discrete[0]:g}" if self.discrete else ""
            raise InputError(
                f"{a} is not in this {self.kind!r} group{members}, so φ({a}) is not defined. Pass a member."
            )
        return power

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the degree as text, such as "1/2"."""
        return asdict(self) | {"degree": None if self.degree is None else str(self.degree)}

    def _power(self, a: float) -> float | None:
        """φ(a), or None where a is no member."""
        if a == 0 or not math.isfinite(a):
            return None
        flip = 1.0 if a > 0 else float(self.parity or 0)
        if abs(a) == 1 or self.exponent is not None:
            size = abs(a) ** (self.exponent or 0.0)
            return flip * size or None
        if self.discrete is None:
            return None
        base, factor = self.discrete
        k = round(math.log(abs(a)) / math.log(abs(base)))
        if abs(math.log(abs(a)) - k * math.log(abs(base))) > 1e-9 * max(1, abs(k)):
            return None
        if base < 0:  # the sign is that of the power, there is no other
            return factor**k if (a < 0) == (k % 2 == 1) else None
        return flip * factor**k or None


def activation_group(fn: Callable[..., Any]) -> ActivationGroup:
    """The scalar intertwiner group of any elementwise function, found numerically in float64.

    A linear function passes every matrix ("all"), and so does zero, for which φ(a) = a is one choice among many. A
    constant c ≠ 0 passes every factor with φ = 1 ("nonzero", degree 0, parity 1).

    Args:
        fn: a function of one tensor that acts on each entry alone, such as `torch.relu`, `torch.nn.GELU()` or a lambda.

    Returns:
        An `ActivationGroup`; `.kind` is one of "trivial", "sign", "positive", "nonzero", "all", `.phi` the map φ.

    Raises:
        InputError: the function is not elementwise, needs several inputs, is random or keeps state, or fails.

    Example:
        >>> import torch, intertwine
        >>> intertwine.activation_group(torch.relu).kind
        'positive'
        >>> intertwine.activation_group(torch.tanh).kind
        'sign'
        >>> intertwine.activation_group(lambda x: x * (2 + torch.sin(2 * torch.pi * x.abs().log2()))).discrete
        (2.0, 2.0)

    Reference: Godfrey et al., On the Symmetries of Deep Learning Models, 2022, Table 1.
    """
    sigma = elementwise(fn)
    x = _grid()
    y = sigma(x)
    if bool(y.isnan().all()):
        raise InputError(
            f"{sigma.name} is NaN at every one of {len(x)} numbers from −10^{SAMPLE_RANGE} to 10^{SAMPLE_RANGE}, so it "
            "has no group. Pass a function that is defined somewhere."
        )
    group = _classify(sigma, x, y)
    sigma.check_steady()
    return group


@lru_cache(maxsize=1)
def _grid() -> Tensor:
    """Points of both signs over many orders of magnitude, none of them special to any activation, and both zeros."""
    places = torch.arange(2 * SAMPLE_RANGE * _PER_DECADE + 1, dtype=torch.float64)
    magnitudes = torch.logspace(-SAMPLE_RANGE, SAMPLE_RANGE, len(places), dtype=torch.float64)
    magnitudes = magnitudes * (1 + 0.01 * torch.sin(places))
    zeros = torch.tensor([-0.0, 0.0], dtype=torch.float64)
    return torch.cat([-magnitudes.flip(0), zeros, magnitudes])


def _classify(sigma: Elementwise, x: Tensor, y: Tensor) -> ActivationGroup:
    if not bool(y.any()):
        return ActivationGroup("all", Fraction(1), -1, exponent=1.0)
    many = len(x) // 2 - 1
    halves = [HalfLine(-1, x[-many:], y[:many].flip(0), sigma.limits), HalfLine(1, x[-many:], y[-many:], sigma.limits)]
    parity = _parity(y, halves[0])
    laws = [half.law() for half in halves]
    irregular = [half for half, law in zip(halves, laws, strict=True) if law is None]
    if not irregular:
        found = {law.exponent for law in laws if law is not None and law.exponent is not None}
        return _homogeneous(sigma, x, y, found, parity, halves[0].tolerance)
    kind = "trivial" if parity is None else "sign"
    if sigma.limits.eps > 1e-12 or any(half.cannot_repeat() for half in irregular):
        return ActivationGroup(kind, None, parity)
    generator = find_generator(sigma, irregular, lambda a: _passes(sigma, x, y, a), parity is not None)
    return ActivationGroup(kind, None, parity, generator)


def _homogeneous(
    sigma: Elementwise, x: Tensor, y: Tensor, exponents: set[float], parity: int | None, tolerance: float
) -> ActivationGroup:
    """The group of a function that is a power law on each half-line: all positive factors, if the laws fit together."""
    degree, exponent = _simplest(exponents, sigma.limits.eps)
    fits = max(exponents, default=0.0) - min(exponents, default=0.0) <= tolerance
    if not fits or not all(agree(sigma(a * x), y, a**exponent, sigma.limits, tolerance) for a in _FACTORS):
        return ActivationGroup("trivial" if parity is None else "sign", None, parity)
    kind = "all" if degree == 1 and parity == -1 else "positive" if parity is None else "nonzero"
    return ActivationGroup(kind, degree, parity, exponent=exponent)


def _simplest(exponents: set[float], eps: float) -> tuple[Fraction | None, float]:
    """The exponent as the fraction or short decimal that it equals within rounding; zero where any is right."""
    mean = sum(exponents) / max(len(exponents), 1)
    simple = Fraction(mean).limit_denominator(64 if eps < 1e-12 else 4)
    if abs(float(simple) - mean) < max(1e-10, eps) * (1 + abs(mean)):
        return simple, float(simple)
    short = round(mean, 10)
    return None, short if abs(short - mean) < 1e-14 * (1 + abs(mean)) else mean


def _parity(y: Tensor, half: HalfLine) -> int | None:
    mirrored = y.flip(0)  # the samples lie symmetrically
    return next((sign for sign in (1, -1) if agree(mirrored, y, float(sign), half.limits, half.tolerance)), None)


def _passes(sigma: Elementwise, x: Tensor, y: Tensor, a: float) -> float | None:
    """The b with σ(a·x) = b·σ(x) at all samples, or None. Near a zero of σ its size around there is the measure."""
    scaled = sigma(a * x)
    clear = torch.isfinite(y) & torch.isfinite(scaled) & (y.abs() > 1e-280) & (scaled.abs() > 1e-280)
    if not bool(clear.any()):
        return None
    b = float((scaled / y)[clear].median())
    slack = 1e-9 * abs(b) * _size_around(x, y, math.log(abs(b)) / math.log(abs(a)))
    return b if agree(scaled, y, b, sigma.limits, 1e-9, slack) else None


def _size_around(x: Tensor, y: Tensor, power: float) -> Tensor:
    """How large |σ| is within half a decade of each sample, apart from its growth |x|^power."""
    growth = power * x.abs().log()
    level = (y.abs().log() - growth).nan_to_num(-torch.inf, -torch.inf)
    highest = torch.nn.functional.max_pool1d(level[None], _PER_DECADE + 1, 1, _PER_DECADE // 2)[0]
    return (highest + growth).exp().nan_to_num(0.0, 0.0)
