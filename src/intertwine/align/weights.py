"""Solver `weights`: permutations, one wire after the other, from several starts (after Ainsworth et al. 2023).

Where the symmetry holds matrices (continuous=True) they move too: rotations of a residual stream, a matrix per head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from intertwine.align.solver import (
    AlignmentProblem,
    AlignmentTask,
    Solution,
    coordinate_descent,
    coordinate_step,
    permutations_of,
)
from intertwine.align.state import AlignmentStep, MatchingState
from intertwine.symmetry.element import Element

#: A sweep that lowers the objective by less than this share of it is the last.
LEAST_GAIN = 1e-5
#: The same while starts are compared: one sweep each, after which the best one is seen to go on being the best.
ONE_SWEEP = 1.0
#: Squared distances below this share of the squared length are taken for rounding, where matrices act.
ROUNDING = 1e-12


@dataclass(frozen=True)
class WeightsOptions:
    """Settings of `weights`.

    `relative`: lower the distance of tensors that are first brought to entries of mean square one. The objective itself
    counts large entries most: the head of a language model can outweigh all else by far, and a residual stream is then
    turned to suit the head alone. The history holds both, `own` is the one that is lowered.
    """

    relative: bool = False


def solve_weights(task: AlignmentTask, options: WeightsOptions) -> Solution:
    """The best element of permutations and matrices found, and every step of every start.

    The pair is left at that element.
    """
    problem, pair = _relative(task) if options.relative else (task.problem, task.pair)
    generator = torch.Generator().manual_seed(task.seed)
    history: list[AlignmentStep] = []
    best: tuple[float, Element] | None = None
    equal = pair.unmoved + (ROUNDING * pair.size if problem.matrices else 0.0)
    for name, element in problem.starts(task.starts, task.seed):
        pair.start_at(permutations_of(element, "matrix"))
        history += _descend(task, pair, name, generator, ONE_SWEEP)
        if best is None or pair.objective < best[0]:
            best = pair.objective, pair.element
        if pair.objective <= equal:
            break  # nothing is nearer than equal
    assert best is not None
    if pair.objective != best[0]:
        pair.start_at(best[1])
    if best[0] > equal:
        history += _descend(task, pair, "the best of these", generator, LEAST_GAIN)
    found = pair.element
    if pair is not task.pair:
        task.pair.start_at(found)
    return found, history


def _descend(
    task: AlignmentTask, pair: MatchingState, start: str, generator: torch.Generator, least: float
) -> list[AlignmentStep]:
    """The steps of one start, with the common objective beside what is lowered where these are not one."""
    if pair is task.pair:
        return coordinate_descent(pair, coordinate_step, start, generator, task.sweeps, least)
    sizes = [_times(task.pair.weights_a[block.parameter], pair.weights_a[block.parameter]) for block in pair.blocks]

    def objective() -> float:
        return task.pair.unmoved + sum(x * size**2 for x, size in zip(pair.squares, sizes, strict=True))

    seen = [objective()]

    def visit(pair: MatchingState, s: int) -> bool:
        moved = coordinate_step(pair, s)
        if moved:
            seen.append(objective())
        return moved

    steps = coordinate_descent(pair, visit, start, generator, task.sweeps, least)
    return [replace(step, objective=x, own=step.objective) for step, x in zip(steps, seen, strict=True)]


def _relative(task: AlignmentTask) -> tuple[AlignmentProblem, MatchingState]:
    """The same task on tensors with entries of mean square one; the symmetry acts on multiples as on themselves."""
    problem, layouts = task.problem, task.problem.symmetry.layouts
    factor: dict[str, float] = {}
    for name, x in problem.a.items():
        lengths = _length(x), _length(problem.b[name])
        shifted = name in layouts and layouts[name].shift  # a running variance scales as (v + eps)
        factor[name] = (x.numel() / (lengths[0] * lengths[1])) ** 0.5 if min(lengths) > 0 and not shifted else 1.0
    a, b = ({n: t * factor[n] if t.is_floating_point() else t for n, t in w.items()} for w in (problem.a, problem.b))
    names = task.pair.weights_a
    pair = MatchingState(problem.symmetry, {n: a[n] for n in names}, {n: b[n] for n in names}, task.pair.movable)
    return replace(problem, a=a, b=b), pair


def _times(x: Tensor, y: Tensor) -> float:
    """How many times as long one tensor is as a multiple of it."""
    return _length(x) / _length(y) if _length(y) > 0 else 1.0


def _length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) if x.is_floating_point() else 0.0
