"""The scalar intertwiner group of an activation: the factors a with σ(a·x) = b·σ(x) for all x, and b = φ(a).

By Theorem E.14 of Godfrey et al. (2022) the whole group of a non-linear σ on n units is permutations times diagonal
matrices with entries from this scalar group, so it decides which scales and signs a layer may carry. It is found
numerically for any elementwise function; no table of names is consulted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from intertwine.errors import InputError

_TOLERANCE = 1e-9
_FACTORS = (0.3, 0.5, 0.8, 1.25, 1.7, 2.0, 3.1)


@dataclass(frozen=True)
class ActivationGroup:
    """What scales pass an activation.

    `kind`: "trivial" {1}, "sign" {±1}, "positive" (0, ∞), "nonzero" (all a ≠ 0), "all" (σ is linear: any matrix).
    `degree`: φ(a) = a**degree for a > 0 (None where positive factors do not pass).
    `parity`: φ(−1) = parity, +1 for an even and −1 for an odd function (None where signs do not pass).
    """

    kind: str
    degree: Fraction | None
    parity: int | None

    def phi(self, a: float) -> float:
        """φ(a): the factor on the output for the factor a on the input.

        Example:
            >>> import torch, intertwine
            >>> intertwine.activation_group(torch.square).phi(-3.0)
            9.0
        """
        if a == 1:
            return 1.0
        if a == 0 or (a < 0 and self.parity is None) or (abs(a) != 1 and self.degree is None):
            raise InputError(
                f"{a} is not in this {self.kind!r} group, so φ({a}) is not defined. Ask for φ only on members."
            )
        sign = 1.0 if a > 0 or self.parity is None else float(self.parity)
        return sign * abs(a) ** float(self.degree) if self.degree is not None else sign


def activation_group(fn: Callable[[Tensor], Tensor]) -> ActivationGroup:
    """The scalar intertwiner group of any elementwise function, found numerically in float64.

    Args:
        fn: a function of one tensor that acts on each entry alone, such as `torch.relu` or a lambda.

    Returns:
        An `ActivationGroup`; `.kind` is one of "trivial", "sign", "positive", "nonzero", "all", `.phi` the map φ.

    Example:
        >>> import torch, intertwine
        >>> intertwine.activation_group(torch.relu).kind
        'positive'
        >>> intertwine.activation_group(torch.tanh).kind
        'sign'

    Reference: Godfrey et al., On the Symmetries of Deep Learning Models, 2022, Table 1.
    """
    x = _grid()
    y = _evaluate(fn, x)
    degree = _degree(fn, x, y)
    parity = _parity(fn, x, y)
    if degree == 1 and parity == -1 and _is_linear(x, y):
        return ActivationGroup("all", degree, parity)
    kind = {(False, False): "trivial", (False, True): "sign", (True, False): "positive", (True, True): "nonzero"}
    return ActivationGroup(kind[degree is not None, parity is not None], degree, parity)


@lru_cache(maxsize=1)
def _grid() -> Tensor:
    """Points of both signs over many orders of magnitude, none of them special to any activation, and zero."""
    places = torch.arange(121, dtype=torch.float64)
    magnitudes = torch.logspace(-12, 12, 121, dtype=torch.float64) * (1 + 0.01 * torch.sin(places))
    return torch.cat([-magnitudes.flip(0), torch.zeros(1, dtype=torch.float64), magnitudes])


def _evaluate(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if isinstance(fn, torch.nn.Module):
        fn = copy.deepcopy(fn).to(torch.float64)
    with torch.no_grad():
        y = fn(x.clone())
    return y.to(torch.float64)


def _ratio(y: Tensor, scaled: Tensor) -> float | None:
    """The b with scaled = b·y everywhere, or None."""
    finite = torch.isfinite(y) & torch.isfinite(scaled)
    if not torch.equal(torch.isfinite(y), torch.isfinite(scaled)) or not bool(finite.any()):
        return None
    y, scaled = y[finite], scaled[finite]
    if not bool(y.any()):
        return 1.0 if not bool(scaled.any()) else None
    top = int(y.abs().argmax())
    b = float(scaled[top] / y[top])
    # each point is judged by its own size, so a deviation where the function is small cannot hide
    error = (scaled - b * y).abs()
    return b if b != 0 and bool((error <= _TOLERANCE * (scaled.abs() + abs(b) * y.abs())).all()) else None


def _degree(fn: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Fraction | None:
    degrees = []
    for a in _FACTORS:
        b = _ratio(y, _evaluate(fn, a * x))
        if b is None or b <= 0:
            return None
        degrees.append(math.log(b) / math.log(a))
    found = Fraction(degrees[0]).limit_denominator(64)
    return found if all(abs(d - float(found)) < 1e-7 for d in degrees) else None


def _parity(fn: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> int | None:
    b = _ratio(y, _evaluate(fn, -x))
    return round(b) if b is not None and abs(abs(b) - 1) < 1e-9 else None


def _is_linear(x: Tensor, y: Tensor) -> bool:
    slope = float(y[-1] / x[-1])
    return bool(((y - slope * x).abs() <= _TOLERANCE * (y.abs() + abs(slope) * x.abs())).all())
