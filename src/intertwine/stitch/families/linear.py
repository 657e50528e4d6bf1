"""Families "linear", "affine" and "identity": any matrix, any matrix with a bias, and the one that changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.errors import MismatchError
from intertwine.stitch.direct import least_squares
from intertwine.stitch.families.base import Family, Parameters, leaf
from intertwine.stitch.families.registry import register
from intertwine.stitch.families.starts import PLAIN_STARTS, random_uniform, start_matrix
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments


@dataclass(frozen=True)
class Linear(Family):
    """Any matrix (row 000-G28), with a bias as "affine" (rows 001-C04, D18)."""

    bias: bool = False
    starts = ("direct", *PLAIN_STARTS)

    @property
    def name(self) -> str:
        return "affine" if self.bias else "linear"

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        if how == "direct" and moments is not None:
            found = self.direct(moments)
        else:
            found = LinearMap(start_matrix(inputs, outputs, how, generator))
            if self.bias and how == "random":
                found = LinearMap(found.matrix, random_uniform((outputs,), inputs, generator))
        return with_bias({"weight": leaf(found.matrix)}, found.bias, self.bias)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["weight"], parameters.get("bias"))

    def decayed(self) -> frozenset[str]:
        return frozenset({"weight"})

    def direct(self, moments: Moments) -> LinearMap:
        return least_squares(moments, bias=self.bias)


@dataclass(frozen=True)
class Identity(Family):
    """Nothing but the identity: the network stitched without a map. There is nothing to train."""

    starts = ("identity", "direct")

    @property
    def name(self) -> str:
        return "identity"

    def check(self, inputs: int, outputs: int) -> None:
        if inputs != outputs:
            raise MismatchError(
                f'The family "identity" was asked to take {inputs} features to {outputs}. It changes nothing, so both '
                'must be the same. Use "linear" or "affine" here.'
            )

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        return {"matrix": leaf(torch.eye(outputs), trained=False)}

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["matrix"])

    def direct(self, moments: Moments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        return LinearMap(torch.eye(moments.inputs).to(moments.a_mean))


def with_bias(parameters: Parameters, bias: Tensor | None, wanted: bool) -> Parameters:
    """The parameters with a bias beside them where one is wanted: the given one, or zeros."""
    if not wanted:
        return parameters
    matrix = next(iter(parameters.values()))
    outputs = matrix.shape[0]
    return parameters | {"bias": leaf(matrix.new_zeros(outputs) if bias is None else bias)}


register(Identity(), Linear(), Linear(bias=True))
