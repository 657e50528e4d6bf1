"""Family "sparse:λ": a penalty on the sum of absolute entries holds matrices so small that most entries end at zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.stitch.direct import fitted
from intertwine.stitch.families.base import Family, Parameters, leaf
from intertwine.stitch.families.linear import with_bias
from intertwine.stitch.families.starts import PLAIN_STARTS, start_matrix
from intertwine.stitch.lasso import Lasso, lasso
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments, Products


@dataclass(frozen=True)
class Sparse(Family):
    """Any matrix, with λ·Σ|W| added to the loss (rows 000-G38, 001-C10).

    `mean`: the penalty is λ times the mean of |W| in place of the sum, as in the code of Csiszárik et al. `threshold`:
    entries below it are zero in the end; the papers zero at 1e-4 and count at 1e-3. `squared`: the direct fit is by
    ‖AM − B‖²/2n, a lasso; False takes ‖AM − B‖ as printed.
    """

    strength: float
    threshold: float = 1e-3
    mean: bool = False
    squared: bool = True
    bias: bool = False
    starts = ("direct", *PLAIN_STARTS)

    def __post_init__(self) -> None:
        if not (self.strength >= 0 and self.threshold >= 0):
            raise InputError(
                f"The family sparse was asked for with strength {self.strength} and threshold {self.threshold}. Both "
                'must be numbers from 0 on, as in "sparse:0.01".'
            )

    @property
    def name(self) -> str:
        return f"sparse:{self.strength:g}{'+bias' if self.bias else ''}"

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        if how == "direct" and moments is not None:
            found = self.direct(moments)
        else:
            found = LinearMap(start_matrix(inputs, outputs, how, generator))
        return with_bias({"weight": leaf(found.matrix)}, found.bias, self.bias)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["weight"], parameters.get("bias"))

    def final(self, parameters: Parameters) -> LinearMap:
        weight, bias = parameters["weight"].detach(), parameters.get("bias")
        kept = torch.where(weight.abs() > self.threshold, weight, 0.0)
        return LinearMap(kept, None if bias is None else bias.detach())

    def penalty(self, parameters: Parameters) -> Tensor:
        sizes = parameters["weight"].abs()
        return self.strength * (sizes.mean() if self.mean else sizes.sum())

    def direct(self, moments: Moments) -> LinearMap:
        return fitted(moments, self.bias, lambda products: self.fit(products).matrix)

    def fit(self, products: Products) -> Lasso:
        """The lasso of the direct fit, with its strength in both scalings."""
        share = products.ab.numel() if self.mean else 1
        return lasso(products, self.strength / share, squared=self.squared)
