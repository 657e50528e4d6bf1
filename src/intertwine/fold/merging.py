"""Greedy pairwise merging: distances between features that are updated after every merge, the merge state, schedules.

A merged slice is a x_m + b x_n, so its inner products with all others are the same combination of theirs: a merge costs
one row of a Gram matrix, however long the slices are. Slices that are added and slices that are averaged have a Gram
matrix each. rows="mean" divides added slices by the number of their features before they are compared; rows="ward" does
so too, and multiplies the distance of groups of a and b features by 2ab/(a + b), as in Ward's clustering: without it,
the means of large groups come near each other and everything is merged.

rows="effect" compares features by what merging them changes in the layers that read them. Positive scales pass through
ReLU, so the length of a row means nothing by itself: where they pass, rows are scaled to length one and their columns
take up the length. The weight of a feature is then the square of its columns. The mean of two rows is taken with these
weights, and the distance of two features of weights a and b is 2ab/(a + b) times that of their rows: the error in the
next layer after the merge, were the features otherwise uncorrelated. Merging one that is hardly read is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.fold.options import Options
from intertwine.fold.prepare import FoldableWire, FoldSlot

Array = NDArray[np.float64]
#: The rounding error of a squared distance from a Gram matrix, relative to the squared lengths.
ROUNDING = 1e-13
#: Distances below this share of the largest, those of copies and dead features, are left out of the typical distance.
NEGLIGIBLE = 1e-6
#: The least weight of a feature, as a share of the mean of its wire; it avoids a division by zero.
LEAST_WEIGHT = 1e-12


class FeatureDistances:
    """Squared distances between live features. `grams`: "sum" and "mean", whichever the wire has."""

    def __init__(
        self,
        grams: Mapping[str, Array],
        counts: Array,
        alive: NDArray[np.bool_],
        rows: str,
        follow_largest: bool = False,
    ) -> None:
        self.grams = dict(grams)
        self.counts, self.alive = counts, alive
        self.per_count, self.weighted = rows in ("mean", "ward"), rows in ("ward", "effect")
        self.follow_largest = follow_largest
        self.rebuild()

    def rebuild(self) -> None:
        """Compute all distances from the Gram matrices."""
        live = np.flatnonzero(self.alive)
        block = np.ix_(live, live)
        part = np.zeros((len(live), len(live)))
        for kind, gram in self.grams.items():
            rows = gram[block]
            if self.per_count and kind == "sum":
                rows /= self.counts[live][:, None]
                rows /= self.counts[live][None, :]
            squares = rows.diagonal().copy()
            rows *= -2
            rows += squares[:, None]
            rows += squares[None, :]
            part += rows
        if self.weighted:
            part *= _ward_factor(self.counts[live][:, None], self.counts[live][None, :])
        table = np.zeros((len(self.alive), len(self.alive)))
        table[block] = part
        self.table = table
        self.near = RowMinima(table, self.alive)
        self.far = RowMinima(-table, self.alive) if self.follow_largest else None
        self.rounding = ROUNDING * float(sum(g.diagonal().max() for g in self.grams.values()))

    @property
    def smallest(self) -> float:
        return self.near.value

    @property
    def largest(self) -> float:
        """The largest distance between two live features; 0 where one is left."""
        far = self.far or RowMinima(-self.table, self.alive)
        return max(-far.value, 0.0)

    @property
    def typical(self) -> float:
        """The median distance of two live features, without copies and dead features."""
        live = np.flatnonzero(self.alive)
        pairs = self.table[np.ix_(live, live)][np.triu_indices(len(live), 1)]
        pairs = pairs[pairs > NEGLIGIBLE * pairs.max(initial=0.0)]
        return float(np.median(pairs)) if len(pairs) else 0.0

    def pair(self) -> tuple[int, int]:
        """The two features nearest to each other, the lower index first."""
        return self.near.pair()

    def merge(self, m: int, n: int) -> None:
        """Merge feature n into feature m; the counts, which the caller shares, are updated too."""
        total = self.counts[m] + self.counts[n]
        for kind, gram in self.grams.items():
            a, b = (1.0, 1.0) if kind == "sum" else (self.counts[m] / total, self.counts[n] / total)
            row = a * gram[m] + b * gram[n]
            row[m] = a * row[m] + b * row[n]
            row[n] = 0.0
            gram[m], gram[:, m] = row, row
            gram[n], gram[:, n] = 0.0, 0.0
        self.counts[m], self.counts[n] = total, 1.0
        self.alive[n] = False
        row = np.zeros(len(self.alive))
        for kind, gram in self.grams.items():
            if self.per_count and kind == "sum":
                squares = gram.diagonal() / self.counts**2
                row += squares + squares[m] - 2 * gram[m] / (self.counts * self.counts[m])
            else:
                row += gram.diagonal() + gram[m, m] - 2 * gram[m]
        if self.weighted:
            row *= _ward_factor(self.counts, self.counts[m])
        self.table[m], self.table[:, m] = row, row
        self.near.replace(m, n, row)
        if self.far is not None:
            self.far.replace(m, n, -row)


def _ward_factor(one: Array, other: Array | float) -> Array:
    """The factor of a distance between groups in Ward's clustering; 1 for two single features."""
    return 2 * one * other / (one + other)


