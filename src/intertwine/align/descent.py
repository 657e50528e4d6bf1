"""Descent over wires: every wire in turn is brought to its best, until none of them moves.

A wire is looked at again only after a wire beside it has moved. The order of a sweep is random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from intertwine.align.pair import Pair

Visit = Callable[[Pair, int], bool]  # brings one strand to its best; whether it moved


@dataclass(frozen=True)
class Step:
    """One step that was kept: in which start and sweep, on which wire, and the objective after it.

    `own`: what the solver itself lowers, where that is not the objective (a loss, a distance of features).
    """

    start: str
    sweep: int
    wire: str
    objective: float
    own: float | None = None


def descend(
    pair: Pair, visit: Visit, start: str, generator: torch.Generator, sweeps: int, least: float = 0.0
) -> list[Step]:
    """Lower the objective until no strand moves, or a whole sweep gains less than a share `least` of the objective."""
    strands = sorted(s for s in pair.movable if pair.places[s])
    waiting = set(strands)
    history = [Step(start, 0, "", pair.objective)]
    for sweep in range(1, sweeps + 1):
        before = pair.objective
        order = [strands[i] for i in torch.randperm(len(strands), generator=generator).tolist()]
        for s in order:
            if s not in waiting:
                continue
            waiting.discard(s)
            if visit(pair, s):
                waiting.update(t for t in pair.around[s] if t in pair.movable)
                history.append(Step(start, sweep, pair.strands[s].name, pair.objective))
        if not waiting or before - pair.objective <= least * before:
            break
    return history
