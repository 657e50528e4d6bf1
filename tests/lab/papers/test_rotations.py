"""The kind "rotation": figure 4 of paper 0, run in small, with a transform put in by hand."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import intertwine as it
from intertwine.errors import InputError
from intertwine.inspect.rotation import haar_orthogonal, rotation
from intertwine.lab.papers.experiments import ExperimentResult, find, plans_folder, read_result, reproduce
from intertwine.lab.papers.plan import read_plan
from intertwine.lab.papers.rotations import DISSECTION, WITH, WITHOUT
from intertwine.lab.papers.work import networks_of, read_data
from intertwine.lab.zoo.datasets.concepts import CATEGORIES, concept_images
from intertwine.lab.zoo.folder import load
from intertwine.lab.zoo.networks.registry import build

# -- The kind "rotation" --


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
    full = ExperimentResult(result.manifest | {"plan": find(NAME).to_dict()}, result.rows)
    assert full.plot(tmp_path / "figure.svg").exists()
    assert len(full.lines()) == 6


def test_numbers_are_points_of_the_best_and_of_the_last_epoch() -> None:
    row = {"label": "0", "kind": "relu", "best_penalty": 0.01, "penalty": 0.02}
    found = ExperimentResult({"plan": find(NAME).to_dict()}, [row, row | {"kind": "identity"}]).numbers
    assert found["G_ReLU, as printed"] == {"0": [1.0]}
    assert found["G_ReLU, corrected"] == {"0": [2.0]}
    assert set(found) == {f"{name}, {form}" for name in ("G_ReLU", "control") for form in ("as printed", "corrected")}


def test_pairs_of_different_networks_are_refused(tmp_path: Path) -> None:
    text = (plans_folder() / f"{NAME}.toml").read_text(encoding="utf-8")
    (tmp_path / "wrong.toml").write_text(text.replace('choose = "self"', 'choose = "random"'), encoding="utf-8")
    with pytest.raises(InputError, match=r'of single networks. Set choose = "self" in \[pairs\]'):
        read_plan(tmp_path / "wrong.toml")


# -- The kind `dissection` on its tiny plans --


EXPERIMENTS = Path(__file__).parents[3] / "experiments"
NAMES = ("godfrey-fig3", "godfrey-fig18", "godfrey-fig19")


@cache
def tiny() -> tuple[dict[str, ExperimentResult], nn.Module, list[str]]:
    """All plans at scale cpu in one folder, run once per process; the network with the ReLU; what was done."""
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        found = {name: reproduce(name, "cpu", folder=folder, progress=said.append) for name in NAMES}
        zoo = load(next(path for path in Path(folder).rglob("resnet20-concepts-residual_relu1")))
        return found, zoo.seed(0), said


# -- the whole run -----------------------------------------------------------------------------------------------------


def test_000_g73_every_plan_runs_and_draws(tmp_path: Path) -> None:
    for name, result in tiny()[0].items():
        assert len(result.rows) == 2 * 3 * 2, "kinds, powers, rotations"
        assert {row["kind"] for row in result.rows} == {WITH, WITHOUT}
        assert all(0 <= row["fraction"] <= 1 for row in result.rows)
        assert result.plot(tmp_path / f"{name}.svg").stat().st_size > 1000


def test_the_figures_share_networks_and_dissections() -> None:
    """Figure 18 looks at what figure 3 found, figure 19 at another place of the same networks."""
    found, _, said = tiny()
    assert found["godfrey-fig18"].rows == found["godfrey-fig3"].rows
    assert {row["at"] for row in found["godfrey-fig19"].rows} == {"layer3.2.relu1"}
    accuracies = [{row["accuracy"] for row in found[name].rows} for name in ("godfrey-fig3", "godfrey-fig19")]
    assert accuracies[0] == accuracies[1]
    assert [line for line in said if line.startswith("dissection, pair")] == [
        *("dissection, pair 1 of 2", "dissection, pair 2 of 2") * 3,
    ]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_000_g73_a_fraction_is_that_of_brute_force(alpha: float) -> None:
    """Thresholds by numpy.quantile and overlaps one unit and concept at a time, on the network of the run."""
    results, model, _ = tiny()
    settings = results["godfrey-fig3"].plan["settings"]
    seen = concept_images(settings["seen"], settings["seen_seed"])
    maps: list[torch.Tensor] = []
    hook = model.get_submodule("layer3").register_forward_hook(lambda module, args, out: maps.append(out))
    with torch.no_grad():
        model(seen.inputs())
    hook.remove()
    turned = torch.einsum("ij,njhw->nihw", rotation(16, alpha, 1, torch.float32), maps[0])
    masks = torch.cat(list(seen.concepts.batches))
    large = functional.interpolate(turned, (32, 32), mode="bilinear", align_corners=False).numpy()
    best = np.zeros(16)
    for unit in range(16):
        above = large[:, unit] > np.quantile(turned[:, unit].double().numpy(), 0.995)
        for concept in range(masks.shape[1]):
            same = [i for i, kind in enumerate(CATEGORIES) if kind == CATEGORIES[concept]]
            labelled = masks[:, same].flatten(1).any(1).numpy()
            a, b = above[labelled], masks[:, concept].numpy()[labelled]
            best[unit] = max(best[unit], (a & b).sum() / max(1, (a | b).sum()))
    (row,) = (
        row for row in results["godfrey-fig3"].rows if (row["kind"], row["alpha"], row["seed"]) == (WITH, alpha, 1)
    )
    assert row["fraction"] == np.mean(best > 0.04)


def test_numbers_are_per_cent_per_network_and_changes() -> None:
    rows = [
        {"kind": kind, "network": network, "alpha": alpha, "fraction": start - alpha * (0.1 + 0.1 * network)}
        for kind, start in ((WITH, 0.8), (WITHOUT, 0.5)) for network in (0, 1) for alpha in (0.0, 1.0) for _ in range(2)
    ]  # fmt: skip
    found = DISSECTION.numbers({}, rows)
    assert found[WITH] == {"α = 0": pytest.approx([80, 80]), "α = 1": pytest.approx([70, 60])}
    assert found["change"] == {WITH: pytest.approx([-10, -20]), WITHOUT: pytest.approx([-10, -20])}


def test_000_g74_categories_are_stacked_to_all_concepts() -> None:
    result = read_result(EXPERIMENTS / "results" / "godfrey-fig18.gpu.json")
    left = DISSECTION.draw(result.plan, result.rows).axes[0]
    tops: dict[float, float] = {}
    for bar in left.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0), bar.get_y() + bar.get_height())
    own = [row for row in result.rows if row["kind"] == WITH]
    wanted = [np.mean([row["concepts"] for row in own if row["alpha"] == a]) for a in (0, 0.25, 0.5, 0.75, 1)]
    assert [tops[x] for x in sorted(tops)] == pytest.approx(wanted)


# -- what was measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_committed_results_are_of_their_plans(name: str) -> None:
    result, plan = read_result(EXPERIMENTS / "results" / f"{name}.gpu.json"), find(name, "gpu").to_dict()
    for table in ("settings", "networks", "pairs"):
        now = {entry: plan[table][entry] for entry in result.plan[table]}  # an entry that is new since has its default
        assert result.plan[table] == now, "the plan has changed since; run it again"
    assert {row["network"] for row in result.rows} == {0, 1, 2}
    assert len(result.rows) == 2 * 3 * 5 * 3


def test_000_g73_what_the_paper_says_and_what_holds() -> None:
    holds = {
        name: [claim.holds for claim in read_result(EXPERIMENTS / "results" / f"{name}.gpu.json").claims()]
        for name in NAMES
    }
    assert holds == {"godfrey-fig3": [True] * 3, "godfrey-fig18": [], "godfrey-fig19": [False]}


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["paper", "gpu", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_places_are_in_the_networks(name: str, scale: str) -> None:
    plan = find(name, scale)
    assert plan.networks is not None
    with torch.device("meta"):
        model = build(plan.networks.architecture, **plan.networks.options, residual_relu=True)
    places = {place for place, _ in model.named_modules()}
    assert set(plan.settings.at) <= places


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[dissection]",
            '[dissection]\nform = "bars"',
            "Unknown form 'bars'. Choose one of: fractions, categories",
        ),
        ("residual_relu = [true, false]", "width = [1, 2]", r"Vary residual_relu in \[networks\]"),
        ('"self"', '"disjoint"', r'of single networks. Set choose = "self" in \[pairs\]'),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (EXPERIMENTS / "godfrey-fig3.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "plan.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        find(str(tmp_path / "plan.toml"))
