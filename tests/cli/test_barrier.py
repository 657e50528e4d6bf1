"""`intertwine barrier`: the line between two networks, BatchNorm reset or not, and the images both are seen on."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import intertwine as it
from intertwine.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[..., tuple[int, str, str]]
FILE = """
import torch
from torch import nn

def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))

def unlike():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12, eps=0.1), nn.ReLU(), nn.Linear(12, 10))
"""
KEYS = {
    *("first", "second", "dataset", "split", "ts", "loss", "error", "loss_barrier", "error_barrier", "data"),
    *("reset_data", "without_reset", "batch_norm", "reset", "notes", "plot"),
}
MIXED = "The networks have BatchNorm, and nothing was reset"


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zoo")
    it.zoo.train("mlp", seeds=[0, 1], data="digits", out=folder, epochs=4, options={"widths": [64, 16, 10]})
    return str(folder)


def normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def seen(part: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Digits as networks see them, by hand: evenly spaced over the part where only some are wanted."""
    data = it.zoo.data("digits")
    images, labels = (data.images, data.labels) if part == "train" else (data.test_images, data.test_labels)
    x = (images.movedim(-1, 1).float() - torch.tensor(data.mean)) / torch.tensor(data.std)
    chosen = [i * len(labels) // count for i in range(count)] if count else list(range(len(labels)))
    return x[chosen], labels[chosen]


@pytest.fixture(scope="module")
def batch_norm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two trained networks with BatchNorm, as words of the command line."""
    place = tmp_path_factory.mktemp("normed")
    (place / "nets.py").write_text(FILE)
    images, labels = seen("train")
    for seed in range(2):
        model = normed(seed)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(20):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        save_file(model.state_dict(), place / f"{seed}.safetensors")
    name = f"{place / 'nets.py'}:normed"
    return [name, name, "--weights", str(place / "0.safetensors"), "--weights-b", str(place / "1.safetensors")]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `intertwine barrier … --data digits`; gives exit code, standard output and standard error."""

    def done(*words: str | Path) -> tuple[int, str, str]:
        code = main(["barrier", *map(str, words), "--data", "digits"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return done


def mixed(a: nn.Module, b: nn.Module, t: float) -> nn.Module:
    found = copy.deepcopy(a)
    other = b.state_dict()
    found.load_state_dict({n: (1 - t) * x + t * other[n] for n, x in a.state_dict().items()})
    return found.eval()


def scores(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    with torch.no_grad():
        outputs = model(images)
    return float(cross_entropy(outputs, labels)), float((outputs.argmax(1) != labels).double().mean())


@pytest.mark.parametrize("split", ["test", "train"])
def test_the_line_by_hand(run: Run, zoo: str, split: str) -> None:
    code, said, _ = run(f"{zoo}:0", f"{zoo}:1", "--points", "5", "--split", split, "--samples", "200", "--json")
    assert code == 0
    found = json.loads(said)
    assert found.keys() >= KEYS
    a, b = it.zoo.load(zoo)[:]
    expected = [scores(mixed(a, b, t), *seen(split, 200)) for t in (0, 0.25, 0.5, 0.75, 1)]
    assert found["loss"] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert found["error"] == pytest.approx([error for _, error in expected])
    above = [
        loss - (1 - t) * expected[0][0] - t * expected[4][0] for t, (loss, _) in zip(found["ts"], expected, strict=True)
    ]
    assert found["loss_barrier"] == pytest.approx(max(above[1:-1]), rel=1e-4)
    assert (found["split"], found["dataset"], found["batch_norm"], found["reset"]) == (split, "digits", False, False)
    assert (found["without_reset"], found["notes"], found["data"]["samples"]) == (None, [], 200)


def test_the_table(run: Run, zoo: str) -> None:
    code, said, _ = run(f"{zoo}:0", f"{zoo}:1", "--points", "3")
    assert code == 0
    a, b = it.zoo.load(zoo)[:]
    rows = [line.split() for line in said.splitlines()]
    assert f"{zoo}:0 to {zoo}:1: 3 networks on 360 test images of digits" in said
    assert ["t", "loss", "error"] in rows
    for t in (0, 0.5, 1):
        loss, error = scores(mixed(a, b, t), *seen("test"))
        assert [f"{t:.3f}", f"{loss:.4f}", f"{error:.2%}"] in rows
    found = it.barrier(a, b, [seen("test")], points=3)
    assert f"loss barrier {found.loss_barrier:.4f} at t = 0.500, error barrier {found.error_barrier:.2%}\n" in said
    assert MIXED not in said


def test_batch_norm_is_reset_by_default_and_shown_beside(run: Run, batch_norm: list[str]) -> None:
    """Against the statistics that BatchNorm itself takes, of one batch in training mode."""
    code, said, _ = run(*batch_norm, "--points", "3", "--json", "--batch", "2000", "--samples", "2000")
    assert code == 0
    found = json.loads(said)
    assert (found["batch_norm"], found["reset"], found["notes"]) == (True, True, [])
    assert found["reset_data"]["samples"] == 1437
    a, b = (normed(seed) for seed in range(2))
    for model, place in ((a, batch_norm[3]), (b, batch_norm[5])):
        model.load_state_dict(load_file(place))
    middle = mixed(a, b, 0.5)
    plain = scores(middle, *seen("test"))
    assert [found["without_reset"][k][1] for k in ("loss", "error")] == pytest.approx(plain, rel=1e-5)
    norm = middle.get_submodule("2")
    assert isinstance(norm, nn.BatchNorm1d)
    norm.momentum = 1.0
    middle.train()(seen("train")[0])
    again = scores(middle.eval(), *seen("test"))
    assert [found[k][1] for k in ("loss", "error")] == pytest.approx(again, rel=1e-4)
    assert abs(plain[0] - again[0]) > 0.01

    said = run(*batch_norm, "--points", "3", "--batch", "2000", "--samples", "2000")[1]
    assert ["0.500", f"{again[0]:.4f}", f"{again[1]:.2%}", f"{plain[0]:.4f}", f"{plain[1]:.2%}"] in [
        line.split() for line in said.splitlines()
    ]
    assert "loss, no reset" in said
    assert f"BatchNorm reset on 1,437 training images: loss barrier {found['loss_barrier']:.4f}" in said
    assert f"without reset: loss barrier {found['without_reset']['loss_barrier']:.4f}" in said
    assert MIXED not in said


def test_no_reset_is_told(run: Run, batch_norm: list[str]) -> None:
    code, said, _ = run(*batch_norm, "--points", "3", "--no-reset")
    assert code == 0
    assert MIXED in said
    assert "no reset" not in said.splitlines()[2]
    found = json.loads(run(*batch_norm, "--points", "3", "--no-reset", "--json")[1])
    assert (found["reset"], found["reset_data"], found["without_reset"], len(found["notes"])) == (False, None, None, 1)


def test_no_batch_of_one_image(run: Run, batch_norm: list[str]) -> None:
    """BatchNorm could not take the variance of a last batch of one."""
    code, said, complaint = run(*batch_norm, "--points", "3", "--samples", "251", "--batch", "250", "--json")
    assert (code, complaint) == (0, "")
    assert json.loads(said)["reset_data"]["samples"] == 251


def test_networks_of_a_zoo_see_images_as_they_learnt_them(run: Run, zoo: str, tmp_path: Path) -> None:
    data = it.zoo.data("digits").normalised([100.0], [20.0])
    other = it.zoo.train("mlp", seeds=[0], data=data, out=tmp_path / "own", epochs=1, options={"widths": [64, 16, 10]})
    code, said, _ = run(f"{tmp_path}/own:0", f"{tmp_path}/own:0", "--points", "3", "--json")
    assert code == 0
    assert json.loads(said)["loss"][0] == pytest.approx(other.records[0].loss, rel=1e-4)
    code, said, complaint = run(f"{tmp_path}/own:0", f"{zoo}:0")
    assert (code, said) == (2, "")
    assert "The networks were trained on digits under different normalisations (mean (" in complaint
    assert "mean (100.0,), std (20.0,)" in complaint


def test_a_picture(run: Run, zoo: str, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "line.svg"
    code, said, _ = run(f"{zoo}:0", f"{zoo}:1", "--points", "3", "--plot", file)
    assert (code, said.splitlines()[-1]) == (0, f"wrote {file}")
    assert "<svg" in file.read_text(encoding="utf-8")


def test_refusals(run: Run, zoo: str, batch_norm: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = f"{zoo}:0", f"{zoo}:1"
    unlike = [batch_norm[0], batch_norm[0].replace(":normed", ":unlike")]
    for call, text in (
        ([a, b, "--points", "2"], "points must be at least 3, both ends and one between, but is 2."),
        ([a, b, "--reset"], "has none. Leave it out."),
        ([a, b, "--plot", "line.pdf"], "Choose a name that ends in .svg or .png."),
        ([a, f"{zoo}:7"], "holds no network of seed 7"),
        ([a, batch_norm[0]], "The two networks differ: '1.weight' is float32 of shape (16, 64) in the first"),
        (unlike, "is BatchNorm1d(eps=1e-05) in the first and BatchNorm1d(eps=0.1) in the second"),
    ):
        code, said, complaint = run(*call)
        assert (code, said) == (2, "")
        assert text in complaint
    with pytest.raises(SystemExit, match="2"):
        main(["barrier", a, b])
    assert "the following arguments are required: --data" in capsys.readouterr().err
