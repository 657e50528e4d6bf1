"""The plans of the stitching figures: each is complete, runs in small to its end, gives its rows and its figure."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import intertwine as it
from intertwine.errors import InputError
from intertwine.stitch.family import find_family
from intertwine.stitch.settings import of_recipe
from intertwine.zoo.networks.sites import figure_numbers
from intertwine.zoo.recipe import recipe

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import stitching  # noqa: E402  # pyrefly: ignore[missing-import]
import stitching_runs  # noqa: E402  # pyrefly: ignore[missing-import]
from stitching_figures import FORMS  # noqa: E402  # pyrefly: ignore[missing-import]
from stitching_plan import read_plan  # noqa: E402  # pyrefly: ignore[missing-import]
from stitching_rows import NUMBERS  # noqa: E402  # pyrefly: ignore[missing-import]

PLANS = sorted((ROOT / "experiments" / "stitching").glob("*.toml"))
NAMES = [file.stem for file in PLANS]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks and stitches of all plans, so that those which share a zoo train it once."""
    return tmp_path_factory.mktemp("stitching")


def test_every_figure_has_a_plan() -> None:
    godfrey = [f"godfrey-figure{number}" for number in (1, 6, 7, 8, 12, 13, 14, 15)]
    csiszarik = [f"csiszarik-figure{name}" for name in ("2-tiny10", "2-resnet20", 3, 4, 5, 6, 7, 8)]
    assert sorted([*godfrey, *csiszarik]) == sorted(NAMES)


@pytest.mark.parametrize("file", PLANS, ids=NAMES)
def test_a_plan_names_what_there_is(file: Path) -> None:
    """Of the full plan: its places are in the network, families and recipes are known, its pairs can be made."""
    plan = read_plan(file)
    first = stitching_runs.groups(plan)[0]
    model = it.zoo.build(plan.networks.architecture, **first.options)
    paths = dict(model.named_modules())
    assert all(place.partition(":")[0] in paths for place in plan.stitching.at)
    names = [*plan.stitching.families, *plan.stitching.direct]
    for name in map(find_family, names):
        of_recipe(plan.stitching.recipe, name.name, {**plan.stitching.options, **plan.stitching.variants[0]})
    recipe(plan.networks.recipe, **plan.networks.changes)
    recipe(plan.stitching.batches)
    assert plan.form in FORMS
    assert all(what in NUMBERS for what in ([plan.what] if isinstance(plan.what, str) else plan.what))
    per_group = len(stitching_runs.groups(plan)) ** (2 if plan.pairs.choose == "groups" else 1)
    assert len(stitching_runs.pairs(plan)) == plan.pairs.count * per_group
    assert set(plan.printed) <= {*names, "relu:birkhoff"}
    assert all(len(numbers) == len(plan.stitching.at) for numbers in plan.printed.values())


@pytest.mark.parametrize("number", [1, 6, 7, 8, 13, 15])
def test_layers_have_the_numbers_of_paper_0(number: int) -> None:
    plan = read_plan(ROOT / f"experiments/stitching/godfrey-figure{number}.toml")
    options = {name: value for name, value in plan.networks.options.items() if name != "activation"}
    known = figure_numbers(it.zoo.build(plan.networks.architecture, **options))
    assert {place: int(label) for place, label in zip(plan.stitching.at, plan.stitching.labels, strict=True)} == known


def test_pairs_are_chosen_as_the_plans_say() -> None:
    random, disjoint, own, across = (
        [(pair.front, pair.back) for pair in stitching_runs.pairs(read_plan(ROOT / "experiments/stitching" / name))]
        for name in ("godfrey-figure1.toml", "godfrey-figure12.toml", "csiszarik-figure5.toml", "godfrey-figure8.toml")
    )
    assert len(random) == 32
    assert all(front != back for front, back in random)
    assert len({end for pair in random for end in pair}) > 40, "of 100 networks, with replacement"
    assert sorted(end[1] for pair in disjoint for end in pair) == list(range(10))
    assert own == [((0, 0), (0, 0))]
    assert sorted({(front[0], back[0]) for front, back in across}) == [(a, b) for a in range(7) for b in range(7)]
    assert all(front[1] != back[1] for front, back in across)


