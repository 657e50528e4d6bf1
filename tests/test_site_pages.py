"""Every Python block and every command of the new pages runs, in the order in which a reader meets them.

Blocks that are indented (installation, clusters) are for reading. A block that begins with a file's name is that file.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS

from intertwine.cli import main
from intertwine.graph import registry
from intertwine.measure import measure as measures

BLOCK = re.compile(r"^```(python|)\n(.*?)^```$", re.M | re.S)
NAMED = re.compile(r'"""(\w+\.py)"""\n')
VERBS = (
    "inspect canonicalize align merge barrier compare stitch fold dissect zoo reproduce"  # study and report: together
)
PAGES = [
    *(
        f"verbs/{name}.md"
        for name in "inspect canonicalize align merge barrier compare stitch fold dissect zoo".split()
    ),
    "quickstart.md",
    "bring-your-own-measure.md",
    "cluster.md",
]
#: Page → what it says, and whether the names that it leaves behind bear it out.
CLAIMS: dict[str, dict[str, Callable[[dict[str, Any]], Any]]] = {
    "verbs/inspect.md": {"the symmetry is certified": lambda n: n["certificate"].ok},
    "verbs/canonicalize.md": {"one network, and another": lambda n: n["same"] is not None and n["other"] is None},
    "verbs/align.md": {"nearer than before": lambda n: n["found"].after < n["found"].before},
    "verbs/merge.md": {
        "better than the plain mean": lambda n: n["merged"].scores[0].error < n["merged"].scores[1].error
    },
    "verbs/barrier.md": {"lower after alignment": lambda n: n["after"].error_barrier < n["before"].error_barrier},
    "verbs/stitch.md": {"a small penalty": lambda n: n["one"].penalty < 0.1},
    "verbs/fold.md": {"a quarter": lambda n: 0.2 < n["small"].parameters.share <= 0.25},
    "quickstart.md": {"the twin is the model": lambda n: n["it"].equivalent(n["model"], n["twin"], n["x"]) is not None},
}
pytestmark = pytest.mark.usefixtures("one_thread")


def blocks(page: str) -> list[tuple[str, str]]:
    """Kind and text of what can be run on a page."""
    return [(kind or "commands", text) for kind, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))]


def words(command: str) -> list[str]:
    return re.sub(r"\s+#.*", "", command).split()[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pages say they are read: with examples/, and the networks that the first page of commands trains."""
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(DOCS.parent / "examples", place / "examples")
    plan = place / "examples" / "digits-study.toml"
    parts = plan.read_text(encoding="utf-8").split("[[parts]]")
    plan.write_text("[[parts]]".join(parts[:4]), encoding="utf-8")  # three verbs show that it runs; all take too long
    ((_, command),) = blocks("verbs/index.md")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(words(command)) == 0
    return place


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader in that folder; what the pages register and import is forgotten afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield
    measures._MAKERS.pop("dimension_ratio", None)
    registry._RULES.pop("mylib.soft_clip", None)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("examples", "my_measure")]:
        del sys.modules[name]


def read(page: str) -> dict[str, Any]:
    """Run a page from top to bottom; gives the names that its Python leaves."""
    names: dict[str, Any] = {}
    for kind, text in blocks(page):
        if kind == "python":
            named = NAMED.match(text)
            if named:
                Path(named[1]).write_text(text, encoding="utf-8")
            exec(compile(text, named[1] if named else page, "exec"), names)
        else:
            for line in text.splitlines():
                assert line.startswith("intertwine "), line
                assert main(words(line)) == 0, line
    return names


@pytest.mark.parametrize("page", PAGES)
def test_everything_on_the_page_runs(page: str, reader: None) -> None:
    assert len(blocks(page)) > 0
    names = read(page)
    for claim, holds in CLAIMS.get(page, {}).items():
        assert holds(names), claim


def test_a_study_and_its_report(reader: None, folder: Path) -> None:
    study = read("verbs/study.md")["study"]
    assert (study.run, study.errors) == (0, {}), "the Python call goes on where the command was"
    read("verbs/report.md")
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_frozen_layer_of_your_own_model_is_told(reader: None, capsys: pytest.CaptureFixture[str]) -> None:
    read("bring-your-own-model.md")
    shown = capsys.readouterr().out
    assert re.search(r"second\.weight axis 0: .*cumsum", shown)


def test_a_page_that_is_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DOCS", tmp_path)
    (tmp_path / "wrong.md").write_text("```python\nimport intertwine as it\n\nit.alignn\n```\n")
    with pytest.raises(AttributeError, match="alignn"):
        read("wrong.md")
    (tmp_path / "wrong.md").write_text("```\nintertwine inspect nothing.py:net\n```\n")
    with pytest.raises(AssertionError, match=r"nothing\.py"):
        read("wrong.md")
