"""`intertwine align`: what it prints and writes, what it says of the barrier, and its refusals."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import intertwine as it
from intertwine.align.align import Alignment, WirePart
from intertwine.checkpoints import Loaded
from intertwine.cli import align as command
from intertwine.cli import main
from intertwine.cli.arguments import method_options

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[..., tuple[int, str, str]]
KEYS = {
    *("first", "second", "dataset", "method", "before", "after", "history", "per_wire", "seconds", "barrier"),
    *("out", "element", "plot"),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zoo")
    it.zoo.train("mlp", seeds=[0, 1], data="digits", out=folder, epochs=5, options={"widths": [64, 16, 12, 10]})
    return str(folder)


@pytest.fixture
def run(zoo: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `intertwine align` on the two networks; gives exit code, standard output and standard error."""

    def done(*words: str | Path) -> tuple[int, str, str]:
        code = main(["align", f"{zoo}:0", f"{zoo}:1", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return done


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Σ ‖A − B‖² over all weights but the last bias, on which no wire acts."""
    return sum(float((a[n].double() - b[n].double()).square().sum()) for n in a if n != "5.bias")


# -- what it prints ----------------------------------------------------------------------------------------------------


def test_distances_and_the_share_left_per_wire(run: Run, zoo: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "moved.safetensors"
    code, said, _ = run("--out", out)
    assert code == 0
    a, b = (it.zoo.load(zoo).seed(seed).state_dict() for seed in (0, 1))
    moved = load_file(out)
    before, after = distance(a, b), distance(a, moved)
    assert after < 0.9 * before
    assert f"squared distance {before:.4g} → {after:.4g}, {after / before:.1%} left; 2 of 2 wires moved" in said
    assert re.search(rf"^{re.escape(zoo)}:1 moved onto {re.escape(zoo)}:0 by weights, in \d+\.\d\d s$", said, re.M)
    first = {n: a[n] for n in ("1.weight", "1.bias", "3.weight")}
    x, y = distance(first, b), distance(first, moved)
    row = next(line.split() for line in said.splitlines() if line.split()[:2] == ["1", "16"])
    assert row[2:] == [f"{x:.4g}", f"{y:.4g}", f"{y / x:.1%}"]
    assert "barrier" not in said
    assert said.rstrip().endswith(f"wrote {out}")


def test_what_it_writes_is_the_same_function_and_loads_again(
    run: Run, zoo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, element = tmp_path / "moved.safetensors", tmp_path / "g.safetensors"
    assert run("--method", "scale-aware", "--out", out, "--element", element, "--json")[0] == 0
    a, b = it.zoo.load(zoo)[:]
    sym = it.symmetry(b, torch.zeros(1, 1, 8, 8))
    by_hand = sym.act(it.Element.load(element), b).state_dict()
    written = load_file(out)
    assert by_hand.keys() == written.keys()
    assert all(torch.equal(by_hand[name], written[name]) for name in written)
    x = torch.randn(20, 1, 8, 8)
    moved = it.zoo.load(zoo).seed(0)
    moved.load_state_dict(written)
    assert torch.allclose(moved(x), b(x), atol=1e-4)
    assert not torch.allclose(moved(x), a(x), atol=0.1)
    # the file serves as a checkpoint: aligned once more, nothing is left to gain
    assert main(["align", f"{zoo}:0", f"{zoo}:0", "--weights-b", str(out), "--method", "scale-aware", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["before"] == pytest.approx(distance(a.state_dict(), written), rel=1e-5)
    assert again["after"] > 0.98 * again["before"]


def test_json_is_json_alone_and_the_same_as_python(run: Run, zoo: str) -> None:
    call = ("--json", "--data", "digits", "--samples", "1437", "--method", "activations", "--option", "cost=inner")
    code, said, _ = run(*call, "--batch", "2000")
    assert code == 0
    found = json.loads(said)
    assert found.keys() == KEYS
    a, b = it.zoo.load(zoo)[:]
    data = it.zoo.data("digits")
    expected = it.align(
        a, b, torch.zeros(1, 1, 8, 8), method="activations", data=data.batches("train", 2000), options={"cost": "inner"}
    )
    assert found["after"] == pytest.approx(expected.after, rel=1e-6)
    assert found["per_wire"] == json.loads(json.dumps(expected.to_dict()["per_wire"]))
    assert (found["dataset"], found["method"], found["out"], found["seconds"] > 0) == ("digits", "activations", None, 1)
    ends = {"before": (a, b), "after": (expected.reference, expected.model)}
    for when, pair in ends.items():
        line = it.barrier(*pair, data.batches("test", 360), points=11)
        assert found["barrier"][when]["loss_barrier"] == pytest.approx(line.loss_barrier, abs=1e-5)
        assert found["barrier"][when]["error_barrier"] == pytest.approx(line.error_barrier, abs=1e-9)
    assert found["barrier"]["worse"] == []
    assert found["barrier"]["after"]["data"]["samples"] == 360


def test_the_barrier_before_and_after(run: Run) -> None:
    code, said, _ = run("--data", "digits", "--samples", "100")
    assert code == 0
    assert "on 100 test images, 11 networks from one to the other\nbefore: loss barrier" in said
    (before, after) = re.findall(r"loss barrier ([\d.]+) at t = [\d.]+, error barrier [\d.]+%", said)
    assert float(after) < float(before)
    assert "worse" not in said


def test_an_alignment_that_raises_the_barrier_is_told(
    zoo: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    align = it.align

    def astray(a: Any, b: Any, **how: Any) -> Alignment:
        sym = how["symmetry"]
        return replace(align(a, b, **how), model=sym.act(sym.random(seed=1), b))

    monkeypatch.setattr(import_module("intertwine.align.align"), "align", astray)
    call = ["align", f"{zoo}:0", f"{zoo}:0", "--data", "digits"]
    assert main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["barrier"]
    words = []
    for kind in ("loss", "error"):
        before, after = (found[when][f"{kind}_barrier"] for when in ("before", "after"))
        assert before < 1e-9 < 0.1 < after
        words.append(f"the {kind} barrier rose from {before:.4f} to {after:.4f}")
    assert found["worse"] == words
    assert main(call) == 0
    assert f"The alignment made it worse: {words[0]} and {words[1]}.\n" in capsys.readouterr().out


def test_bad_news_is_red(zoo: str) -> None:
    a, b = it.zoo.load(zoo)[:]
    batches = it.zoo.data("digits").batches("test", 360)
    good, bad = it.barrier(a, a, batches, points=3), it.barrier(a, b, batches, points=3)
    told = command._barriers(command.BarrierChange(good, bad))
    assert [span.style for span in told.spans if "worse" in told.plain[span.start : span.end]] == ["bold red"]
    for same in (command.BarrierChange(bad, good), command.BarrierChange(bad, bad)):
        assert "worse" not in command._barriers(same).plain


def test_weights_that_move_apart_are_told(zoo: str) -> None:
    """Methods that lower a measure of their own may raise the distance of the weights."""
    a, b = it.zoo.load(zoo)[:]
    sym = it.symmetry(a, torch.zeros(1, 1, 8, 8))
    found = it.align(a, b, symmetry=sym)
    loaded = Loaded("x", a, (), {})
    farther = replace(found, before=1.0, after=2.0)
    assert "The weights are farther apart than before" in command._summary(loaded, loaded, farther, 0.1).plain
    assert "200.0% left" in command._summary(loaded, loaded, farther, 0.1).plain
    assert "farther" not in command._summary(loaded, loaded, found, 0.1).plain


def test_equal_networks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["align", "zoo:lenet", "zoo:lenet", "--starts", "1"]) == 0
    said = capsys.readouterr().out
    assert "squared distance 0 → 0; 0 of" in said
    assert "The two have the same weights" in said


def test_many_wires_are_cut_to_those_with_most_left(zoo: str) -> None:
    a, b = it.zoo.load(zoo)[:]
    found = it.align(a, b, torch.zeros(1, 1, 8, 8))
    wire = found.symmetry.wires[0]
    many = [replace(wire, name=f"w{i}") for i in range(30)]
    parts = tuple(WirePart(f"w{i}", 100.0, float(i)) for i in range(30))
    table = command._wires(replace(found, per_wire=parts, symmetry=replace(found.symmetry, wires=tuple(many))))
    names = list(table.columns[0].cells)
    assert names == [*(f"w{i}" for i in range(6, 30)), "and 6 more, with no more left; --json has all"]


# -- what it is told ---------------------------------------------------------------------------------------------------


def test_only_some_wires(run: Run, tmp_path: Path) -> None:
    element = tmp_path / "g.safetensors"
    code, said, _ = run("--wires", "3", "--element", element)
    assert code == 0
    assert "1 of 2 wires moved" in said
    units = it.Element.load(element)["1"].permutation
    assert units is not None
    assert torch.equal(units, torch.arange(16))
    assert "1 of 2 wires" not in run("--wires", "1,3")[1]


def test_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two linear layers with nothing between meet in any invertible matrix."""
    file = tmp_path / "nets.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def net(): return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))\n"
        "def example_inputs(): return torch.zeros(2, 3)\n"
    )
    model, other = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4)), tmp_path / "b.pt"
    sym = it.symmetry(model, torch.zeros(2, 3), continuous=True)
    assert sym.wire_specs[0].matrix
    torch.save(model.state_dict(), tmp_path / "a.pt")
    torch.save(sym.act(sym.random(seed=0), model).state_dict(), other)
    call = [
        "align",
        f"{file}:net",
        f"{file}:net",
        "--weights",
        str(tmp_path / "a.pt"),
        "--weights-b",
        str(other),
        "--json",
    ]
    shares = []
    for more in ([], ["--continuous", "--out", str(tmp_path / "moved.safetensors")]):
        assert main([*call, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        shares.append(found["after"] / found["before"])
    assert shares[1] < 0.1 * shares[0]
    again = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4))
    again.load_state_dict(load_file(tmp_path / "moved.safetensors"))
    x = torch.randn(9, 3)
    assert torch.allclose(again(x), model(x), atol=1e-4)