@pytest.mark.parametrize("file", PLANS, ids=NAMES)
def test_a_plan_runs_in_small(file: Path, folder: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "rows.json", tmp_path / "figure.svg"
    arguments = ["--small", "--zoo", str(folder), "--device", "cpu", "--out", str(out), "--plot", str(picture)]
    assert stitching.main([file.stem, *arguments]) == 0
    rows = json.loads(out.read_text())["rows"]
    plan = read_plan(file, small=True)
    asked = plan.stitching
    places = len(asked.at) * len(stitching_runs.pairs(plan))
    trained = len(asked.families) * len(asked.variants) * asked.seeds * asked.orders
    assert len(rows) == places * (trained + len(asked.direct) + bool(asked.alphas))
    kinds = {(row["family"], row["fit"]) for row in rows}
    wanted = {(name, "task") for name in asked.families} | {(name, "direct") for name in asked.direct}
    assert kinds == wanted | ({("relu:birkhoff", "task")} if asked.alphas else set())
    assert {row["label"] for row in rows} == set(asked.labels)
    assert all(0 <= row["accuracy"] <= 1 and row["penalty"] is not None for row in rows)
    assert all(0 <= row["sparsity"] <= 1 and row["front_seed"] is not None for row in rows)
    assert picture.read_text(encoding="utf-8").count("<path") > 5


def test_what_single_plans_promise(folder: Path, tmp_path: Path) -> None:
    """Traces, chosen α, stars inside blocks, kept matrices, one order per start."""
    found = {name: _rows(name, folder, tmp_path) for name in ("csiszarik-figure4", "csiszarik-figure5")}
    assert all({"linear_cka_biased", "r2"} <= set(row["history"][0]) for row in found["csiszarik-figure4"])
    assert [row["cka"] for row in found["csiszarik-figure5"]] == [0.1, 1.0, 10.0]
    assert {row["alpha"] for row in _rows("godfrey-figure14", folder, tmp_path) if "alpha" in row} <= {0.01, 1.0}
    inside = {row["label"]: row["skip"] for row in _rows("godfrey-figure6", folder, tmp_path)}
    assert inside == {"3": "none", "8": "front", "11": "none"}
    sparse = _rows("csiszarik-figure8", folder, tmp_path)
    assert all(len(row["matrix"]) == row["outputs"] for row in sparse)
    starts = [(row["start"], row["order"], row["seed"]) for row in _rows("csiszarik-figure6", folder, tmp_path)]
    assert sorted(set(starts)) == [("direct", 0, 0), ("direct", 1, 1), ("random", 0, 0), ("random", 1, 1)]


def _rows(name: str, folder: Path, tmp_path: Path) -> list[dict[str, Any]]:
    out = tmp_path / f"{name}.json"
    assert stitching.main([name, "--small", "--zoo", str(folder), "--device", "cpu", "--out", str(out)]) == 0
    return json.loads(out.read_text())["rows"]


def test_finished_pairs_are_not_stitched_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figure 14 has the rows of figure 13, and a second run of a plan those of the first."""
    first = _rows("godfrey-figure13", folder, tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("stitched again")

    monkeypatch.setattr(stitching_runs.it, "stitches", refuse)
    monkeypatch.setattr(stitching_runs, "cross_validate", refuse)
    assert _rows("godfrey-figure13", folder, tmp_path) == first
    assert _rows("godfrey-figure14", folder, tmp_path) == first


def test_a_figure_is_drawn_from_its_result_alone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _rows("godfrey-figure1", folder, tmp_path)
    monkeypatch.setattr(stitching, "run", None)
    picture = tmp_path / "again.svg"
    result = str(tmp_path / "godfrey-figure1.json")
    assert stitching.main(["godfrey-figure1", "--draw", result, "--plot", str(picture)]) == 0
    text = picture.read_text(encoding="utf-8")
    assert "G_ReLU" in text or text.count("<path") > 20


# -- plans that are refused --------------------------------------------------------------------------------------------

WHOLE = """
title = "a"
form = "penalties"
what = "penalty"
data = { name = "digits" }
networks = { name = "mlp", architecture = "mlp", pool = 2, recipe = "plain" }
pairs = { count = 1, choose = "disjoint" }
stitching = { at = ["2"], families = ["linear"], recipe = "godfrey", batches = "plain" }
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('title = "a"', "", "lacks title"),
        ('title = "a"', 'title = "a"\nsize = 3', "unknown entries size"),
        ("count = 1", "counts = 1", r"\[pairs\] has 'counts'. Did you mean count"),
        ("count = 1, ", "", r"\[pairs\] is not complete: .*'count'"),
        ('"disjoint"', '"any"', "pairs are chosen 'any'; they can be random, disjoint, self, groups"),
        ('families = ["linear"]', "seeds = 1", "neither families, nor direct, nor alphas"),
        ('at = ["2"]', 'at = ["2"], labels = ["1", "2"]', "there are 1 places and 2 labels"),
        ('title = "a"', "title =", "cannot be read"),
        ("pool = 2", "pool = 2, vary = { a = [1], b = [2] }", "one option at a time can vary"),
    ],
)
def test_plans_that_are_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(WHOLE.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read_plan(file)


def test_errors_of_the_program_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stitching.main(["godfrey-figure2"]) == 2
    assert "which does not exist. Did you mean godfrey-figure" in capsys.readouterr().err
    assert stitching.main(["godfrey-figure1", "--draw", str(tmp_path / "none.json")]) == 2
    assert "which does not exist. Run the plan first, with --out" in capsys.readouterr().err
    file = tmp_path / "own.toml"
    file.write_text(WHOLE.replace("count = 1", "count = 2"), encoding="utf-8")
    assert stitching.main([str(file), "--zoo", str(tmp_path)]) == 2
    assert "2 pairs, chosen 'disjoint', need at least 4 networks, but the pool is 2" in capsys.readouterr().err
    file.write_text(WHOLE.replace('"penalties"', '"bars"'), encoding="utf-8")
    assert stitching.main([str(file)]) == 2
    assert "the form is 'bars'; there are penalties" in capsys.readouterr().err
