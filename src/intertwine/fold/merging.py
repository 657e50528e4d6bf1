"""Greedy pairwise merging: feature distances that are updated after every merge, weighting by how strongly features
are read, the merge state, and the schedules with their stop rule.
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

# ----------------------------------------------------------------------------------------------------
# Distances between the features of one wire, kept up to date while features are merged.
#
# A merged slice is a x_m + b x_n, so its inner products with all others are the same combination of theirs: one merge
# costs one row of a Gram matrix, whatever the length of the slices. Slices that are added and slices that are averaged
# have a Gram matrix each. rows="mean" divides added slices by the number of features in them before they are compared;
# rows="ward" does so too, and counts a distance of groups of a and b features 2ab/(a + b) times, as Ward's clustering
# does: the mean of many is near the mean of all, and without that groups draw in everything at last.


Array = NDArray[np.float64]
#: How far a squared distance read off a Gram matrix may be from the truth, relative to the squared lengths.
ROUNDING = 1e-13
#: Distances below this share of the largest, of copies and dead features, do not say how far apart others usually are.
NEGLIGIBLE = 1e-6


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
        """Measure all distances anew from the Gram matrices."""
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
            part *= _weights(self.counts[live][:, None], self.counts[live][None, :])
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
        """How far apart two live features usually are: the median, copies and dead features left out."""
        live = np.flatnonzero(self.alive)
        pairs = self.table[np.ix_(live, live)][np.triu_indices(len(live), 1)]
        pairs = pairs[pairs > NEGLIGIBLE * pairs.max(initial=0.0)]
        return float(np.median(pairs)) if len(pairs) else 0.0

    def pair(self) -> tuple[int, int]:
        """The two features nearest to each other, the lower index first."""
        return self.near.pair()

    def merge(self, m: int, n: int) -> None:
        """Feature n goes into feature m. Counts are the caller's: they still hold both on entry, and m's sum after."""
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
        self._measure(m, n)

    def _measure(self, m: int, n: int) -> None:
        row = np.zeros(len(self.alive))
        for kind, gram in self.grams.items():
            if self.per_count and kind == "sum":
                squares = gram.diagonal() / self.counts**2
                row += squares + squares[m] - 2 * gram[m] / (self.counts * self.counts[m])
            else:
                row += gram.diagonal() + gram[m, m] - 2 * gram[m]
        if self.weighted:
            row *= _weights(self.counts, self.counts[m])
        self.table[m], self.table[:, m] = row, row
        self.near.replace(m, n, row)
        if self.far is not None:
            self.far.replace(m, n, -row)


def _weights(one: Array, other: Array | float) -> Array:
    """How much a distance between groups counts: once where both are single features."""
    return 2 * one * other / (one + other)


class RowMinima:
    """The least entry in the row of every live feature, so that the least of all is found in one pass over them.

    Where the entry a row had its least from is gone or grew, the old value is still a bound from below. Such rows are
    looked at again only when no other row has a smaller value.
    """

    def __init__(self, table: Array, alive: NDArray[np.bool_]) -> None:
        self.alive = alive
        self.table = np.where(alive[:, None] & alive[None, :], table, np.inf)
        np.fill_diagonal(self.table, np.inf)
        self.index = self.table.argmin(1)
        self.least = self.table[np.arange(len(alive)), self.index]
        self.bound = np.zeros(len(alive), bool)  # rows of which only a bound is known

    @property
    def value(self) -> float:
        return float(self.least[self._first()])

    def pair(self) -> tuple[int, int]:
        first = self._first()
        return min(first, int(self.index[first])), max(first, int(self.index[first]))

    def _first(self) -> int:
        """The row with the least entry of all."""
        while self.bound[first := int(self.least.argmin())]:
            self._look(first)
        return first

    def _look(self, i: int) -> None:
        self.index[i] = self.table[i].argmin()
        self.least[i], self.bound[i] = self.table[i, self.index[i]], False

    def replace(self, m: int, n: int, row: Array) -> None:
        """Feature m has new distances, feature n is gone."""
        row = np.where(self.alive, row, np.inf)
        row[m] = np.inf
        self.table[m], self.table[:, m] = row, row
        self.table[n], self.table[:, n] = np.inf, np.inf
        nearer = row < self.least
        self.bound |= (self.index == m) | (self.index == n)
        self.least[nearer], self.index[nearer], self.bound[nearer] = row[nearer], m, False
        self._look(m)
        self._look(n)


# ----------------------------------------------------------------------------------------------------
# Effects: features compared by what merging them would change in the layers that read them.
#
# Positive scales pass through ReLU, so the length of a row means nothing by itself. Where they pass, rows are brought
# to length one, and their columns take the length up. A feature then counts by the square of its columns. The mean of two
# rows is taken with these weights, and the distance of two features of weights a and b is 2ab/(a + b) times that of their
# rows: what is wrong in the next layer after the merge, had the features nothing else in common. A feature that is hardly
# read is merged into its nearest at no cost, and does not move it.


#: The least weight of a feature, as a share of the largest of its wire: none is divided by zero.
LEAST_WEIGHT = 1e-12


class ReadWeighting:
    """Wires balanced in their working tensors, with rows to be averaged, and the weights of their features."""

    def __init__(self, wires: Sequence[FoldableWire], bias: bool = True) -> None:
        """`bias`: whether biases are part of a row's length."""
        self._given, self._lengths = wires, []
        for wire in wires:  # in turn: the columns of one are in the rows of the next
            self._lengths.append(_row_lengths(wire, bias))
            _rescale(wire, 1 / self._lengths[-1])
        self.wires = [_averaged(wire) for wire in wires]
        self.weights = [_weights_effects(wire) for wire in wires]
        self._read = [weights.copy() for weights in self.weights]

    def settle(self, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """Give every feature that is left the length of that one of its group which is read most."""
        for wire, sizes, read, of in zip(self._given, self._lengths, self._read, groups, strict=True):
            best = [max(group, key=lambda i: read[i]) if group else i for i, group in enumerate(of)]
            _rescale(wire, sizes[best])


def _row_lengths(wire: FoldableWire, bias: bool) -> Float[Tensor, " features"]:
    """The lengths of rows where scales pass; 1 where they do not, or where a row is zero."""
    if wire.rule != "sum":
        return torch.ones(wire.size, dtype=torch.float64)
    size = _length([s for s in wire.sites if s.added and s.piece.counted in (("in", "bias") if bias else ("in",))])
    return torch.where(size > 0, size, 1.0)


def _rescale(wire: FoldableWire, factors: Float[Tensor, " features"]) -> None:
    """Rows times a factor, columns divided by it; the function of the network stays as it is."""
    for site in wire.sites if wire.rule == "sum" else ():
        shape = [1] * site.piece.data.ndim
        shape[site.dim] = -1
        if site.added:
            site.piece.data.mul_(factors.view(shape))
        elif site.role == "read":
            site.piece.data.div_(factors.view(shape))


def _averaged(wire: FoldableWire) -> FoldableWire:
    return replace(wire, rule="mean", sites=tuple(replace(s, added=s.role == "read") for s in wire.sites))


def _weights_effects(wire: FoldableWire) -> Array:
    found = feature_norms(wire, ("read",)).square().numpy()
    return np.maximum(found / max(found.mean(), 1e-300), LEAST_WEIGHT)


def feature_norms(wire: FoldableWire, roles: tuple[str, ...]) -> Float[Tensor, " features"]:
    """The length of everything that writes, or reads, each feature."""
    return _length([s for s in wire.sites if s.role in roles and s.piece.counted is not None])


def _length(sites: Sequence[FoldSlot]) -> Float[Tensor, " features"]:
    squares = [s.piece.data.square().movedim(s.dim, 0).reshape(s.piece.data.shape[s.dim], -1) for s in sites]
    return torch.stack([x.sum(1) for x in squares]).sum(0).sqrt()


# ----------------------------------------------------------------------------------------------------
# Merging: features of wires merged one pair at a time, the weights and all live distances kept up to date.
#
# Merging in one wire shortens the slices of its neighbours: in a weight of both, two slices become one. For the Gram
# matrix of a neighbour that is an update of low rank.


class MergeState:
    """The state of folding: which feature is in which group, and how far apart those that are left are."""

    def __init__(self, wires: Sequence[FoldableWire], options: Options) -> None:
        self._effects = ReadWeighting(wires, options.bias) if options.rows == "effect" else None
        wires = self._effects.wires if self._effects else wires
        self.wires, self.options = tuple(wires), options
        self.groups = [[[i] for i in range(wire.size)] for wire in wires]  # empty: merged into another
        self.alive = [np.ones(wire.size, bool) for wire in wires]
        # how many features each one stands for, or how much it is read
        self.counts = self._effects.weights if self._effects else [np.ones(wire.size) for wire in wires]
        self.live: dict[int, FeatureDistances] = {}  # wires whose distances are kept up to date
        self.stale: set[int] = set()
        self._number = {wire.strand: i for i, wire in enumerate(wires)}
        self._met = {(id(s.piece), s.dim): s for wire in wires for s in wire.sites}
        # a layer from a wire to itself changes its own slices along their length: its distances are measured anew
        self._loops = [len({id(s.piece) for s in wire.sites}) < len(wire.sites) for wire in wires]
        # views of the working tensors: a merge touches short slices, where arrays of numpy are quicker
        self._views = [[np.moveaxis(s.piece.data.numpy(), s.dim, 0) for s in wire.sites] for wire in wires]
        self._beside = [[self._neighbours(site) for site in wire.sites] for wire in wires]

    # -- distances -------------------------------------------------------------------------------------------------

    def distances(self, w: int) -> FeatureDistances:
        """The distances of a wire, up to date; they stay so until they are dropped."""
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
        for site in self.wires[w].sites:
            if self.measured(site):
                rows = feature_slices(site.piece.data, site.dim).numpy()
                gram = rows @ rows.T  # of an array and itself numpy makes one half, and copies it
                kind = _kind(site)
                grams[kind] = grams[kind] + gram if kind in grams else gram
        return grams

    def measured(self, site: FoldSlot) -> bool:
        """Whether distances look at a site."""
        if site.role == "read":
            return self.options.terms == "in+out" and site.piece.counted is not None
        return site.piece.counted == "in" or (site.piece.counted == "bias" and self.options.bias)

    # -- merging ---------------------------------------------------------------------------------------------------

    def merge(self, w: int, m: int, n: int) -> None:
        """Merge feature n of a wire into feature m."""
        shares = self.counts[w][[m, n]] / self.counts[w][[m, n]].sum()
        if w in self.live:
            self.live[w].merge(m, n)
        else:
            self.counts[w][m] += self.counts[w][n]
            self.counts[w][n], self.alive[w][n] = 1.0, False
        for site, rows, beside in zip(self.wires[w].sites, self._views[w], self._beside[w], strict=True):
            a, b = (1.0, 1.0) if site.added else (float(shares[0]), float(shares[1]))
            for dim, other in beside:
                self._follow(site, dim, other, m, n, a, b)
            rows[m] = rows[m] + rows[n] if site.added else a * rows[m] + b * rows[n]
            rows[n] = 0.0
        if self._loops[w] and w in self.live:
            self.stale.add(w)
        self.groups[w][m] += self.groups[w][n]
        self.groups[w][n] = []

    def _neighbours(self, site: FoldSlot) -> list[tuple[int, FoldSlot]]:
        """The sites of other wires in the same piece whose distances look at it, each with its dimension there."""
        met = ((dim, self._met.get((id(site.piece), dim))) for dim in range(site.piece.data.ndim) if dim != site.dim)
        return [(dim, other) for dim, other in met if other is not None and self.measured(other)]

    def _follow(self, site: FoldSlot, dim: int, other: FoldSlot, m: int, n: int, a: float, b: float) -> None:
        """Update the Gram matrix of another wire in the same piece, before two slices of it become one."""
        w = self._number[site.piece.block.wire_axis(dim).wire]
        if w not in self.live:
            return
        self.stale.add(w)
        if self._loops[w]:
            return
        at = dim - (dim > site.dim)
        first, second = (feature_slices(site.piece.data.select(site.dim, i), at) for i in (m, n))
        left = torch.cat([(a * a - 1) * first + a * b * second, a * b * first + (b * b - 1) * second], 1)
        gram = torch.from_numpy(self.live[w].grams[_kind(other)])
        gram.addmm_(left, torch.cat([first, second], 1).T)

    def settle(self) -> None:
        """Leave the working tensors as the smaller network is to have them; nothing can be merged afterwards."""
        if self._effects is not None:
            self._effects.settle(self.groups)

    def kept(self, w: int) -> list[int]:
        """The features that are left, in their order."""
        return np.flatnonzero(self.alive[w]).tolist()

    def merged(self, w: int) -> tuple[tuple[int, ...], ...]:
        """The groups of a wire: the features behind every one that is left."""
        return tuple(tuple(sorted(self.groups[w][i])) for i in self.kept(w))


def feature_slices(x: Tensor, dim: int) -> Float[Tensor, "features entries"]:
    """One row per index of a dimension."""
    return x.movedim(dim, 0).reshape(x.shape[dim], -1)


def _kind(site: FoldSlot) -> str:
    return "sum" if site.added else "mean"


# ----------------------------------------------------------------------------------------------------
# Schedules: in which order features are merged, and when a wire is done.
#
# "layerwise": one wire after the other, each to its end, as Algorithm 1 is printed. "round-robin": one merge per wire and
# sweep, until no wire merges any more, as the code published with the paper does. A wire stops when its smallest distance
# exceeds β times a distance to go by: how far apart two of its features usually are, or the largest distance. Distances
# that are zero but for rounding are merged in any case.


def run_schedule(merging: MergeState) -> None:
    """Merge until every wire has stopped."""
    SCHEDULES[merging.options.schedule](merging, _Stop(merging))


class _Stop:
    """The stop rule; it remembers the distance that every wire goes by, unless that is to be measured at every step."""

    def __init__(self, merging: MergeState) -> None:
        self.merging = merging
        self.by: dict[int, float] = {}

    def next_pair(self, w: int) -> tuple[int, int] | None:
        """The pair to merge next in a wire, or None where it is done."""
        merging, wire = self.merging, self.merging.wires[w]
        beta = merging.options.beta_of(wire.name)
        removed = wire.size - int(merging.alive[w].sum())
        if beta is None or removed >= merging.options.most(wire.size):
            return None
        distances = merging.distances(w)
        if merging.options.maximum == "recompute" or w not in self.by:  # one pass over all pairs: not in vain
            self.measure(w)
        return None if distances.smallest > max(beta * self.by[w], distances.rounding) else distances.pair()

    def measure(self, w: int) -> None:
        """Remember what a wire goes by as it is now."""
        distances = self.merging.distances(w)
        self.by[w] = distances.typical if self.merging.options.maximum == "typical" else distances.largest


def _layerwise(merging: MergeState, stop: _Stop) -> None:
    for w in range(len(merging.wires)):
        while (pair := stop.next_pair(w)) is not None:
            merging.merge(w, *pair)
        merging.drop(w)


def _round_robin(merging: MergeState, stop: _Stop) -> None:
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


SCHEDULES: dict[str, Callable[[MergeState, _Stop], None]] = {"layerwise": _layerwise, "round-robin": _round_robin}
