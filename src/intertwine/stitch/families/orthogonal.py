"""Family "orthogonal": rotations and reflections, and matrices with orthonormal rows or columns where widths differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.shapes import Float
from intertwine.stitch.direct import fitted, polar, procrustes
from intertwine.stitch.families.base import Family, Parameters, leaf
from intertwine.stitch.families.linear import with_bias
from intertwine.stitch.families.registry import register
from intertwine.stitch.families.starts import start_matrix
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments

#: Each brings a singular value s to (3s − s³)/2; from between 0.3 and 1 this many end at 1 in single precision.
ROUNDS = 8


@dataclass(frozen=True)
class Orthogonal(Family):
    """Orthogonal matrices (row 001-C08). After every step the weight is taken back to the nearest one.

    `bias`: None by default (row D18); True adds one.
    """

    bias: bool = False
    starts = ("direct", "identity", "random", "permutation")

    @property
    def name(self) -> str:
        return "orthogonal+bias" if self.bias else "orthogonal"

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        bias = None
        if how == "direct" and moments is not None:
            found = self.direct(moments)
            weight, bias = found.matrix, found.bias
        elif how == "random":
            weight = random_orthogonal(outputs, inputs, generator)
        else:
            weight = start_matrix(inputs, outputs, how, generator)
        return with_bias({"weight": leaf(weight)}, bias, self.bias)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["weight"], parameters.get("bias"))

    def final(self, parameters: Parameters) -> LinearMap:
        weight = parameters["weight"].detach()
        bias = parameters.get("bias")
        return LinearMap(polar(weight.double()).to(weight.dtype), None if bias is None else bias.detach())

    def project_(self, parameters: Parameters) -> None:
        parameters["weight"].data.copy_(nearly_polar(parameters["weight"].data))

    def direct(self, moments: Moments) -> LinearMap:
        return fitted(moments, self.bias, procrustes)


def random_orthogonal(outputs: int, inputs: int, generator: torch.Generator) -> Float[Tensor, "outputs inputs"]:
    """Orthonormal rows or columns in directions at random."""
    return polar(torch.randn(outputs, inputs, generator=generator, dtype=torch.float64))


def nearly_polar(matrix: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """The nearest matrix with orthonormal rows or columns by products alone (Newton and Schulz), for one near to it.

    Large singular values are brought below one first, as a longest row of the Gram matrix bounds them.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.mT
    bound = (x @ x.mT).abs().sum(-1).max().sqrt()
    x = x / bound.clamp(min=1.0)
    for _ in range(ROUNDS):
        x = 1.5 * x - 0.5 * (x @ x.mT) @ x
    return x if wide else x.mT


register(Orthogonal(), Orthogonal(bias=True))