class RowMinima:
    """The least entry in the row of every live feature, so that the least of all is found in one pass over them.

    Where the least entry of a row was removed or grew, its old value is a lower bound. Such a row is searched again
    only when no other row has a smaller value.
    """

    def __init__(self, table: Array, alive: NDArray[np.bool_]) -> None:
        self.alive = alive
        self.table = np.where(alive[:, None] & alive[None, :], table, np.inf)
        np.fill_diagonal(self.table, np.inf)
        self.index = self.table.argmin(1)
        self.least = self.table[np.arange(len(alive)), self.index]
        self.bound = np.zeros(len(alive), bool)  # rows of which only a lower bound is known

    @property
    def value(self) -> float:
        return float(self.least[self._first()])

    def pair(self) -> tuple[int, int]:
        first = self._first()
        return min(first, int(self.index[first])), max(first, int(self.index[first]))

    def _first(self) -> int:
        """The row with the least entry of all."""
        while self.bound[first := int(self.least.argmin())]:
            self._search(first)
        return first

    def _search(self, i: int) -> None:
        self.index[i] = self.table[i].argmin()
        self.least[i], self.bound[i] = self.table[i, self.index[i]], False

    def replace(self, m: int, n: int, row: Array) -> None:
        """Set new distances of feature m, and remove feature n."""
        row = np.where(self.alive, row, np.inf)
        row[m] = np.inf
        self.table[m], self.table[:, m] = row, row
        self.table[n], self.table[:, n] = np.inf, np.inf
        nearer = row < self.least
        self.bound |= (self.index == m) | (self.index == n)
        self.least[nearer], self.index[nearer], self.bound[nearer] = row[nearer], m, False
        self._search(m)
        self._search(n)


