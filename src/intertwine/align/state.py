"""`MatchingState`: the weights of A, and the weights of B moved by the element found so far, with their squared
distance known at every step. A step moves only the blocks of its wires and is kept only if the distance falls.

The objective that solvers minimise is Σ ‖A − g·B‖² over the tensors that wires act on: the parameters that the function
reads and, on request, its buffers. Whole tensors count, also positions that nothing moves; a tensor with two names
counts once. Squares are added in double precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from intertwine.argument_types import Float, Int
from intertwine.graph.model import tied_names
from intertwine.symmetry.blocks import BlockSlot, block_weights, transform_weights
from intertwine.symmetry.element import Element, Move, WireSpec, identity_move
from intertwine.symmetry.geometry import FixedAxis, LayoutAxis, ProductAxis, SumAxis, WireAxis
from intertwine.symmetry.symmetry import Symmetry

#: Smaller entries count as zero: their products underflow in single precision.
DENORMAL = 1e-30
#: Rows of at most this many entries are multiplied in double precision, those of all slots together.
SHORT = 16
#: The most bytes of cached products, over all wires of a pair.
MOST = 2**29
#: A step must lower the distance of the blocks it changes by more than this share; less is rounding.
LEAST = 1e-12
#: The most pairs of units whose nested units are matched; with more of them the order of nested units stays.
MOST_PAIRS = 4096


def counted_weights(
    symmetry: Symmetry, model: nn.Module, weights: Mapping[str, Tensor], buffers: bool
) -> dict[str, Tensor]:
    """The weights of a model that the objective counts."""
    tied = tied_names(model)
    parameters = {tied[name] for name, _ in model.named_parameters()}
    return {
        name: tensor
        for name, tensor in weights.items()
        if name in symmetry.layouts and symmetry.layouts[name].moves
        and tensor.is_floating_point() and (buffers or name in parameters)
    }  # fmt: skip


def without_denormals(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without the 1e-38 that weight decay leaves in dead units, which make arithmetic many times slower."""
    found = dict(weights)
    for name, x in weights.items():
        if x.dtype == torch.float32 and x.numel() and float(x.abs().min()) < DENORMAL:  # the minimum is found quickly
            tiny = (x.abs() < DENORMAL) & (x != 0)
            found[name] = x.masked_fill(tiny, 0.0) if bool(tiny.any()) else x
    return found


def squared_distance(x: Tensor, y: Tensor) -> float:
    """‖x − y‖², accumulated in double precision."""
    return float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2


