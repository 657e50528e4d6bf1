"""The command line: `report`, and `report.write` from a study, its folder and a table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_folders import write_images

import intertwine as it
from intertwine.cli import main
from intertwine.errors import InputError

pytest.importorskip("polars")
pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Any:
    zoo = {"architecture": "mlp", "data": "digits", "seeds": "0:2", "epochs": 2, "options": {"widths": [64, 16, 10]}}
    parts = [
        {"verb": "barrier", "options": {"points": 3}, "grid": {"method": ["none", "weights"]}},
        {"verb": "fold", "networks": [0], "options": {"at": [1e-9]}},  # which only the task finds out to be too few
        {"verb": "compare", "layers": ["1", "2"]},
    ]
    plan = {"name": "two networks", "zoos": {"digits-mlp": zoo}, "parts": parts}
    return it.study.run(plan, out=tmp_path_factory.mktemp("studies") / "s")


def test_a_report_shows_the_verbs_the_networks_the_plan_and_what_failed(study: Any, tmp_path: Path) -> None:
    path = it.report.write(study, tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    for words in ("two networks", "digits-mlp", "error_barrier", "linear_cka", "parameters were asked for", "S_16"):
        assert words in text, words
    assert len(text) < 10_000_000
    assert it.report.write(study.folder, tmp_path / "again.html").read_text() == text


def test_a_table_alone_is_enough(study: Any, tmp_path: Path) -> None:
    text = it.report.write(study.frame(), tmp_path / "table.html").read_text()
    assert "linear_cka" in text
    assert "S_16" not in text  # networks are in the study's folder, not in its table


def test_results_are_shown_where_the_networks_are_gone(tmp_path: Path) -> None:
    zoo = it.zoo.train("mlp", seeds=[0], data="digits", out=tmp_path / "z", epochs=1)
    plan = {"name": "p", "zoos": {"z": {"folder": str(zoo.folder)}}, "parts": [{"verb": "accuracy"}]}
    study = it.study.run(plan, out=tmp_path / "s")
    shutil.rmtree(zoo.folder)
    assert "accuracy" in it.report.write(study, tmp_path / "r.html").read_text()


def test_the_wires_are_shown_where_the_images_are_gone(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    options = {"widths": [75, 7, 2]}
    zoo = it.zoo.train("mlp", seeds=[0], data=f"folder:{images}", out=tmp_path / "z", epochs=1, options=options)
    plan = {"name": "p", "zoos": {"z": {"folder": str(zoo.folder)}}, "parts": [{"verb": "accuracy"}]}
    study = it.study.run(plan, out=tmp_path / "s")
    shutil.rmtree(images)
    assert "S_7" in it.report.write(study.folder, tmp_path / "r.html").read_text()


def test_the_command(study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(study.folder)]) == 0
    assert capsys.readouterr().out.startswith(f"the report is {study.folder / 'report.html'}, 0.")
    assert main(["report", str(study.folder), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(tmp_path / "r.html")
    for name in ("x[a]", "x[/b]"):  # which rich would read as markup
        (tmp_path / name).mkdir(parents=True)
        assert main(["report", str(study.folder), "--out", str(tmp_path / name / "r.html")]) == 0
        assert capsys.readouterr().out.startswith(f"the report is {tmp_path / name / 'r.html'}, 0.")
    assert main(["report", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    with pytest.raises(InputError):
        it.report.write(tmp_path, tmp_path / "r.html")
