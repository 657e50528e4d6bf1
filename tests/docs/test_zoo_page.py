"""docs/zoo.md: its tables are what was measured and what the code holds, its examples run, its names exist."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from pages import DOCS, script

import intertwine as it
from intertwine.lab.zoo.recipe import RECIPES

PAGE = (DOCS / "zoo.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """The script that writes the tables."""
    return script("results")


def test_the_tables_are_what_was_measured(results: ModuleType) -> None:
    assert results.written_zoo(PAGE) == PAGE, "run: python docs/results.py"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(block, names)
    zoo = names["zoo"]
    assert isinstance(zoo, it.zoo.Zoo)
    assert min(record.accuracy for record in zoo.records) > 0.9


def test_parameters_are_as_printed() -> None:
    """The first count of each row is that of the network as it stands, or of the one named beside it."""
    section = PAGE.partition("## Architectures")[2].partition("## Data")[0]
    rows = re.findall(r"^\| (`.*?) \| ([\d,]+)(?: \(`?(\w+)`?\))?", section, re.M)
    assert len(rows) >= 9
    for names, count, beside in rows:
        first = re.findall(r"`(\w+)`", names)[0]
        name = first if not beside else beside if not beside.isdigit() else f"resnet{beside}"
        parameters = sum(p.numel() for p in it.zoo.build(name).parameters())
        assert f"{parameters:,}" == count.rstrip(","), name


def test_recipes_are_all_there() -> None:
    section = PAGE.partition("### Recipes")[2].partition("Any entry")[0]
    assert set(re.findall(r"`([\w-]+)`", section)) == set(RECIPES)
