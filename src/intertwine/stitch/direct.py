"""Direct fits: a linear map of features in closed form (least squares, Procrustes, reduced rank) from second moments
that are accumulated in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError, MismatchError

# ----------------------------------------------------------------------------------------------------
# A linear map of features with or without a bias: what stands between the two halves of a stitched network.


@dataclass(frozen=True, eq=False)
class LinearMap:
    """x ↦ matrix · x + bias on the last axis. `matrix` is outputs × inputs; `bias` None means none.

    Example:
        >>> import torch
        >>> swap = LinearMap(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        >>> swap(torch.tensor([[3.0, 5.0]]))
        tensor([[10.,  3.]])
    """

    matrix: Float[Tensor, "outputs inputs"]
    bias: Float[Tensor, " outputs"] | None = None

    def __call__(self, rows: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """The map of every row, in the precision of the rows."""
        if rows.shape[-1] != self.inputs:
            raise MismatchError(
                f"A map of {self.inputs} features to {self.outputs} was given rows of {rows.shape[-1]} features. "
                "Put the features on the last axis, or fit a map of this width."
            )
        bias = None if self.bias is None else self.bias.to(rows)
        return torch.nn.functional.linear(rows, self.matrix.to(rows), bias)

    @property
    def inputs(self) -> int:
        """How many features go in."""
        return self.matrix.shape[1]

    @property
    def outputs(self) -> int:
        """How many features come out."""
        return self.matrix.shape[0]

    def to(self, *args: Any, **kwargs: Any) -> LinearMap:
        """The same map with its tensors moved or cast, as `Tensor.to` does it.

        >>> LinearMap(torch.eye(2)).to(torch.float64).matrix.dtype
        torch.float64
        """
        bias = None if self.bias is None else self.bias.to(*args, **kwargs)
        return LinearMap(self.matrix.to(*args, **kwargs), bias)

    def detach(self) -> LinearMap:
        """The same map without a gradient."""
        return LinearMap(self.matrix.detach(), None if self.bias is None else self.bias.detach())

    def __repr__(self) -> str:
        return f"LinearMap({self.inputs} → {self.outputs}{'' if self.bias is None else ', with bias'})"


# ----------------------------------------------------------------------------------------------------
# Sums over rows of two sets of features, in one pass: all that the closed forms need, and never the rows themselves.
#
# Sums are kept in float64, around the mean of the first batch, so that nothing cancels. What convolutions leave, channels
# before positions, is copied in whole rows of positions: bringing channels last would cost more than the products.


#: Rows that are brought to float64 at a time.
CHUNK, DEVICE_CHUNK = 4096, 65536
#: What rounding may leave in a product, as a share of the lengths of its two columns.
NOISE = 4 * float(torch.finfo(torch.float64).eps)


@dataclass(frozen=True, eq=False)
class PairProducts:
    """Sums of products of rows A with themselves (aa), with rows B (ab), and of B with themselves (bb)."""

    count: int
    aa: Float[Tensor, "inputs inputs"]
    ab: Float[Tensor, "inputs outputs"]
    bb: Float[Tensor, "outputs outputs"]


class PairMoments:
    """n, ΣA, ΣB, AᵀA, AᵀB and BᵀB of rows that come batch by batch.

    Example:
        >>> import torch
        >>> moments = PairMoments()
        >>> for _ in range(3):
        ...     moments.update(torch.ones(10, 4), torch.ones(10, 2))
        >>> moments.count, moments.ab.shape, float(moments.ab[0, 0])
        (30, torch.Size([4, 2]), 30.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self._inputs = 0
        self._shift: Tensor | None = None
        self._total = self._joint = torch.zeros(0)  # sums and products of both sets side by side, around the shift

    def update(self, a: Tensor, b: Tensor) -> None:
        """Take in rows of the front (…, inputs) and of the back (…, outputs), the same rows in the same order.

        Raises:
            MismatchError: the numbers of rows differ, or a width is not that of the batches before.
        """
        if a.shape[:-1].numel() != b.shape[:-1].numel():
            raise MismatchError(
                f"Moments were given {a.shape[:-1].numel()} rows of the front and {b.shape[:-1].numel()} of the back. "
                "Every row of the one needs its row of the other: bring both to the same positions first."
            )
        a, b = (x.detach() for x in (a, b))
        if not a.numel() or not b.numel():
            return
        if self._shift is None:
            self._begin(a, b)
        if (a.shape[-1], b.shape[-1]) != (self.inputs, self.outputs):
            raise MismatchError(
                f"The batches before had {self.inputs} features of the front and {self.outputs} of the back; this one "
                f"has {a.shape[-1]} and {b.shape[-1]}. Use one Moments per pair of places."
            )
        if _channels_first(a) and _channels_first(b) and a.shape[:-1] == b.shape[:-1]:
            self._add_channels_first(a.mT, b.mT)
        else:
            self._add(*(x.reshape(-1, x.shape[-1]) for x in (a, b)))
        self.count += a.shape[:-1].numel()

    def _begin(self, a: Tensor, b: Tensor) -> None:
        self._inputs = a.shape[-1]
        self._shift = torch.cat([x.double().mean(tuple(range(x.dim() - 1))) for x in (a, b)])
        self._total = torch.zeros_like(self._shift)
        self._joint = self._total.new_zeros(len(self._total), len(self._total))

    def _add(self, a: Tensor, b: Tensor) -> None:
        """Rows (rows, features)."""
        shift = self._begun()
        for x, y in zip(
            *(rows.split(CHUNK if a.device.type == "cpu" else DEVICE_CHUNK) for rows in (a, b)), strict=True
        ):
            both = torch.cat([x.double(), y.double()], 1).sub_(shift)
            self._total += both.sum(0)
            self._add_products(both.mT)

    def _add_channels_first(self, a: Tensor, b: Tensor) -> None:
        """Features as convolutions leave them, (samples, features, positions): copied in whole rows of positions."""
        shift = self._begun()
        size = max(1, (CHUNK if a.device.type == "cpu" else DEVICE_CHUNK) // a.shape[2])
        for x, y in zip(a.split(size), b.split(size), strict=True):
            both = shift.new_empty(len(shift), len(x), x.shape[2])
            both[: self._inputs].copy_(x.transpose(0, 1))
            both[self._inputs :].copy_(y.transpose(0, 1))
            columns = both.flatten(1).sub_(shift[:, None])
            self._total += columns.sum(1)
            self._add_products(columns)

    def _add_products(self, columns: Float[Tensor, "features rows"]) -> None:
        """Products of all features; those of the back with the front are those of the front with the back."""
        front, back = columns[: self._inputs], columns[self._inputs :]
        self._joint[: self._inputs].addmm_(front, columns.mT)
        self._joint[self._inputs :, self._inputs :].addmm_(back, back.mT)

    @property
    def inputs(self) -> int:
        """Features of the front."""
        self._begun()
        return self._inputs

    @property
    def outputs(self) -> int:
        """Features of the back."""
        return len(self._begun()) - self._inputs

    def _begun(self) -> Tensor:
        if self._shift is None:
            raise InputError("These moments hold no rows yet. Call update(front_rows, back_rows) first.")
        return self._shift

    @property
    def a_mean(self) -> Float[Tensor, " inputs"]:
        """The mean of the front's rows."""
        return (self._begun() + self._total / self.count)[: self._inputs]

    @property
    def b_mean(self) -> Float[Tensor, " outputs"]:
        """The mean of the back's rows."""
        return (self._begun() + self._total / self.count)[self._inputs :]

    @property
    def a_sum(self) -> Float[Tensor, " inputs"]:
        """ΣA."""
        return self.a_mean * self.count

    @property
    def b_sum(self) -> Float[Tensor, " outputs"]:
        """ΣB."""
        return self.b_mean * self.count

    @property
    def aa(self) -> Float[Tensor, "inputs inputs"]:
        """AᵀA."""
        return self.products(centred=False).aa

    @property
    def ab(self) -> Float[Tensor, "inputs outputs"]:
        """AᵀB."""
        return self.products(centred=False).ab

    @property
    def bb(self) -> Float[Tensor, "outputs outputs"]:
        """BᵀB."""
        return self.products(centred=False).bb

    def products(self, *, centred: bool) -> PairProducts:
        """The products of rows as they are, or around their means.

        Raises:
            InputError: there are no rows yet, or they hold a number that is not finite.
        """
        mean = self._begun() + self._total / self.count
        if not bool(self._joint.isfinite().all()):
            raise InputError(
                f"Of {self.count} rows some hold a number that is not finite (NaN or infinity), so no map can be "
                "fitted. Look for the layer at which the front or the back first gives one."
            )
        joint = self._joint.triu() + self._joint.triu(1).T
        inner = joint - torch.outer(self._total, self._total) / self.count
        if centred:  # what is left of a constant feature is rounding, and must not be taken for a small one
            rounding = NOISE * joint.diagonal() + self.count * (NOISE * mean).square()
            varies = (inner.diagonal() > rounding).double()
            inner = inner * varies[:, None] * varies
        else:
            inner = inner + self.count * torch.outer(mean, mean)
        n = self._inputs
        return PairProducts(self.count, inner[:n, :n], inner[:n, n:], inner[n:, n:])


def _channels_first(rows: Tensor) -> bool:
    """Whether rows (samples, positions, features) are a view of what a convolution gave."""
    return rows.dim() == 3 and rows.shape[1] > 1 and rows.mT.is_contiguous()


# ----------------------------------------------------------------------------------------------------
# Closed forms: the map of a family that brings rows A nearest to rows B, from their moments alone.


def fit_with_bias(moments: PairMoments, bias: bool, fit: Callable[[PairProducts], Tensor]) -> LinearMap:
    """A map by `fit`: of centred products with the bias that goes with it, or of plain products without one."""
    matrix = fit(moments.products(centred=bias))
    return LinearMap(matrix, moments.b_mean - matrix @ moments.a_mean if bias else None)


def least_squares(moments: PairMoments, *, bias: bool) -> LinearMap:
    """The map with the least ‖map(A) − B‖ (row 001-C07); of several the one with the least norm, as a pseudo-inverse.

    Args:
        moments: of rows A and B. bias: True fits a constant as well, as a column of ones beside A would.

    Example:
        >>> import torch
        >>> from intertwine.stitch.direct import PairMoments
        >>> a, moments = torch.randn(50, 2).double(), PairMoments()
        >>> moments.update(a, a @ torch.tensor([[1.0, 0.0], [3.0, 2.0]]).double() + 5)
        >>> found = least_squares(moments, bias=True)
        >>> found.matrix.round(decimals=6), found.bias.round(decimals=6)
        (tensor([[1., 3.], [0., 2.]], dtype=torch.float64), tensor([5., 5.], dtype=torch.float64))
    """
    return fit_with_bias(moments, bias, lambda p: solve(p).T)


def solve(products: PairProducts) -> Float[Tensor, "inputs outputs"]:
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


def procrustes(products: PairProducts) -> Float[Tensor, "outputs inputs"]:
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


def reduced_rank(
    products: PairProducts, rank: int
) -> tuple[Float[Tensor, "outputs rank"], Float[Tensor, "rank inputs"]]:
    """The best map of at most this rank (row 001-C09) as two factors: M_LS V_k V_kᵀ, V from A·M_LS = USVᵀ."""
    best = solve(products)
    fit = best.T @ products.aa @ best
    directions = torch.linalg.eigh((fit + fit.T) / 2).eigenvectors[:, -rank:].flip(1)
    return directions, (best @ directions).T