class ReadWeighting:
    """Wires with normalised rows, which are averaged, and the weights of their features (see rows="effect" above)."""

    def __init__(self, wires: Sequence[FoldableWire], bias: bool = True) -> None:
        """`bias`: whether biases are part of a row's length."""
        self._given, self._lengths = wires, []
        counted = ("in", "bias") if bias else ("in",)
        for wire in wires:  # in turn: the columns of one are in the rows of the next
            length = torch.ones(wire.size, dtype=torch.float64)
            if wire.rule == "sum":
                length = _length([s for s in wire.slots if s.added and s.block.counted in counted])
            self._lengths.append(torch.where(length > 0, length, 1.0))
            _rescale(wire, 1 / self._lengths[-1])
        self.wires = [
            replace(wire, rule="mean", slots=tuple(replace(s, added=s.role == "read") for s in wire.slots))
            for wire in wires
        ]
        squares = [feature_norms(wire, ("read",)).square().numpy() for wire in wires]
        self.weights = [np.maximum(found / max(found.mean(), 1e-300), LEAST_WEIGHT) for found in squares]
        self._read = [weights.copy() for weights in self.weights]

    def restore_lengths(self, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """Give every remaining feature the row length of that member of its group which is read most."""
        for wire, lengths, read, of in zip(self._given, self._lengths, self._read, groups, strict=True):
            best = [max(group, key=lambda i: read[i]) if group else i for i, group in enumerate(of)]
            _rescale(wire, lengths[best])


def _rescale(wire: FoldableWire, factors: Float[Tensor, " features"]) -> None:
    """Multiply rows and divide columns by a factor per feature; the function of the network stays as it is."""
    for slot in wire.slots if wire.rule == "sum" else ():
        shape = [1] * slot.block.data.ndim
        shape[slot.dim] = -1
        if slot.added:
            slot.block.data.mul_(factors.view(shape))
        elif slot.role == "read":
            slot.block.data.div_(factors.view(shape))


def feature_norms(wire: FoldableWire, roles: tuple[str, ...]) -> Float[Tensor, " features"]:
    """The norm of all weights that write, or read, each feature."""
    return _length([s for s in wire.slots if s.role in roles and s.block.counted is not None])


def _length(slots: Sequence[FoldSlot]) -> Float[Tensor, " features"]:
    squares = [s.block.data.square().movedim(s.dim, 0).reshape(s.block.data.shape[s.dim], -1) for s in slots]
    return torch.stack([x.sum(1) for x in squares]).sum(0).sqrt()


class MergeState:
    """The groups of merged features, and the distances of those that are left.

    A merge in one wire shortens the slices of its neighbours: in a weight of both, two slices become one. That is an
    update of low rank for the Gram matrix of the neighbour.
    """

    def __init__(self, wires: Sequence[FoldableWire], options: Options) -> None:
        self._effects = ReadWeighting(wires, options.bias) if options.rows == "effect" else None
        wires = self._effects.wires if self._effects else wires
        self.wires, self.options = tuple(wires), options
        self.groups = [[[i] for i in range(wire.size)] for wire in wires]  # empty: merged into another
        self.alive = [np.ones(wire.size, bool) for wire in wires]
        # the number of features that each one stands for, or its weight
        self.counts = self._effects.weights if self._effects else [np.ones(wire.size) for wire in wires]
        self.live: dict[int, FeatureDistances] = {}  # wires whose distances are kept up to date
        self.stale: set[int] = set()
        self._number = {wire.index: i for i, wire in enumerate(wires)}
        # a layer from a wire to itself changes its own slices along their length, and needs all its distances again
        self._loops = [len({id(s.block) for s in wire.slots}) < len(wire.slots) for wire in wires]
        # numpy views of the working tensors: a merge changes short slices, for which numpy is faster
        self._views = [[np.moveaxis(s.block.data.numpy(), s.dim, 0) for s in wire.slots] for wire in wires]
        by_dim = {(id(s.block), s.dim): s for wire in wires for s in wire.slots}
        self._neighbours = [[self._neighbours_of(slot, by_dim) for slot in wire.slots] for wire in wires]

    def distances(self, w: int) -> FeatureDistances:
        """The distances of a wire, kept up to date until they are dropped."""
        if w not in self.live:
            follow = self.options.maximum == "recompute"
            self.live[w] = FeatureDistances(self._grams(w), self.counts[w], self.alive[w], self.options.rows, follow)
        elif w in self.stale:
            if self._loops[w]:
                self.live[w].grams = self._grams(w)
            self.live[w].rebuild()
        self.stale.discard(w)
        return self.live[w]

    def drop(self, w: int) -> None:
        """Stop keeping the distances of a wire."""
        self.live.pop(w, None)
        self.stale.discard(w)

    def _grams(self, w: int) -> dict[str, Array]:
        grams: dict[str, Array] = {}
        for slot in self.wires[w].slots:
            if self.measured(slot):
                rows = feature_slices(slot.block.data, slot.dim).numpy()
                gram = rows @ rows.T  # numpy computes one half of a product with the transpose, and copies it
                kind = _kind(slot)
                grams[kind] = grams[kind] + gram if kind in grams else gram
        return grams

    def measured(self, slot: FoldSlot) -> bool:
        """Whether a slot is part of the distances."""
        if slot.role == "read":
            return self.options.terms == "in+out" and slot.block.counted is not None
        return slot.block.counted == "in" or (slot.block.counted == "bias" and self.options.bias)

    def merge(self, w: int, m: int, n: int) -> None:
        """Merge feature n of a wire into feature m."""
        shares = self.counts[w][[m, n]] / self.counts[w][[m, n]].sum()
        if w in self.live:
            self.live[w].merge(m, n)
        else:
            self.counts[w][m] += self.counts[w][n]
            self.counts[w][n], self.alive[w][n] = 1.0, False
        for slot, rows, neighbours in zip(self.wires[w].slots, self._views[w], self._neighbours[w], strict=True):
            a, b = (1.0, 1.0) if slot.added else (float(shares[0]), float(shares[1]))
            for dim, other in neighbours:
                self._update_neighbour(slot, dim, other, m, n, a, b)
            rows[m] = rows[m] + rows[n] if slot.added else a * rows[m] + b * rows[n]
            rows[n] = 0.0
        if self._loops[w] and w in self.live:
            self.stale.add(w)
        self.groups[w][m] += self.groups[w][n]
        self.groups[w][n] = []

    def _neighbours_of(self, slot: FoldSlot, by_dim: Mapping[tuple[int, int], FoldSlot]) -> list[tuple[int, FoldSlot]]:
        """The slots of other wires in the same block that are part of distances, each with its dimension there."""
        others = ((dim, by_dim.get((id(slot.block), dim))) for dim in range(slot.block.data.ndim) if dim != slot.dim)
        return [(dim, other) for dim, other in others if other is not None and self.measured(other)]

    def _update_neighbour(self, slot: FoldSlot, dim: int, other: FoldSlot, m: int, n: int, a: float, b: float) -> None:
        """Update the Gram matrix of another wire in the same block, before two slices of it become one."""
        w = self._number[slot.block.axis(dim).wire]
        if w not in self.live:
            return
        self.stale.add(w)
        if self._loops[w]:
            return
        at = dim - (dim > slot.dim)
        first, second = (feature_slices(slot.block.data.select(slot.dim, i), at) for i in (m, n))
        left = torch.cat([(a * a - 1) * first + a * b * second, a * b * first + (b * b - 1) * second], 1)
        gram = torch.from_numpy(self.live[w].grams[_kind(other)])
        gram.addmm_(left, torch.cat([first, second], 1).T)

    def finish(self) -> None:
        """Bring the working tensors to their final scales; nothing can be merged afterwards."""
        if self._effects is not None:
            self._effects.restore_lengths(self.groups)

    def kept(self, w: int) -> list[int]:
        """The features that are left, in their order."""
        return np.flatnonzero(self.alive[w]).tolist()

    def merged(self, w: int) -> tuple[tuple[int, ...], ...]:
        """The groups of a wire: the features behind every one that is left."""
        return tuple(tuple(sorted(self.groups[w][i])) for i in self.kept(w))


def feature_slices(x: Tensor, dim: int) -> Float[Tensor, "features entries"]:
    """One row per index of a dimension."""
    return x.movedim(dim, 0).reshape(x.shape[dim], -1)


def _kind(slot: FoldSlot) -> str:
    return "sum" if slot.added else "mean"


def run_schedule(merging: MergeState) -> None:
    """Merge until every wire has stopped."""
    SCHEDULES[merging.options.schedule](merging, _StopCriterion(merging))


class _StopCriterion:
    """A wire stops when its smallest distance exceeds β times its reference: the typical distance, or the largest.

    The reference is measured once, or at every step with maximum="recompute". Distances that are zero up to rounding
    are merged in any case.
    """

    def __init__(self, merging: MergeState) -> None:
        self.merging = merging
        self.reference: dict[int, float] = {}

    def next_pair(self, w: int) -> tuple[int, int] | None:
        """The pair to merge next in a wire, or None where it has stopped."""
        merging, wire = self.merging, self.merging.wires[w]
        beta = merging.options.beta_of(wire.name)
        removed = wire.size - int(merging.alive[w].sum())
        if beta is None or removed >= merging.options.most(wire.size):
            return None
        distances = merging.distances(w)
        if merging.options.maximum == "recompute" or w not in self.reference:
            self.measure(w)
        return None if distances.smallest > max(beta * self.reference[w], distances.rounding) else distances.pair()

    def measure(self, w: int) -> None:
        """Set the reference of a wire to that of now."""
        distances = self.merging.distances(w)
        self.reference[w] = distances.typical if self.merging.options.maximum == "typical" else distances.largest


def _layerwise(merging: MergeState, stop: _StopCriterion) -> None:
    """One wire after the other, each until it stops, as Algorithm 1 is printed."""
    for w in range(len(merging.wires)):
        while (pair := stop.next_pair(w)) is not None:
            merging.merge(w, *pair)
        merging.drop(w)


def _round_robin(merging: MergeState, stop: _StopCriterion) -> None:
    """One merge per wire and sweep until every wire has stopped, as in the code published with the paper."""
    if merging.options.maximum != "recompute":
        for w in range(len(merging.wires)):
            stop.measure(w)
    busy = True
    while busy:
        busy = False
        for w in range(len(merging.wires)):
            if (pair := stop.next_pair(w)) is not None:
                merging.merge(w, *pair)
                busy = True


SCHEDULES: dict[str, Callable[[MergeState, _StopCriterion], None]] = {
    "layerwise": _layerwise,
    "round-robin": _round_robin,
}
