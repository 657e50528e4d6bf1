"""The plans of the stitching figures: each names what there is, gives every number it prints, and runs to its end."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import intertwine as it
from intertwine.errors import InputError
from intertwine.lab.papers import experiments, stitching
from intertwine.lab.papers.experiments import ExperimentResult, claims, lines, reproduce
from intertwine.lab.papers.plan import ExperimentPlan, Row, read_plan
from intertwine.lab.papers.stitching import draw, numbers
from intertwine.lab.papers.work import groups, pairs
from intertwine.lab.zoo.networks.registry import figure_numbers
from intertwine.lab.zoo.recipe import recipe
from intertwine.stitch.families.names import find_family
from intertwine.stitch.training import recipe_settings

# -- The plans of the stitching figures --


OF_PAPERS_0_AND_1 = [name for name in experiments.names() if name.startswith(("godfrey-", "csiszarik-"))]
NAMES = [name for name in OF_PAPERS_0_AND_1 if experiments.find(name).kind == "stitching"]
#: Run by `make test`; the others by `make test-slow`.
QUICK = ("csiszarik-fig2-tiny10", "csiszarik-cka-tiny10", "godfrey-fig13", "godfrey-fig14")
SCALES = ("paper", "gpu", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks and stitches of all plans, so that those which share a zoo train it once."""
    return tmp_path_factory.mktemp("stitching")


@pytest.mark.usefixtures("one_thread")
def test_every_row_of_the_papers_has_a_plan() -> None:
    held = {row for name in NAMES for row in experiments.find(name).rows}
    godfrey = {f"000-G{number}" for number in (57, 58, 59, 60, 61, 62, 71)}
    csiszarik = {f"001-C{number}" for number in (12, 13, 14, 15, 16, 24, 25, 26, 27, 28, 29, 30, 31)}
    assert held == godfrey | csiszarik


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_names_what_there_is(name: str) -> None:
    """At every scale: its places are in the network, families and recipes are known, its pairs can be made."""
    for scale in SCALES:
        plan = experiments.find(name, scale)
        asked, networks = plan.settings, plan.networks
        assert networks is not None
        paths = dict(it.zoo.build(networks.architecture, **groups(plan)[0].options).named_modules())
        assert all(place.partition(":")[0] in paths for place in asked.at.values()), scale
        for family in map(find_family, [*asked.families, *asked.direct]):
            recipe_settings(asked.recipe, family.name, {**asked.options, **asked.variants[0]})
        recipe(networks.recipe, **networks.changes)
        recipe(asked.batches)
        assert pairs(plan)
        assert set(plan.cost) == {"paper", "gpu", "cpu"}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("number", [1, 6, 7, 8, 13, 15])
def test_layers_have_the_numbers_of_paper_0(number: int) -> None:
    plan = experiments.find(f"godfrey-fig{number}")
    assert plan.networks is not None
    options = {name: value for name, value in plan.networks.options.items() if name != "activation"}
    known = figure_numbers(it.zoo.build(plan.networks.architecture, **options))
    assert {place: int(label) for label, place in plan.settings.at.items()} == known


@pytest.mark.usefixtures("one_thread")
def test_zoos_of_one_name_are_trained_alike() -> None:
    """Or the second plan would find networks that it did not ask for."""
    found: dict[tuple[str, str], Any] = {}
    for name, scale in product(OF_PAPERS_0_AND_1, SCALES):
        plan = experiments.find(name, scale)
        if plan.networks is None or plan.networks.published:
            continue
        one = plan.networks
        for group in groups(plan):
            how = (one.architecture, one.recipe, dict(one.changes), one.select, group.trained_on or plan.data)
            key = (scale, group.folder)
            assert found.setdefault(key, (how, group.options)) == (how, group.options), (name, key)


