"""Words that pages and pictures put together: reasons without their place, failures, names, labels of a heat map."""

import torch
from torch import nn

import intertwine as it
from intertwine.report.outline import reasons
from intertwine.report.study.entries import Task
from intertwine.report.study.naming import Names
from intertwine.report.study.overview import _failures
from intertwine.symmetry.wire import Frozen


def test_a_reason_loses_its_place_whatever_the_file_is_called() -> None:
    place = "at my own model.py:15 in body.conv"
    frozen = [Frozen(name, f"positions along it matter to cumsum {place}") for name in "ab"]
    (found,) = reasons(frozen)
    assert (found.text, found.axes) == ("positions along it matter to cumsum", ("a", "b"))
    (found,) = reasons([Frozen("a", "it meets b (an input) in conv2d at net.py:3")])
    assert found.text == "it meets b (an input) in conv2d"


def test_a_failure_is_cut_at_a_word() -> None:
    error = "Traceback …\nintertwine.errors.InputError: Choose a place " + "before the end " * 20
    said = _failures([{"verb": "fold", "a": "z:0", "error": error}]).partition("</summary>")[0]
    assert said.endswith("<summary>fold z:0: Choose a place " + "before the end " * 9 + "before …")


def test_a_name_that_holds_its_zoo_is_not_given_it_twice() -> None:
    names = Names(zoos=True, options=())
    for told, shown in (("small:1", "small:1"), ("mine", "small mine")):
        about = {"verb": "fold", "zoo": "small", "a": told}
        assert names._name(Task(1, about, {}), "a") == shown


def test_a_heat_map_says_whose_layers_are_where() -> None:
    a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU()) for _ in range(2))
    found = it.compare(a, b, [(torch.randn(20, 3), None)])
    (axes, _) = found.plot(names=("A", "B")).axes
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("layers of A", "layers of B")
    assert found.plot().axes[0].get_ylabel() == "layers of the first network"
