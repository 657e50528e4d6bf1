"""Solver `scale-aware`: permutations, positive scales and signs together, without data.

Units are matched where scales cannot mislead, with both networks in their normal form of scales; where matrices act and
there is no such form, from the embeddings inwards. From there, and from the result of `weights`, orders, signs, scales
and matrices are improved in turn on the objective itself. The better one is kept, so the result is never worse than
that of `weights`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from intertwine.align.descent import Step, descend
from intertwine.align.pair import Pair
from intertwine.align.scales import rescale
from intertwine.align.starts import permutations_of, scales_of
from intertwine.align.task import Found, NoOptions, Task
from intertwine.align.visits import improve
from intertwine.align.weights import WeightsOptions, solve_weights
from intertwine.canonical.blocks import moved, pieces
from intertwine.canonical.gauge import ScaleGauge
from intertwine.symmetry.element import Element

#: A sweep that lowers the objective by less than this share of it is the last: while starts are compared, and then.
COARSE, FINE = 1e-3, 1e-5
#: Squared distances below this share of the squared length are taken for rounding.
ROUNDING = 1e-12
ROUNDS = 2  # of order and scale on one wire before the next one has its turn


def solve_scale_aware(task: Task, _options: NoOptions) -> Found:
    """The best element found, and every step on the objective; the pair is left at that element."""
    problem, pair = task.problem, task.pair
    generator = torch.Generator().manual_seed(task.seed)
    equal = pair.unmoved + ROUNDING * pair.size
    ways: dict[str, Callable[[], Element]] = {}
    if problem.matrices:  # there are no normal forms to start from
        ways["embeddings"] = lambda: problem.from_embeddings(signs=True)
    else:
        canonical = problem.between_forms().only(*problem.wires)
        best = min((_reached(pair, element) for element in (permutations_of(canonical), canonical)), key=lambda x: x[0])
        if best[0] <= equal:  # the networks are of one orbit
            pair.start_at(best[1])
            return best[1], [Step("canonical", 0, "", best[0])]
        ways["canonical"] = lambda: canonical
        ways["normal scales"] = lambda: _matched_in_normal_form(task)
    plain, history = solve_weights(task, WeightsOptions())
    best = pair.objective, plain
    ways["weights"] = lambda: plain
    for name, make in ways.items():
        if best[0] <= equal:
            break  # nothing is nearer than equal, but for rounding
        pair.start_at(make())
        history += descend(pair, _visit, name, generator, task.sweeps, COARSE)
        if pair.objective < best[0] and _stays_finite(task, pair.element):
            best = pair.objective, pair.element
    pair.start_at(best[1])
    if best[0] > equal:
        history += descend(pair, _visit, "best of these", generator, task.sweeps, FINE)
        if not _stays_finite(task, pair.element):
            pair.start_at(best[1])
    return pair.element, history


def _stays_finite(task: Task, element: Element) -> bool:
    """Whether b moved by an element is made of finite numbers, batch statistics included, which the pair does not hold.

    A scale enters a running variance squared, so a nearly dead unit can take it out of its precision.
    """
    after = moved(task.problem.symmetry, element, task.problem.b)
    return all(torch.equal(after[name].isfinite(), x.isfinite()) for name, x in task.problem.b.items())


def _reached(pair: Pair, element: Element) -> tuple[float, Element]:
    pair.start_at(element)
    return pair.objective, element


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
    """Orders and signs found with all scales normalised; then scales of b that have the lengths of a."""
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
        descend(normal, lambda p, s: improve(p, s, signs=True), name, generator, task.sweeps)
        if found is None or normal.objective < found[0]:
            found = normal.objective, normal.element
        if found[0] <= normal.unmoved + ROUNDING * normal.size:
            break
    assert found is not None
    return here.inverse() @ found[1] @ there
