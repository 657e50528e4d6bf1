"""The guides under docs/: their examples run, and what they state is what the library does."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import fields
from importlib import import_module
from inspect import signature
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest
import torch
from pages import DOCS, run_example, script
from torch import nn
from torch.nn.modules import activation

import intertwine as it
from intertwine.align.align import SOLVERS
from intertwine.cli import parser
from intertwine.connect.merge import REPAIRS
from intertwine.fold.budget import METHODS
from intertwine.fold.fold import fold
from intertwine.fold.options import CHOICES, PAPER_CODE, PRINTED, STATISTICS
from intertwine.inspect.dissection import Dissection
from intertwine.inspect.guided import GuidedMaps
from intertwine.inspect.rotation import rotation
from intertwine.inspect.rotation_scan import RotationScan, rotation_scan
from intertwine.lab.study.plan import plan_of, read_plan
from intertwine.lab.study.tasks import expand
from intertwine.lab.study.verbs import VERBS
from intertwine.lab.study.zoos import known_zoos
from intertwine.measure.measure import Result
from intertwine.stitch.collection import Stitches
from intertwine.stitch.families.names import families, find_family
from intertwine.stitch.result import Stitch
from intertwine.stitch.training import RECIPES, StitchSettings

# -- docs/alignment.md --


PAGE = (DOCS / "alignment.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """The script that writes the tables."""
    return script("results")


def test_the_tables_are_what_was_measured(results: ModuleType) -> None:
    assert results.written_alignment(PAGE) == PAGE, "run: python docs/results.py"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_example(PAGE)
    before, after, merged = names["before"], names["after"], names["merged"]
    assert isinstance(before, type(after))
    assert after.error_barrier < before.error_barrier / 3
    assert merged.scores
    assert "Alignment(weights" in capsys.readouterr().out


def test_every_method_is_in_the_table() -> None:
    table = PAGE.partition("| method | needs data |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([\w-]+)`", table)) >= set(SOLVERS)
    for name, solver in SOLVERS.items():
        row = next(line for line in table.splitlines() if f"`{name}`" in line)
        assert (row.split("|")[2].strip() == "yes") == solver.needs_data


def test_every_repair_is_named() -> None:
    assert all(f'"{name}"' in PAGE for name in REPAIRS)


def test_pictures_are_there() -> None:
    for picture in re.findall(r"\]\((images/[\w.-]+)\)", PAGE):
        assert (DOCS / picture).is_file()


# -- docs/canonical.md --


PAGE_CANONICAL_PAGE = (DOCS / "canonical.md").read_text(encoding="utf-8")


def test_the_tables_are_what_was_measured_canonical_page(results: ModuleType) -> None:
    assert results.written_canonical(PAGE_CANONICAL_PAGE) == PAGE_CANONICAL_PAGE, "run: python docs/results.py"


def test_an_old_table_is_seen(results: ModuleType) -> None:
    old = PAGE_CANONICAL_PAGE.replace("| weight matching | 61.80 |", "| weight matching | 60.80 |")
    assert old != PAGE_CANONICAL_PAGE
    assert results.written_canonical(old) == PAGE_CANONICAL_PAGE
    with pytest.raises(SystemExit, match="has no place for 'bench'"):
        results.written_canonical("# nothing here")


def test_the_examples_run() -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE_CANONICAL_PAGE, re.S):
        exec(block, names)
    assert "square" in names


def test_the_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE_CANONICAL_PAGE)
    assert links
    assert [link for link in links if not (DOCS / link).exists()] == []


# -- docs/engine.md --


PAGE_ENGINE_PAGE = (DOCS / "engine.md").read_text(encoding="utf-8")


def test_numbers_are_what_was_measured() -> None:
    results = script("results")
    assert results.written_engine(PAGE_ENGINE_PAGE) == PAGE_ENGINE_PAGE, "run: python docs/results.py"
    for measured in ("| torchvision/resnet50 | 357 |", " 0 silently wrong,"):
        old = PAGE_ENGINE_PAGE.replace(measured, measured.upper().replace("0", "1"))
        assert old != PAGE_ENGINE_PAGE
        assert results.written_engine(old) == PAGE_ENGINE_PAGE


# -- docs/folding.md --


PAGE_FOLDING_PAGE = (DOCS / "folding.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("one_thread")
def test_the_tables_are_what_was_measured_folding_page(results: ModuleType) -> None:
    assert results.written_folding(PAGE_FOLDING_PAGE) == PAGE_FOLDING_PAGE, "run: python docs/results.py"


@pytest.mark.usefixtures("one_thread")
def test_a_benchmark_that_has_not_run_is_said_in_words(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fold as bench  # found once the script of the tables is loaded

    monkeypatch.setattr(bench, "RESULTS", tmp_path / "none.json")
    for held in (None, "{}", '{"speed": []}'):
        if held is not None:
            bench.RESULTS.write_text(held)
        assert "Nothing is measured yet: `python bench/fold.py speed` does it." in results.written_folding(
            PAGE_FOLDING_PAGE
        )
    row = {"architecture": "mlp", "weight_decay": 1e-4, "epochs": 3, "accuracies": [0.5], "seconds": 2.0}
    bench.RESULTS.write_text(json.dumps({"train": [row]}))
    page = results.written_folding(PAGE_FOLDING_PAGE)
    assert "| mlp | 0.0001 | 3 | 50.00 | 2 |" in page
    assert "Nothing is measured yet" not in page


@pytest.mark.usefixtures("one_thread")
def test_the_examples_run_003_F18_F27(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE_FOLDING_PAGE, re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    small, seeing, least = names["small"], names["seeing"], names["least"]
    assert 0.2 < small.parameters.share <= 0.25
    assert 0.08 < seeing.parameters.share <= 0.1
    assert least.parameters.share < 0.25
    right = [(least.model(x).argmax(1) == y).double() for x, y in names["train"][2:]]
    assert torch.cat(right).mean() >= 0.95
    folded, swaps = names["folded"], names["swaps"]
    assert folded.parameters.share < 0.9
    assert swaps.error_barriers["equivalent"] < 0.02
    assert swaps.loss_barriers["random"] > 2 * swaps.loss_barriers["equivalent"]
    assert folded.model[1].out_features == names["again"][1].out_features == folded.widths["1"].after < 128
    printed = capsys.readouterr().out
    assert "classes  equivalent  dead" in printed
    assert "rows averaged, columns summed" in printed


@pytest.mark.usefixtures("one_thread")
def test_options_are_named_as_they_are_003_F23() -> None:
    named = set(re.findall(r'`(\w+)="([\w+-]+)"', PAGE_FOLDING_PAGE))
    others = {("repair", "variances"), ("score", "l1"), *(("how", how) for how in METHODS)}
    others |= {("statistics", value) for value in STATISTICS}
    for option, value in named - others:
        assert value in CHOICES[option], option
    table = PAGE_FOLDING_PAGE.partition("| | printed |")[2].partition("\n\n")[0]
    for option, value in {**PRINTED, **PAPER_CODE}.items():
        assert f'{option}="{value}"' in table or f"{option}={value}" in table
    for name in CHOICES:
        default = signature(fold).parameters[name].default
        assert f'"{default}"' in table
    assert all(decision in table for decision in ("counts", "compared", "BatchNorm", "activation"))


@pytest.mark.usefixtures("one_thread")
def test_the_table_of_what_methods_ask_for_is_the_papers_003_F23() -> None:
    table = PAGE_FOLDING_PAGE.partition("| method | data before |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[1:] for row in rows[:6]] == [["yes", "no"], ["yes", "yes"], ["yes", "yes"], ["no", "yes"],
                                             ["yes", "no"], ["no", "no"]]  # fmt: skip
    assert all(row[2].startswith("no") for row in rows[6:])  # nothing here trains
    named = set(re.findall(r"`(\w+)", table))
    assert {"fold", "fold_to", "fold_kmeans", "fold_activations", "repair_variances", "prune"} <= named


@pytest.mark.usefixtures("one_thread")
def test_functions_of_the_page_exist() -> None:
    homes = {
        name: module for module, name in re.findall(r"from (intertwine\.fold\.\w+) import (\w+)", PAGE_FOLDING_PAGE)
    }
    assert len(homes) >= 7
    for name, module in homes.items():
        assert callable(getattr(import_module(module), name))
    called = set(re.findall(r"`(?:it\.)?((?:fold|prune|repair|swap|distance)\w*)[(`]", PAGE_FOLDING_PAGE))
    assert len(called) >= 7
    for name in called:
        assert callable(getattr(import_module(homes.get(name, "intertwine")), name)), name


@pytest.mark.usefixtures("one_thread")
def test_commands_of_the_page_are_understood() -> None:
    lines = re.findall(r"`intertwine (fold [^`]*)`", PAGE_FOLDING_PAGE)
    assert len(lines) == 2
    assert parser().parse_args(lines[0].split()).parameters == 0.25
    assert parser().parse_args(lines[1].split()).beta == ["0.05"]
    for words in ("--floor 0.95", "--method kmeans --widths 0.5", "--method activations --data digits"):
        assert f"`{words}`" in PAGE_FOLDING_PAGE
        assert parser().parse_args(["fold", "zoo:mlp", *words.split()])


@pytest.mark.usefixtures("one_thread")
def test_pictures_are_there_folding_page() -> None:
    found = set(re.findall(r"\]\((images/[\w.-]+)\)", PAGE_FOLDING_PAGE))
    assert found == {f"images/{path.name}" for path in (DOCS / "images").glob("folding_*")}
    assert len(found) == 6
    for picture in found:
        assert (DOCS / picture).stat().st_size < 1_000_000


@pytest.mark.usefixtures("one_thread")
def test_pictures_can_be_drawn_again_003_F17_F18_F19_F25(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, in a minute size: small networks, digits for MNIST."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    figures = script("folding_figures")
    monkeypatch.setattr(figures, "WIDTHS", (12, 16))
    monkeypatch.setattr(figures, "DECAYS", (5e-4, 1e-2))
    monkeypatch.setattr(figures, "HIDDEN", 2)
    monkeypatch.setattr(figures, "BETAS", (0.8,))
    monkeypatch.setattr(figures, "OF_LARGEST", (0.3,))
    monkeypatch.setattr(figures, "SHARES", (0.6,))
    monkeypatch.setattr(figures, "SHOWN", (16, 1e-2))
    monkeypatch.setattr(figures, "BETA", 0.8)
    figures.draw(tmp_path, it.zoo.data("digits"), epochs=2)
    figures.save(tmp_path, "measured", figures.measured(json.loads(figures.RESULTS.read_text())["curves"]))
    drawn = {path.stem for path in tmp_path.iterdir()}
    assert drawn == {path.stem for path in (DOCS / "images").glob("folding_*")}


# -- docs/inspection.md --


PAGE_INSPECTION_PAGE = (DOCS / "inspection.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The script that writes the tables."""
    return script("inspection_tables")


