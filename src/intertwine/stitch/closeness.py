"""What kind of matrix a stitch is: its rank, its sparsity, and how far it is from permutations and rotations."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.errors import InputError
from intertwine.shapes import Float, Int

#: Singular values below this share of the largest count as zero.
RANK_TOLERANCE = 1e-5
#: Entries up to this size count as zero, as in Godfrey et al.; Csiszárik et al. have 1e-4.
SPARSE = 1e-3


@dataclass(frozen=True)
class Closeness:
    """How far a matrix is from the nearest member of some groups, as a share of its own Frobenius norm.

    0 for a member; exactly so for permutations and scaled permutations. None throughout for a matrix of zeros. Where
    widths differ, the members are those with one entry in every row or column of the shorter side, and matrices with
    orthonormal rows or columns.

    Attributes:
        relu: to a permutation times positive scales, the group of ReLU. permutation: to a permutation.
        orthogonal: to a rotation or reflection; for members what rounding leaves.
        largest: the mean over rows of the largest entry, once columns and then rows of |M| sum to 1. That undoes the
            scales: of M = P·D with P doubly stochastic it is the mean largest entry of a row of P, and 1 for the group.
    """

    relu: float | None
    permutation: float | None
    orthogonal: float | None
    largest: float | None

    def to_dict(self) -> dict[str, float | None]:
        """As plain data."""
        return asdict(self)


def closeness(matrix: Float[Tensor, "out in"]) -> Closeness:
    """How near a matrix is to the groups that stitches are taken from.

    >>> import torch
    >>> found = closeness(torch.tensor([[0.0, 3.0], [0.5, 0.0]]))
    >>> found.relu, found.largest, round(found.permutation, 3)
    (0.0, 1.0, 0.678)
    """
    m = _checked(matrix)
    norm = torch.linalg.matrix_norm(m)
    if not norm:
        return Closeness(None, None, None, None)

    def share(rest: Tensor) -> float:
        return float(torch.linalg.matrix_norm(rest) / norm)

    rows, columns = _assigned(m.clamp(min=0).square())
    scaled, plain = m.clone(), m.clone()
    scaled[rows, columns] -= m[rows, columns].clamp(min=0)
    rows, columns = _assigned(m)
    plain[rows, columns] -= 1
    ones = torch.linalg.svdvals(m) - 1
    size = m.abs()
    for axis in (0, 1):
        sums = size.sum(axis, keepdim=True)
        size = torch.where(sums > 0, size / sums, 0.0)
    return Closeness(
        share(scaled), share(plain), float(torch.linalg.vector_norm(ones) / norm), float(size.amax(1).mean())
    )


def rank(matrix: Float[Tensor, "out in"], tolerance: float = RANK_TOLERANCE) -> int:
    """How many singular values rise above `tolerance` times the largest.

    >>> import torch
    >>> rank(torch.ones(3, 5)), rank(torch.diag(torch.tensor([1.0, 1e-3, 1e-8]))), rank(torch.zeros(2, 2))
    (1, 2, 0)
    """
    values = torch.linalg.svdvals(_checked(matrix))
    return int((values > tolerance * values.max()).sum())


def sparsity(matrix: Float[Tensor, "out in"], threshold: float = SPARSE) -> float:
    """The share of entries that are no larger than `threshold`.

    >>> import torch
    >>> sparsity(torch.eye(4)), sparsity(torch.tensor([[1.0, -1e-3], [2e-3, 0.0]]))
    (0.75, 0.5)
    """
    # in the precision of the matrix: an entry that was set to the threshold counts
    return float((matrix.detach().abs() <= torch.tensor(threshold, dtype=matrix.dtype)).double().mean())


def sorted_for_the_eye(matrix: Float[Tensor, "out in"]) -> tuple[Int[Tensor, " out"], Int[Tensor, " in"]]:
    """Orders of rows and columns that bring the best matched entries onto the diagonal, largest first.

    >>> import torch
    >>> rows, columns = sorted_for_the_eye(torch.tensor([[0.0, 3.0, 0.1], [5.0, 0.0, 0.0]]))
    >>> rows.tolist(), columns.tolist()
    ([1, 0], [0, 1, 2])
    """
    squares = _checked(matrix).square()
    rows, columns = _assigned(squares)
    first = squares[rows, columns].argsort(descending=True, stable=True)

    def rest(size: int, taken: Tensor) -> Tensor:
        free = torch.ones(size, dtype=torch.bool)
        free[taken] = False
        return free.nonzero().flatten()

    return (
        torch.cat([rows[first], rest(matrix.shape[0], rows)]),
        torch.cat([columns[first], rest(matrix.shape[1], columns)]),
    )


def _assigned(gain: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = linear_sum_assignment(gain.numpy(), maximize=True)
    return torch.from_numpy(rows), torch.from_numpy(columns)


def _checked(matrix: Tensor) -> Tensor:
    m = matrix.detach().double().cpu()
    if not bool(m.isfinite().all()):
        raise InputError(
            "The matrix of the stitch has entries that are not finite, so it has no rank and no nearest member of a "
            "group. The training diverged: see .diverged; lower the rate or the penalty."
        )
    return m
