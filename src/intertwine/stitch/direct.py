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


@dataclass(frozen=True, eq=False)
class LinearMap:
    """x ↦ matrix · x + bias on the last axis. `matrix` is outputs × inputs; `bias` may be None.

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
                f"The map is {self.inputs} → {self.outputs}, but the rows have {rows.shape[-1]} features. Put the "
                "features on the last axis, or fit a map of this width."
            )
        bias = None if self.bias is None else self.bias.to(rows)
        return torch.nn.functional.linear(rows, self.matrix.to(rows), bias)

    @property
    def inputs(self) -> int:
        """The number of input features."""
        return self.matrix.shape[1]

    @property
    def outputs(self) -> int:
        """The number of output features."""
        return self.matrix.shape[0]

    def to(self, *args: Any, **kwargs: Any) -> LinearMap:
        """The same map with its tensors moved or cast, as by `Tensor.to`.

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


#: Rows converted to float64 at a time, on a CPU and on other devices.
CHUNK, DEVICE_CHUNK = 4096, 65536
#: Rounding errors of a product, as a share of the lengths of its two columns.
NOISE = 4 * float(torch.finfo(torch.float64).eps)


@dataclass(frozen=True, eq=False)
class PairProducts:
    """Sums of products of rows A with themselves (aa), with rows B (ab), and of B with themselves (bb)."""

    count: int
    aa: Float[Tensor, "inputs inputs"]
    ab: Float[Tensor, "inputs outputs"]
    bb: Float[Tensor, "outputs outputs"]


class PairMoments:
    """n, ΣA, ΣB, AᵀA, AᵀB and BᵀB of rows that come batch by batch: all that the closed forms need.

    Sums are kept in float64, around the mean of the first batch, so that nothing cancels.

    Example:
        >>> import torch
        >>> moments = PairMoments()
        >>> for _ in range(3):
        ...     moments.update(torch.ones(10, 4), torch.ones(10, 2))
        >>> products = moments.products(centred=False)
        >>> moments.count, products.ab.shape, float(products.ab[0, 0])
        (30, torch.Size([4, 2]), 30.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self._inputs = 0
        self._shift: Tensor | None = None
        self._total = self._joint = torch.zeros(0)  # sums and products of both sets side by side, around the shift

    def update(self, a: Tensor, b: Tensor) -> None:
        """Add rows of the front (…, inputs) and of the back (…, outputs), the same rows in the same order.

        Raises:
            MismatchError: the numbers of rows differ, or a width is not that of the batches before.
        """
        if a.shape[:-1].numel() != b.shape[:-1].numel():
            raise MismatchError(
                f"There are {a.shape[:-1].numel()} rows of the front, but {b.shape[:-1].numel()} of the back. Resize "
                "both to the same positions first, so that the rows correspond."
            )
        a, b = (x.detach() for x in (a, b))
        if not a.numel() or not b.numel():
            return
        if self._shift is None:
            self._inputs = a.shape[-1]
            self._shift = torch.cat([x.double().mean(tuple(range(x.dim() - 1))) for x in (a, b)])
            self._total = torch.zeros_like(self._shift)
            self._joint = self._total.new_zeros(len(self._total), len(self._total))
        if (a.shape[-1], b.shape[-1]) != (self.inputs, self.outputs):
            raise MismatchError(
                f"Earlier batches have {self.inputs} features of the front and {self.outputs} of the back, but this "
                f"one has {a.shape[-1]} and {b.shape[-1]}. Use one PairMoments per stitch point."
            )
        if _channels_first(a) and _channels_first(b) and a.shape[:-1] == b.shape[:-1]:
            self._add_channels_first(a.mT, b.mT)
        else:
            self._add(*(x.reshape(-1, x.shape[-1]) for x in (a, b)))
        self.count += a.shape[:-1].numel()

    def _add(self, a: Tensor, b: Tensor) -> None:
        """Rows (rows, features)."""
        shift = self._begun()
        size = CHUNK if a.device.type == "cpu" else DEVICE_CHUNK
        for x, y in zip(a.split(size), b.split(size), strict=True):
            both = torch.cat([x.double(), y.double()], 1).sub_(shift)
            self._total += both.sum(0)
            self._add_products(both.mT)

    def _add_channels_first(self, a: Tensor, b: Tensor) -> None:
        """Features as convolutions give them, (samples, features, positions), copied in whole rows of positions.

        Moving channels last would cost more than the products.
        """
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
        """Products of all features; those of the back with the front follow by symmetry."""
        front, back = columns[: self._inputs], columns[self._inputs :]
        self._joint[: self._inputs].addmm_(front, columns.mT)
        self._joint[self._inputs :, self._inputs :].addmm_(back, back.mT)

    @property
    def inputs(self) -> int:
        """The number of features of the front."""
        self._begun()
        return self._inputs

    @property
    def outputs(self) -> int:
        """The number of features of the back."""
        return len(self._begun()) - self._inputs

    def _begun(self) -> Tensor:
        if self._shift is None:
            raise InputError("The moments hold no rows. Call update(front_rows, back_rows) first.")
        return self._shift

    @property
    def a_mean(self) -> Float[Tensor, " inputs"]:
        """The mean of the front's rows."""
        return (self._begun() + self._total / self.count)[: self._inputs]

    @property
    def b_mean(self) -> Float[Tensor, " outputs"]:
        """The mean of the back's rows."""
        return (self._begun() + self._total / self.count)[self._inputs :]

    def products(self, *, centred: bool) -> PairProducts:
        """The products of the rows, or of the rows around their means.

        Raises:
            InputError: there are no rows, or some value is NaN or infinite.
        """
        mean = self._begun() + self._total / self.count
        if not bool(self._joint.isfinite().all()):
            raise InputError(
                f"Some of the {self.count} rows hold NaN or infinity, so no map can be fitted. Find the first layer "
                "of the front or the back that gives one."
            )
        joint = self._joint.triu() + self._joint.triu(1).T
        inner = joint - torch.outer(self._total, self._total) / self.count
        if centred:  # the rest of a constant feature is rounding, and must not count as a small feature
            rounding = NOISE * joint.diagonal() + self.count * (NOISE * mean).square()
            varies = (inner.diagonal() > rounding).double()
            inner = inner * varies[:, None] * varies
        else:
            inner = inner + self.count * torch.outer(mean, mean)
        n = self._inputs
        return PairProducts(self.count, inner[:n, :n], inner[:n, n:], inner[n:, n:])