@pytest.fixture(scope="module")
def rows(tables: ModuleType) -> list[dict[str, Any]]:
    return tables.read_rows()


@pytest.mark.usefixtures("one_thread")
def test_the_tables_are_what_was_measured_inspection_page(tables: ModuleType) -> None:
    assert tables.written(PAGE_INSPECTION_PAGE) == PAGE_INSPECTION_PAGE, "run: python docs/results.py"


@pytest.mark.usefixtures("one_thread")
def test_the_example_runs_inspection_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_example(PAGE_INSPECTION_PAGE)
    own, scan, maps = names["own"], names["scan"], names["maps"]
    assert isinstance(own, Dissection)
    assert isinstance(scan, RotationScan)
    assert isinstance(maps, GuidedMaps)
    assert own.null is not None
    assert set(scan.curve) == {0.0, 0.5, 1.0}
    assert scan.curve[0.0] == [own.fraction] * 2
    assert maps.warning is None
    assert "Dissection(" in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
def test_the_command_of_the_page_is_understood() -> None:
    from intertwine.cli import parser

    (line,) = re.findall(r"`intertwine (dissect MODEL [^`]*)`", PAGE_INSPECTION_PAGE)
    options = parser().parse_args(line.split())
    assert (options.at, options.rotation, options.out) == ("layer4", "0,0.5,1", "found")


