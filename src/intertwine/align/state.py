"""`MatchingState`: the weights of A, and the weights of B moved by the element found so far, with their squared
distance known at every step. A step moves only the blocks of its wires and is kept only if the distance falls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from intertwine.argument_types import Float, Int
from intertwine.graph.model import tied_names
from intertwine.symmetry.blocks import BlockedWeights, WeightBlock, block_weights, transform_weights
from intertwine.symmetry.element import Element, Move, identity_move
from intertwine.symmetry.geometry import FixedAxis, Layout, LayoutAxis, ProductAxis, SumAxis, WireAxis
from intertwine.symmetry.symmetry import Symmetry

# ----------------------------------------------------------------------------------------------------
# Place: one occurrence of a strand in a block of weights.


@dataclass(frozen=True)
class StateSlot:
    """One occurrence of a strand: in which block, along which dimensions (bases, then its own), and what is left."""

    block: int
    axis: WireAxis
    front: tuple[int, ...]
    rest: tuple[int, ...]

    def rows(self, x: Tensor) -> Float[Tensor, "copies n entries"]:
        """The slices of a block: one row per copy and index of the strand."""
        shape = [x.shape[d] for d in self.front]
        return x.permute(*self.front, *self.rest).reshape(prod(shape[:-1]), shape[-1], -1)


# ----------------------------------------------------------------------------------------------------
# The objective that every solver lowers: Σ ‖A − g·B‖² over the tensors that wires act on.
#
# It counts the parameters the function reads and, where asked, its buffers. Whole tensors are counted, also positions of
# them that nothing moves; a tensor under two names is counted once. Squares are added in double precision.


#: Smaller entries are taken for zero: products of two of them are no numbers of single precision.
TRACE = 1e-30


def counted_weights(
    symmetry: Symmetry, model: nn.Module, weights: Mapping[str, Tensor], buffers: bool
) -> dict[str, Tensor]:
    """Those weights of a model that the objective counts."""
    tied = tied_names(model)
    parameters = {tied[name] for name, _ in model.named_parameters()}
    moving = {name for name, layout in symmetry.layouts.items() if layout.moves}
    return {
        name: tensor
        for name, tensor in weights.items()
        if name in moving and tensor.is_floating_point() and (buffers or name in parameters)
    }


def without_denormals(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without what weight decay has left of dead units (1e-38), which makes arithmetic many times slower."""
    found = dict(weights)
    for name, x in weights.items():
        if x.dtype != torch.float32 or not x.numel() or float(x.abs().min()) >= TRACE:  # the least is found quickly
            continue
        if bool((traces := (x.abs() < TRACE) & (x != 0)).any()):
            found[name] = x.masked_fill(traces, 0.0)
    return found


def squared_distance(x: Tensor, y: Tensor) -> float:
    """‖x − y‖², accumulated in double precision."""
    return float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2