def _channels_first(rows: Tensor) -> bool:
    """Whether rows (samples, positions, features) are a view of the output of a convolution."""
    return rows.dim() == 3 and rows.shape[1] > 1 and rows.mT.is_contiguous()


def fit_with_bias(moments: PairMoments, bias: bool, fit: Callable[[PairProducts], Tensor]) -> LinearMap:
    """A map by `fit`: from centred products with its optimal bias, or from plain products without one."""
    matrix = fit(moments.products(centred=bias))
    return LinearMap(matrix, moments.b_mean - matrix @ moments.a_mean if bias else None)


def least_squares(moments: PairMoments, *, bias: bool) -> LinearMap:
    """The map that minimises ‖map(A) − B‖; of several the one with the smallest norm, as a pseudo-inverse.

    Args:
        moments: of rows A and B. bias: True fits a constant too, like a column of ones in A.

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
    """A⁺B. Columns of A are first scaled to length one, so that small ones count as much as large ones.

    A direction counts as missing if its eigenvalue in the products of these columns is below `NOISE` times the number
    of columns. The solution has no component along missing directions, nor from columns that are zero.
    """
    lengths = products.aa.diagonal().clamp(min=0).sqrt()
    live = lengths > 0
    inverse = 1 / lengths[live]
    values, vectors = torch.linalg.eigh(products.aa[live][:, live] * inverse[:, None] * inverse)
    present = values > NOISE * len(values)
    kept = vectors * torch.where(present, values, 1.0).rsqrt() * present
    found = inverse[:, None] * (kept @ (kept.T @ (inverse[:, None] * products.ab[live])))
    missing = vectors[:, ~present] * inverse[:, None]
    if missing.shape[1]:  # a direction v of unit columns is the direction v/lengths of the columns themselves
        u, sizes, _ = torch.linalg.svd(missing / missing.norm(dim=0), full_matrices=False)
        basis = u[:, sizes > 1e-10]
        found = found - basis @ (basis.T @ found)
    solution = torch.zeros_like(products.ab)
    solution[live] = found
    return solution


def procrustes(products: PairProducts) -> Float[Tensor, "outputs inputs"]:
    """The orthogonal map that brings A closest to B: UVᵀ of AᵀB = USVᵀ, here outputs × inputs.

    With fewer outputs than inputs its rows are orthonormal, and it maximises ⟨map(A), B⟩; this does not minimise the
    distance, as ‖map(A)‖ varies.
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
    """The best map of at most this rank as two factors: M_LS V_k V_kᵀ, V from A·M_LS = USVᵀ."""
    best = solve(products)
    fit = best.T @ products.aa @ best
    directions = torch.linalg.eigh((fit + fit.T) / 2).eigenvectors[:, -rank:].flip(1)
    return directions, (best @ directions).T
