"""How far an activation is from being positively homogeneous: the root mean square of σ(λX) − λ·σ(X), X normal.

GELU is nearly ReLU, and its intertwiner group holds permutations only. This number says how much of the scale symmetry
of ReLU is lost at each scale λ (Godfrey et al. 2022, equation E.22 and Figure 17).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from intertwine.errors import InputError
from intertwine.symmetry.elementwise import elementwise

_REACH = 20.0  # a normal number is farther out with probability 1e-88
_MOST = 100_000  # intervals at once; a function that asks for more is noise
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def homogeneity_defect(fn: Callable[..., Any], scale: float) -> float:
    """ξ(λ) = √E[(σ(λX) − λ·σ(X))²] for a standard normal X: zero for all λ > 0 exactly if σ is homogeneous of degree 1.

    The integral is taken by adaptive Gauss–Legendre quadrature, good to about 1e-12 for smooth and kinked functions.

    Args:
        fn: an elementwise function. scale: λ, any finite number.

    Raises:
        InputError: the function is no activation, the scale is not finite, or the mean does not exist.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.homogeneity import homogeneity_defect
        >>> homogeneity_defect(torch.nn.GELU(), 2.0)
        0.1767
        >>> homogeneity_defect(torch.relu, 2.0)
        0.0
    """
    if not math.isfinite(scale):
        raise InputError(f"The homogeneity defect at the scale {scale} was asked for. Pass a finite scale.")
    sigma = elementwise(fn)

    def at(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        moved, still = (sigma(torch.from_numpy(p.ravel())).numpy().reshape(p.shape) for p in (scale * x, x))
        return moved, scale * still

    with np.errstate(over="ignore", invalid="ignore"):
        size = _gauss(lambda x: sum(part**2 for part in at(x)) * _normal(x), *_intervals()).sum()
        # below this the two terms differ by their rounding only
        floor = 1e-26 * float(size)
        mean = _integral(lambda x: np.subtract(*at(x)) ** 2 * _normal(x), floor)
    if not math.isfinite(mean):
        raise InputError(
            f"The homogeneity defect of {sigma.name} at the scale {scale} is not finite: the function is not defined "
            f"somewhere, or grows too fast for a normal input. Pass an activation of moderate growth."
        )
    return math.sqrt(mean)


def _normal(x: np.ndarray) -> np.ndarray:
    return np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _intervals() -> tuple[np.ndarray, np.ndarray]:
    """Left and right ends that cover [−20, 20], ever finer towards zero, where large scales act."""
    edges = np.concatenate([[0.0], _REACH * 2.0 ** np.arange(-24, 1)])
    return np.concatenate([edges[:-1], -edges[1:]]), np.concatenate([edges[1:], -edges[:-1]])


def _integral(density: Callable[[np.ndarray], np.ndarray], floor: float) -> float:
    """The integral to `floor` and to 1e-14 of itself: intervals on which one and two Gauss rules differ are halved."""
    left, right = _intervals()
    total = 0.0
    while True:
        middle = (left + right) / 2
        whole = _gauss(density, left, right)
        halves = _gauss(density, left, middle) + _gauss(density, middle, right)
        wrong = np.abs(whole - halves) > 1e-14 * max(total, float(np.abs(halves).max())) + floor
        narrow = (right - left) < 1e-14 * np.maximum(np.abs(left), 1e-9)  # a jump: nothing is left to halve
        wrong &= ~narrow
        if not wrong.any() or not np.isfinite(halves).all() or wrong.sum() > _MOST:
            return total + float(halves.sum())
        total += float(halves[~wrong].sum())
        left, right = np.concatenate([left[wrong], middle[wrong]]), np.concatenate([middle[wrong], right[wrong]])


def _gauss(density: Callable[[np.ndarray], np.ndarray], left: np.ndarray, right: np.ndarray) -> np.ndarray:
    half = (right - left) / 2
    return half * (density((left + right)[:, None] / 2 + half[:, None] * _NODES) @ _WEIGHTS)
