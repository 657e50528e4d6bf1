"""Family "masked:…": matrices with one entry a row in places that are chosen before training (row 001-C35)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.errors import InputError, did_you_mean
from intertwine.shapes import Float
from intertwine.stitch.assignment import check_injection, correlations, matrix_from
from intertwine.stitch.direct import fitted
from intertwine.stitch.families.base import Family, Parameters, leaf
from intertwine.stitch.families.linear import with_bias
from intertwine.stitch.families.registry import register
from intertwine.stitch.families.starts import random_order
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments, Products

MASKS = ("semi-match", "abs-semi-match", "random-permutation")


@dataclass(frozen=True)
class Masked(Family):
    """Each output is one input times a factor; which one, the mask says.

    "semi-match": the input that correlates best with the output, "abs-semi-match": by absolute value (an input may then
    serve several outputs); "random-permutation": inputs at random by `seed`, none twice.
    """

    mask: str = "semi-match"
    seed: int = 0
    bias: bool = False
    starts = ("direct", "random", "ones")

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise InputError(
                f"The mask {self.mask!r} was asked for. {did_you_mean(self.mask, MASKS)}Masks: {', '.join(MASKS)}."
            )

    @property
    def name(self) -> str:
        return f"masked:{self.mask}{'+bias' if self.bias else ''}"

    def check(self, inputs: int, outputs: int) -> None:
        if self.mask == "random-permutation":
            check_injection(self.name, inputs, outputs)

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        if moments is None:
            if self.mask != "random-permutation":
                raise InputError(
                    f"The family {self.name!r} chooses its places by correlation, and no moments were given. Pass the "
                    "moments of the features."
                )
            places = self._places(inputs, outputs, None)
        else:
            places = self.places(moments)
        bias, weight = None, torch.ones(outputs)
        if how == "random":
            weight = 2 * torch.rand(outputs, generator=generator) - 1
        elif how == "direct" and moments is not None:
            found = self.direct(moments)
            weight, bias = found.matrix.gather(1, places.argmax(1, keepdim=True))[:, 0], found.bias
        return with_bias({"weight": leaf(weight), "mask": leaf(places, trained=False)}, bias, self.bias)

    def places(self, moments: Moments) -> Float[Tensor, "outputs inputs"]:
        """One in every row where the entry may be, zero elsewhere."""
        return self._places(moments.inputs, moments.outputs, moments)

    def _places(self, inputs: int, outputs: int, moments: Moments | None) -> Tensor:
        if self.mask == "random-permutation" or moments is None:
            order = random_order(inputs, outputs, torch.Generator().manual_seed(self.seed))
            order = order if moments is None else order.to(moments.a_mean.device)
        else:
            table = correlations(moments.products(centred=True))
            order = (table.abs() if self.mask == "abs-semi-match" else table).argmax(1)
        return matrix_from(order, torch.ones(outputs, device=order.device), inputs)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["weight"][:, None] * parameters["mask"], parameters.get("bias"))

    def decayed(self) -> frozenset[str]:
        return frozenset({"weight"})

    def direct(self, moments: Moments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        places = self.places(moments)

        def fit(products: Products) -> Tensor:
            lengths = products.aa.diagonal()
            return places * torch.where(lengths > 0, products.ab.T / torch.where(lengths > 0, lengths, 1.0), 0.0)

        return fitted(moments, self.bias, fit)


register(*(Masked(mask, bias=bias) for mask in MASKS for bias in (False, True)))
