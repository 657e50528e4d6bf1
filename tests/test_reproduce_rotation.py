"""The kind "rotation": figure 4 of paper 0, run in small, with a transform put in by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import intertwine as it
from intertwine.errors import InputError
from intertwine.inspect.transforms import haar_orthogonal
from intertwine.reproduce.experiments import Result, find, plans_folder, reproduce
from intertwine.reproduce.networks import networks_of, read_data
from intertwine.reproduce.plan import read_plan
from intertwine.zoo.folder import load

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "godfrey-fig4"


def test_the_plan_names_what_there_is() -> None:
    plan = find(NAME)
    network = it.zoo.build(networks_of(plan).architecture, **networks_of(plan).options)
    convolutions = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Conv2d)]
    assert list(plan.settings.at.values()) == convolutions[:-1]
    assert plan.labels == tuple(plan.settings.at)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in network.modules())


def test_the_plan_runs_in_small(tmp_path: Path) -> None:
    result = reproduce(NAME, "cpu", folder=tmp_path)
    assert len(result.rows) == 3 * 3  # layers × (G_ReLU, orthogonal, control)
    for row in result.rows:
        assert row["best_penalty"] == pytest.approx(row["before"] - max(row["history"]))
        assert row["penalty"] == pytest.approx(row["before"] - row["history"][-1])
    plan = find(NAME, "cpu")
    assert plan.data is not None
    data, network = read_data(plan.data), load(tmp_path / "cpu" / networks_of(plan).name)[0]
    row = next(row for row in result.rows if (row["label"], row["kind"]) == ("2", "orthogonal"))
    with torch.no_grad():
        x = network[:3](data.inputs(data.test_images))
        turned = torch.einsum("dc,nchw->ndhw", haar_orthogonal(8, row["seed"]).float(), x)
        shares = [float((network[3:](y).argmax(1) == data.test_labels).double().mean()) for y in (x, turned)]
    assert [row["before"], row["inserted"]] == pytest.approx(shares)
    full = Result(result.manifest | {"plan": find(NAME).to_dict()}, result.rows)
    assert full.plot(tmp_path / "figure.svg").exists()
    assert len(full.lines()) == 6


def test_numbers_are_points_of_the_best_and_of_the_last_epoch() -> None:
    row = {"label": "0", "kind": "relu", "best_penalty": 0.01, "penalty": 0.02}
    found = Result({"plan": find(NAME).to_dict()}, [row, row | {"kind": "identity"}]).numbers
    assert found["G_ReLU, as printed"] == {"0": [1.0]}
    assert found["G_ReLU, corrected"] == {"0": [2.0]}
    assert set(found) == {f"{name}, {form}" for name in ("G_ReLU", "control") for form in ("as printed", "corrected")}


def test_pairs_of_different_networks_are_refused(tmp_path: Path) -> None:
    text = (plans_folder() / f"{NAME}.toml").read_text(encoding="utf-8")
    (tmp_path / "wrong.toml").write_text(text.replace('choose = "self"', 'choose = "random"'), encoding="utf-8")
    with pytest.raises(InputError, match='penalties are of single networks; in \\[pairs\\], say choose = "self"'):
        read_plan(tmp_path / "wrong.toml")
