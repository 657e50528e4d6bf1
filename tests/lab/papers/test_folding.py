"""Reproducing Chen et al. 2024: the plans name what exists, numbers agree with those by hand, every name runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.lab.papers import folding, folding_curves, folding_features
from intertwine.lab.papers.experiments import ExperimentResult, find, plans_folder, reproduce
from intertwine.lab.papers.folding import MEASURES
from intertwine.lab.papers.folding_curves import RESET, RULES, FoldingSettings, answers
from intertwine.lab.papers.plan import ExperimentPlan
from intertwine.lab.papers.work import Work, networks_of
from intertwine.lab.zoo.folder import load
from intertwine.lab.zoo.networks.registry import build

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = sorted(path.stem for path in plans_folder().glob("chen-*.toml"))
FAST = ("chen-fig1a", "chen-fig6", "chen-fig5b")
ROW = {"network": "net", "front_group": None, "pair": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all experiments here, as they share their networks."""
    return tmp_path_factory.mktemp("chen")


# -- plans -------------------------------------------------------------------------------------------------------------


def architectures(plan: ExperimentPlan) -> list[str]:
    return plan.settings.architectures or [networks_of(plan).architecture]


def series_of(plan: ExperimentPlan) -> set[str]:
    """The series that a run of a plan can have, put together by hand."""
    s = plan.settings
    if s.measure == "seconds":
        return set(folding.WAYS)
    ((_, widths),) = (plan.networks.vary if plan.networks else {}).items() or (("", [None]),)
    nets = [name + ("" if w is None else f" ×{w:g}") for name in architectures(plan) for w in widths]
    ends: dict[str, list[str]] = {
        "curves": [f"{method}{reset}" for method in (*s.rules, *s.methods) for reset in ("", RESET)],
        "distances": ["as printed", "corrected"],
        "swaps": [
            f"{kind}, {rule}, {some} features"
            for kind in ("equivalent", "random") for rule in s.rules for some in ("all", "live")
        ],
        "complexity": [f"{rule}, β = {beta:g}" for rule in s.rules for beta in s.betas],
        "groups": ["maps of one group", "maps of any two features"],
    }  # fmt: skip
    own = {"place of the largest", "features left against accuracy"} if s.measure == "complexity" else set()
    return {f"{net}: {end}" for net in nets for end in ends[s.measure]} | own


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_speaks_of_networks_rules_and_series_that_exist(name: str) -> None:
    for scale in ("paper", "gpu"):
        plan = find(name, scale)
        known = series_of(plan)
        assert set(plan.printed) <= known
        for claim in plan.claims:
            assert {*claim.get("rising", ()), claim.get("series", next(iter(known)))} <= known, claim["says"]
        for architecture in architectures(plan):
            model = build(architecture, **(plan.networks.options if plan.networks else plan.settings.options))
            assert not plan.settings.layer or isinstance(model.get_submodule(plan.settings.layer), nn.ReLU)


def test_plans_share_their_networks() -> None:
    """The VGG-16 of figure 1a is that of figure 2a, at every scale."""
    vgg = [name for name in NAMES if name not in ("chen-table2", "chen-claims", "chen-fig2b", "chen-fig4")]
    for scale in ("paper", "gpu", "cpu"):
        alike = [networks_of(find(name, scale)) for name in vgg if name != "chen-fig2a-decay"]
        assert len({(n.name, n.recipe, str(n.changes), str(n.options), n.pool) for n in alike}) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"measure": "curve"}, "Unknown measure 'curve'. Did you mean 'curves'? Choose one of: curves, distances"),
        (
            {"measure": "curves", "rules": ["printed"]},
            "Unknown rule 'printed'. Did you mean 'as printed', 'corrected'? Choose one of: as printed",
        ),
        ({"measure": "curves", "methods": ["prune"]}, "Choose one of: fold_to, prune, L1"),
    ],
)
def test_words_that_nothing_is_known_of_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        FoldingSettings(**settings).check(find("chen-fig1a"), "plan")
    assert says in str(error.value)


