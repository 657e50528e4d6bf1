"""The kind "accuracy": table 3 and the zoos of paper 0, and accuracies counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from intertwine.errors import InputError
from intertwine.reproduce.experiments import Result, find, plans_folder, reproduce
from intertwine.reproduce.networks import groups, read_data
from intertwine.reproduce.plan import read_plan
from intertwine.zoo.folder import load

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ["godfrey-table3", "godfrey-zoo-myrtle", "godfrey-zoo-resnet20", "godfrey-zoo-resnet18"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["paper", "gpu"])
def test_a_plan_names_what_there_is(name: str, scale: str) -> None:
    plan = find(name, scale)
    values = [group.value for group in groups(plan)]
    labels = [f"{value:g}" for value in values] if values != [None] else [plan.settings.label]
    assert list(plan.labels) == labels
    assert plan.pairs is not None
    assert plan.networks is not None
    assert plan.pairs.count == plan.networks.pool
    assert set(plan.printed) == {"accuracy, as printed"}


def test_accuracies_are_those_of_a_count(tmp_path: Path) -> None:
    result = reproduce("godfrey-zoo-myrtle", "cpu", folder=tmp_path)
    plan = find("godfrey-zoo-myrtle", "cpu")
    assert plan.data is not None
    zoo, data = load(tmp_path / "cpu" / "myrtle"), read_data(plan.data)
    inputs, label = data.inputs(data.test_images), plan.settings.label
    with torch.no_grad():
        right = [float((model(inputs).argmax(1) == data.test_labels).double().mean()) for model in zoo]
    assert result.numbers["accuracy, as printed"][label] == pytest.approx([100 * share for share in right])
    last = [record.history["accuracy"][-1] for record in zoo.records]
    assert [row["last_accuracy"] for row in result.rows] == last
    full = Result(result.manifest | {"plan": find("godfrey-zoo-myrtle").to_dict()}, result.rows)
    assert full.plot(tmp_path / "zoo.svg").exists()
    assert [line.count for line in full.lines()] == [2]


def test_the_best_and_the_last_epoch_are_told_apart() -> None:
    plan = {**find("godfrey-zoo-myrtle").to_dict(), "kind": "accuracy"}
    found = Result({"plan": plan}, [{"accuracy": 0.9, "last_accuracy": 0.8, "front_group": None}]).numbers
    assert found == {"accuracy, as printed": {"Myrtle CNN": [90.0]}, "accuracy, corrected": {"Myrtle CNN": [80.0]}}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_runs_in_small(name: str, tmp_path: Path) -> None:
    result = reproduce(name, "cpu", folder=tmp_path)
    assert len(result.rows) == 2 * len(groups(find(name, "cpu")))
    assert result.plot(tmp_path / "figure.svg").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('choose = "self"', 'choose = "random"', 'say choose = "self"'),
        ('label = "Myrtle CNN"', 'label = ""', "says no label"),
    ],
)
def test_a_plan_that_is_wrong_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = (plans_folder() / "godfrey-zoo-myrtle.toml").read_text(encoding="utf-8")
    (tmp_path / "wrong.toml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_plan(tmp_path / "wrong.toml")
