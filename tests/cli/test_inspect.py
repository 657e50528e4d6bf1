"""The command line: what `inspect` and `demo` print and write, their exit codes, and the words of every refusal."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file

from intertwine.cli import main
from intertwine.symmetry.symmetry import Certificate, FailedOp, Symmetry

SOURCE = Path(__file__).parents[2] / "src"
FILE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
    def forward(self, x):
        return self.second(torch.linalg.qr(self.first(x)).R)

class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, x):
        return torch.softmax(self.layer(x).sum(-1, keepdim=True), -1)

def mlp():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

def linear():
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))

def blocks():
    return nn.Sequential(nn.Linear(3, 6), *(Block() for _ in range(6)), nn.Linear(6, 2))

def example_inputs():
    return torch.randn(2, 3)
"""

Inspect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nets(tmp_path: Path) -> str:
    path = tmp_path / "nets.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def run(nets: str, capsys: pytest.CaptureFixture[str]) -> Inspect:
    """Runs `intertwine inspect`; gives exit code, standard output and standard error."""

    def inspected(model: str, *options: str) -> tuple[int, str, str]:
        code = main(["inspect", model.format(nets=nets), *(option.format(nets=nets) for option in options)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return inspected


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_shows_header_tree_frozen_axes_and_certificate(run: Inspect, nets: str) -> None:
    code, out, err = run("{nets}:mlp")
    assert (code, err) == (0, "")
    header, *rest = out.split("\n")
    assert header.startswith(f"{nets}:mlp · 122 parameters · 2 wires · e^21 permutations · 8 continuous dimensions")
    assert "98.36% coverage" in header
    text = "\n".join(rest)
    assert re.search(r"├── 0 +8  S_8 ⋉ \(R₊\)\^8\n└── 2 +8  S_8 ⋉ {±1}\^8\n", text)
    assert "frozen: 3 axes" in text
    assert "2  it is an axis of the model's output (4.weight axis 0, 4.bias axis 0)" in text
    assert "1  it meets an input of the model (0.weight axis 1)" in text
    assert re.search(r"✓ certified: outputs change by \d.\de-1\d, .* over 3 random elements in float64", text)


def test_the_legend_explains_what_occurs_and_nothing_else(run: Inspect) -> None:
    _, out, _ = run("{nets}:mlp", "--no-certify")
    assert "S_n all orders of n indices · R₊ positive scales · {±1} signs · ⋉ together\n" in out


def test_repeated_blocks_are_told_once(run: Inspect) -> None:
    _, out, _ = run("{nets}:blocks", "--no-certify")
    assert "1 … 6 (×6)\n    └── up" in out
    assert out.count("up") == 1


def test_slots_and_frozen_axes_in_full(run: Inspect) -> None:
    _, out, _ = run("{nets}:mlp", "--slots", "--frozen", "--no-certify")
    for line in ("├── 0.weight[axis 0] ", "└── 2.weight[axis 1] ", "  0.weight axis 1: it meets an input of the model"):
        assert line in out
    assert "not certified" in out
    assert "certified:" not in out


def test_an_op_without_a_rule_is_named(run: Inspect) -> None:
    code, out, _ = run("{nets}:Strange")
    assert code == 0
    assert "ops without a rule, what they touch is frozen:" in out
    assert re.search(r"1  aten.linalg_qr\S* \(first at nets.py:17\)", out)
    assert "none: only the identity preserves the function of this network" in out


def test_a_certificate_that_proves_nothing_says_so(run: Inspect) -> None:
    code, out, _ = run("{nets}:Constant")
    assert code == 0
    assert "certificate empty: the outputs do not depend on the weights" in out


def test_trials_are_passed_on(run: Inspect) -> None:
    assert "over 1 random element in float64" in " ".join(run("{nets}:mlp", "--trials", "1")[1].split())


def test_continuous_lets_matrices_act(run: Inspect) -> None:
    plain, continuous = (json.loads(run("{nets}:linear", "--json", *more)[1]) for more in ([], ["--continuous"]))
    assert [w["group"] for w in plain["wires"]] == ["S_5 ⋉ (R*)^5"]
    assert [w["group"] for w in continuous["wires"]] == ["GL(5)"]
    assert continuous["certificate"]["ok"]


def test_json_holds_everything(run: Inspect, nets: str) -> None:
    code, out, err = run("{nets}:mlp", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["model"] == f"{nets}:mlp"
    assert (found["parameters"], found["inputs"]) == (122, ["float32 2×3"])
    assert [(w["name"], w["size"], w["group"]) for w in found["wires"]] == [
        ("0", 8, "S_8 ⋉ (R₊)^8"),
        ("2", 8, "S_8 ⋉ {±1}^8"),
    ]
    assert {"what": "0.weight axis 1", "reason": "it meets an input of the model"} in found["frozen"]
    assert found["certificate"]["ok"] is True
    assert set(found["certificate"]["per_wire"]) == {"0", "2"}
    assert 0.98 < found["coverage"] < 0.99
    assert (found["dimension"], found["unsupported"]) == (8, [])
    assert json.loads(run("{nets}:mlp", "--json", "--no-certify")[1])["certificate"] is None


def test_svg_is_written_where_asked(run: Inspect, tmp_path: Path) -> None:
    path = tmp_path / "pictures" / "mlp.svg"
    assert run("{nets}:mlp", "--svg", str(path))[0] == 0
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    assert {g.get("data-wire") for g in root.iter() if g.get("data-wire")} == {"0", "2"}


def test_weights_are_loaded(run: Inspect, tmp_path: Path) -> None:
    shapes = {
        "0.weight": (8, 3),
        "0.bias": (8,),
        "2.weight": (8, 8),
        "2.bias": (8,),
        "4.weight": (2, 8),
        "4.bias": (2,),
    }
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "w.safetensors")
    assert run("{nets}:mlp", "--weights", str(tmp_path / "w.safetensors"))[0] == 0


# -- exit codes --------------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let every certificate come out with some changes."""
    honest = Symmetry.certify
    monkeypatch.setattr(Symmetry, "certify", lambda *args, **kwargs: replace(honest(*args, **kwargs), **changes))


def test_a_failed_certificate_exits_with_1(run: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ok=False, max_error=0.25)
    code, out, _ = run("{nets}:mlp")
    assert code == 1
    assert "✗ not a symmetry: outputs change by 2.5e-01" in out
    code, out, _ = run("{nets}:mlp", "--json")
    assert (code, json.loads(out)["certificate"]["ok"]) == (1, False)


def test_an_infinite_error_is_still_json(run: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ok=False, max_error=float("inf"))
    assert json.loads(run("{nets}:mlp", "--json")[1])["certificate"]["max_error"] == "inf"


def test_what_broke_is_told_with_its_place(run: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = FailedOp("aten.relu.default", "nets.py:8 in 1", ("0", "2", "3", "4", "5"), 0.5)
    failing(monkeypatch, broken=(broken,))
    code, out, _ = run("{nets}:mlp")
    assert code == 0
    assert "broke at aten.relu.default (nets.py:8 in 1) by 5.0e-01; frozen there: 0, 2, 3 and 2 more" in out


def test_what_is_shown_is_what_the_certificate_left(run: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Symmetry.certify

    def without_relu(self: Symmetry, *args: Any, **kwargs: Any) -> Certificate:
        call = next(c.name for c in self.geometry.graph.program.calls if "relu" in c.op)
        return replace(honest(self, *args, **kwargs), symmetry=self.distrusting(call))

    monkeypatch.setattr(Symmetry, "certify", without_relu)
    assert [w["name"] for w in json.loads(run("{nets}:mlp", "--json")[1])["wires"]] == ["2"]
    assert "· 1 wire ·" in run("{nets}:mlp")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["keras:net"], "Unknown model 'keras:net'. Name it in one of these ways"),
        (["nowhere.py:mlp"], "There is no file nowhere.py"),
        (["{nets}:cnn"], "Unknown function 'cnn' in"),
        (["{nets}:mlp", "--weights", "nowhere.safetensors"], "There is no file nowhere.safetensors"),
        (["{nets}:mlp", "--input", "3by4"], "The input '3by4' is not understood"),
        (["{nets}:mlp", "--input", "2x5"], "raises RuntimeError when called with float32 2×5: mat1"),
        (["{nets}:mlp", "--input", "int:2x3"], "raises RuntimeError when called with int64 2×3: mat1"),
        (["{nets}:mlp", "--svg", "{nets}/mlp.svg"], "could not be written"),
    ],
)
def test_a_users_error_exits_with_2_and_a_message_alone(run: Inspect, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("intertwine: ")
    assert message in err
    assert "Traceback" not in err


def test_weights_of_another_network(run: Inspect, tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(9, 3)}, tmp_path / "w.safetensors")
    code, _, err = run("{nets}:mlp", "--weights", str(tmp_path / "w.safetensors"))
    assert code == 2
    assert "do not fit Sequential: 5 missing from the file: 0.bias" in err
    assert "1 of another shape: 0.weight (file (9, 3), model (8, 3))" in err


def test_a_pickle_that_would_run_code_is_refused(run: Inspect, tmp_path: Path) -> None:
    torch.save({"0.weight": print}, tmp_path / "w.pt")
    code, _, err = run("{nets}:mlp", "--weights", str(tmp_path / "w.pt"))
    assert code == 2
    assert "is refused: reading it could run code" in err


def test_a_certificate_too_large_for_the_machine(run: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intertwine.checkpoints.libraries.physical_memory", lambda: 1000)
    code, _, err = run("{nets}:mlp")
    assert code == 2
    assert "Pass --no-certify" in err
    assert run("{nets}:mlp", "--no-certify")[0] == 0


@pytest.mark.parametrize("arguments", [["fly"], ["inspect"], ["inspect", "a", "--trials", "0"], ["demo", "--in", "x"]])
def test_a_malformed_command_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "usage: intertwine" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"intertwine {version('intertwine')}\n"  # as pyproject.toml has it


@pytest.mark.parametrize(("package", "extra"), [("rich", "cli"), ("sklearn", "data")])
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, extra: str
) -> None:
    def missing(options: Namespace) -> int:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("intertwine.cli.demo.run", missing)
    assert main(["demo"]) == 2
    assert f"needs the package {package}: pip install 'intertwine[{extra}]'" in capsys.readouterr().err


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("intertwine.cli.demo.run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "intertwine: stopped; the same command resumes from here\n"


# -- as a program ------------------------------------------------------------------------------------------------------


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "intertwine.cli", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)


def test_json_of_the_program_is_json_alone(nets: str) -> None:
    done = program("inspect", f"{nets}:mlp", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["wires"]) == 2


def test_an_error_of_the_program_is_one_message() -> None:
    done = program("inspect", "keras:net")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("intertwine: Unknown model 'keras:net'")
    assert done.stderr.count("\n") == 1


@pytest.mark.models
def test_a_library_model_end_to_end(run: Inspect) -> None:
    code, out, _ = run("timm:test_resnet")
    assert code == 0
    assert out.startswith("timm:test_resnet · ")
    assert "✓ certified" in out


# -- what was not understood -------------------------------------------------------------------------------------------


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words, usage in (([], "usage: intertwine [-h]"), (["zoo"], "usage: intertwine zoo [-h]")):
        assert main(words) == 0
        said = capsys.readouterr()
        assert said.out.startswith(usage)
        assert said.err == ""


@pytest.mark.parametrize(
    ("words", "usage", "text"),
    [
        (["inpsect"], "usage: intertwine [-h]", "Unknown value 'inpsect' for COMMAND. Did you mean 'inspect"),
        (["inspect", "a", "--frozn"], "usage: intertwine inspect", "Unknown argument --frozn. Did you mean '--frozen"),
        (["inspect", "a", "b"], "usage: intertwine inspect", "Unknown argument b."),
        (["inspect", "a", "--trials", "x"], "usage: intertwine inspect", "'x' is not a whole number; write one"),
        (["fold", "a", "--floor", "x"], "usage: intertwine fold", "'x' is not a number; write one such as 0.5"),
        (["fold", "a", "--floor", "nan"], "usage: intertwine fold", "nan is not a finite number"),
    ],
)  # fmt: skip
def test_mistyped_lines(words: list[str], usage: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    complaint = capsys.readouterr().err
    assert caught.value.code == 2
    assert complaint.startswith(usage)
    assert text in complaint


def test_a_picture_of_another_kind_is_refused(run: Inspect, tmp_path: Path) -> None:
    code, _, complaint = run("{nets}:mlp", "--svg", str(tmp_path / "wires.png"))
    assert code == 2
    assert "wires.png. Choose a name that ends in .svg." in complaint
    assert not (tmp_path / "wires.png").exists()
    assert f"\nwrote {tmp_path / 'wires.svg'}\n" in run("{nets}:mlp", "--svg", str(tmp_path / "wires.svg"))[1]


def test_what_a_file_prints_does_not_get_between_the_json(run: Inspect, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(FILE + 'print("imported")\n')
    code, said, err = run(f"{tmp_path / 'loud.py'}:mlp", "--json")
    assert (code, err) == (0, "imported\n")
    assert json.loads(said)["certificate"]["ok"]


def test_a_text_is_no_checkpoint(run: Inspect, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Not weights\n")
    code, _, complaint = run("{nets}:mlp", "--weights", str(tmp_path / "README.md"))
    assert code == 2
    assert "README.md is not a checkpoint, or a damaged one: it is neither a safetensors file" in complaint
    assert "run code" not in complaint