@pytest.mark.usefixtures("one_thread")
def test_pictures_are_there_and_drawn_by_the_script() -> None:
    found = re.findall(r"\]\((images/[\w.-]+)\)", PAGE_INSPECTION_PAGE)
    drawn = (DOCS / "inspection_figures.py").read_text(encoding="utf-8")
    assert found
    for picture in found:
        assert (DOCS / picture).is_file()
        assert f'"{Path(picture).stem.removeprefix("inspection_")}"' in drawn


@pytest.mark.usefixtures("one_thread")
def test_files_that_the_page_names_are_there() -> None:
    for name in re.findall(r"`(?:python )?((?:experiments|bench|docs)/[\w./-]+)", PAGE_INSPECTION_PAGE):
        assert (DOCS.parent / name).is_file(), name


# -- 000-G73: interpretable units against α ----------------------------------------------------------------------------


def fractions(rows: list[dict[str, Any]], kind: str, at: str, alpha: float, network: int | None = None) -> float:
    some = [
        row["fraction"] for row in rows
        if (row["kind"], row["at"], row["alpha"]) == (kind, at, alpha) and network in (None, row["network"])
    ]  # fmt: skip
    return mean(some)


@pytest.mark.usefixtures("one_thread")
def test_000_g73_what_the_page_says_of_the_trend_is_in_the_rows(rows: list[dict[str, Any]]) -> None:
    relu, none = "with residual ReLU", "without"
    networks = {row["network"] for row in rows}
    assert len(networks) == 3
    falls = {
        (kind, network): fractions(rows, kind, "layer3", 1.0, network) - fractions(rows, kind, "layer3", 0.0, network)
        for kind in (relu, none) for network in networks
    }  # fmt: skip
    assert all(falls[relu, network] < -0.05 for network in networks)
    assert abs(mean(falls[none, network] for network in networks)) < 0.05
    assert sum(falls[none, network] < -0.05 for network in networks) == 1  # "one of them falls too"
    assert fractions(rows, none, "layer3", 0.0) < fractions(rows, relu, "layer3", 0.0) - 0.1
    for kind in (relu, none):  # the paper's curve rises
        inside = [fractions(rows, kind, "layer3.2.relu1", alpha) for alpha in (0.0, 1.0)]
        assert inside[1] < inside[0]
    assert max(row["chance"] for row in rows) < 0.01