def unmoved_part(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """What positions that nothing moves add to the objective, in tensors other positions of which are moved."""
    total = 0.0
    for name, x in a.items():
        if _has_still_blocks(symmetry.layouts[name]):
            still = torch.ones(x.shape)
            for block in block_weights(symmetry, {name: still}).blocks:
                block.data.zero_()
            there = still.bool().to(x.device)
            total += squared_distance(x[there], b[name].to(x.device)[there])
    return total


def _has_still_blocks(layout: Layout) -> bool:
    def split(tree: LayoutAxis) -> bool:
        if isinstance(tree, SumAxis):
            return any(isinstance(part, FixedAxis) or split(part) for part in tree.parts)
        return isinstance(tree, ProductAxis) and any(split(part) for part in tree.parts)

    return any(split(axis) for axis in layout.axes)


# ----------------------------------------------------------------------------------------------------
# Inner products of A's and B's slices, kept until the block they were taken from changes.
#
# They are what weight matching spends its time on. Between two visits of a wire most of its blocks have not changed, and
# where the wire itself was reordered its products are the same ones in another order.


#: Rows of so few entries are multiplied in double precision, those of all places together: it costs nothing there.
SHORT = 16
#: Products that are kept, in bytes, over all wires of a pair.
MOST = 2**29

Rows = Callable[[StateSlot], Tensor]


@dataclass
class InnerProducts:
    """The products of one pair of weights: `a` and `b` give the slices at a place, `block` the present block of b.

    A block of b is a new tensor after every step, so that its identity tells its age. Products are kept with a row for
    each unit of b: what was reordered is then whole rows, several times as quick to move as columns.
    """

    a: Rows
    b: Rows
    block: Callable[[int], Tensor]
    _kept: dict[StateSlot, tuple[ReferenceType[Tensor], Tensor]] = field(default_factory=dict)
    _bytes: int = 0

    def total(self, places: Sequence[StateSlot]) -> Float[Tensor, "copies n m"]:
        """⟨a_i, b_j⟩ of all pairs of units, summed over places of one strand; on the CPU."""
        short = [place for place in places if self.a(place).shape[-1] <= SHORT]
        parts = [self._of(place) for place in places if place not in short]
        if short:
            rows = [torch.cat([of(place).double() for place in short], -1) for of in (self.a, self.b)]
            parts.append(torch.matmul(rows[1], rows[0].mT).cpu())
        found = parts[-1].clone()
        for part in parts[:-1]:
            found += part
        return found.mT

    def _of(self, place: StateSlot) -> Float[Tensor, "copies m n"]:
        block, kept = self.block(place.block), self._kept.get(place)
        if kept is not None and kept[0]() is block:
            return kept[1]
        found = torch.matmul(self.b(place), self.a(place).mT).cpu()
        size = 0 if kept is not None else found.numel() * found.element_size()
        if self._bytes + size <= MOST:
            self._bytes += size
            self._kept[place] = (ref(block), found)
        return found

    def reordered(self, places: Sequence[StateSlot], order: Int[Tensor, "copies n"], before: Sequence[Tensor]) -> None:
        """The strand of these places alone was reordered, which made new blocks of b out of the blocks `before`."""
        for place in places:
            kept = self._kept.get(place)
            once = sum(1 for other in places if other.block == place.block) == 1
            if kept is not None and once and kept[0]() is before[place.block]:
                alone = order.shape[0] == 1  # several times as quick
                moved = (
                    kept[1].index_select(-2, order[0]) if alone else torch.take_along_dim(kept[1], order[..., None], -2)
                )
                self._kept[place] = (ref(self.block(place.block)), moved)


# ----------------------------------------------------------------------------------------------------
# Pair: two sets of weights, the second on its way to the first, with their distance known at every step.
#
# The weights are cut into blocks once. A step moves only the blocks its wire sits in, and is kept only if the objective
# falls; the element that all steps make together is kept beside them.


#: A step must lower the distance of the blocks it touches by more than this share of it: less is rounding.
LEAST = 1e-12


class MatchingState:
    """Weights `a`, and weights `b` moved by the element found so far."""

    def __init__(
        self, symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], movable: Collection[int]
    ) -> None:
        self.symmetry = symmetry
        self.movable = frozenset(movable)  # the strands that steps may move
        self.wire_specs = symmetry.wire_specs
        self.weights_a = a
        self.weights_b = {n: t.to(a[n].device) for n, t in b.items()}
        cut = block_weights(symmetry, a)
        self.a = [block.data for block in cut.blocks]
        self.blocks: tuple[WeightBlock, ...] = cut.blocks
        self.places = _places(cut)
        self.touched = [tuple(dict.fromkeys(p.block for p in places)) for places in self.places]
        self.around = [self._neighbours(s) for s in range(len(self.wire_specs))]
        self.unmoved = unmoved_part(symmetry, a, self.weights_b)
        self._rows: dict[StateSlot, Tensor] = {}
        self.products = InnerProducts(self.rows_of_a, self.rows_of_b, lambda i: self.b[i])
        self.start_at(symmetry.identity())

    def start_at(self, element: Element) -> None:
        """Forget all steps and move `b` by an element."""
        self.moves = dict(element.moves)
        cut = block_weights(
            self.symmetry, transform_weights(self.symmetry, element.without_identities(), self.weights_b)
        )
        self.b = [block.data.to(x.dtype) for x, block in zip(self.a, cut.blocks, strict=True)]
        self.squares = [squared_distance(x, y) for x, y in zip(self.a, self.b, strict=True)]

    @property
    def element(self) -> Element:
        """The element that has moved `b` so far."""
        return Element(self.wire_specs, dict(self.moves), self.symmetry.signature)

    @property
    def objective(self) -> float:
        return self.unmoved + sum(self.squares)

    @property
    def size(self) -> float:
        """The squared length of a."""
        return sum(float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 for x in self.a)

    def copies(self, s: int) -> int:
        """How many copies of a strand there are, over all its bases together."""
        return prod(self.wire_specs[b].size for b in self.wire_specs[s].bases)

    def part(self, s: int) -> float:
        """What the blocks of one strand add to the objective; a block of two strands is part of both."""
        return sum(self.squares[i] for i in self.touched[s])

    def rows_of_a(self, place: StateSlot) -> Float[Tensor, "copies n entries"]:
        """The slices of a block of `a`; they are laid out once."""
        if place not in self._rows:
            self._rows[place] = place.rows(self.a[place.block])
        return self._rows[place]

    def rows_of_b(self, place: StateSlot) -> Float[Tensor, "copies n entries"]:
        return place.rows(self.b[place.block])

    def step(self, moves: Mapping[int, Move], least: float = LEAST) -> bool:
        """Move some strands if that lowers the distance of what they touch by a share `least` of it; whether it did."""
        step = Element(self.wire_specs, dict(moves), self.symmetry.signature)
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
        there = [d for d, dim in enumerate(dims) if isinstance(dim.tree, WireAxis) and dim.tree.wire in step.moves]
        for d in sorted(there, key=lambda d: -step.depth(self.blocks[i].wire_axis(d).wire)):
            x = step.act_on_axis(x, d, dims)
        return x

    def _compose(self, step: Element) -> None:
        """The element after a step. Only the strands that step change, so only they and their bases are looked at."""
        near = {b for s in step.moves for b in self._below(s)}
        whole = {i: step.moves.get(i) or identity_move(self.wire_specs, i) for i in near if i in self.moves}
        before = Element(self.wire_specs, {i: self.moves[i] for i in whole}, step.signature)
        after = replace(step, moves=whole) @ before
        self.moves |= {s: after.moves[s] for s in step.moves}

    def _below(self, s: int) -> set[int]:
        return {s}.union(*(self._below(b) for b in self.wire_specs[s].bases))

    def _neighbours(self, s: int) -> tuple[int, ...]:
        """The strands that share a block with one, itself among them if it enters a block twice."""
        found: dict[int, None] = {}
        for i in self.touched[s]:
            met = [d.tree.wire for d in self.blocks[i].dims if isinstance(d.tree, WireAxis)]
            found |= dict.fromkeys(t for t in met if t != s or met.count(s) > 1)
        return tuple(found)


def _places(cut: BlockedWeights) -> tuple[tuple[StateSlot, ...], ...]:
    number = {id(block): i for i, block in enumerate(cut.blocks)}
    return tuple(
        tuple(StateSlot(number[id(site.block)], site.axis, site.front, site.rest) for site in sites)
        for sites in cut.sites
    )


@dataclass(frozen=True)
class AlignmentStep:
    """One step that was kept: in which start and sweep, on which wire, and the objective after it.

    `own`: what the solver itself lowers, where that is not the objective (a loss, a distance of features).
    """

    start: str
    sweep: int
    wire: str
    objective: float
    own: float | None = None
