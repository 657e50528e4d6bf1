"""Solver `weights`: permutations only, one wire after the other, from several starts (after Ainsworth et al. 2023)."""

from __future__ import annotations

import torch

from intertwine.align.assignment import assign
from intertwine.align.descent import Step, descend
from intertwine.align.pair import Pair
from intertwine.align.starts import Problem, permutations_of
from intertwine.symmetry.element import Element


def solve_weights(problem: Problem, pair: Pair, starts: int, seed: int, sweeps: int) -> tuple[Element, list[Step]]:
    """The best element of permutations found, and every step of every start; the pair is left at that element."""
    generator = torch.Generator().manual_seed(seed)
    history: list[Step] = []
    best: tuple[float, Element] | None = None
    for name, element in problem.starts(starts, seed):
        pair.start_at(permutations_of(element))
        history += descend(pair, assign, name, generator, sweeps)
        if best is None or pair.objective < best[0]:
            best = pair.objective, pair.element
        if pair.objective == pair.unmoved:
            break  # nothing is nearer than equal
    assert best is not None
    pair.start_at(best[1])
    return best[1], history