def test_classes_that_the_data_does_not_have_are_refused(tmp_path: Path) -> None:
    work = Work(find("chen-fig5b", "cpu"), tmp_path, torch.device("cpu"))
    with pytest.raises(InputError, match=r"Unknown class 'truck'. Choose one of: 0, 1, 2"):
        folding_features.class_numbers(work, FoldingSettings("groups", classes=["truck"]))


def test_the_networks_see_pixels_from_0_to_1(tmp_path: Path) -> None:
    work = Work(find("chen-fig1a", "cpu"), tmp_path, torch.device("cpu"))
    assert work.data.inputs(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)).item() == 1.0


# -- curves ------------------------------------------------------------------------------------------------------------


def curve(*points: tuple[float, float, float, float, float]) -> list[dict[str, Any]]:
    """Rows of one method, each (value, left, accuracy, first half, second half); the first is the whole network."""
    return [
        ROW | {"method": "m" if i else "whole", "value": value, "left": left, "accuracy": accuracy}
        | {"first": first, "second": second, "accuracy_reset": accuracy + 1}
        for i, (value, left, accuracy, first, second) in enumerate(points)
    ]  # fmt: skip


def test_curves_are_read_off_between_their_points() -> None:
    rows = curve((0, 100.0, 90.0, 90, 90), (0.1, 60.0, 88.0, 84, 92), (0.2, 20.0, 86.0, 88, 84))
    found = folding_curves.curve_numbers({"settings": {"at": [30.0, 10.0], "within": 2.5}}, rows)
    assert found["net: m"] == {
        "whole": [90.0], "30 % left": [86.5], "left within 2.5 points": [60.0],
        "left, chosen on test images": [20.0], "accuracy, chosen on test images": [86.0],
        "left, chosen on half of them": [20.0], "accuracy, chosen on half of them": [84.0],
    }  # fmt: skip
    assert found["net: m, statistics reset"]["30 % left"] == [87.5]


def test_a_choice_on_half_of_the_images_is_told_on_the_other_half() -> None:
    rows = curve((0, 100.0, 90.0, 90.0, 90.0), (0.1, 40.0, 86.0, 80.0, 92.0))
    found = folding_curves.curve_numbers({"settings": {"at": [], "within": 1.0}}, rows)["net: m"]
    assert found["left, chosen on test images"] == [40.0]  # 86 > 0.95 · 90
    assert found["left, chosen on half of them"] == [100.0]  # 80 < 0.95 · 90
    assert found["accuracy, chosen on half of them"] == [90.0]


# -- distances ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def distances(folder: Path) -> ExperimentResult:
    return reproduce("chen-fig1a", "cpu", folder=folder)


def test_printed_distances_are_equation_6(distances: ExperimentResult, folder: Path) -> None:
    model = load(folder / "cpu" / "chen-vgg11_bn").seed(0)
    last = [module for module in model.modules() if isinstance(module, nn.Conv2d)][-1]
    rows = last.weight.detach().double().flatten(1).numpy()
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    columns = head.weight.detach().double().T.numpy()
    rows = np.concatenate([rows, columns], 1)
    table = ((rows[:, None] - rows[None]) ** 2).sum(2)
    apart = table[np.triu_indices(len(table), 1)]
    found = distances.numbers["vgg11_bn: as printed"]
    assert found["smallest distance"] == [pytest.approx(apart.min() / apart.max())]
    assert found["pairs below 0.1, %"] == [pytest.approx(100 * (apart <= 0.1 * apart.max()).mean())]


def test_short_features_are_counted(distances: ExperimentResult) -> None:
    for row in distances.rows:
        assert 0 <= row["dead_0.001"] <= row["dead_0.01"] <= row["dead_0.1"] <= 1


# -- swaps, complexity, groups, seconds --------------------------------------------------------------------------------


def test_what_a_swap_costs_is_the_deepest_point_on_the_way() -> None:
    about = ROW | {"rule": "corrected", "beta": 0.1, "features": "all", "pairs": 3, "kind": "random"}
    lines = {0: (90.0, 80.0, 90.0), 1: (90.0, 86.0, 90.0)}
    rows = [about | {"seed": s, "t": i / 2, "accuracy": x} for s, line in lines.items() for i, x in enumerate(line)]
    rows.append(ROW | {"rule": "as printed", "beta": 0.1, "features": "all", "pairs": 0})
    assert folding_curves.swap_numbers({}, rows) == {"net: random, corrected, all features": {"β = 0.1": [7.0]}}
    assert len(folding_curves.draw_swaps({}, rows).axes) == 2