@pytest.mark.usefixtures("one_thread")
def test_pairs_are_chosen_as_the_plans_say() -> None:
    random, disjoint, own, across = (
        [(pair.front, pair.back) for pair in pairs(experiments.find(name))]
        for name in ("godfrey-fig1", "godfrey-fig12", "csiszarik-fig5", "godfrey-fig8")
    )
    assert len(random) == 32
    assert all(front != back for front, back in random)
    assert len({end for pair in random for end in pair}) > 40, "of 100 networks, with replacement"
    assert sorted(end[1] for pair in disjoint for end in pair) == list(range(10))
    assert own == [((0, 0), (0, 0))]
    assert sorted({(front[0], back[0]) for front, back in across}) == [(a, b) for a in range(7) for b in range(7)]
    into = [(pair.front, pair.back) for pair in pairs(experiments.find("csiszarik-cross", "gpu"))]
    assert into == [((group, 2 * i), (0, 2 * i + 1)) for group in range(4) for i in range(3)]
    published = {frozenset((pair.front[1], pair.back[1])) for pair in pairs(experiments.find("csiszarik-fig2-tiny10"))}
    assert len(published) == 10, "no pair twice"


# -- printed numbers and claims ----------------------------------------------------------------------------------------


def imagined(plan: ExperimentPlan) -> list[Row]:
    """Rows such as a run of the plan gives, with numbers out of thin air."""
    asked, found = plan.settings, []
    options = {"cka": 0.0, "start": "direct", "trace_every": 0} | asked.options
    values = [group.value for group in groups(plan)]
    for pair, (label, place) in product(pairs(plan), asked.at.items()):
        around = "front" if place.endswith("relu1") else "none"
        base = {
            "pair": pair.number, "label": label, "skip": around, "front_group": values[pair.front[0]],
            "back_group": values[pair.back[0]], "sparsity": 0.9, "variant": "",
        }  # fmt: skip
        base |= dict.fromkeys(("penalty", "best_penalty", "relative_accuracy", "cross_entropy"), 0.5)
        base |= dict.fromkeys(("cka_images", "cka_positions"), 0.5)
        for family, variant in product(asked.families, asked.variants):
            row = base | {"family": family, "fit": "task"} | options | variant
            row["variant"] = stitching._variant(row, asked.variants)
            history = [{"step": step, **dict.fromkeys(asked.what, 0.5)} for step in (0, 1)]
            found += [row | {"history": history if row["trace_every"] else []}] * asked.seeds * asked.orders
        found += [base | {"family": family, "fit": "direct"} for family in asked.direct]
        found += [base | {"family": "relu:birkhoff", "fit": "task", "alpha": 0.1}] if asked.alphas else []
        found += [base | {"family": "affine", "fit": "line", "line": [0.9, 0.9], "lowest": 0.9}] if asked.line else []
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("scale", ["paper", "gpu"])
@pytest.mark.parametrize("name", NAMES)
def test_every_printed_number_and_every_claim_finds_its_own(name: str, scale: str) -> None:
    plan = experiments.find(name, scale)
    ours = numbers(plan.to_dict(), imagined(plan))
    assert all(line.count > 0 for line in lines(plan.to_dict(), ours))
    assert all(" of " in claim.seen for claim in claims(plan.to_dict(), ours)), "a claim without numbers"
    assert plan.printed or plan.claims


