"""The command line: `canonicalize` and `canonicalize --dedupe`, what they print and write, and their refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import intertwine as it
from intertwine.cli import main
from intertwine.symmetry.symmetry import Certificate, Symmetry

FILE = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.up, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7)
        self.head.weight = self.emb.weight
    def forward(self, i):
        return self.head(torch.relu(self.up(self.emb(i))))

def mlp():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

def tied():
    return Tied()

def example_inputs():
    return torch.randn(2, 3)
"""
INPUT = torch.zeros(2, 3)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nets(tmp_path: Path) -> str:
    path = tmp_path / "nets.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def run(nets: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `intertwine canonicalize` on a network of the file; gives exit code, standard output and standard error."""

    def done(factory: str, *options: str) -> tuple[int, str, str]:
        code = main(["canonicalize", f"{nets}:{factory}", *options])
        said = capsys.readouterr()
        return code, said.out, said.err

    return done


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two networks; a moved, a noisy and a plain copy of the first; two files that are no copies of anything."""
    place = tmp_path / "zoo"
    (place / "more").mkdir(parents=True)
    first, second = mlp(0), mlp(1)
    sym = it.symmetry(first, INPUT)
    noisy = {
        k: v * (1 + 1e-6 * torch.randn_like(v)) for k, v in sym.act(sym.random(seed=2), first).state_dict().items()
    }
    save_file(first.state_dict(), place / "a.safetensors")
    save_file(sym.act(sym.random(seed=1), first).state_dict(), place / "b.safetensors")
    torch.save(noisy, place / "c.pt")
    save_file(first.state_dict(), place / "d.safetensors")
    save_file(second.state_dict(), place / "more" / "e.safetensors")
    (place / "f.safetensors").write_bytes(b"not a checkpoint")
    save_file({"x": torch.zeros(2)}, place / "g.safetensors")
    (place / "notes.txt").write_text("no checkpoint")
    return place


def test_the_canonical_weights_and_the_element_are_written(run: Run, tmp_path: Path, folder: Path) -> None:
    out, element = tmp_path / "deep" / "canon.safetensors", tmp_path / "deep" / "g.safetensors"
    code, said, _ = run("mlp", "--weights", str(folder / "b.safetensors"), "--out", str(out), "--element", str(element))
    assert code == 0
    expected = it.canonicalize(mlp(0), INPUT).model.state_dict()
    written = load_file(out)
    assert all(torch.allclose(written[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)
    moved = mlp(0)
    moved.load_state_dict(load_file(folder / "b.safetensors"))
    again = it.symmetry(moved, INPUT).act(it.Element.load(element), moved).state_dict()
    assert all(torch.equal(again[name], written[name]) for name in written)
    for words in ("122 parameters", "fingerprint  ", "lexicographic order: 2 of 2 wires moved", f"wrote {out}"):
        assert words in said


def test_json_is_json_alone_and_names_the_orbit(run: Run, folder: Path) -> None:
    marks = []
    for name in ("a", "b", "d"):
        code, said, _ = run("mlp", "--weights", str(folder / f"{name}.safetensors"), "--json")
        assert code == 0
        marks.append(json.loads(said)["fingerprint"])
    assert len(set(marks)) == 1
    _, said, _ = run("mlp", "--weights", str(folder / "more" / "e.safetensors"), "--json", "--order", "nodesort")
    other = json.loads(said)
    assert other["fingerprint"] != marks[0]
    assert (other["order"], other["unique"], other["doubts"]) == ("nodesort", True, [])


def test_the_printed_order_says_that_it_is_in_doubt(run: Run) -> None:
    _, said, _ = run("mlp", "--order", "nodesort-printed")
    assert "in doubt: as printed, NodeSort depends on the order of the units" in said


def test_tied_weights_are_written_once_and_load_again(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "tied.safetensors"
    assert run("tied", "--input", "int:1x4", "--out", str(out))[0] == 0
    assert set(load_file(out)) == {"emb.weight", "up.weight", "up.bias", "head.bias"}
    code, said, _ = run("tied", "--input", "int:1x4", "--weights", str(out))
    assert code == 0
    assert "0 of 2 wires moved" in said or "0 of 1 wires moved" in said  # it is its own canonical form


def test_dedupe_finds_copies_up_to_symmetry_and_noise(run: Run, folder: Path) -> None:
    code, said, _ = run("mlp", "--dedupe", str(folder))
    assert code == 0
    assert f"7 checkpoints in {folder} · 2 different, 3 copies of these, 2 not read" in said
    rows = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert "moved " in rows["b.safetensors"]
    assert "moved, with noise" in rows["c.pt"] or "moved " in rows["c.pt"]
    assert "identical" in rows["d.safetensors"]
    assert "is a copy of" in said
    assert "more/e.safetensors" in rows
    assert "f.safetensors cannot be read as a checkpoint" in said
    assert "The weights in g.safetensors do not fit Sequential" in said


def test_dedupe_as_json(run: Run, folder: Path) -> None:
    _, said, _ = run("mlp", "--dedupe", str(folder), "--json")
    found = json.loads(said)
    families = {f["first"]: [c["name"] for c in f["copies"]] for f in found["families"]}
    assert families == {"a.safetensors": ["b.safetensors", "c.pt", "d.safetensors"], "more/e.safetensors": []}
    assert set(found["refused"]) == {"f.safetensors", "g.safetensors"}


def test_dedupe_where_nothing_fits_is_refused(run: Run, tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"other": torch.zeros(2)}, tmp_path / f"{name}.pt")
    code, said, err = run("mlp", "--dedupe", str(tmp_path))
    assert (code, said) == (2, "")
    assert "None of the 2 checkpoints in" in err
    assert err.count("missing") == 1, "one reason is enough"


def test_dedupe_keeps_to_its_tolerance(run: Run, folder: Path) -> None:
    _, said, _ = run("mlp", "--dedupe", str(folder), "--json", "--tol", "1e-9")
    families = {f["first"]: [c["name"] for c in f["copies"]] for f in json.loads(said)["families"]}
    assert "d.safetensors" in families["a.safetensors"]
    assert "c.pt" not in families["a.safetensors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dedupe", "{folder}/missing"], "missing is not a folder. Give --dedupe a folder with files that end in"),
        (["--dedupe", "{folder}/empty"], "empty holds no checkpoint. Give --dedupe a folder with files that end in"),
        (
            ["--dedupe", "{folder}", "--out", "x"],
            "--out and --dedupe cannot be given together: --dedupe compares checkpoints and",
        ),
        (["--dedupe", "{folder}", "--element", "x"], "--element and --dedupe cannot be given together"),
        (["--dedupe", "{folder}", "--order", "nodesort"], "--order and --dedupe cannot be given together"),
        (["--dedupe", "{folder}", "--tol", "-1"], "--tol must be 0 or more, such as 1e-6, but is -1"),
        (["--tol", "0.1"], "--tol 0.1 has no effect without --dedupe DIR"),
        (["--base", "2"], "--base 2 has no effect on the lexicographic order"),
        (["--order", "nodesort", "--base", "0.5"], "--base must be above 1, but is 0.5."),
        (["--out", "{folder}/a.safetensors/x"], "could not be written"),
    ],
)
def test_refusals(run: Run, folder: Path, options: list[str], message: str) -> None:
    (folder / "empty").mkdir()
    code, said, complaint = run("mlp", *(option.format(folder=folder) for option in options))
    assert (code, said) == (2, "")
    assert message in complaint


def test_weights_that_are_no_numbers(run: Run, tmp_path: Path) -> None:
    state = mlp(0).state_dict()
    state["0.weight"][0, 0] = float("inf")
    save_file(state, tmp_path / "inf.safetensors")
    code, _, complaint = run("mlp", "--weights", str(tmp_path / "inf.safetensors"), "--no-certify")
    assert code == 2
    assert "'0.weight' holds infinite values, which have no order and no length" in complaint


def test_a_failed_certificate_exits_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Symmetry, *args: object, **kwargs: object) -> Certificate:
        return Certificate(False, 0.5, 1, {}, (), False, self)

    monkeypatch.setattr(Symmetry, "certify", broken)
    assert run("mlp")[0] == 1
