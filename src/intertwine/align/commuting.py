"""The commutativity of two networks: Σ ‖(W_A − g·W_B)(H_A − g·H_B)‖² over layers, on its way to a minimum.

If it is zero, features of the mixed network are mixed features (paper 004, Eq. 2). In an order P on the outputs of a
layer the cost is linear. In an order Q on its inputs it is quadratic: with QᵀQ = 1 the residual is
W_A·H_A + W_B·H_B − W_A·Q·H_B − W_B·Qᵀ·H_A, so its slope says how well units fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from intertwine.align.fits import Flips, Moving, rows_of, sites_of
from intertwine.align.layers import Layer
from intertwine.shapes import Float
from intertwine.symmetry.element import Element, Move
from intertwine.symmetry.layout import Layout, Still, act
from intertwine.symmetry.symmetry import Symmetry

#: A step must lower the cost by more than this share of it: less is rounding.
LEAST = 1e-6


@dataclass(frozen=True)
class Term:
    """One layer at the present element: weights and inputs of both networks, and the residual of their differences."""

    layer: Layer
    weights: tuple[Tensor, Tensor]
    inputs: tuple[Tensor, Tensor]

    @property
    def residual(self) -> Float[Tensor, "samples outputs"]:
        """(W_A − W_B)(H_A − H_B), one row per position."""
        return self.apply(self.weights[0] - self.weights[1], self.inputs[0] - self.inputs[1])

    def cost(self) -> float:
        return float(torch.linalg.vector_norm(self.residual, dtype=torch.float64)) ** 2

    def factors(self) -> tuple[float, float]:
        """‖W_A − W_B‖² and ‖H_A − H_B‖², whose product bounds the cost."""
        pairs = (self.weights, self.inputs)
        first, second = (float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2 for x, y in pairs)
        return first, second

    def apply(self, weight: Tensor, x: Tensor) -> Float[Tensor, "samples outputs"]:
        """The layer without its bias."""
        return torch.einsum("sgik,goik->sgo", self._grouped(x), self._heads(weight)).flatten(1)

    def back(self, weight: Tensor, y: Tensor) -> Float[Tensor, "samples channels places"]:
        """The transpose of the layer."""
        y = y.unflatten(1, (self.layer.groups, -1))
        return torch.einsum("sgo,goik->sgik", y, self._heads(weight)).flatten(1, 2)

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.layer.groups, -1))

    def _heads(self, weight: Tensor) -> Tensor:
        places = self.inputs[0].shape[2]
        return weight.reshape(self.layer.groups, len(weight) // self.layer.groups, weight.shape[1], places)


class Commuting:
    """The cost of two networks, b moved by `element`."""

    def __init__(
        self,
        symmetry: Symmetry,
        moving: Moving,
        layers: Iterable[Layer],
        weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    ) -> None:
        self.symmetry, self.moving = symmetry, moving
        self.start = [_term(layer, weights) for layer in layers]
        self.touched = [
            [i for i, term in enumerate(self.start) if s in self._strands(term)] for s in range(len(moving.strands))
        ]
        self.start_at(symmetry.identity())

    def _strands(self, term: Term) -> set[int]:
        layouts = (self.symmetry.layouts[term.layer.weight], term.layer.layout())
        return {leaf.strand for layout in layouts for leaf in layout.leaves()}

    def start_at(self, element: Element) -> None:
        """Forget all steps and move b by an element."""
        self.element = element
        self.terms = [self._moved(term, element) for term in self.start]
        self.costs = [term.cost() for term in self.terms]

    @property
    def cost(self) -> float:
        return sum(self.costs)

    def step(self, moves: Mapping[int, Move]) -> bool:
        """Move some strands if that lowers the cost; whether it did."""
        touched = sorted({i for s in moves for i in self.touched[s]})
        step = replace(self.element, moves=dict(moves))
        terms = {i: self._moved(self.terms[i], step) for i in touched}
        costs = {i: term.cost() for i, term in terms.items()}
        if not sum(self.costs[i] for i in touched) - sum(costs.values()) > LEAST * sum(self.costs[i] for i in touched):
            return False
        for i, term in terms.items():
            self.terms[i], self.costs[i] = term, costs[i]
        self.element = replace(step, moves={**self.symmetry.identity().moves, **moves}) @ self.element
        return True

    def _moved(self, term: Term, g: Element) -> Term:
        weight = act(self.symmetry.layouts[term.layer.weight], term.weights[1], g)
        inputs = act(term.layer.layout(), term.inputs[1], g, term.layer.degree)
        return replace(term, weights=(term.weights[0], weight), inputs=(term.inputs[0], inputs))

    def fits(self, s: int) -> dict[Flips, Float[Tensor, "units units"]]:
        """How well units of a strand fit at the present element: exact on outputs, the slope of the cost on inputs."""
        found: dict[Flips, Tensor] = {}
        for i in self.touched[s]:
            term = self.terms[i]
            weight, inputs = self.symmetry.layouts[term.layer.weight], term.layer.layout()
            outputs = Layout((Still(len(term.inputs[0])), weight.axes[0]))
            if any(leaf.strand == s for leaf in outputs.leaves()):
                change = term.inputs[0] - term.inputs[1]
                self._add(found, s, outputs, *(term.apply(w, change) for w in term.weights))
            if any(leaf.strand == s for leaf in inputs.leaves()):
                here, there = (term.back(w, term.residual) for w in term.weights)
                self._add(found, s, inputs, here, term.inputs[1])
                self._add(found, s, inputs, term.inputs[0], there)
        return found

    def _add(self, found: dict[Flips, Tensor], s: int, layout: Layout, a: Tensor, b: Tensor) -> None:
        for x, y in zip(*(sites_of(layout, v, s, self.moving.strands) for v in (a, b)), strict=True):
            flips = tuple(int(f) % 2 for f in x.leaf.flips)
            fit = (rows_of(x) @ rows_of(y).mT).double().cpu()
            found[flips] = found[flips] + fit if flips in found else fit


def _term(layer: Layer, weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]) -> Term:
    assert layer.inputs is not None
    first = weights[0][layer.weight]
    first = first if first.dtype == torch.float64 else first.float()
    x, y = layer.inputs
    return Term(layer, (first, weights[1][layer.weight].to(first)), (x.to(first), y.to(first)))
