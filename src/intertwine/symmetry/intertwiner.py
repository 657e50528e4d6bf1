"""The intertwiner group of an activation on n units: the matrices A with σ(A·x) = B·σ(x) for all x, and B = φ(A).

Membership is decided by sampling, without the theorem that reduces it to scalars, so that the theorem can be checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.shapes import Float
from intertwine.symmetry.elementwise import Elementwise, elementwise

#: Largest relative residual of a member. Members stay below 1e-12, the next best matrix is far above.
TOLERANCE = 1e-9
_MAGNITUDES = (0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Intertwining:
    """Whether σ∘A = B∘σ. `output` is the best B, `residual` its largest relative error over the units and samples."""

    ok: bool
    output: Float[Tensor, "n n"]
    residual: float

    @property
    def margin(self) -> float:
        """How many powers of ten lie between the residual and the line between members and others."""
        return abs(math.log10(max(self.residual, 1e-300)) - math.log10(TOLERANCE))

    def __repr__(self) -> str:
        verdict = "a member" if self.ok else "no member"
        return f"Intertwining({verdict} on {len(self.output)} units, residual {self.residual:.1e})"


def intertwines(fn: Callable[..., Any], matrix: Float[Tensor, "n n"], seed: int = 0) -> Intertwining:
    """Whether a matrix passes an activation: is there a B with σ(A·x) = B·σ(x) for all x?

    Samples of both signs and of several magnitudes are drawn in float64, and B is fitted to them by least squares.
    Where several B fit (σ is constant), the one nearest to the identity is taken.

    Args:
        fn: an elementwise function. matrix: A, invertible. seed: of the samples.

    Raises:
        InputError: the function is no activation, or the matrix is not square and invertible.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.intertwiner import intertwines
        >>> intertwines(torch.relu, torch.tensor([[0.0, 1.0], [2.0, 0.0]])).ok
        True
        >>> intertwines(torch.relu, torch.tensor([[1.0, 1.0], [0.0, 1.0]])).ok
        False
    """
    a = _invertible(matrix)
    sigma = elementwise(fn)
    x = _samples(len(a), seed)
    y, moved = _apply(sigma, x), _apply(sigma, x @ a.T)
    if not bool(y.any()) and not bool(moved.any()):  # σ = 0 passes everything
        return Intertwining(True, torch.eye(len(a), dtype=torch.float64), 0.0)
    own, size = y.norm(dim=1, keepdim=True), moved.norm(dim=1, keepdim=True)
    scale = torch.maximum(own, 1e-50 * size)  # each sample counts alike, whatever its magnitude
    known = (torch.isfinite(own + size) & (scale > 0))[:, 0]
    if int(known.sum()) < 2 * len(a):
        raise InputError(
            f"Membership of a {len(a)} × {len(a)} matrix was asked for, and {sigma.name} is finite at only "
            f"{int(known.sum())} of {len(x)} samples. Pass an activation that is defined for both signs."
        )
    return _fit(y[known] / scale[known], moved[known] / scale[known])


def _fit(y: Tensor, moved: Tensor) -> Intertwining:
    """The B with moved = y·Bᵀ, and how well it does; of many, the one nearest to the identity."""
    found = torch.linalg.lstsq(y, moved, driver="gelsd")
    output = found.solution.T
    if int(found.rank) < y.shape[1]:
        change = torch.linalg.lstsq(y, moved - y, driver="gelsd").solution
        output = change.T + torch.eye(y.shape[1], dtype=torch.float64)
    error, size = (y @ output.T - moved).norm(dim=0), moved.norm(dim=0)
    residual = float(torch.where(size > 0, error / size, error).max())
    return Intertwining(residual < TOLERANCE, output, residual)


def phi(fn: Callable[..., Any], matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """φ_σ(A) = σ(A)·σ(I)⁻¹, with σ entry by entry: the B of a member A. On other matrices it has no such meaning.

    Raises:
        InputError: σ(I) is singular (Lemma E.7), so that the formula does not apply.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.intertwiner import phi
        >>> phi(torch.square, torch.tensor([[0.0, 3.0], [-2.0, 0.0]]))
        tensor([[0., 9.],
                [4., 0.]], dtype=torch.float64)
    """
    a = _square(matrix)
    sigma = elementwise(fn)
    n = len(a)
    at_zero, at_one = _at_zero_and_one(sigma)
    once, often = _spectrum(at_zero, at_one, n)
    size = max(abs(at_zero), abs(at_one))
    if not (abs(once) > 1e-12 * n * size and (n == 1 or abs(often) > 1e-12 * size)):
        broken = "σ(1) = σ(0)" if n > 1 and abs(often) <= 1e-12 * size else "σ(1) = −(n − 1)·σ(0)"
        raise InputError(
            f"φ_σ(A) = σ(A)·σ(I)⁻¹ was asked for with {sigma.name} on {n} units, and σ(I) is singular because "
            f"{broken}: σ(0) = {at_zero:g}, σ(1) = {at_one:g}. Use intertwines(fn, matrix).output, which fits B to "
            f"many samples, or activation_group(fn).phi for one factor."
        )
    identity = at_zero + (at_one - at_zero) * torch.eye(n, dtype=torch.float64)
    return torch.linalg.solve(identity, _apply(sigma, a), left=False)


def identity_spectrum(fn: Callable[..., Any], n: int) -> tuple[float, float]:
    """The eigenvalues of σ(I) on n units: σ(1) + (n − 1)·σ(0) once, and σ(1) − σ(0) n − 1 times (Lemma E.7).

    φ_σ(A) = σ(A)·σ(I)⁻¹ needs both to be different from zero; for n = 1 there is only the first.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.intertwiner import identity_spectrum
        >>> identity_spectrum(torch.cos, 3)  # cos 1 + 2, cos 1 − 1
        (2.5403, -0.4597)
    """
    if n < 1:
        raise InputError(f"The spectrum of σ(I) on {n} units was asked for. Pass at least one unit.")
    return _spectrum(*_at_zero_and_one(elementwise(fn)), n)


def _spectrum(at_zero: float, at_one: float, n: int) -> tuple[float, float]:
    return at_one + (n - 1) * at_zero, at_one - at_zero


def _at_zero_and_one(sigma: Elementwise) -> tuple[float, float]:
    at_zero, at_one = sigma(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    if not (math.isfinite(at_zero) and math.isfinite(at_one)):
        raise InputError(
            f"σ(I) was asked for, and {sigma.name} has σ(0) = {at_zero} and σ(1) = {at_one}. The formula needs finite "
            f"numbers; use intertwines(fn, matrix), which samples elsewhere."
        )
    return at_zero, at_one


def _apply(sigma: Elementwise, x: Tensor) -> Tensor:
    return sigma(x.flatten()).reshape(x.shape)


def _samples(n: int, seed: int) -> Tensor:
    """Normal vectors of several magnitudes, and vectors whose entries have magnitudes of their own."""
    many = max(32, 4 * n)
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(len(_MAGNITUDES) + 1, many, n, generator=generator, dtype=torch.float64)
    own = 10 ** torch.empty(many, n, dtype=torch.float64).uniform_(-2, 2, generator=generator)
    alike = torch.tensor(_MAGNITUDES, dtype=torch.float64)[:, None, None].expand(-1, many, n)
    return (draw * torch.cat([alike, own[None]])).flatten(0, 1)


def _square(matrix: Tensor) -> Tensor:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise InputError(f"A square matrix was expected, one of shape {tuple(matrix.shape)} was given.")
    return matrix.detach().to("cpu", torch.float64)


def _invertible(matrix: Tensor) -> Tensor:
    a = _square(matrix)
    values = torch.linalg.svdvals(a)
    if not bool(torch.isfinite(a).all()) or float(values[-1]) <= 1e-13 * float(values[0]):
        raise InputError(
            f"An invertible matrix was expected; the given {len(a)} × {len(a)} matrix has singular values from "
            f"{float(values[-1]):.1e} to {float(values[0]):.1e}. The intertwiner group holds invertible matrices only."
        )
    return a
