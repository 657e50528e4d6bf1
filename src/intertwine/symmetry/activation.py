"""The scalar intertwiner group of an activation: the factors a with σ(a·x) = b·σ(x) for all x, and b = φ(a).

By Theorem E.14 of Godfrey et al. (2022) the whole group of a non-linear σ on n units is permutations times diagonal
matrices with entries from this scalar group, so it decides which scales and signs a layer may carry. It is found
numerically for any elementwise function; no table of names is consulted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.symmetry.dilation import find_generator
from intertwine.symmetry.elementwise import Elementwise, elementwise
from intertwine.symmetry.halfline import REACH, HalfLine, agree

_PER_DECADE = 20
#: Factors at which a power law is tried once more, at points between the samples.
_FACTORS = (0.3, 1.7)


@dataclass(frozen=True)
class ActivationGroup:
    """What scales pass an activation.

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
                f"{a} is not in this {self.kind!r} group{members}, so φ({a}) is not defined. Ask for φ only on members."
            )
        return power

    def to_dict(self) -> dict[str, Any]:
        """As plain data, the degree in words such as "1/2"."""
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

    Two cases to know: a linear function passes every matrix ("all"), and so does zero, which is linear; φ(a) = a is
    then one choice among many. A constant c ≠ 0 passes every factor with φ = 1 ("nonzero", degree 0, parity 1).

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
            f"The group of {sigma.name} was asked for, and it is NaN at every one of {len(x)} numbers from "
            f"−10^{REACH} to 10^{REACH}. Pass a function that is defined somewhere."
        )
    group = _classify(sigma, x, y)
    sigma.check_steady()
    return group


@lru_cache(maxsize=1)
def _grid() -> Tensor:
    """Points of both signs over many orders of magnitude, none of them special to any activation, and both zeros."""
    places = torch.arange(2 * REACH * _PER_DECADE + 1, dtype=torch.float64)
    magnitudes = torch.logspace(-REACH, REACH, len(places), dtype=torch.float64) * (1 + 0.01 * torch.sin(places))
    zeros = torch.tensor([-0.0, 0.0], dtype=torch.float64)
    return torch.cat([-magnitudes.flip(0), zeros, magnitudes])


def _classify(sigma: Elementwise, x: Tensor, y: Tensor) -> ActivationGroup:
    if not bool(y.any()):
        return ActivationGroup("all", Fraction(1), -1, exponent=1.0)
    many = len(x) // 2 - 1
    halves = [
        HalfLine(-1, x[-many:], y[:many].flip(0), sigma.limits),
        HalfLine(1, x[-many:], y[-many:], sigma.limits),
    ]
    parity = _parity(y, halves[0])
    laws = [half.law() for half in halves]
    restless = [half for half, law in zip(halves, laws, strict=True) if law is None]
    if not restless:
        found = {law.exponent for law in laws if law is not None and law.exponent is not None}
        return _homogeneous(sigma, x, y, found, parity, halves[0].tolerance)
    kind = "trivial" if parity is None else "sign"
    if sigma.limits.eps > 1e-12 or any(half.cannot_repeat() for half in restless):
        return ActivationGroup(kind, None, parity)
    generator = find_generator(sigma, restless, lambda a: _passes(sigma, x, y, a), parity is not None)
    return ActivationGroup(kind, None, parity, generator)


def _homogeneous(
    sigma: Elementwise, x: Tensor, y: Tensor, exponents: set[float], parity: int | None, tolerance: float
) -> ActivationGroup:
    """The group of a function that is a power law on each half-line: all positive factors, if the laws fit together."""
    degree, exponent = _simplest(exponents, sigma.limits.eps)
    fits = max(exponents, default=0.0) - min(exponents, default=0.0) <= tolerance
    if not fits or not all(_agrees(sigma, x, y, a, a**exponent, tolerance) for a in _FACTORS):
        return ActivationGroup("trivial" if parity is None else "sign", None, parity)
    linear = degree == 1 and parity == -1
    return ActivationGroup(
        "all" if linear else "positive" if parity is None else "nonzero", degree, parity, exponent=exponent
    )


def _simplest(exponents: set[float], eps: float) -> tuple[Fraction | None, float]:
    """The exponent, as the fraction or the short decimal it is as far as can be told. Zero where any would do."""
    mean = sum(exponents) / max(len(exponents), 1)
    simple = Fraction(mean).limit_denominator(64 if eps < 1e-12 else 4)
    if abs(float(simple) - mean) < max(1e-10, eps) * (1 + abs(mean)):
        return simple, float(simple)
    short = round(mean, 10)
    return None, short if abs(short - mean) < 1e-14 * (1 + abs(mean)) else mean


def _agrees(sigma: Elementwise, x: Tensor, y: Tensor, a: float, b: float, tolerance: float) -> bool:
    return agree(sigma(a * x), y, b, sigma.limits, tolerance)


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
