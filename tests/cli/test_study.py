"""`intertwine study run` and `intertwine report`: output, files, exit codes and errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_folders import write_images

import intertwine as it
from intertwine.cli import main
from intertwine.cli.study import EXECUTORS
from intertwine.errors import InputError
from intertwine.lab.study.executors import EXECUTORS as KNOWN
from intertwine.lab.study.store import Store

# -- study run ---------------------------------------------------------------------------------------------------------

pytest.importorskip("polars")
pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = """\
name = "two digits networks"
[zoos.z]
folder = "{folder}"
[[parts]]
verb = "accuracy"
[[parts]]
verb = "barrier"
options = {{ points = 3 }}
grid = {{ method = ["none", "weights"] }}
"""
#: No network can be folded to nothing, which only the task finds out.
FAILING = '[[parts]]\nverb = "fold"\nnetworks = [0]\noptions = { at = [1e-9] }\n'
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("zoos") / "z"
    it.zoo.train("mlp", seeds=range(2), data="digits", out=place, options={"widths": (64, 16, 10)}, epochs=2)
    return place


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def done(*words: str | Path) -> tuple[int, str, str]:
        code = main(["study", "run", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return done


def plan(folder: Path, zoo: Path, more: str = "") -> Path:
    path = folder / "plan.toml"
    path.write_text(PLAN.format(folder=zoo) + more, encoding="utf-8")
    return path


def test_a_plan_is_carried_out_and_gone_on_with(zoo: Path, tmp_path: Path, run: Run) -> None:
    code, out, _ = run(plan(tmp_path, zoo), "--out", tmp_path / "s")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "two digits networks: 4 tasks, 4 of them run now"
    assert [line.split()[:3] for line in lines[2:4]] == [["accuracy", "2", "2"], ["barrier", "2", "16"]]
    assert lines[-1] == f"results in {tmp_path / 's'}"
    frame = Store.existing(tmp_path / "s").frame()
    assert len(frame) == 18
    command = frame["command"].to_list()[0]
    assert command.startswith(f"intertwine study run {tmp_path / 'plan.toml'} --out {tmp_path / 's'} --only ")
    code, out, _ = run(plan(tmp_path, zoo), "--out", tmp_path / "s", "--json")
    told = json.loads(out)
    assert (code, told["tasks"], told["run"], told["failed"]) == (0, 4, 0, 0)
    code, out, _ = run(plan(tmp_path, zoo), "--out", tmp_path / "s", "--json", "--only", command.split()[-1])
    assert json.loads(out)["run"] == 1


def test_failed_tasks_are_shown_and_give_exit_code_1(zoo: Path, tmp_path: Path, run: Run) -> None:
    code, out, _ = run(plan(tmp_path, zoo, FAILING), "--out", tmp_path / "s")
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("failed: ")]
    assert "Less than one of" in line


def test_bad_plans_are_refused_with_line_and_reason(zoo: Path, tmp_path: Path, run: Run) -> None:
    path = plan(tmp_path, zoo)
    path.write_text(path.read_text().replace('verb = "barrier"', 'verb = "barier"'))
    code, out, err = run(path, "--out", tmp_path / "s")
    assert (code, out) == (2, "")
    assert "Part 2 (line 6): Unknown verb 'barier'. Did you mean 'barrier'?" in err
    assert not (tmp_path / "s").exists()
    code, _, err = run(tmp_path / "none.toml")
    assert code == 2
    assert "Cannot read the plan" in err
    assert "(No such file or directory). Give the path of a TOML file." in err


def test_the_executors_of_the_command_line_are_those_of_the_library() -> None:
    assert EXECUTORS == KNOWN


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom intertwine.cli import main\ntry:\n    main(['study', 'run', '--help'])\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 0
    assert "--executor" in told.stdout


# -- report ------------------------------------------------------------------------------------------------------------

pytest.importorskip("polars")


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
    for words in ("two networks", "digits-mlp", "error_barrier", "linear_cka", "parameters cannot be reached", "S_16"):
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
