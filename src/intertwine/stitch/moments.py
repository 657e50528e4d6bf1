"""Sums over rows of two sets of features, in one pass: all that the closed forms need, and never the rows themselves.

Sums are kept in float64, around the mean of the first batch, so that nothing cancels. What convolutions leave, channels
before positions, is copied in whole rows of positions: bringing channels last would cost more than the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.shapes import Float

#: Rows that are brought to float64 at a time.
RUN, DEVICE_RUN = 4096, 65536
#: What rounding may leave in a product, as a share of the lengths of its two columns.
NOISE = 4 * float(torch.finfo(torch.float64).eps)


@dataclass(frozen=True, eq=False)
class Products:
    """Sums of products of rows A with themselves (aa), with rows B (ab), and of B with themselves (bb)."""

    count: int
    aa: Float[Tensor, "inputs inputs"]
    ab: Float[Tensor, "inputs outputs"]
    bb: Float[Tensor, "outputs outputs"]


class Moments:
    """n, ΣA, ΣB, AᵀA, AᵀB and BᵀB of rows that come batch by batch.

    Example:
        >>> import torch
        >>> moments = Moments()
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
        for x, y in zip(*(rows.split(RUN if a.device.type == "cpu" else DEVICE_RUN) for rows in (a, b)), strict=True):
            both = torch.cat([x.double(), y.double()], 1).sub_(shift)
            self._total += both.sum(0)
            self._add_products(both.mT)

    def _add_channels_first(self, a: Tensor, b: Tensor) -> None:
        """Features as convolutions leave them, (samples, features, positions): copied in whole rows of positions."""
        shift = self._begun()
        size = max(1, (RUN if a.device.type == "cpu" else DEVICE_RUN) // a.shape[2])
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

    def products(self, *, centred: bool) -> Products:
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
        return Products(self.count, inner[:n, :n], inner[:n, n:], inner[n:, n:])


def _channels_first(rows: Tensor) -> bool:
    """Whether rows (samples, positions, features) are a view of what a convolution gave."""
    return rows.dim() == 3 and rows.shape[1] > 1 and rows.mT.is_contiguous()
