"""bench/fold.py on small networks: the printed algorithm merges the same pairs, rows are stored, a run resumes."""

import copy
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from intertwine import zoo
from intertwine.fold.fold import fold
from intertwine.fold.prune import prune

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import fold as bench
import fold_curves
import fold_speed

#: In place of an interpreter with torch-pruning: takes the same words, and prunes with our own code.
PEER = """
import json, sys
import torch
from safetensors.torch import load_file
from intertwine.fold.prune import prune
from intertwine.lab.zoo.networks.registry import build
script, name, options, side, share, whole, pruned = sys.argv[1:]
assert script.endswith("fold_peer.py")
model = build(name, **json.loads(options)).eval()
model.load_state_dict(load_file(whole))
small = prune(model, torch.zeros(1, 1, int(side), int(side)), widths=float(share)).model
torch.save(small, pruned)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small perceptrons, trained a little on digits."""
    out = tmp_path_factory.mktemp("zoo")
    zoo.train("mlp", seeds=range(2), data="digits", out=out, epochs=2, options={"widths": [64, 20, 16, 10]})
    return out


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fold.py", *words])
    bench.main()


def vgg() -> Any:
    torch.manual_seed(0)
    return fold_speed.spread(zoo.build("vgg11_bn", width=0.0625))


@pytest.mark.parametrize("every", [1, 5])
def test_the_printed_way_merges_the_same_pairs_003_F11_F24(every: int) -> None:
    row = fold_speed.measure_printed(0.1, every, vgg(), "small")
    assert row["same_merges"]
    assert row["merges"] > 20
    assert row["tables"] > row["merges"]  # one more where a layer stops
    assert row["extrapolated"] == (every > 1)
    assert (row["measured_tables"] < row["tables"] / 3) == (every > 1)
    assert 0 < row["ratio_whole"] < row["ratio"]


def test_other_merges_are_seen() -> None:
    model = vgg()
    _, merging = fold_speed.measure_ours(model, torch.zeros(1, 3, 32, 32), 0.1)  # not as printed
    printed = fold_speed.Printed(fold_speed.chain_of(model), 0.1)
    assert printed.run(merging.pairs) > 0
    assert printed.pairs != merging.pairs


def test_the_chain_computes_what_the_network_computes() -> None:
    """Up to the shifts, which distances as printed leave out."""
    model = vgg()
    first = fold_speed.chain_of(model)[0]
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        whole, shift = (model.features[:2](i) for i in (x, torch.zeros_like(x)))
        own = torch.nn.functional.conv2d(x.double(), first.unflatten(2, (3, 3)), padding=1)
    assert torch.allclose(own, (whole - shift).double(), atol=1e-4)


@pytest.mark.slow
def test_a_large_network_of_torchvision() -> None:
    pytest.importorskip("torchvision")
    rows = list(fold_speed.measure_large("resnet18", 0.1, side=32))
    assert [row["options"] for row in rows] == ["as called", 'maximum="fixed"']
    assert 10 < rows[0]["merges"] < rows[1]["merges"]
    assert all(row["over_floor"] > 0 for row in rows)


def test_curves_are_kept_and_go_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "fold.json"
    words = ("--results", str(results), "curves", "mlp", "--zoo", str(folder), "--network", "1", "--seen", "200",
             "--betas", "0.1", "--shares", "0.5", "--device", "cpu")  # fmt: skip
    call(monkeypatch, *words, "--methods", "fold,prune-l1,prune-gamma,torch-pruning")
    rows = {row["method"]: row for row in json.loads(results.read_text())["curves"]}
    assert list(rows) == ["none", "fold", "prune-l1", "prune-gamma", "torch-pruning"]
    held = zoo.load(folder)
    assert rows["none"]["accuracy"] == pytest.approx(held.records[1].accuracy)
    assert (rows["none"]["parameters_share"], rows["none"]["seed"]) == (1.0, held.seeds[1])
    folded = fold(held[1], torch.zeros(1, 1, 8, 8), beta=0.1)
    assert rows["fold"]["parameters"] == folded.parameters.after
    assert rows["fold"]["flops_share"] == pytest.approx(folded.flops.share)
    assert rows["fold"]["accuracy_reset"] is None
    assert rows["prune-gamma"]["failed"].startswith("score='gamma' needs a BatchNorm")
    assert rows["torch-pruning"]["failed"] == "--peers PYTHON is missing"
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("| prune-l1 | ")]
    share, percent = rows["prune-l1"]["parameters_share"], f"{100 * rows['prune-l1']['accuracy']:.1f}"
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells == [percent if share <= column + bench.ROUNDED else "" for column in bench.COLUMNS]
    assert {percent, ""} == set(cells)
    assert "- torch-pruning with share 0.5 failed: --peers" in printed
    assert "fewest parameters (%) at 95% of" in printed

    done: list[str] = []

    def noted(case: fold_curves.Case, method: str, value: float | None) -> dict[str, Any]:
        done.append(method)
        return fold_curves.measure(case, method, value)

    monkeypatch.setattr(bench, "measure", noted)
    call(monkeypatch, *words, "--methods", "fold,prune-random")
    assert done == ["prune-random"]
    assert len(json.loads(results.read_text())["curves"]) == 6
    call(monkeypatch, *words, "--methods", "prune-random", "--again")
    assert done == ["prune-random", "none", "prune-random"]
    assert len(json.loads(results.read_text())["curves"]) == 6


