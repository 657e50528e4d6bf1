"""The command line: `study run`, what it prints and writes, its exit codes and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import intertwine as it
from intertwine.cli import main
from intertwine.commands.arguments.study import EXECUTORS
from intertwine.study import Store
from intertwine.study.executors import EXECUTORS as KNOWN

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
    assert "Fewer than one of" in line


def test_bad_plans_are_refused_with_line_and_reason(zoo: Path, tmp_path: Path, run: Run) -> None:
    path = plan(tmp_path, zoo)
    path.write_text(path.read_text().replace('verb = "barrier"', 'verb = "barier"'))
    code, out, err = run(path, "--out", tmp_path / "s")
    assert (code, out) == (2, "")
    assert "Part 2 (line 6): there is no verb 'barier'. Did you mean barrier?" in err
    assert not (tmp_path / "s").exists()
    code, _, err = run(tmp_path / "none.toml")
    assert code == 2
    assert "cannot be read (No such file or directory). Give the path of a TOML file." in err


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