class Turned(nn.Module):
    """Rectified units of one concept each, as they are or in a basis turned at random."""

    def __init__(self, units: int, turned: bool) -> None:
        super().__init__()
        matrix = rotation(units, 1, 5, torch.float32) if turned else torch.eye(units)
        self.relu, self.mix = nn.ReLU(), nn.Conv2d(units, units, 1, bias=False)
        self.mix.weight = nn.Parameter(matrix[:, :, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.relu(x))


@pytest.mark.usefixtures("one_thread")
def test_000_g73_only_a_basis_in_which_units_are_rectified_is_special() -> None:
    """The trend where it is known: units of rare events, one each, fall as the basis turns; a turned basis stays."""
    g = torch.Generator().manual_seed(0)
    masks = torch.rand(40, 24, 10, 10, generator=g) < 0.02
    x = torch.where(masks, 2.0, -1.0) + 0.3 * torch.randn(40, 24, 10, 10, generator=g)
    curves = {
        turned: {alpha: mean(some) for alpha, some in rotation_scan(
            Turned(24, turned), "mix", x, masks, [0, 0.5, 1], seeds=[0, 1], share=0.02, level=0.5
        ).curve.items()}
        for turned in (False, True)
    }  # fmt: skip
    own, level = curves[False], curves[True]
    assert own[0.0] == 1.0
    assert own[0.5] < own[0.0]
    assert own[1.0] < own[0.5]
    assert own[1.0] < 0.5
    assert max(level.values()) - min(level.values()) < 0.25
    assert level[0.0] < 0.5


@pytest.mark.usefixtures("one_thread")
def test_the_published_reading_of_angles_does_not_end_at_q() -> None:
    """What the first figure shows, from the script that draws it."""
    sys.path.insert(0, str(DOCS))
    try:
        drawing = script("inspection_figures")
    finally:
        sys.path.remove(str(DOCS))
    q = rotation(64, 1, 0).numpy()
    length = float((q**2).sum() ** 0.5)
    assert float(((drawing.published_power(q, 1.0) - q) ** 2).sum() ** 0.5) > 0.5 * length
    assert abs(drawing.published_power(q, 0.0) - torch.eye(64).numpy()).max() < 1e-12


# -- docs/measures.md --


PAGE_MEASURES_PAGE = (DOCS / "measures.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_code_declares() -> None:
    module = script("measures")
    assert module.written(PAGE_MEASURES_PAGE) == PAGE_MEASURES_PAGE, "run: python docs/measures.py"
    assert set(module.COSTS) <= {m.name for m in it.measures()}, "a cost of a measure that is gone"
    assert set(module.PEERS) <= set(module.COSTS)


def test_the_times_are_what_was_measured() -> None:
    bench = script("measure", DOCS.parent / "bench")
    results = json.loads(bench.RESULTS.read_text(encoding="utf-8"))
    table = bench.page(results["rows"] + results["layers"])
    assert table in PAGE_MEASURES_PAGE, "write the table of `python bench/measure.py page` into docs/measures.md"
    gpu = script("measure_gpu", DOCS.parent / "bench")
    table = gpu.page(json.loads(gpu.RESULTS.read_text(encoding="utf-8")))
    assert table in PAGE_MEASURES_PAGE, "write the table of `python bench/measure_gpu.py` into docs/measures.md"


def test_the_examples_run_measures_page() -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE_MEASURES_PAGE, re.S):
        exec(block, names)
    found = names["found"]
    assert isinstance(found, Result)
    assert abs(found.value - 1) < 1e-6


def test_the_files_it_names_are_there() -> None:
    for path in re.findall(r"`(measure/\w+\.py)`", PAGE_MEASURES_PAGE):
        assert (DOCS.parent / "src" / "intertwine" / path).exists()


# -- docs/stitching.md --


PAGE_STITCHING_PAGE = (DOCS / "stitching.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("one_thread")
def test_the_tables_are_what_was_measured_stitching_page(results: ModuleType) -> None:
    assert results.written_stitching(PAGE_STITCHING_PAGE) == PAGE_STITCHING_PAGE, "run: python docs/results.py"


@pytest.mark.usefixtures("one_thread")
def test_the_example_runs_stitching_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_example(PAGE_STITCHING_PAGE)
    one, many = names["one"], names["many"]
    assert isinstance(one, Stitch)
    assert isinstance(many, Stitches)
    assert len(many) == 3 * 3 * 2
    assert all(s.penalty is not None and s.penalty < 0.3 for s in many if s.family == "affine" and s.fit == "task")
    printed = capsys.readouterr().out
    assert "Stitch(4 by relu, direct" in printed
    assert "lowrank:4" in printed


@pytest.mark.usefixtures("one_thread")
def test_every_family_is_in_the_table() -> None:
    table = PAGE_STITCHING_PAGE.partition("| family | maps |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([\w:]+)`", table))
    assert all(find_family(re.sub("K$", "4", name.replace("ACTIVATION", "tanh").replace("λ", "0.1"))) for name in named)
    plain = {name for name in families() if not re.search(r"[+:]|^masked", name)}
    assert plain <= named


@pytest.mark.usefixtures("one_thread")
def test_settings_and_recipes_are_named_as_they_are() -> None:
    assert all(f'recipe="{name}"' in PAGE_STITCHING_PAGE for name in RECIPES if name != "intertwine")
    options = set(re.findall(r"`(\w+)=", PAGE_STITCHING_PAGE)) - {"skip", "resize", "fit", "recipe", "out", "loss"}
    assert options <= {field.name for field in fields(StitchSettings)}


@pytest.mark.usefixtures("one_thread")
def test_pictures_are_there_stitching_page() -> None:
    found = re.findall(r"\]\((images/[\w.-]+)\)", PAGE_STITCHING_PAGE)
    assert found
    for picture in found:
        assert (DOCS / picture).is_file()


# -- docs/studies.md and the example plan --


PAGE_STUDIES_PAGE = (DOCS / "studies.md").read_text(encoding="utf-8")
EXAMPLE = DOCS.parent / "examples" / "digits-study.toml"


@pytest.mark.usefixtures("one_thread")
def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polars")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE_STUDIES_PAGE, re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    assert set(names["study"].frame()["verb"].to_list()) == {"accuracy", "barrier"}


@pytest.mark.usefixtures("one_thread")
def test_the_plan_of_the_page_is_a_plan() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE_STUDIES_PAGE, re.S)
    plan = plan_of(tomllib.loads(block))
    assert plan.parts[0].grid == {"method": ("none", "weights")}


