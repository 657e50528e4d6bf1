"""check_measure: every measure is what it declares, and a false declaration is found."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import intertwine as it
from intertwine.measure.measure import CHANGES, find
from intertwine.measure.representation import Representation
from intertwine.measure.result import Result
from intertwine.testing import MeasureError, check_measure

MEASURES = [m.name for m in it.measures()]


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_is_what_it_declares(name: str) -> None:
    """The whole row of the invariance matrix, in both directions."""
    report = check_measure(name, seeds=(0, 1, 2))
    assert report.to_dict()["measure"] == name
    assert set(report.moves) == set(CHANGES)


def _broken(change: Callable[[Result], Result]) -> dict[str, object]:
    cka = find("linear_cka")
    return {"compare_with": lambda a, b: change(cka.compare_with(a, b))}


@pytest.mark.parametrize(
    ("parts", "law", "text"),
    [
        ({"at_identity": 0.0}, "value at identity", "off by 1.0e\\+00"),
        ({"range": (0.99, 1.0)}, "range", "allowed is 1e-09"),
        ({"invariances": frozenset(CHANGES)}, "positive scales", "is declared invariant, and the value moves by"),
        ({"invariances": frozenset({"permutation", "signs", "orthogonal", "translation"})}, "isotropic scale", "only"),
        (_broken(lambda r: replace(r, value=r.value + 1e-3)), "value at identity", "off by 1.0e-03"),
    ],
)
def test_a_false_declaration_is_found(parts: dict[str, object], law: str, text: str) -> None:
    wrong = replace(find("linear_cka"), **parts)  # pyrefly: ignore
    with pytest.raises(MeasureError, match=text) as caught:
        check_measure(wrong)
    assert caught.value.law == law


def test_a_measure_of_ones_own_that_changes_its_input() -> None:
    def spoil(x: Representation) -> Representation:
        x.values.mul_(2)
        return x

    wrong = replace(find("linear_cka"), prepare_with=spoil, compare_with=lambda a, b: Result("mine", 1.0))
    with pytest.raises(MeasureError, match="inputs untouched"):
        check_measure(wrong)


def test_a_measure_without_a_value() -> None:
    wrong = replace(find("linear_cka"), needs=1000)
    with pytest.raises(MeasureError, match="degenerate on ordinary data: it needs at least 1000 samples"):
        check_measure(wrong)


def test_results_read_well() -> None:
    x = torch.randn(10, 3)
    assert repr(it.measure(x, x)) == "Result(linear_cka: 1.000000)"
    plain = {"measure": "linear_cka", "value": 1.0, "degenerate": None, "notes": [], "baseline": None}
    assert it.measure(x, x).to_dict() == plain
    assert float(it.measure(x, x)) == 1.0
    assert repr(check_measure("rv")).startswith("MeasureReport(rv: 6 laws hold; invariant to permutation, signs")
