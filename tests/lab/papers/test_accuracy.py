"""The kind "accuracy": table 3 and the zoos of paper 0, and accuracies counted by hand."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from intertwine.errors import InputError
from intertwine.lab.papers import experiments
from intertwine.lab.papers.corrections import CHECKS, numbers
from intertwine.lab.papers.experiments import ExperimentResult, find, plans_folder, reproduce
from intertwine.lab.papers.plan import read_plan
from intertwine.lab.papers.work import groups, read_data
from intertwine.lab.zoo.folder import load

# -- The kind "accuracy" --


NAMES = ["godfrey-table3", "godfrey-zoo-myrtle", "godfrey-zoo-resnet20", "godfrey-zoo-resnet18"]


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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
    full = ExperimentResult(result.manifest | {"plan": find("godfrey-zoo-myrtle").to_dict()}, result.rows)
    assert full.plot(tmp_path / "zoo.svg").exists()
    assert [line.count for line in full.lines()] == [2]


@pytest.mark.usefixtures("one_thread")
def test_the_best_and_the_last_epoch_are_told_apart() -> None:
    plan = {**find("godfrey-zoo-myrtle").to_dict(), "kind": "accuracy"}
    found = ExperimentResult({"plan": plan}, [{"accuracy": 0.9, "last_accuracy": 0.8, "front_group": None}]).numbers
    assert found == {"accuracy, as printed": {"Myrtle CNN": [90.0]}, "accuracy, corrected": {"Myrtle CNN": [80.0]}}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_runs_in_small(name: str, tmp_path: Path) -> None:
    result = reproduce(name, "cpu", folder=tmp_path)
    assert len(result.rows) == 2 * len(groups(find(name, "cpu")))
    assert result.plot(tmp_path / "figure.svg").exists()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('choose = "self"', 'choose = "random"', 'Set choose = "self"'),
        ('label = "Myrtle CNN"', 'label = ""', "the networks have no label"),
    ],
)
def test_a_plan_that_is_wrong_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = (plans_folder() / "godfrey-zoo-myrtle.toml").read_text(encoding="utf-8")
    (tmp_path / "wrong.toml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_plan(tmp_path / "wrong.toml")


# -- The kind "activation" --


NAME = "godfrey-fig17"


def defect(scale: float) -> float:
    """λ√E[(X(Φ(λX) − Φ(X)))²], equation E.22, for λ > 0."""
    density = lambda x: (x * (norm.cdf(scale * x) - norm.cdf(x))) ** 2 * norm.pdf(x)  # noqa: E731
    return scale * sqrt(quad(density, -12, 12, points=[0], limit=500)[0])


def test_the_values_are_those_of_scipy(tmp_path: Path) -> None:
    result = reproduce(NAME, "cpu", folder=tmp_path)
    exact, sampled = (result.numbers[f"GELU, {form}"] for form in ("corrected", "as printed"))
    for label in ("0.39", "0.5", "2", "10"):
        assert exact[label] == pytest.approx([defect(float(label))], rel=1e-7)
        assert np.mean(sampled[label]) == pytest.approx(exact[label][0], rel=0.01)
    assert exact["slope"] == pytest.approx([0.12675], abs=5e-6)
    assert exact["1"] == [0.0]
    assert len(sampled["slope"]) == 2
    curve = {row["scale"]: row["value"] for row in result.rows if row["series"] == "curve"}
    assert len(curve) == 40
    assert curve[1.0] == 0
    assert result.plot(tmp_path / "figure.svg").exists()
    full = ExperimentResult(result.manifest | {"plan": find(NAME).to_dict()}, result.rows)
    assert {line.verdict for line in full.lines()} == {"agrees"}
    assert [claim.holds for claim in full.claims()] == [True]


# -- The corrections --


#: Check → the printed way and the corrected way lie within these.
BOUNDS = {
    "D4": ((0.5, 0.95), (1 - 1e-6, 1.0 + 1e-9)),
    "D6": ((0.47, 0.56), (0.40, 0.46)),  # independent ReLU features: about 0.446, raised by dead ones to about 0.52
    "D7": ((0.3, 0.9), (1 - 1e-9, 1 + 1e-9)),
    "D9": ((1.0, 1.0), (16.0, 16.0)),
    "D11": ((0.1, 100.0), (0.0, 1e-12)),
    "D13": ((0.01, 10.0), (0.0, 1e-9)),
    "D15": ((0.0, 1e-12), (0.1, 1.0)),
    "D22": ((1.9, 2.1), (0.0, 1e-12)),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", BOUNDS)
def test_a_check_tells_both_ways_apart(name: str) -> None:
    for value, (low, high) in zip(CHECKS[name].values(3), BOUNDS[name], strict=True):
        assert low <= value <= high


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_nodesort_with_two_hidden_layers() -> None:
    assert CHECKS["D10"].values(0) == (0.0, 1.0)


@pytest.mark.usefixtures("one_thread")
def test_the_small_plan_runs(tmp_path: Path) -> None:
    result = experiments.reproduce("corrections", "cpu", folder=tmp_path)
    found = numbers(result.plan, result.rows)
    assert list(found["as printed"]) == ["D6", "D9", "D11", "D15", "D22"]
    assert result.plot(tmp_path / "c.svg").stat().st_size > 1000


@pytest.mark.usefixtures("one_thread")
def test_an_unknown_check_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('title = "t"\nrows = []\nkind = "corrections"\n[corrections]\nchecks = ["D99"]\n')
    with pytest.raises(InputError, match=r"Unknown check 'D99'.*Choose one of: D4, D6"):
        read_plan(file)
