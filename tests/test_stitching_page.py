"""docs/stitching.md: its tables are what was measured, its example runs, its families and options exist."""

import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from pages import DOCS, run_example, script

from intertwine.stitch.collection import Stitches
from intertwine.stitch.family import families, find_family
from intertwine.stitch.outcome import Stitch
from intertwine.stitch.settings import RECIPES, Settings

PAGE = (DOCS / "stitching.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """The script that writes the tables."""
    return script("results")


def test_the_tables_are_what_was_measured(results: ModuleType) -> None:
    assert results.written_stitching(PAGE) == PAGE, "run: python docs/results.py"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_example(PAGE)
    one, many = names["one"], names["many"]
    assert isinstance(one, Stitch)
    assert isinstance(many, Stitches)
    assert len(many) == 3 * 3 * 2
    assert all(s.penalty is not None and s.penalty < 0.3 for s in many if s.family == "affine" and s.fit == "task")
    printed = capsys.readouterr().out
    assert "Stitch(4 by relu, direct" in printed
    assert "lowrank:4" in printed


def test_every_family_is_in_the_table() -> None:
    table = PAGE.partition("| family | maps |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([\w:]+)`", table))
    assert all(find_family(re.sub("K$", "4", name.replace("ACTIVATION", "tanh").replace("λ", "0.1"))) for name in named)
    plain = {name for name in families() if not re.search(r"[+:]|^masked", name)}
    assert plain <= named


def test_settings_and_recipes_are_named_as_they_are() -> None:
    assert all(f'recipe="{name}"' in PAGE for name in RECIPES if name != "intertwine")
    options = set(re.findall(r"`(\w+)=", PAGE)) - {"skip", "resize", "fit", "recipe", "out", "loss"}
    assert options <= {field.name for field in fields(Settings)}


def test_pictures_are_there() -> None:
    found = re.findall(r"\]\((images/[\w.-]+)\)", PAGE)
    assert found
    for picture in found:
        assert (DOCS / picture).is_file()
