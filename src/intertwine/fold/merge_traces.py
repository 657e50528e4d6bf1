"""Merge traces: for every wire on its own, which pairs of features are merged one after the other, and what that costs.

Each wire is merged down to one feature while the others stay as they are. The cost is the share of the variance of its
rows, weighted as `intertwine.fold.effects` says, that lies inside the groups, as in Ward's clustering. Beside it stands
the β at which `fold` would merge so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from intertwine.fold.absorbing import lost
from intertwine.fold.fold import finished
from intertwine.fold.folded import Fold
from intertwine.fold.merging import Merging
from intertwine.fold.options import Options
from intertwine.fold.prepared import Prepared, prepare


@dataclass(frozen=True)
class MergeTrace:
    """One wire. `costs` and `betas` start with 0: those of no merge."""

    pairs: tuple[tuple[int, int], ...]
    costs: tuple[float, ...]
    betas: tuple[float, ...]


def merge_trace(prepared: Prepared, w: int) -> MergeTrace:
    """Merge one wire to its end; the working tensors are as before afterwards."""
    wire = prepared.wires[w]
    merging = Merging(prepared.wires, Options())
    before = [site.piece.data.clone() for site in wire.sites]
    distances = merging.distances(w)
    by, inside = distances.typical, 0.0
    weights = merging.counts[w]
    total = float((distances.table * (weights[:, None] + weights[None, :])).sum()) / 4 / weights.sum()
    pairs, costs, betas = [], [0.0], [0.0]
    for _ in range(wire.size - 1):
        distances = merging.distances(w)
        m, n = distances.pair()
        smallest = max(distances.smallest, 0.0)
        inside += smallest / 2  # what a merge adds to the squares inside groups is half of Ward's distance
        merging.merge(w, m, n)
        pairs.append((m, n))
        costs.append(max(costs[-1], lost(inside / total if total > 0 else 0.0)))
        betas.append(max(betas[-1], smallest / by if by > 0 else 0.0))
    for site, data in zip(wire.sites, before, strict=True):
        site.piece.data.copy_(data)
    return MergeTrace(tuple(pairs), tuple(costs), tuple(betas))


class MergingTo:
    """A network whose wires can be merged to any widths."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.traces = {wire.strand: merge_trace(prepared, w) for w, wire in enumerate(prepared.wires)}

    @property
    def costs(self) -> dict[int, tuple[float, ...]]:
        """Strand → what it costs once 0, 1, … of its features are gone."""
        return {strand: trace.costs for strand, trace in self.traces.items()}

    def built(self, widths: Mapping[int, int]) -> Fold:
        """The network with so many features left in each wire."""
        prepared = prepare(self.prepared.model, self.prepared.example)  # merging writes into it
        merging = Merging(prepared.wires, Options())
        betas = {}
        for w, wire in enumerate(prepared.wires):
            trace = self.traces[wire.strand]
            gone = wire.size - widths[wire.strand]
            for pair in trace.pairs[:gone]:
                merging.merge(w, *pair)
            betas[wire.name] = trace.betas[gone]
        return finished(prepared, merging, betas)
