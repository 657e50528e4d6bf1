"""Closed forms: the map of a family that brings rows A nearest to rows B, from their moments alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from intertwine.shapes import Float
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import NOISE, Moments, Products


def fitted(moments: Moments, bias: bool, fit: Callable[[Products], Tensor]) -> LinearMap:
    """A map by `fit`: of centred products with the bias that goes with it, or of plain products without one."""
    matrix = fit(moments.products(centred=bias))
    return LinearMap(matrix, moments.b_mean - matrix @ moments.a_mean if bias else None)


def least_squares(moments: Moments, *, bias: bool) -> LinearMap:
    """The map with the least ‖map(A) − B‖ (row 001-C07); of several the one with the least norm, as a pseudo-inverse.

    Args:
        moments: of rows A and B. bias: True fits a constant as well, as a column of ones beside A would.

    Example:
        >>> import torch
        >>> from intertwine.stitch.moments import Moments
        >>> a, moments = torch.randn(50, 2).double(), Moments()
        >>> moments.update(a, a @ torch.tensor([[1.0, 0.0], [3.0, 2.0]]).double() + 5)
        >>> found = least_squares(moments, bias=True)
        >>> found.matrix.round(decimals=6), found.bias.round(decimals=6)
        (tensor([[1., 3.], [0., 2.]], dtype=torch.float64), tensor([5., 5.], dtype=torch.float64))
    """
    return fitted(moments, bias, lambda p: solve(p).T)


def solve(products: Products) -> Float[Tensor, "inputs outputs"]:
    """A⁺B. Columns of A are first brought to length one, so that small ones count as much as large ones.

    A direction counts as missing where its eigenvalue in the products of these columns is below `NOISE` times the
    number of columns. The answer has no part along missing directions, nor from columns that are zero.
    """
    lengths = products.aa.diagonal().clamp(min=0).sqrt()
    live = lengths > 0
    found = torch.zeros_like(products.ab)
    found[live] = _solved(products.aa[live][:, live], products.ab[live], 1 / lengths[live])
    return found


def _solved(aa: Tensor, ab: Tensor, inverse: Tensor) -> Tensor:
    """The same where no column is zero; `inverse` are the columns' lengths, inverted."""
    values, vectors = torch.linalg.eigh(aa * inverse[:, None] * inverse)
    there = values > NOISE * len(values)
    kept = vectors * torch.where(there, values, 1.0).rsqrt() * there
    found = inverse[:, None] * (kept @ (kept.T @ (inverse[:, None] * ab)))
    missing = vectors[:, ~there] * inverse[:, None]
    if not missing.shape[1]:
        return found
    # a direction v of unit columns is the direction v/lengths of the columns themselves
    u, sizes, _ = torch.linalg.svd(missing / missing.norm(dim=0), full_matrices=False)
    basis = u[:, sizes > 1e-10]
    return found - basis @ (basis.T @ found)


def procrustes(products: Products) -> Float[Tensor, "outputs inputs"]:
    """The orthogonal map nearest to taking A to B (row 001-C08): UVᵀ of AᵀB = USVᵀ, here outputs × inputs.

    With fewer outputs than inputs its rows are orthonormal, and it is the one with the largest ⟨map(A), B⟩; the least
    distance is then another matter, for ‖map(A)‖ is not fixed.
    """
    return polar(products.ab.T)


def polar(matrix: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """The nearest matrix with orthonormal rows or columns, whichever are fewer.

    >>> import torch
    >>> polar(torch.tensor([[0.0, 3.0], [-2.0, 0.0]])).round(decimals=4)
    tensor([[ 0.,  1.], [-1.,  0.]])
    """
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def reduced_rank(products: Products, rank: int) -> tuple[Float[Tensor, "outputs rank"], Float[Tensor, "rank inputs"]]:
    """The best map of at most this rank (row 001-C09) as two factors: M_LS V_k V_kᵀ, V from A·M_LS = USVᵀ."""
    best = solve(products)
    fit = best.T @ products.aa @ best
    directions = torch.linalg.eigh((fit + fit.T) / 2).eigenvectors[:, -rank:].flip(1)
    return directions, (best @ directions).T