@pytest.mark.usefixtures("one_thread")
def test_a_plan_like_another_changes_single_entries_at_every_scale() -> None:
    base, own = experiments.find("godfrey-fig1", "gpu"), experiments.find("godfrey-fig13", "gpu")
    assert base.networks is not None
    assert own.networks == replace(base.networks, pool=4)
    assert (base.pairs.count, own.pairs.count) == (3, 2)  # pyrefly: ignore
    assert (own.settings.trial_epochs, own.settings.form) == (1, "penalties")
    assert dict(own.printed) == {"G_ReLU": [7.3, 7.3, 16.5, 5.2]}, "printed numbers are not mixed"
    assert experiments.find("godfrey-fig13", "cpu").networks == experiments.find("godfrey-fig1", "cpu").networks


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_a_plan_runs_at_scale_cpu(name: str, folder: Path, tmp_path: Path) -> None:
    result = reproduce(name, "cpu", folder=folder)
    plan = experiments.find(name, "cpu")
    asked, rows = plan.settings, [row for row in result.rows if row["fit"] != "line"]
    places = len(asked.at) * len(pairs(plan))
    trained = len(asked.families) * len(asked.variants) * asked.seeds * asked.orders
    assert len(rows) == places * (trained + len(asked.direct) + bool(asked.alphas))
    wanted = {(family, "task") for family in asked.families} | {(family, "direct") for family in asked.direct}
    assert {(row["family"], row["fit"]) for row in rows} == wanted | (
        {("relu:birkhoff", "task")} if asked.alphas else set()
    )
    assert {row["label"] for row in rows} == set(asked.at)
    assert all(0 <= row["accuracy"] <= 1 and row["penalty"] is not None for row in rows)
    assert all(0 <= row["sparsity"] <= 1 and row["front_seed"] is not None for row in rows)
    assert result.numbers
    again = experiments.read_result(result.save(tmp_path / "a.json")).numbers
    assert again.keys() == result.numbers.keys()
    for series, places in result.numbers.items():
        assert again[series] == {label: pytest.approx(values, rel=1e-5) for label, values in places.items()}
    assert result.plot(tmp_path / "a.svg").read_text(encoding="utf-8").count("<path") > 5


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_what_single_plans_promise(folder: Path) -> None:
    """Traces, stars inside blocks, kept matrices, one order per start, lines, rotations that CKA does not see."""
    found = {
        name: reproduce(name, "cpu", folder=folder).rows for name in NAMES if not name.startswith("csiszarik-base")
    }
    assert all({"linear_cka_biased", "r2"} <= set(row["history"][0]) for row in found["csiszarik-fig4"])
    assert [row["cka"] for row in found["csiszarik-fig5"]] == [0.1, 1.0, 10.0]
    inside = {row["label"]: row["skip"] for row in found["godfrey-fig6"]}
    assert inside == {"3": "none", "8": "front", "11": "none"}
    kept = [row for row in found["csiszarik-fig8"] if "matrix" in row]  # those that the figure shows
    assert kept
    assert len(kept) < len(found["csiszarik-fig8"])
    assert all(len(row["matrix"]) == row["outputs"] for row in kept)
    starts = [(row["start"], row["order"], row["seed"]) for row in found["csiszarik-fig6"]]
    assert sorted(set(starts)) == [("direct", 0, 0), ("direct", 1, 1), ("random", 0, 0), ("random", 1, 1)]
    between = [row for row in found["csiszarik-connected"] if row["fit"] == "line"]
    assert [(row["label"], row["seeds"], row["shares"]) for row in between] == [
        ("1", [0, 1], [1.0, 0.5, 0.0]),
        ("3", [0, 1], [1.0, 0.5, 0.0]),
    ]
    ends = {(row["label"], row["seed"]): row["relative_accuracy"] for row in found["csiszarik-connected"][:4]}
    assert all((row["line"][0], row["line"][-1]) == (ends[row["label"], 0], ends[row["label"], 1]) for row in between)
    for row in found["csiszarik-rotation"]:
        assert row["cka_positions"] == pytest.approx(1, abs=1e-5) == row["cka_images"]
        assert row["relative_accuracy"] < 0.5
    variants = [(row["rate"], row["momentum"], row["variant"]) for row in found["godfrey-fig1-rates"]]
    assert variants == [
        (0.01, 0.0, "rate 0.01"),
        (0.001, 0.0, "rate 0.001"),
        (0.001, 0.9, "rate 0.001, momentum 0.9"),
    ]


