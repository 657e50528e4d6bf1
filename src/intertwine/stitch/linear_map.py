"""A linear map of features with or without a bias: what stands between the two halves of a stitched network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intertwine.errors import MismatchError
from intertwine.shapes import Float


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
