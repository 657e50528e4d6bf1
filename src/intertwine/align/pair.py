"""Pair: two sets of weights, the second on its way to the first, with their distance known at every step.

The weights are cut into blocks once. A step moves only the blocks its wire sits in, and is kept only if the objective
falls; the element that all steps make together is kept beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from intertwine.align.inner_products import InnerProducts
from intertwine.align.objective import squared_distance, unmoved_part
from intertwine.align.place import Place
from intertwine.canonical.blocks import Block, Pieces, moved, pieces
from intertwine.shapes import Float
from intertwine.symmetry.element import Element, Move, identity_move
from intertwine.symmetry.layout import Leaf
from intertwine.symmetry.symmetry import Symmetry

#: A step must lower the distance of the blocks it touches by more than this share of it: less is rounding.
LEAST = 1e-12


class Pair:
    """Weights `a`, and weights `b` moved by the element found so far."""

    def __init__(
        self, symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], movable: Collection[int]
    ) -> None:
        self.symmetry = symmetry
        self.movable = frozenset(movable)  # the strands that steps may move
        self.strands = symmetry.strands
        self.weights_a = a
        self.weights_b = {n: t.to(a[n].device) for n, t in b.items()}
        cut = pieces(symmetry, a)
        self.a = [block.data for block in cut.blocks]
        self.blocks: tuple[Block, ...] = cut.blocks
        self.places = _places(cut)
        self.touched = [tuple(dict.fromkeys(p.block for p in places)) for places in self.places]
        self.around = [self._neighbours(s) for s in range(len(self.strands))]
        self.unmoved = unmoved_part(symmetry, a, self.weights_b)
        self._rows: dict[Place, Tensor] = {}
        self.products = InnerProducts(self.rows_of_a, self.rows_of_b, lambda i: self.b[i])
        self.start_at(symmetry.identity())

    def start_at(self, element: Element) -> None:
        """Forget all steps and move `b` by an element."""
        self.moves = dict(element.moves)
        cut = pieces(self.symmetry, moved(self.symmetry, element.without_identities(), self.weights_b))
        self.b = [block.data.to(x.dtype) for x, block in zip(self.a, cut.blocks, strict=True)]
        self.squares = [squared_distance(x, y) for x, y in zip(self.a, self.b, strict=True)]

    @property
    def element(self) -> Element:
        """The element that has moved `b` so far."""
        return Element(self.strands, dict(self.moves), self.symmetry.signature)

    @property
    def objective(self) -> float:
        return self.unmoved + sum(self.squares)

    @property
    def size(self) -> float:
        """The squared length of a."""
        return sum(float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 for x in self.a)

    def copies(self, s: int) -> int:
        """How many copies of a strand there are, over all its bases together."""
        return prod(self.strands[b].size for b in self.strands[s].bases)

    def part(self, s: int) -> float:
        """What the blocks of one strand add to the objective; a block of two strands is part of both."""
        return sum(self.squares[i] for i in self.touched[s])

    def rows_of_a(self, place: Place) -> Float[Tensor, "copies n entries"]:
        """The slices of a block of `a`; they are laid out once."""
        if place not in self._rows:
            self._rows[place] = place.rows(self.a[place.block])
        return self._rows[place]

    def rows_of_b(self, place: Place) -> Float[Tensor, "copies n entries"]:
        return place.rows(self.b[place.block])

    def step(self, moves: Mapping[int, Move], least: float = LEAST) -> bool:
        """Move some strands if that lowers the distance of what they touch by a share `least` of it; whether it did."""
        step = Element(self.strands, dict(moves), self.symmetry.signature)
        found = {i: self.act(step, i) for i in dict.fromkeys(i for s in moves for i in self.touched[s])}
        squares = {i: squared_distance(self.a[i], x) for i, x in found.items()}
        fall = sum(self.squares[i] - squares[i] for i in found)
        if not fall > least * sum(self.squares[i] for i in found):
            return False
        for i, x in found.items():
            self.b[i], self.squares[i] = x, squares[i]
        self._compose(step)
        return True

    def act(self, step: Element, i: int) -> Tensor:
        """A block moved by a step; a fibre is read in the coordinates its base still has, so it goes first."""
        x, dims = self.b[i], self.blocks[i].dims
        there = [d for d, dim in enumerate(dims) if isinstance(dim.tree, Leaf) and dim.tree.strand in step.moves]
        for d in sorted(there, key=lambda d: -step.depth(self.blocks[i].leaf(d).strand)):
            x = step.act_on_leaf(x, d, dims)
        return x

    def _compose(self, step: Element) -> None:
        """The element after a step. Only the strands that step change, so only they and their bases are looked at."""
        near = {b for s in step.moves for b in self._below(s)}
        whole = {i: step.moves.get(i) or identity_move(self.strands, i) for i in near if i in self.moves}
        before = Element(self.strands, {i: self.moves[i] for i in whole}, step.signature)
        after = replace(step, moves=whole) @ before
        self.moves |= {s: after.moves[s] for s in step.moves}

    def _below(self, s: int) -> set[int]:
        return {s}.union(*(self._below(b) for b in self.strands[s].bases))

    def _neighbours(self, s: int) -> tuple[int, ...]:
        """The strands that share a block with one, itself among them if it enters a block twice."""
        found: dict[int, None] = {}
        for i in self.touched[s]:
            met = [d.tree.strand for d in self.blocks[i].dims if isinstance(d.tree, Leaf)]
            found |= dict.fromkeys(t for t in met if t != s or met.count(s) > 1)
        return tuple(found)


def _places(cut: Pieces) -> tuple[tuple[Place, ...], ...]:
    number = {id(block): i for i, block in enumerate(cut.blocks)}
    return tuple(
        tuple(Place(number[id(site.block)], site.leaf, site.front, site.rest) for site in sites) for sites in cut.sites
    )
