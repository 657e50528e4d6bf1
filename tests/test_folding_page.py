"""docs/folding.md: its examples run, what it names exists, its pictures are there and can be drawn again."""

import re
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, script

import intertwine as it
from intertwine.fold.fold import fold
from intertwine.fold.options import CHOICES, PAPER_CODE, PRINTED

PAGE = (DOCS / "folding.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_examples_run_003_F18_F27(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    folded, swaps = names["folded"], names["swaps"]
    assert folded.parameters.share < 0.9
    assert swaps.error_barriers["equivalent"] < 0.02
    assert swaps.loss_barriers["random"] > 2 * swaps.loss_barriers["equivalent"]
    assert folded.model[1].out_features == names["again"][1].out_features == folded.widths["1"].after < 128
    printed = capsys.readouterr().out
    assert "classes  equivalent  dead" in printed
    assert "rows summed, columns averaged" in printed


def test_options_are_named_as_they_are_003_F23() -> None:
    named = set(re.findall(r'`(\w+)="([\w+-]+)"', PAGE))
    for option, value in named - {("repair", "variances"), ("norm", "sum")}:
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
    assert [row[1:] for row in rows] == [["yes", "no"], ["yes", "yes"], ["yes", "yes"], ["no", "yes"], ["yes", "no"],
                                         ["no", "no"]]  # fmt: skip


def test_functions_of_the_page_exist() -> None:
    for module, name in re.findall(r"`(fold\.\w+)\.(\w+)`", PAGE):
        assert callable(getattr(import_module(f"intertwine.{module}"), name))


def test_pictures_are_there() -> None:
    found = set(re.findall(r"\]\((images/[\w.-]+)\)", PAGE))
    assert found == {f"images/{path.name}" for path in (DOCS / "images").glob("folding_*")}
    assert len(found) == 4
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
    monkeypatch.setattr(figures, "BETAS", (0.3,))
    monkeypatch.setattr(figures, "SHOWN", (16, 1e-2))
    monkeypatch.setattr(figures, "BETA", 0.3)
    figures.draw(tmp_path, it.zoo.data("digits"), epochs=2)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "images").glob("folding_*")}