@pytest.mark.usefixtures("one_thread")
def test_finished_pairs_are_not_stitched_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figure 14 has the rows of figure 13; the form of a figure is no part of what was asked."""
    first = reproduce("godfrey-fig13", "cpu", folder=folder)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("stitched again")

    monkeypatch.setattr(stitching, "stitches", refuse)
    monkeypatch.setattr(stitching, "cross_validate", refuse)
    again = reproduce("godfrey-fig14", "cpu", folder=folder)
    assert again.rows == first.rows
    chosen = [row["alpha"] for row in again.rows if row["label"] == "3" and "alpha" in row]
    assert again.numbers["layer 3"] == {"0.01": [100.0 * (chosen == [0.01])], "1": [100.0 * (chosen == [1.0])]}


@pytest.mark.usefixtures("one_thread")
def test_least_squares_accuracy_and_cka_by_hand(folder: Path) -> None:
    """Figure 2 at layer 3, with numpy's least squares over all positions, and CKA from its definition."""
    result = reproduce("csiszarik-fig2-tiny10", "cpu", folder=folder)
    (row,) = [row for row in result.rows if (row["label"], row["family"], row["fit"]) == ("3", "affine", "direct")]
    data = it.zoo.data("digits")
    images, test = (
        part.repeat_interleave(4, 1).repeat_interleave(4, 2)[:size]
        for part, size in ((data.images, 128), (data.test_images, 64))
    )
    labels = data.test_labels[:64]
    zoo = it.zoo.load(folder / "cpu" / "tiny10")
    ends: list[Any] = [zoo.seed(row[f"{end}_seed"]) for end in ("front", "back")]
    front, back = ends
    cut = list(dict(front.named_children())).index("bn3") + 1
    with torch.no_grad():
        a, b, ta, tb = (
            net[:cut](data.inputs(some)).permute(0, 2, 3, 1).double().numpy()
            for some in (images, test)
            for net in (front, back)
        )
        rows = np.concatenate([a.reshape(-1, a.shape[-1]), np.ones((a[..., 0].size, 1))], 1)
        fitted = np.linalg.lstsq(rows, b.reshape(-1, b.shape[-1]), rcond=None)[0]
        moved = ta @ fitted[:-1] + fitted[-1]
        answers = back[cut:](torch.from_numpy(moved).float().permute(0, 3, 1, 2)).argmax(1)
        own = back(data.inputs(test)).argmax(1)
    hits, reach = (float((some == labels).double().mean()) for some in (answers, own))
    assert row["relative_accuracy"] == pytest.approx(hits / reach, abs=1e-12)
    assert row["cka_images"] == pytest.approx(cka(moved[:50].reshape(50, -1), tb[:50].reshape(50, -1)), abs=1e-5)
    positions = (some[:50].reshape(-1, some.shape[-1]) for some in (moved, tb))
    assert row["cka_positions"] == pytest.approx(cka(*positions), abs=1e-5)
    assert result.numbers["full, least squares"]["3"] == [row["relative_accuracy"]]


def cka(x: np.ndarray, y: np.ndarray) -> float:
    """Linear CKA from its definition."""
    x, y = (some - some.mean(0) for some in (x, y))
    return float(np.sum((x.T @ y) ** 2) / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)))


@pytest.mark.usefixtures("one_thread")
def test_penalties_are_the_mean_accuracy_of_both_ends_less_that_of_the_stitch(folder: Path) -> None:
    result: ExperimentResult = reproduce("godfrey-fig13", "cpu", folder=folder)
    for row in result.rows:
        mean = (row["front_accuracy"] + row["back_accuracy"]) / 2
        assert row["penalty"] == pytest.approx(mean - row["accuracy"])
        assert row["best_penalty"] == pytest.approx(mean - row["best_accuracy"])
    full = [row for row in result.rows if row["family"] == "linear"]
    assert result.numbers["full"] == {row["label"]: [100 * row["best_penalty"]] for row in full}
    assert result.numbers["full, last epoch"] == {row["label"]: [100 * row["penalty"]] for row in full}


# -- plans that are refused --------------------------------------------------------------------------------------------