@pytest.mark.usefixtures("one_thread")
def test_every_verb_and_every_option_is_on_the_page() -> None:
    table = PAGE_STUDIES_PAGE.partition("| verb | of |")[2].partition("\n\n")[0]
    rows = {line.split("|")[1].strip(" `"): line for line in table.splitlines()[2:]}
    assert set(rows) == set(VERBS)
    for name, verb in VERBS.items():
        for option in verb.options:
            assert f"`{option}`" in rows[name] or option == "layers", (name, option)


@pytest.mark.usefixtures("one_thread")
def test_the_example_plan_has_all_verbs(tmp_path: Path) -> None:
    plan = read_plan(EXAMPLE)
    tasks = expand(plan, known_zoos(plan, tmp_path))
    assert {task.verb for task in tasks} == set(VERBS)
    assert 20 < len(tasks) < 60


# -- docs/symmetry.md --


PAGE_SYMMETRY_PAGE = (DOCS / "symmetry.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_code_finds() -> None:
    assert script("activations").rewritten(PAGE_SYMMETRY_PAGE) == PAGE_SYMMETRY_PAGE, "run: python docs/activations.py"


def test_an_old_table_is_seen_symmetry_page() -> None:
    activations = script("activations")
    old = PAGE_SYMMETRY_PAGE.replace("| `positive` | a > 0 | a |", "| `positive` | a > 0 | a² |")
    assert old != PAGE_SYMMETRY_PAGE
    assert activations.rewritten(old) == PAGE_SYMMETRY_PAGE
    with pytest.raises(SystemExit, match="no block between"):
        activations.rewritten("# nothing here")


def test_no_activation_of_torch_is_left_out() -> None:
    activations = script("activations")
    shown = {type(m).__name__ for m in (*activations.MODULES.values(), *activations.REFUSED.values())}
    assert set(activation.__all__) <= shown
    for name in (*activations.MODULES, *activations.REFUSED):
        assert name in PAGE_SYMMETRY_PAGE


def test_what_is_refused_is_refused() -> None:
    activations = script("activations")
    assert all(activations.is_refused(module) for module in activations.REFUSED.values())
    assert not activations.is_refused(torch.relu)


def test_the_examples_run_symmetry_page() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE_SYMMETRY_PAGE, re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("print(", "str("), names)  # the blocks build on each other, as on the page


