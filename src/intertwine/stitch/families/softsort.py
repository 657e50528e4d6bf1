"""Family "softsort": G_ReLU with the permutation as a soft sort of n numbers (row 000-G37).

As printed the formula lacks an absolute value, and every row is then the same (row D9); it is here as it must be.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.shapes import Float
from intertwine.stitch.assignment import best_assignment, matrix_from
from intertwine.stitch.families.base import Family, Parameters, leaf
from intertwine.stitch.families.birkhoff import check_square
from intertwine.stitch.families.monomial import Monomial
from intertwine.stitch.families.registry import register
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments


@dataclass(frozen=True)
class SoftSort(Family):
    """P·D with P = softmax(−|sort(s)1ᵀ − 1sᵀ|·n) and D = diag(e^λ); in the end every row is its largest entry."""

    @property
    def name(self) -> str:
        return "softsort"

    def check(self, inputs: int, outputs: int) -> None:
        check_square(self.name, inputs, outputs)

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        logs = torch.zeros(inputs)
        if how == "random":
            return {"keys": leaf(2 * torch.rand(inputs, generator=generator) - 1), "log_scales": leaf(logs)}
        order = torch.arange(inputs)
        if how == "direct" and moments is not None:
            matrix = self.direct(moments).matrix
            order, logs = matrix.argmax(1).cpu(), matrix.amax(0).log()
        keys = torch.empty(inputs)
        keys[order] = torch.linspace(1, -1, inputs)  # the i-th largest key is that of the i-th output's input
        return {"keys": leaf(keys), "log_scales": leaf(logs)}

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(soft_sort(parameters["keys"]) * parameters["log_scales"].exp())

    def final(self, parameters: Parameters) -> LinearMap:
        keys, scales = parameters["keys"].detach(), parameters["log_scales"].detach().exp()
        rows = soft_sort(keys)
        order = rows.argmax(1)
        if len(order.unique()) < len(order):
            warnings.warn(
                f"softsort: of {len(keys)} keys some are equal, so that the largest entries of the rows are no "
                "permutation; the best assignment was taken.",
                stacklevel=2,
            )
            order = best_assignment(rows)
        return LinearMap(matrix_from(order, scales[order], len(keys)))

    def direct(self, moments: Moments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        return Monomial("positive").direct(moments)


def soft_sort(keys: Float[Tensor, " n"]) -> Float[Tensor, "n n"]:
    """Row i has its largest share at the i-th largest key; the temperature is 1/n.

    Example:
        >>> import torch
        >>> soft_sort(torch.tensor([0.0, 5.0, 9.0])).argmax(1)
        tensor([2, 1, 0])
    """
    ordered = keys.sort(descending=True).values
    return torch.softmax(-(ordered[:, None] - keys[None, :]).abs() * len(keys), dim=1)


register(SoftSort())