WHOLE = """
title = "a"
rows = []
kind = "stitching"
data = { name = "digits" }
networks = { name = "mlp", architecture = "mlp", pool = 2 }
pairs = { count = 1, choose = "disjoint" }
[stitching]
form = "penalties"
what = "penalty"
at = { 1 = "2" }
families = ["linear"]
recipe = "godfrey"
batches = "plain"
"""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('families = ["linear"]', "seeds = 1", "Set families, direct or alphas"),
        ('"penalties"', '"bars"', r"Unknown form 'bars'.*Choose one of: penalties, slopes"),
        ('what = "penalty"', 'what = "penaltys"', "Unknown number of a stitch 'penaltys'. Did you mean 'penalty"),
    ],
)
def test_plans_that_are_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(WHOLE.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read_plan(file)


# -- The stitching figures show the numbers of their rows --


Row_reproduce_stitching_figures = dict[str, Any]


def row(**changes: Any) -> Row_reproduce_stitching_figures:
    return {
        "label": "3",
        "skip": "none",
        "family": "linear",
        "fit": "task",
        "cka": 0.0,
        "sparsity": 0.0,
        "pair": 0,
    } | changes


def plan_of(form: str, what: Any = "relative_accuracy", **changes: Any) -> dict[str, Any]:
    settings = {"form": form, "what": what} | changes.pop("settings", {})
    base = {"labels": (), "printed": {}, "spread": {}, "networks": {"vary": {}}}
    return base | changes | {"settings": settings}


def drawn(
    form: str, rows: list[Row_reproduce_stitching_figures], what: Any = "relative_accuracy", **changes: Any
) -> Any:
    return draw(plan_of(form, what, **changes), rows)


def line(axes: Any, label: str) -> tuple[list[float], list[float]]:
    """The x and y of the line with a label; whiskers have theirs in a container."""
    found = [one.lines[0] for one in axes.containers if one.get_label() == label]
    (one,) = found or [one for one in axes.get_lines() if one.get_label() == label]
    x, y = (np.round(np.asarray(values, float), 6).tolist() for values in one.get_data())
    return x, y


def ticks(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_xticklabels()]


def test_penalties_are_means_over_pairs_in_per_cent_with_stars_and_what_is_printed() -> None:
    rows = [
        row(label=label, skip=skip, family=family, best_penalty=base + pair)
        for label, skip, base in (("3", "none", 0.1), ("8", "front", 0.3))
        for family in ("linear", "relu:birkhoff")
        for pair in (0.0, 0.02)
    ]
    figure = drawn("penalties", rows, "best_penalty", printed={"full": [1.0, 2.0]})
    (axes,) = figure.axes
    assert line(axes, "full") == line(axes, "G_ReLU") == ([0, 1], [11.0, 31.0])
    assert line(axes, "full, printed") == ([0, 1], [1.0, 2.0])
    assert ticks(axes) == ["3", "8*"]
    assert axes.get_xlabel() == "layer, * inside a residual block"


def test_slopes_are_a_line_each_and_a_matrix_between_them() -> None:
    rows = [
        row(label=label, front_group=a, back_group=b, penalty=a + 10 * b + extra)
        for a in (0.1, 0.5)
        for b in (0.1, 0.5)
        for label, extra in (("3", 0.0), ("8", 0.2))
    ]
    left, right, _ = drawn("slopes", rows, "penalty", networks={"vary": {"slope": [0.1, 0.5]}}).axes
    assert line(left, "slope 0.5") == ([0, 1], [550.0, 570.0])
    assert np.allclose(right.images[0].get_array(), [[120, 520], [160, 560]])
    assert (right.get_xlabel(), right.get_ylabel()) == ("slope of the back", "slope of the front")


def test_histograms_count_what_was_chosen() -> None:
    rows = [row(label=label, alpha=alpha) for label, alpha in (("3", 0.1), ("3", 0.1), ("3", 1.0), ("6", 1.0))]
    figure = drawn("histograms", [row(family="linear"), *rows], settings={"alphas": [0.1, 1.0, 10.0]})
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert np.allclose(heights, [[200 / 3, 100 / 3, 0], [0, 100, 0]])
    assert ticks(figure.axes[0]) == ["0.1", "1", "10"]


def test_sparsity_joins_the_strengths_of_a_fit() -> None:
    rows = [
        row(family=f"sparse:{strength:g}", fit=fit, sparsity=zeros + apart, relative_accuracy=value)
        for fit in ("task", "direct")
        for strength, zeros, value in ((0.1, 0.8, 0.5), (0.01, 0.2, 0.9))
        for apart in (-0.1, 0.1)
    ]
    rows.append(row(family="relu:birkhoff", sparsity=0.95, relative_accuracy=0.7))
    rows.append(row(family="sparse:0.01", sparsity=0.2, relative_accuracy=0.9, matrix=[[1.0, 0.0], [0.0, -2.0]]))
    above, below = drawn("sparsity", rows).axes
    assert line(above, "ℓ1, least squares") == line(above, "ℓ1, task loss") == ([20, 80], [0.9, 0.5])
    assert line(above, "G_ReLU, task loss") == ([95], [0.7])
    assert below.images[0].get_array().tolist() == [[1, 0], [0, -2]]


def test_layers_show_accuracy_cross_entropy_and_what_there_is_without_a_map() -> None:
    rows = [row(fit=fit, relative_accuracy=0.5, cross_entropy=number) for number, fit in enumerate(("direct", "task"))]
    rows += [row(family="identity", fit="direct", relative_accuracy=0.1, cross_entropy=value) for value in (6.0, 8.0)]
    left, right = drawn("layers", rows).axes
    assert line(left, "least squares: relative accuracy") == ([0], [0.5])
    assert line(right, "task loss: cross-entropy") == ([0], [1.0])
    assert left.get_title() == "without a map: cross-entropy 7.00 ± 1.41"


def test_widths_and_ranks_are_lines_over_their_number() -> None:
    wide = [
        row(front_group=width, relative_accuracy=0.1 * width + apart) for width in (3, 1) for apart in (-0.01, 0.01)
    ]
    (axes,) = drawn("groups", wide, networks={"vary": {"width": [1, 3]}}).axes
    assert line(axes, "task loss") == ([1, 3], [0.1, 0.3])
    ranks = [
        row(family=f"lowrank:{rank}", fit=fit, relative_accuracy=base + rank / 100)
        for fit, base in (("task", 0.5), ("direct", 0.2))
        for rank in (4, 16)
    ]
    (axes,) = drawn("ranks", ranks).axes
    assert line(axes, "task loss") == ([4, 16], [0.54, 0.66])
    assert line(axes, "least squares") == ([4, 16], [0.24, 0.36])


def test_starts_are_two_histograms() -> None:
    rows = [row(start=start, relative_accuracy=value) for start in ("random", "direct") for value in (0.2, 0.9, 0.91)]
    (axes,) = drawn("starts", rows).axes
    for bars in axes.containers:
        assert sum(bar.get_height() for bar in bars) == 3
    assert [text.get_text() for text in axes.get_figure().legends[0].get_texts()] == [
        "from random",
        "from least squares",
    ]


def test_iterations_are_means_of_runs() -> None:
    loss = {"epoch": 1, "loss": 2.0}
    rows = [
        row(cka=weight, history=[{"step": 0, "r2": 0.5 + run}, {"step": 5, "r2": weight + run}, loss])
        for weight in (0.1, 1.0)
        for run in (-0.1, 0.1)
    ]
    first, second = drawn("iterations", rows, ["r2", "loss"]).axes
    assert line(first, "weight 1 of the CKA") == ([0, 5], [0.5, 1.0])
    assert line(second, "weight 0.1 of the CKA") == ([1], [2.0])
    assert (first.get_xlabel(), second.get_xlabel()) == ("iteration", "epoch")


def test_averages_stand_beside_what_is_printed() -> None:
    rows = [row(label=label, family="identity", cross_entropy=value) for label, value in (("1", 6.0), ("2", 8.0))]
    plan = {"printed": {"no map": [6.99]}, "spread": {"no map": [1.96]}, "labels": ("all layers",)}
    (axes,) = drawn("averages", rows, "cross_entropy", **plan).axes
    assert line(axes, "ours") == ([0], [7.0])
    assert line(axes, "printed") == ([0.15], [6.99])


def test_lines_are_drawn_in_the_panel_of_their_layer() -> None:
    ends = [row(label=label, relative_accuracy=0.9) for label in ("1", "2")]
    between = row(label="2", fit="line", shares=[1.0, 0.5, 0.0], line=[0.9, 0.3, 0.8], lowest=0.3)
    first, second = drawn("lines", [*ends, between]).axes
    assert list(second.get_lines()[0].get_ydata()) == [0.9, 0.3, 0.8]
    assert len(first.get_lines()) == len(second.get_lines()) - 1
    found = numbers(plan_of("lines"), [*ends, between])
    assert found["lowest on the line"] == {"2": [0.3]}
    assert found["lower end"] == {"2": [0.8]}
    assert found["full"] == {"1": [0.9], "2": [0.9]}


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_penalties_inside_and_outside_of_blocks_are_means_per_pair() -> None:
    rows = [
        row(pair=pair, label=label, skip=skip, best_penalty=base + pair / 10, penalty=1.0)
        for pair in (0, 1)
        for label, skip, base in (("3", "none", 0.1), ("8", "front", 0.3), ("11", "none", 0.2))
    ]
    found = numbers(plan_of("penalties", "best_penalty"), rows)
    assert np.allclose(found["full, outside blocks"]["all layers"], [15, 25])
    assert np.allclose(found["full, inside blocks"]["all layers"], [30, 40])
    assert found["full, last epoch"] == {"3": [100.0] * 2, "8": [100.0] * 2, "11": [100.0] * 2}


def test_the_reach_of_a_slope_is_from_its_lowest_to_its_highest_layer() -> None:
    rows = [
        row(label=label, front_group=1.0, back_group=back, penalty=value)
        for back, label, value in ((1.0, "3", 0.1), (1.0, "8", 0.4), (0.5, "8", 0.9))
    ]
    found = numbers(plan_of("slopes", "penalty", networks={"vary": {"slope": [0.5, 1.0]}}), rows)
    assert found["slope 1"] == {"3": [10.0], "8": [40.0]}
    assert np.allclose(found["slope 1, reach"]["all layers"], [30])


def test_of_sparse_maps_the_best_with_enough_zeros_counts() -> None:
    rows = [
        row(family=f"sparse:{strength}", sparsity=zeros, relative_accuracy=value, penalty=1 - value, pair=pair)
        for pair in (0, 1)
        for strength, zeros, value in (("0.1", 0.5, 0.99), ("0.2", 0.8, 0.6 + pair / 10), ("0.3", 0.9, 0.5))
    ]
    found = numbers(plan_of("sparsity"), rows)
    assert np.allclose(found["task loss, 80% zeros or more"]["3"], [0.6, 0.7])
    low = numbers(plan_of("sparsity", "penalty"), rows)
    assert np.allclose(low["task loss, 80% zeros or more"]["3"], [40, 30])
    assert found["ℓ1, λ = 0.1, zeros"] == {"3": [50.0, 50.0]}


def test_of_starts_the_worst_counts() -> None:
    rows = [row(start=start, relative_accuracy=value) for start in ("random", "direct") for value in (0.9, 0.2, 0.91)]
    found = numbers(plan_of("starts"), rows)
    assert found["from random"] == {"3": [0.9, 0.2, 0.91]}
    assert found["from least squares, worst"] == {"3": [0.2]}


def test_of_a_training_its_first_and_its_last_value_count() -> None:
    history = [{"step": step, "r2": 0.5 - step / 100} for step in (0, 5, 10)]
    rows = [row(cka=weight, history=history, relative_accuracy=0.9) for weight in (0.1, 1.0)]
    found = numbers(plan_of("iterations", ["r2"]), rows)
    assert found["weight 1, R² of the map at the start"] == {"3": [0.5]}
    assert found["weight 0.1, R² of the map at the end"] == {"3": [0.4]}
    assert found["weight 1, relative accuracy at the end"] == {"3": [0.9]}
    assert "R² of the map at the end" in numbers(plan_of("iterations", ["r2"]), rows[:1])