def unmoved_part(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The squared distance over positions that nothing moves, in tensors that wires move elsewhere."""
    total = 0.0
    for name, x in a.items():
        if any(_partly_fixed(axis) for axis in symmetry.layouts[name].axes):
            fixed = torch.ones(x.shape)
            for block in block_weights(symmetry, {name: fixed}).blocks:
                block.data.zero_()
            where = fixed.bool().to(x.device)
            total += squared_distance(x[where], b[name].to(x.device)[where])
    return total


def _partly_fixed(axis: LayoutAxis) -> bool:
    if isinstance(axis, SumAxis):
        return any(isinstance(part, FixedAxis) or _partly_fixed(part) for part in axis.parts)
    return isinstance(axis, ProductAxis) and any(map(_partly_fixed, axis.parts))


def move_of(wire_specs: Sequence[WireSpec], w: int, **parts: Tensor) -> Move:
    """A move of one wire: the identity but for the parts given. Their copies may be flattened into one axis."""
    identity = identity_move(wire_specs, w)
    shapes = {name: part.shape for name, part in identity.items()}
    return replace(identity, **{name: part.reshape(shapes[name]) for name, part in parts.items()})


@dataclass(frozen=True)
class MovableWires:
    """The wires that may move, among all."""

    wire_specs: tuple[WireSpec, ...]
    movable: frozenset[int]

    @cached_property
    def permuted(self) -> frozenset[int]:
        return frozenset(w for w in self.movable if self.wire_specs[w].permutes)

    @cached_property
    def in_order(self) -> list[int]:
        """Bases before the wires over them."""
        return sorted(self.movable, key=lambda w: (len(self.wire_specs[w].bases), w))

    def nested(self, w: int) -> list[int]:
        """The permuting wires over w alone, if there are few enough pairs of units to match inside all of them."""
        if w not in self.permuted or self.wire_specs[w].bases or self.wire_specs[w].size ** 2 > MOST_PAIRS:
            return []
        return [t for t in sorted(self.permuted) if self.wire_specs[t].bases == (w,)]


@dataclass(frozen=True)
class StateSlot:
    """Where a wire stands in a block: along which dimensions (bases, then its own), and the remaining dimensions."""

    block: int
    axis: WireAxis
    front: tuple[int, ...]
    rest: tuple[int, ...]

    def rows(self, x: Tensor) -> Float[Tensor, "copies n entries"]:
        """The slices of a block: one row per copy and index of the wire."""
        shape = [x.shape[d] for d in self.front]
        return x.permute(*self.front, *self.rest).reshape(prod(shape[:-1]), shape[-1], -1)


class InnerProducts:
    """Inner products of A's and B's slices, cached until the block of B changes.

    Weight matching spends most of its time on them. A block of B is a new tensor after every step, so its identity is
    the cache key. Products have one row per unit of B, so reordering units moves whole rows.
    """

    def __init__(self, state: MatchingState) -> None:
        self.state = state
        self._kept: dict[StateSlot, tuple[ReferenceType[Tensor], Tensor]] = {}
        self._bytes = 0

    def total(self, slots: Sequence[StateSlot]) -> Float[Tensor, "copies n m"]:
        """⟨a_i, b_j⟩ for all pairs of units, summed over slots of one wire; on the CPU."""
        short = [slot for slot in slots if self.state.rows_of_a(slot).shape[-1] <= SHORT]
        parts = [self.of(slot) for slot in slots if slot not in short]
        if short:
            sides = (self.state.rows_of_a, self.state.rows_of_b)
            a, b = (torch.cat([rows(slot).double() for slot in short], -1) for rows in sides)
            parts.append(torch.matmul(b, a.mT).cpu())
        found = parts[-1].clone()
        for part in parts[:-1]:
            found += part
        return found.mT

    def of(self, slot: StateSlot) -> Float[Tensor, "copies m n"]:
        """The products at one slot."""
        block, kept = self.state.b[slot.block], self._kept.get(slot)
        if kept is not None and kept[0]() is block:
            return kept[1]
        found = torch.matmul(self.state.rows_of_b(slot), self.state.rows_of_a(slot).mT).cpu()
        size = 0 if kept is not None else found.numel() * found.element_size()
        if self._bytes + size <= MOST:
            self._bytes += size
            self._kept[slot] = (ref(block), found)
        return found

    def reorder(self, w: int, order: Int[Tensor, "copies n"], before: Sequence[Tensor]) -> None:
        """Reorder the cached products of a wire after a step that reordered it alone; `before`: B's former blocks."""
        slots = self.state.slots[w]
        for slot in slots:
            kept = self._kept.get(slot)
            once = sum(1 for other in slots if other.block == slot.block) == 1
            if kept is not None and once and kept[0]() is before[slot.block]:
                if len(order) == 1:  # several times as fast
                    moved = kept[1].index_select(-2, order[0])
                else:
                    moved = torch.take_along_dim(kept[1], order[..., None], -2)
                self._kept[slot] = (ref(self.state.b[slot.block]), moved)


class MatchingState:
    """Weights `a`, and weights `b` moved by the element found so far, both cut into blocks.

    `movable`: the wires that steps may move.
    """

    def __init__(
        self, symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], movable: Collection[int]
    ) -> None:
        self.symmetry = symmetry
        self.movable = frozenset(movable)
        self.wire_specs = symmetry.wire_specs
        self.wires = MovableWires(self.wire_specs, self.movable)
        self.weights_a = a
        self.weights_b = {n: t.to(a[n].device) for n, t in b.items()}
        blocked = block_weights(symmetry, a)
        self.blocks = blocked.blocks
        self.a = [block.data for block in self.blocks]
        number = {id(block): i for i, block in enumerate(self.blocks)}

        def slot(found: BlockSlot) -> StateSlot:
            return StateSlot(number[id(found.block)], found.axis, found.front, found.rest)

        self.slots = tuple(tuple(map(slot, found)) for found in blocked.sites)
        self.blocks_of = [tuple(dict.fromkeys(slot.block for slot in slots)) for slots in self.slots]
        self.neighbours = [self._neighbours(w) for w in range(len(self.wire_specs))]
        self.unmoved = unmoved_part(symmetry, a, self.weights_b)
        self._rows: dict[StateSlot, Tensor] = {}
        self.products = InnerProducts(self)
        self.start_at(symmetry.identity())

    def start_at(self, element: Element) -> None:
        """Forget all steps and move `b` by an element."""
        self.moves = dict(element.moves)
        moved = transform_weights(self.symmetry, element.without_identities(), self.weights_b)
        blocks = block_weights(self.symmetry, moved).blocks
        self.b = [block.data.to(x.dtype) for x, block in zip(self.a, blocks, strict=True)]
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

    def move(self, w: int, **parts: Tensor) -> Move:
        """A move of one wire: the identity but for the parts given."""
        return move_of(self.wire_specs, w, **parts)

    def copies(self, w: int) -> int:
        """How many copies of a wire there are, over all its bases together."""
        return prod(self.wire_specs[b].size for b in self.wire_specs[w].bases)

    def part(self, w: int) -> float:
        """The share of the objective in the blocks of one wire; a block of two wires is part of both."""
        return sum(self.squares[i] for i in self.blocks_of[w])

    def rows_of_a(self, slot: StateSlot) -> Float[Tensor, "copies n entries"]:
        """The slices of a block of `a`, made once."""
        if slot not in self._rows:
            self._rows[slot] = slot.rows(self.a[slot.block])
        return self._rows[slot]

    def rows_of_b(self, slot: StateSlot) -> Float[Tensor, "copies n entries"]:
        return slot.rows(self.b[slot.block])

    def step(self, moves: Mapping[int, Move], least: float = LEAST) -> bool:
        """Move some wires if that lowers the distance of their blocks by more than a share `least`; whether it did."""
        step = Element(self.wire_specs, dict(moves), self.symmetry.signature)
        found = {i: self.act(step, i) for i in dict.fromkeys(i for w in moves for i in self.blocks_of[w])}
        squares = {i: squared_distance(self.a[i], x) for i, x in found.items()}
        if not sum(self.squares[i] - squares[i] for i in found) > least * sum(self.squares[i] for i in found):
            return False
        for i, x in found.items():
            self.b[i], self.squares[i] = x, squares[i]
        self._compose(step)
        return True

    def act(self, step: Element, i: int) -> Tensor:
        """A block moved by a step. Dependent axes move first: they are read in the old coordinates of their bases."""
        x, dims = self.b[i], self.blocks[i].dims
        moved = {d: dim.tree.wire for d, dim in enumerate(dims) if isinstance(dim.tree, WireAxis)}
        for d in sorted((d for d, w in moved.items() if w in step.moves), key=lambda d: -step.depth(moved[d])):
            x = step.act_on_axis(x, d, dims)
        return x

    def _compose(self, step: Element) -> None:
        """The element after a step. Only moved wires change, so only they and their bases are composed."""
        near = {b for w in step.moves for b in self._with_bases(w)}
        whole = {i: step.moves.get(i) or identity_move(self.wire_specs, i) for i in near if i in self.moves}
        before = Element(self.wire_specs, {i: self.moves[i] for i in whole}, step.signature)
        after = replace(step, moves=whole) @ before
        self.moves |= {w: after.moves[w] for w in step.moves}

    def _with_bases(self, w: int) -> set[int]:
        return {w}.union(*(self._with_bases(b) for b in self.wire_specs[w].bases))

    def _neighbours(self, w: int) -> tuple[int, ...]:
        """The wires that share a block with one; itself among them if it enters a block twice."""
        found: dict[int, None] = {}
        for i in self.blocks_of[w]:
            met = [d.tree.wire for d in self.blocks[i].dims if isinstance(d.tree, WireAxis)]
            found |= dict.fromkeys(t for t in met if t != w or met.count(w) > 1)
        return tuple(found)


@dataclass(frozen=True)
class AlignmentStep:
    """One step that was kept: in which start and sweep, on which wire, and the objective after it.

    `own`: the quantity that the solver itself minimises, if it is not the objective (a loss, a distance of features).
    """

    start: str
    sweep: int
    wire: str
    objective: float
    own: float | None = None
