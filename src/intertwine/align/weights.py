"""Method `weights`: permutations by weights alone, one wire after the other, from several starts (Ainsworth et al.
2023). If the symmetry holds matrices (continuous=True) they move too: rotations of a residual stream, a matrix per
head.
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

#: The last sweep lowers the objective by less than this share of it.
LEAST_GAIN = 1e-5
#: The same while starts are compared: one sweep each; after that the best one tends to stay the best.
ONE_SWEEP = 1.0
#: Squared distances below this share of the squared length count as rounding where matrices act.
ROUNDING = 1e-12


@dataclass(frozen=True)
class WeightsOptions:
    """Settings of `weights`.

    `relative`: minimise the distance of tensors normalised to entries of mean square one. The objective itself is
    dominated by large entries: the head of a language model can outweigh all other tensors, and the rotation of a
    residual stream then fits the head alone. The history holds both; `own` is the quantity that is minimised.
    """

    relative: bool = False


def solve_weights(task: AlignmentTask, options: WeightsOptions) -> Solution:
    """The best element of permutations and matrices found, and every step of every start.

    The matching state ends at that element.
    """
    problem, state = _normalised(task) if options.relative else (task.problem, task.state)
    generator = torch.Generator().manual_seed(task.seed)
    history: list[AlignmentStep] = []
    best: tuple[float, Element] | None = None
    equal = state.unmoved + (ROUNDING * state.size if problem.matrices else 0.0)
    for name, element in problem.starts(task.starts, task.seed):
        state.start_at(permutations_of(element, "matrix"))
        history += _descend(task, state, name, generator, ONE_SWEEP)
        if best is None or state.objective < best[0]:
            best = state.objective, state.element
        if state.objective <= equal:
            break  # already identical
    assert best is not None
    if state.objective != best[0]:
        state.start_at(best[1])
    if best[0] > equal:
        history += _descend(task, state, "best start", generator, LEAST_GAIN)
    found = state.element
    if state is not task.state:
        task.state.start_at(found)
    return found, history


def _descend(
    task: AlignmentTask, state: MatchingState, start: str, generator: torch.Generator, least: float
) -> list[AlignmentStep]:
    """The steps of one start; the history also holds the common objective if another quantity is minimised."""
    if state is task.state:
        return coordinate_descent(state, coordinate_step, start, generator, task.sweeps, least)
    norms = [[_norm(s.weights_a[block.parameter]) for s in (task.state, state)] for block in state.blocks]
    sizes = [original / normalised if normalised > 0 else 1.0 for original, normalised in norms]

    def objective() -> float:
        return task.state.unmoved + sum(x * size**2 for x, size in zip(state.squares, sizes, strict=True))

    objectives = [objective()]

    def step(state: MatchingState, w: int) -> bool:
        moved = coordinate_step(state, w)
        if moved:
            objectives.append(objective())
        return moved

    steps = coordinate_descent(state, step, start, generator, task.sweeps, least)
    return [replace(step, objective=x, own=step.objective) for step, x in zip(steps, objectives, strict=True)]


def _normalised(task: AlignmentTask) -> tuple[AlignmentProblem, MatchingState]:
    """The same task on tensors with entries of mean square one; the symmetry acts the same on multiples of a tensor."""
    problem, layouts = task.problem, task.problem.symmetry.layouts
    factor: dict[str, float] = {}
    for name, x in problem.a.items():
        norms = _norm(x), _norm(problem.b[name])
        shifted = name in layouts and layouts[name].shift  # a running variance scales as (v + eps)
        factor[name] = (x.numel() / (norms[0] * norms[1])) ** 0.5 if min(norms) > 0 and not shifted else 1.0
    a, b = ({n: t * factor[n] if t.is_floating_point() else t for n, t in x.items()} for x in (problem.a, problem.b))
    names = task.state.weights_a
    state = MatchingState(problem.symmetry, {n: a[n] for n in names}, {n: b[n] for n in names}, task.state.movable)
    return replace(problem, a=a, b=b), state


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) if x.is_floating_point() else 0.0
