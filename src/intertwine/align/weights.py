"""Solver `weights`: permutations only, one wire after the other, from several starts (after Ainsworth et al. 2023)."""

from __future__ import annotations

import torch

from intertwine.align.assignment import assign
from intertwine.align.descent import Step, descend
from intertwine.align.starts import permutations_of
from intertwine.align.task import Found, NoOptions, Task
from intertwine.symmetry.element import Element


def solve_weights(task: Task, _options: NoOptions) -> Found:
    """The best element of permutations found, and every step of every start; the pair is left at that element."""
    pair = task.pair
    generator = torch.Generator().manual_seed(task.seed)
    history: list[Step] = []
    best: tuple[float, Element] | None = None
    for name, element in task.problem.starts(task.starts, task.seed):
        pair.start_at(permutations_of(element))
        history += descend(pair, assign, name, generator, task.sweeps)
        if best is None or pair.objective < best[0]:
            best = pair.objective, pair.element
        if pair.objective == pair.unmoved:
            break  # nothing is nearer than equal
    assert best is not None
    pair.start_at(best[1])
    return best[1], history
