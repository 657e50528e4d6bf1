"""docs/alignment.md: its tables are what was measured, its example runs, its methods and options exist."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from pages import DOCS, run_example, script

from intertwine.align.align import SOLVERS
from intertwine.connect.merging import REPAIRS

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
