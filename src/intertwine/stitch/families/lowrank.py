"""Family "lowrank:k": matrices of rank at most k, as two factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.stitch.direct import fitted, reduced_rank
from intertwine.stitch.families.base import Family, Parameters, leaf
from intertwine.stitch.families.linear import with_bias
from intertwine.stitch.families.orthogonal import random_orthogonal
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments, Products


@dataclass(frozen=True)
class LowRank(Family):
    """The features are taken to k numbers and from there to the outputs (rows 000-G29, 001-C09, 001-C28)."""

    rank: int
    bias: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f'A rank of {self.rank} was asked for. It must be 1 or more, as in "lowrank:4".')

    @property
    def name(self) -> str:
        return f"lowrank:{self.rank}{'+bias' if self.bias else ''}"

    def check(self, inputs: int, outputs: int) -> None:
        if self.rank > min(inputs, outputs):
            raise MismatchError(
                f"The family {self.name!r} was asked to take {inputs} features to {outputs}, and no such map has a "
                f'rank above {min(inputs, outputs)}. Use "lowrank:{min(inputs, outputs)}" or less, or "linear".'
            )

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        bias = None
        if how == "direct" and moments is not None:
            up, down = reduced_rank(moments.products(centred=self.bias), self.rank)
            bias = moments.b_mean - up @ (down @ moments.a_mean)
        elif how == "random":
            up = random_orthogonal(outputs, self.rank, generator)
            down = random_orthogonal(self.rank, inputs, generator)
        else:
            up, down = torch.eye(outputs, self.rank), torch.eye(self.rank, inputs)
        return with_bias({"up": leaf(up), "down": leaf(down)}, bias, self.bias)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["up"] @ parameters["down"], parameters.get("bias"))

    def decayed(self) -> frozenset[str]:
        return frozenset({"up", "down"})

    def direct(self, moments: Moments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)

        def fit(products: Products) -> Tensor:
            up, down = reduced_rank(products, self.rank)
            return up @ down

        return fitted(moments, self.bias, fit)
