"""check_aligner: every method of `align` passes, and each law can fail."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from intertwine.align.align import SOLVERS
from intertwine.align.solver import AlignmentTask, NoOptions, Solution, Solver
from intertwine.align.state import AlignmentStep
from intertwine.align.weights import WeightsOptions, solve_weights
from intertwine.errors import InputError
from intertwine.symmetry.element import Element
from intertwine.testing.aligner import AlignerError, check_aligner

SEEDS = count()


#: The promises hold after few steps as well as after many.
FEW_STEPS = {"straight-through": {"steps": 8}, "sinkhorn": {"steps": 8}}


#: A search of many steps per promise; its own tests are in tests/align/test_commutativity.py.
LONG = "commutativity"


@pytest.mark.parametrize("method", [pytest.param(m, marks=pytest.mark.slow) if m == LONG else m for m in SOLVERS])
def test_every_method_keeps_its_promises(method: str) -> None:
    report = check_aligner(method, FEW_STEPS.get(method))
    assert max(report.laws.values()) < 1e-9
    assert len(report.laws) == 9
    assert report.to_dict()["method"] == method


def solved(task: AlignmentTask) -> Solution:
    return solve_weights(task, WeightsOptions())


def lies_about_the_element(task: AlignmentTask, _options: NoOptions) -> Solution:
    element, history = solved(task)
    return task.problem.symmetry.random(seed=1).only(*task.problem.wires) if len(history) > 1 else element, history


def stays(task: AlignmentTask, _options: NoOptions) -> Solution:
    return task.problem.symmetry.identity(), [AlignmentStep("identity", 0, "", task.state.objective)]


def changes_a(task: AlignmentTask, _options: NoOptions) -> Solution:
    with torch.no_grad():
        next(task.a.parameters()).add_(1.0)
    return stays(task, _options)


def draws(task: AlignmentTask, _options: NoOptions) -> Solution:
    torch.rand(1)
    return solved(task)


def never_the_same(task: AlignmentTask, _options: NoOptions) -> Solution:
    element = task.problem.symmetry.random(seed=next(SEEDS)).only(*task.problem.wires)
    task.state.start_at(element)
    return element, [AlignmentStep("random", 0, "", task.state.objective)]


def moves_everything(task: AlignmentTask, _options: NoOptions) -> Solution:
    element, history = solved(task)
    if len(task.problem.wires) < len(task.problem.symmetry.wires):
        element = task.problem.symmetry.random(seed=3)
        task.state.start_at(element)
        history = [AlignmentStep("random", 0, "", task.state.objective)]
    return element, history


def no_history(task: AlignmentTask, _options: NoOptions) -> Solution:
    return solved(task)[0], []


def fails_on_zeros(task: AlignmentTask, _options: NoOptions) -> Solution:
    element, history = solved(task)
    dead = any(bool((t == 0).all(-1).any()) for t in task.problem.b.values() if t.ndim == 2)
    if not dead:
        return element, history
    moves = {i: replace(m, scale=None if m.scale is None else m.scale * float("nan")) for i, m in element.moves.items()}
    return Element(element.wire_specs, moves, element.signature), history


BROKEN = {
    "objective": lies_about_the_element,
    "planted": stays,
    "inputs": changes_a,
    "repeated": never_the_same,
    "partial": moves_everything,
    "history": no_history,
    "degenerate": fails_on_zeros,
}


@pytest.mark.parametrize("law", BROKEN)
def test_every_law_can_fail(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOLVERS, "broken", Solver(BROKEN[law], SOLVERS["scale-aware"].moves))
    with pytest.raises(AlignerError, match="The method 'broken' fails the law") as caught:
        check_aligner("broken")
    assert caught.value.law == law


def test_random_numbers_of_the_user_are_part_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOLVERS, "drawing", Solver(draws, SOLVERS["weights"].moves))
    with pytest.raises(AlignerError, match="'inputs'"):
        check_aligner("drawing")


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(InputError, match="Unknown method 'magic'"):
        check_aligner("magic")