def test_the_results_in_the_examples_are_true() -> None:
    names: dict[str, object] = {}
    exec("import torch, intertwine as it\nfrom intertwine.symmetry.intertwiner import homogeneity_defect", names)
    claims = re.findall(
        r"^((?:it\.activation_group|homogeneity_defect)\(.*)  # ('\w+'|[\d.]+)", PAGE_SYMMETRY_PAGE, re.MULTILINE
    )
    assert len(claims) >= 4
    for code, said in claims:
        found = eval(code, names)
        expected = eval(said)
        assert found == (pytest.approx(expected, abs=5e-5) if isinstance(expected, float) else expected), code


def test_the_links_lead_somewhere_symmetry_page() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE_SYMMETRY_PAGE):
        assert (DOCS / target).exists(), target
    for file in re.findall(r"tests/\w+\.py", PAGE_SYMMETRY_PAGE):
        assert (DOCS.parent / file).exists(), file


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = script("figures")
    figures.gelu_defect(tmp_path / "first.svg")
    figures.gelu_defect(tmp_path / "second.svg")
    first = (tmp_path / "first.svg").read_text(encoding="utf-8")
    assert "GELU" in first
    assert first == (tmp_path / "second.svg").read_text(encoding="utf-8")
    assert (DOCS / "images" / "gelu-defect.svg").read_text(encoding="utf-8").startswith("<?xml")