def test_accuracy_after_statistics_reset_is_apart() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x = 5 * torch.randn(300, 4) + 3
    with torch.no_grad():
        answers = copy.deepcopy(model).train()(x).argmax(1)  # those of a network whose statistics are right
    case = fold_curves.Case(model.eval(), ("own", {}), {}, [(x, answers)], [(x, answers)], "cpu")
    row = fold_curves.measure(case, "none", None)
    assert row["accuracy_reset"] > 0.99 > row["accuracy"]
    assert row["accuracy"] == pytest.approx(float((model(x).argmax(1) == answers).float().mean()))
    assert fold_curves.measure(case, "prune-gamma", 0.5)["parameters"] == 4 * 4 + 4 + 8 + 3 * 4 + 3


def test_what_a_peer_pruned_is_read_back(folder: Path, tmp_path: Path) -> None:
    program, python = tmp_path / "peer.py", tmp_path / "python"
    program.write_text(PEER)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    case = fold_curves.opened("mlp", str(folder), 0, 100, 100, "cpu", str(python))
    found, own = fold_curves.by_torch_pruning(case, 0.5), prune(case.model, case.example, widths=0.5).model
    assert found.state_dict().keys() == own.state_dict().keys()
    assert all(torch.equal(t, own.state_dict()[n]) for n, t in found.state_dict().items())

    program.write_text("raise SystemExit('it cannot')")
    with pytest.raises(fold_curves.PeerFailed, match="it cannot"):
        fold_curves.by_torch_pruning(case, 0.5)


def test_a_share_that_cannot_be_reached_is_a_row(folder: Path) -> None:
    case = fold_curves.opened("mlp", str(folder), 0, 100, 100, "cpu", None)
    row = fold_curves.measure(case, "prune-l1-across", 0.0001)
    assert "cannot be reached: with one feature on every wire" in row["failed"]
    assert "accuracy" not in row


def test_training_by_weight_decay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TRAINED", (("mlp", 1e-4, 3), ("mlp", 5e-4, 3)))
    results = tmp_path / "fold.json"
    words = ("--results", str(results), "train", "--out", str(tmp_path), "--data", "digits", "--epochs", "1",
             "--train", "200", "--test", "100", "--seeds", "0:2", "--device", "cpu")  # fmt: skip
    call(monkeypatch, *words)
    for decay, name in ((1e-4, "mlp-1e-4"), (5e-4, "mlp-5e-4")):
        plan = zoo.load(tmp_path / name).manifest.plan
        assert (plan.recipe["weight_decay"], plan.recipe["epochs"]) == (decay, 1)
        assert plan.recipe["schedule"] == "one-cycle"
    assert [len(row["accuracies"]) for row in json.loads(results.read_text())["train"]] == [2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("curves", "vgg16_bn"), "The trained vgg16_bn networks are missing"),
        (("curves", "vgg16_bn", "--zoo", "ZOO"), "holds networks of mlp, not of vgg16_bn"),
        (("curves", "mlp", "--zoo", "ZOO", "--methods", "melt"), "There is no method 'melt'"),
    ],
)
def test_what_is_refused(folder: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit, match=message):
        call(monkeypatch, *(str(folder) if word == "ZOO" else word for word in words))