def test_where_most_features_are_and_whether_more_are_better() -> None:
    rows = [
        ROW | {"pair": pair, "rule": "corrected", "beta": 0.1, "number": i + 1, "width": 10, "left": left}
        | {"accuracy": 80.0 + pair}
        for pair, layers in enumerate([(2, 4, 1), (3, 4, 1), (3, 5, 1)])
        for i, left in enumerate(layers)
    ]  # fmt: skip
    found = folding_features.complexity_numbers({}, rows)
    series = "net: corrected, β = 0.1"
    assert found[series]["2"] == [4.0, 4.0, 5.0]
    assert found[series]["all layers, %"] == pytest.approx([100 * 7 / 30, 100 * 8 / 30, 30.0])
    assert found["place of the largest"][series] == [0.5, 0.5, 0.5]
    assert found["features left against accuracy"][series] == pytest.approx([1.0])


def test_maps_are_compared_by_correlation() -> None:
    chance = np.random.default_rng(0)
    a, b = (torch.from_numpy(chance.normal(size=(3, 20))) for _ in range(2))
    b[2] = 1.0  # a constant map has no correlation
    wanted = [np.corrcoef(a[i], b[i])[0, 1] for i in range(2)]
    assert folding_features._correlation(a, b) == pytest.approx(wanted)


def test_groups_that_respond_to_a_class_alone_come_first() -> None:
    responses = torch.ones(10, 6, dtype=torch.float64)
    inside = torch.arange(10) < 3
    responses[inside, 2:4] = 5.0
    responses[:, 4:] = 0.0
    assert folding_features._chosen([[0, 1], [2, 3], [4, 5]], responses, inside, 3) == [[2, 3], [0, 1]]


def test_a_sweep_merges_one_pair_per_layer_either_way() -> None:
    """Both ways to have distances end with the same groups, so their times are of the same work."""
    left = {}
    for way in folding.WAYS:
        settings = FoldingSettings("seconds", sweeps=3, options={"width": 0.0625})
        merging = folding.prepared_merging("vgg11_bn", settings)
        assert len(list(folding.sweeps(merging, way, 3))) == 3
        left[way] = [merging.merged(w) for w in range(len(merging.wires))]
        assert [len(found) for found in left[way]] == [wire.size - 3 for wire in merging.wires]
    assert left[folding.WAYS[0]] == left[folding.WAYS[1]]


# -- every name --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_every_name_runs_at_scale_cpu(name: str, folder: Path, tmp_path: Path) -> None:
    found = reproduce(name, "cpu", folder=folder)
    plan = find(name, "cpu")
    assert set(found.numbers) <= series_of(plan)
    assert found.numbers
    assert found.plot(tmp_path / f"{name}.png").stat().st_size > 1000
    assert found.save(tmp_path / "result.json").stat().st_size < 200_000


@pytest.mark.slow
def test_the_whole_network_is_scored_as_a_plain_loop_does(folder: Path) -> None:
    found = reproduce("chen-fig2a", "cpu", folder=folder)
    (whole,) = [row for row in found.rows if row["method"] == "whole"]
    work = Work(find("chen-fig2a", "cpu"), folder, torch.device("cpu"))
    model = load(folder / "cpu" / "chen-vgg11_bn").seed(0)
    pixels = work.data.test_images.permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        right = float((model(pixels).argmax(1) == work.data.test_labels).double().mean())
    assert whole["accuracy"] == pytest.approx(100 * right)
    assert whole["accuracy"] == pytest.approx((whole["first"] + whole["second"]) / 2)
    assert answers(model, work.data).mean() == pytest.approx(right)
    methods = {row["method"] for row in found.rows}
    assert methods == {"whole", *RULES, "fold_to"}


def test_every_measure_has_a_home() -> None:
    assert {find(name).settings.measure for name in NAMES} == {*MEASURES, "seconds"}