@pytest.mark.parametrize("kind", ["svg", "PNG"])
def test_a_picture(run: Run, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "deep" / f"units.{kind}"
    code, said, _ = run("--data", "digits", "--samples", "60", "--plot", file)
    assert code == 0
    assert f"wrote {file}" in said
    begins = {"svg": b"<?xml", "PNG": b"\x89PNG"}
    assert file.read_bytes().startswith(begins[kind])


def test_a_search_is_set_up_as_asked(run: Run) -> None:
    histories = [json.loads(run("--json", "--seed", "1", "--starts", starts)[1])["history"] for starts in ("1", "4")]
    starts = [{step["start"] for step in history} - {"best start"} for history in histories]
    assert [len(names) for names in starts] == [1, 4]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--method", "weihgts"], "Unknown method 'weihgts'. Did you mean 'weights'?"),
        (["--method", "activations"], "compares activations on data, and no data is given. Add --data NAME"),
        (["--plot", "x.svg"], "how units correlate on data, and no data is given. Add --data NAME"),
        (["--plot", "x.pdf"], "Unknown kind of picture x.pdf. Choose a name that ends in .svg or .png."),
        (["--wires", "1,7"], "Unknown wire '7'."),
        (["--option", "relative"], "--option 'relative' is not of the form NAME=VALUE"),
        (["--option", "relativ=True"], "has no option 'relativ'. Did you mean 'relative'?"),
        (["--option", "relative=false"], "'weights' must be True or False, but is 'false'."),
        (["--data", "didgits"], "Did you mean 'digits'?"),
        (["--data-folder", "here"], "--data-folder here is given without a data set. Add --data NAME."),
        (["--weights-b", "none.pt"], "There is no file none.pt"),
        (["--out", "/dev/null/x"], "could not be written"),
    ],
)  # fmt: skip
def test_refusals(run: Run, words: list[str], text: str) -> None:
    code, said, complaint = run(*words)
    assert (code, said) == (2, "")
    assert text in complaint


