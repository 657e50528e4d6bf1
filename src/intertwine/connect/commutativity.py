"""Commutativity: may the layers of two networks be swapped? (Condition II: (W_A − W_B)(H_A − H_B) = 0)

It decides what a linear layer does to a mix of its inputs: W_α H_α = αW_A H_A + (1 − α)W_B H_B less the error
α(1 − α)(W_A − W_B)(H_A − H_B). Biases cancel. The error is small where the weights are near, or the inputs are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn
from torch.func import functional_call

from intertwine.graph.copies import copied

#: Layers that are one linear map of their input, given by one weight; a subclass that computes otherwise is not.
LINEAR = (
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


@dataclass(frozen=True)
class Commutativity:
    """One linear layer. Every length is relative to the root mean square of the two lengths it is made from.

    Attributes:
        residual: the length of (W_A − W_B)(H_A − H_B), relative to W_A H_A and W_B H_B. 0 where layers commute; about
            2 for networks that have nothing to do with each other, where nothing has a mean.
        weights: the length of W_A − W_B, relative to W_A and W_B. inputs: of H_A − H_B, relative to H_A and H_B.
    """

    residual: float | None
    weights: float | None
    inputs: float | None

    @property
    def product(self) -> float | None:
        """Both factors multiplied: about what the residual would be if they did not turn away from each other."""
        return None if self.weights is None or self.inputs is None else self.weights * self.inputs


def why_not(layer: nn.Module) -> str:
    """Why a layer is no linear map by one weight, or empty.

    >>> why_not(nn.Linear(2, 2)), why_not(nn.LayerNorm(2))
    ('', 'a LayerNorm is no linear map by one weight')
    """
    if "forward" in vars(layer) or not any(type(layer).forward is kind.forward for kind in LINEAR):
        return f"a {type(layer).__name__} is no linear map by one weight"
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        return "its weight is computed from others"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "an Embedding with max_norm rewrites its weight while it runs"
    return ""


class CommutativityMeter:
    """Adds up squared lengths for one layer, batch by batch; runs the layer's own forward on differences."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        weight = a.get_parameter("weight").detach()
        exact = torch.promote_types(weight.dtype, torch.float32)  # half precision would round the difference away
        self.layer = copied(a)
        self.layer._forward_hooks.clear()  # of the user, which must not hear these calls
        self.layer._forward_pre_hooks.clear()
        self.a = weight.to(exact)
        self.b = b.get_parameter("weight").detach().to(weight.device, exact)
        self.sums = torch.zeros(6, dtype=torch.float64, device=weight.device)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Take in the inputs of the layer in both networks."""
        apart, first, second = self._outputs(a, b)
        inputs = _one_hot_squares(a, b) if isinstance(self.layer, nn.Embedding) else _squares(a - b, a, b)
        self.sums += torch.cat([_squares(apart, first, second), inputs])

    def _outputs(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(self.layer, nn.Embedding):
            difference = self.a - self.b
            apart = self._forward(difference, a) - self._forward(difference, b)
        else:
            a, b = a.to(self.a.dtype), b.to(self.a.dtype)
            apart = self._forward(self.a - self.b, a - b)
        return apart, self._forward(self.a, a), self._forward(self.b, b)

    def _forward(self, weight: Tensor, x: Tensor) -> Tensor:
        bias = getattr(self.layer, "bias", None)
        tensors = {"weight": weight} | ({} if bias is None else {"bias": torch.zeros_like(bias, dtype=weight.dtype)})
        return functional_call(self.layer, tensors, (x,))

    def result(self) -> Commutativity:
        weights = _squares(self.a - self.b, self.a, self.b)
        apart, first, second, inputs, left, right = self.sums.tolist()
        return Commutativity(
            _relative(apart, first, second), _relative(*weights.tolist()), _relative(inputs, left, right)
        )


def _squares(*tensors: Tensor) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in tensors])


def _one_hot_squares(a: Tensor, b: Tensor) -> Tensor:
    """The same for indices, each taken as the vector that has a one there."""
    differ = 2 * (a != b).sum()
    return torch.stack([differ, *differ.new_tensor([a.numel(), b.numel()])]).double()


def _relative(apart: float, first: float, second: float) -> float | None:
    return sqrt(2 * apart / (first + second)) if first + second > 0 else None
