"""The scripts of examples/ that are notebooks: they run from top to bottom, and what their text says comes out."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
EXAMPLES = DOCS.parent / "examples"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints are trained into a folder of this test, and pictures go to pictures/ in it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return tmp_path


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a script leaves behind; it was told where its picture goes."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(folder / "pictures")])
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    picture = folder / "pictures" / f"{name}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in picture.parent.iterdir()] == [picture.name], "pictures and nothing else"
    assert (DOCS / "images" / picture.name).is_file(), "make docs draws it for the page"
    return names


def test_compare_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("compare_checkpoints", folder, monkeypatch)
    shown = capsys.readouterr().out
    assert names["certificate"].ok
    assert names["moved_by"] > 0.5
    assert "a and its moved copy are equivalent: True" in shown
    assert "a and b are equivalent: False" in shown
    first, second, third = shown.partition("fingerprints: ")[2].splitlines()[0].split()
    assert first == second != third
    assert names["found"].result("relu1", "relu1", "linear_cka").value > 0.8
    assert names["kept"] < 1e-4
    assert names["after"].mean > 5 * abs(names["before"].mean)


def test_merge_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("merge_models", folder, monkeypatch)
    assert min(names["parents"]) > 0.93
    assert names["plain"] < 0.8, "the plain mean fails"
    assert names["aligned"] > names["plain"] + 0.15, "aligned first, it works"
    assert names["repaired"] > names["aligned"]
    assert names["repaired"] > min(names["parents"]) - 0.02
    assert names["after"].error_barrier < names["as_trained"].error_barrier / 3
    assert names["file"].is_file()


def test_shrink_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("shrink_model", folder, monkeypatch)
    assert names["small"].parameters.share <= 0.25
    assert names["folded"] > names["whole"] - 0.03
    assert abs(names["pruned"].parameters.share - 0.25) < 0.02, "about the same size"
    assert names["folded"] > names["cut"], "folded, it does better than pruned"
    assert names["least"].parameters.share < 0.25
    assert names["chosen"] > 0.9
    assert names["curve"][0] > names["curve"][-1]
    assert (names["folder"] / "folded.safetensors").is_file()
