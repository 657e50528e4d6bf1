"""Distances between the features of one wire, kept up to date while features are merged.

A merged slice is a x_m + b x_n, so its inner products with all others are the same combination of theirs: one merge
costs one row of a Gram matrix, whatever the length of the slices. Slices that are added and slices that are averaged
have a Gram matrix each. rows="mean" divides added slices by the number of features in them before they are compared;
rows="ward" does so too, and counts a distance of groups of a and b features 2ab/(a + b) times, as Ward's clustering
does: the mean of many is near the mean of all, and without that groups draw in everything at last.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
#: How far a squared distance read off a Gram matrix may be from the truth, relative to the squared lengths.
ROUNDING = 1e-13
#: Distances below this share of the largest, of copies and dead features, do not say how far apart others usually are.
NOTHING = 1e-6


class Distances:
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
        self.near = Extremes(table, self.alive)
        self.far = Extremes(-table, self.alive) if self.follow_largest else None
        self.rounding = ROUNDING * float(sum(g.diagonal().max() for g in self.grams.values()))

    @property
    def smallest(self) -> float:
        return self.near.value

    @property
    def largest(self) -> float:
        """The largest distance between two live features; 0 where one is left."""
        far = self.far or Extremes(-self.table, self.alive)
        return max(-far.value, 0.0)

    @property
    def typical(self) -> float:
        """How far apart two live features usually are: the median, copies and dead features left out."""
        live = np.flatnonzero(self.alive)
        pairs = self.table[np.ix_(live, live)][np.triu_indices(len(live), 1)]
        pairs = pairs[pairs > NOTHING * pairs.max(initial=0.0)]
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


class Extremes:
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
