"""Schedules: in which order features are merged, and when a wire is done.

"layerwise": one wire after the other, each to its end, as Algorithm 1 is printed. "round-robin": one merge per wire and
sweep, until no wire merges any more, as the code published with the paper does. A wire stops when its smallest distance
exceeds β times a distance to go by: how far apart two of its features usually are, or the largest distance. Distances
that are zero but for rounding are merged in any case.
"""

from __future__ import annotations

from collections.abc import Callable

from intertwine.fold.merging import Merging


def run(merging: Merging) -> None:
    """Merge until every wire has stopped."""
    SCHEDULES[merging.options.schedule](merging, _Stop(merging))


class _Stop:
    """The stop rule; it remembers the distance that every wire goes by, unless that is to be measured at every step."""

    def __init__(self, merging: Merging) -> None:
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


def _layerwise(merging: Merging, stop: _Stop) -> None:
    for w in range(len(merging.wires)):
        while (pair := stop.next_pair(w)) is not None:
            merging.merge(w, *pair)
        merging.drop(w)


def _round_robin(merging: Merging, stop: _Stop) -> None:
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


SCHEDULES: dict[str, Callable[[Merging, _Stop], None]] = {"layerwise": _layerwise, "round-robin": _round_robin}