def test_other_architectures(zoo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["align", f"{zoo}:0", "zoo:mlp"]) == 2
    complaint = capsys.readouterr().err
    assert "different architectures: '1.weight' has shape (16, 64) in the first and has shape (512, 784)" in complaint


# -- what the commands on networks share -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "text", "wanted"),
    [
        ("sinkhorn", "steps=2.5", "a whole number"),
        ("sinkhorn", "steps=True", "a whole number"),
        ("sinkhorn", "rate=fast", "a number"),
        ("sinkhorn", "at=half", "a number or None"),
        ("sinkhorn", "loss=mine", "None"),
        ("activations", "cost=1", "a word"),
    ],
)
def test_an_option_of_the_wrong_kind(method: str, text: str, wanted: str) -> None:
    with pytest.raises(it.InputError, match=f"must be {wanted}, but is .*Leave it out"):
        method_options(method, [text])


def test_options_of_the_right_kind() -> None:
    given = method_options("sinkhorn", ["steps=20", "rate=1", "at=None", "temperature=0.5"])
    assert given == {"steps": 20, "rate": 1, "at": None, "temperature": 0.5}
    assert method_options("none of these", ["anything=1"]) == {"anything": 1}


@pytest.mark.parametrize("name", ["align", "barrier", "merge"])
def test_help_does_not_import_torch(name: str) -> None:
    code = f"import sys; from intertwine.cli import main\ntry: main(['{name}', '--help'])\n"
    code += "except SystemExit: print({'torch', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: intertwine" in done.stdout
    assert done.stdout.endswith("set()\n")
