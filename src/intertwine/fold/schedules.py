"""Schedules: in which order features are merged, and when a wire is done.

"layerwise": one wire after the other, each to its end, as Algorithm 1 is printed. "round-robin": one merge per wire and
sweep, until no wire merges any more, as the code published with the paper does. A wire stops when its smallest distance
exceeds β times the largest one. Distances that are zero but for rounding are merged whatever the largest one is.
"""

from __future__ import annotations

from collections.abc import Callable

from intertwine.fold.merging import Merging


def run(merging: Merging) -> None:
    """Merge until every wire has stopped."""
    SCHEDULES[merging.options.schedule](merging, _Stop(merging))


class _Stop:
    """The stop rule; it remembers the largest distance of every wire at its start, if that is asked for."""

    def __init__(self, merging: Merging) -> None:
        self.merging = merging
        self.largest: dict[int, float] = {}

    def next_pair(self, w: int) -> tuple[int, int] | None:
        """The pair to merge next in a wire, or None where it is done."""
        merging, wire = self.merging, self.merging.wires[w]
        beta = merging.options.beta_of(wire.name)
        removed = wire.size - int(merging.alive[w].sum())
        if beta is None or removed >= merging.options.most(wire.size):
            return None
        distances = merging.distances(w)
        if merging.options.maximum == "recompute" or w not in self.largest:  # one pass over all pairs: not in vain
            self.largest[w] = distances.largest
        largest = self.largest[w]
        return None if distances.smallest > max(beta * largest, distances.rounding) else distances.pair()


def _layerwise(merging: Merging, stop: _Stop) -> None:
    for w in range(len(merging.wires)):
        while (pair := stop.next_pair(w)) is not None:
            merging.merge(w, *pair)
        merging.drop(w)


def _round_robin(merging: Merging, stop: _Stop) -> None:
    if merging.options.maximum == "fixed":
        for w in range(len(merging.wires)):
            stop.largest[w] = merging.distances(w).largest
    busy = True
    while busy:
        busy = False
        for w in range(len(merging.wires)):
            if (pair := stop.next_pair(w)) is not None:
                merging.merge(w, *pair)
                busy = True


SCHEDULES: dict[str, Callable[[Merging, _Stop], None]] = {"layerwise": _layerwise, "round-robin": _round_robin}
