"""Solver `scale-aware`: permutations, positive scales and signs together, without data.

Networks of one orbit, up to noise, are brought together exactly: from canonical forms, and from paired units. For
others, units are matched as they are (`weights`), and once more with both networks in their normal form of scales,
where scales cannot mislead. Then scales are given where lengths show that they differ (`gauge_gap`), and orders and
signs are improved again. The nearest of these and the result of `weights` is kept, so the result is never farther
than that of `weights`.

Scales are not chosen to lower the distance. It falls most when units of B that fit nothing shrink, and deep networks
aligned that way had higher barriers than without any scales.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from intertwine.align.descent import Step, descend
from intertwine.align.gauge_gap import close_gap
from intertwine.align.pair import Pair
from intertwine.align.scales import rescale
from intertwine.align.starts import permutations_of, scales_of
from intertwine.align.task import Found, NoOptions, Task
from intertwine.align.visits import improve
from intertwine.align.weights import ONE_SWEEP, WeightsOptions, solve_weights
from intertwine.canonical.blocks import moved, pieces
from intertwine.canonical.gauge import ScaleGauge
from intertwine.symmetry.element import Element

#: A sweep that lowers the objective by less than this share of it is the last.
FINE = 1e-5
#: Squared distances below this share of the squared length are taken for rounding.
ROUNDING = 1e-12
#: Networks whose squared distance is below this share of their squared length are of one orbit, up to noise.
NEAR = 0.05
ROUNDS = 2  # of order and scale, on one wire or on all of them


def solve_scale_aware(task: Task, _options: NoOptions) -> Found:
    """The best element found, and every step on the objective; the pair is left at that element."""
    pair = task.pair
    generator = torch.Generator().manual_seed(task.seed)
    steps = _one_orbit(task, generator)
    if steps:
        return pair.element, steps
    plain, history = solve_weights(task, WeightsOptions())
    best = pair.objective, plain
    ways: dict[str, Callable[[], Element]] = {"weights": lambda: plain}
    if not task.problem.matrices:
        ways["normal scales"] = lambda: _matched_in_normal_form(task)
    for name, make in ways.items():
        element = make()
        for _ in range(ROUNDS):
            pair.start_at(permutations_of(element, "sign", "matrix"))
            for s in sorted(pair.movable) * 2:  # twice: what one wire shows depends on the scales of those beside it
                close_gap(pair, s)
            history += descend(pair, _order, name, generator, task.sweeps, FINE)
            element = pair.element
            if pair.objective < best[0] and _stays_finite(task, element):
                best = pair.objective, element
    pair.start_at(best[1])
    return best[1], [*history, Step("the best of these", 0, "", pair.objective)]


def _one_orbit(task: Task, generator: torch.Generator) -> list[Step]:
    """For networks of one orbit, up to noise: the steps to the element between them, where the pair stays."""
    problem, pair = task.problem, task.pair
    equal = pair.unmoved + ROUNDING * pair.size
    ways: dict[str, Callable[[], Element]] = {
        "canonical": lambda: problem.between_forms,
        "paired": lambda: problem.paired,
    }
    if problem.matrices:  # there are no normal forms to start from
        ways = {"embeddings": lambda: problem.from_embeddings(signs=True)}
    for name, make in ways.items():
        whole = make().only(*problem.wires)
        for element in (permutations_of(whole, "matrix"), whole):
            pair.start_at(element)
            if pair.objective <= equal:
                return [Step(name, 0, "", pair.objective)]
        steps = descend(pair, _visit, name, generator, task.sweeps, ONE_SWEEP)
        if pair.objective <= pair.unmoved + NEAR * pair.size:
            steps += descend(pair, _visit, name, generator, task.sweeps, FINE)
            if _stays_finite(task, pair.element):
                return steps
    return []


def _order(pair: Pair, s: int) -> bool:
    """Order and signs of one wire, or its matrix."""
    return improve(pair, s, signs=True)


def _stays_finite(task: Task, element: Element) -> bool:
    """Whether b moved by an element is made of finite numbers, batch statistics included, which the pair does not hold.

    A scale enters a running variance squared, so a nearly dead unit can take it out of its precision.
    """
    after = moved(task.problem.symmetry, element, task.problem.b)
    return all(torch.equal(after[name].isfinite(), x.isfinite()) for name, x in task.problem.b.items())


def _visit(pair: Pair, s: int) -> bool:
    """Order and signs, then scales, until the order stays; or the matrix."""
    moved_at_all = False
    for _ in range(ROUNDS):
        ordered = improve(pair, s, signs=True)
        scaled = rescale(pair, s)
        moved_at_all |= ordered or scaled
        if not scaled:
            break
    return moved_at_all


def _matched_in_normal_form(task: Task) -> Element:
    """Orders and signs found with all scales normalised."""
    problem, pair = task.problem, task.pair
    cuts = [pieces(pair.symmetry, weights, copy=True) for weights in (pair.weights_a, pair.weights_b)]
    here, there = (scales_of(pair, ScaleGauge(cut).run()).only(*problem.wires) for cut in cuts)
    normal = Pair(
        pair.symmetry,
        moved(pair.symmetry, here, pair.weights_a),
        moved(pair.symmetry, there, pair.weights_b),
        pair.movable,
    )
    generator = torch.Generator().manual_seed(task.seed)
    found: tuple[float, Element] | None = None
    for name, element in problem.starts(task.starts, task.seed, signs=True):
        normal.start_at(permutations_of(element, "sign"))
        descend(normal, _order, name, generator, task.sweeps, ONE_SWEEP)
        if found is None or normal.objective < found[0]:
            found = normal.objective, normal.element
        if found[0] <= normal.unmoved + ROUNDING * normal.size:
            break
    assert found is not None
    return found[1]
