"""docs/folding.md: its tables are what was measured, its examples run, what it names exists, it can be drawn again."""

import json
import re
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pages import DOCS, script

import intertwine as it
from intertwine.cli import parser
from intertwine.fold.budget import HOW
from intertwine.fold.fold import fold
from intertwine.fold.options import CHOICES, PAPER_CODE, PRINTED, STATISTICS

PAGE = (DOCS / "folding.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """The script that writes the tables."""
    return script("results")


def test_the_tables_are_what_was_measured(results: ModuleType) -> None:
    assert results.written_folding(PAGE) == PAGE, "run: python docs/results.py"


def test_a_benchmark_that_has_not_run_is_said_in_words(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fold as bench  # found once the script of the tables is loaded

    monkeypatch.setattr(bench, "RESULTS", tmp_path / "none.json")
    for held in (None, "{}", '{"speed": []}'):
        if held is not None:
            bench.RESULTS.write_text(held)
        assert "Nothing is measured yet: `python bench/fold.py speed` does it." in results.written_folding(PAGE)
    row = {"architecture": "mlp", "weight_decay": 1e-4, "epochs": 3, "accuracies": [0.5], "seconds": 2.0}
    bench.RESULTS.write_text(json.dumps({"train": [row]}))
    page = results.written_folding(PAGE)
    assert "| mlp | 0.0001 | 3 | 50.00 | 2 |" in page
    assert "Nothing is measured yet" not in page


def test_the_examples_run_003_F18_F27(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
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


def test_options_are_named_as_they_are_003_F23() -> None:
    named = set(re.findall(r'`(\w+)="([\w+-]+)"', PAGE))
    others = {("repair", "variances"), ("score", "l1"), *(("how", how) for how in HOW)}
    others |= {("statistics", value) for value in STATISTICS}
    for option, value in named - others:
        assert value in CHOICES[option], option
    table = PAGE.partition("| | printed |")[2].partition("\n\n")[0]
    for option, value in {**PRINTED, **PAPER_CODE}.items():
        assert f'{option}="{value}"' in table or f"{option}={value}" in table
    for name in CHOICES:
        default = signature(fold).parameters[name].default
        assert f'"{default}"' in table
    assert all(decision in table for decision in ("D11", "D12", "D13", "D14"))


def test_the_table_of_what_methods_ask_for_is_the_papers_003_F23() -> None:
    table = PAGE.partition("| method | data before |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[1:] for row in rows[:6]] == [["yes", "no"], ["yes", "yes"], ["yes", "yes"], ["no", "yes"],
                                             ["yes", "no"], ["no", "no"]]  # fmt: skip
    assert all(row[2].startswith("no") for row in rows[6:])  # nothing here trains
    named = set(re.findall(r"`(\w+)", table))
    assert {"fold", "fold_to", "fold_kmeans", "fold_activations", "repair_variances", "prune"} <= named


def test_functions_of_the_page_exist() -> None:
    homes = {name: module for module, name in re.findall(r"from (intertwine\.fold\.\w+) import (\w+)", PAGE)}
    assert len(homes) >= 7
    for name, module in homes.items():
        assert callable(getattr(import_module(module), name))
    called = set(re.findall(r"`(?:it\.)?((?:fold|prune|repair|swap|distance)\w*)[(`]", PAGE))
    assert len(called) >= 7
    for name in called:
        assert callable(getattr(import_module(homes.get(name, "intertwine")), name)), name


def test_commands_of_the_page_are_understood() -> None:
    lines = re.findall(r"`intertwine (fold [^`]*)`", PAGE)
    assert len(lines) == 2
    assert parser().parse_args(lines[0].split()).parameters == 0.25
    assert parser().parse_args(lines[1].split()).beta == ["0.05"]
    for words in ("--floor 0.95", "--method kmeans --widths 0.5", "--method activations --data digits"):
        assert f"`{words}`" in PAGE
        assert parser().parse_args(["fold", "zoo:mlp", *words.split()])


def test_pictures_are_there() -> None:
    found = set(re.findall(r"\]\((images/[\w.-]+)\)", PAGE))
    assert found == {f"images/{path.name}" for path in (DOCS / "images").glob("folding_*")}
    assert len(found) == 6
    for picture in found:
        assert (DOCS / picture).stat().st_size < 1_000_000


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
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "images").glob("folding_*")}
