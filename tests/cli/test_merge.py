"""`intertwine merge`: the network it makes, how it is scored beside the given ones, its notes and refusals."""

import json
import re
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
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9, bias=False), nn.ReLU(), nn.Linear(9, 10))

def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 10))
"""
KEYS = {"models", "dataset", "method", "repair", "weights", "before", "after", "frame", "scores", "notes", "out"}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zoo")
    it.zoo.train("mlp", seeds=[0, 1, 2], data="digits", out=folder, epochs=6, options={"widths": [64, 24, 10]})
    return str(folder)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "nets.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `intertwine merge`; gives exit code, standard output and standard error."""

    def done(*words: str | Path) -> tuple[int, str, str]:
        code = main(["merge", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return done


def states(zoo: str) -> list[dict[str, Tensor]]:
    return [model.state_dict() for model in it.zoo.load(zoo)]


def score(model: nn.Module) -> tuple[float, float]:
    """Loss and error on the test digits, by hand."""
    data = it.zoo.data("digits")
    images = (data.test_images.movedim(-1, 1).float() - torch.tensor(data.mean)) / torch.tensor(data.std)
    with torch.no_grad():
        outputs = model(images)
    wrong = (outputs.argmax(1) != data.test_labels).double().mean()
    return float(cross_entropy(outputs, data.test_labels)), float(wrong)


def filled(zoo: str, state: dict[str, Tensor]) -> nn.Module:
    model = it.zoo.load(zoo)[0]
    model.load_state_dict(state)
    return model


def test_the_plain_mean_by_hand(run: Run, zoo: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "mean.safetensors"
    shares = (0.5, 0.3, 0.2)
    code, said, _ = run(
        *(f"{zoo}:{i}" for i in range(3)), "--method", "none", "--weights-of", "0.5,.3,0.2", "--out", out
    )
    assert code == 0
    written = load_file(out)
    given = states(zoo)
    assert written.keys() == given[0].keys()
    for name, value in written.items():
        torch.testing.assert_close(value, sum(w * state[name] for w, state in zip(shares, given, strict=True)))
    assert "3 networks merged by none\n" in said
    assert "shares 0.5, 0.3, 0.2\n" in said
    assert "accuracy" not in said
    assert said.endswith(f"wrote {out}\n")


def test_every_network_is_scored_on_test_images(run: Run, zoo: str, tmp_path: Path) -> None:
    out = tmp_path / "merged.safetensors"
    call = (f"{zoo}:0", f"{zoo}:1", "--data", "digits", "--out", out)
    code, said, _ = run(*call, "--json")
    assert code == 0
    found = json.loads(said)
    assert found.keys() == KEYS
    a, b, _ = states(zoo)
    mean = {name: (a[name] + b[name]) / 2 for name in a}
    networks = {"merged": load_file(out), "plain mean": mean, f"0 {zoo}:0": a, f"1 {zoo}:1": b}
    assert [s["name"] for s in found["scores"]] == list(networks)
    for one, state in zip(found["scores"], networks.values(), strict=True):
        assert (one["loss"], one["error"]) == pytest.approx(score(filled(zoo, state)), rel=1e-4)
    assert found["scores"][0]["loss"] < found["scores"][1]["loss"]
    assert (found["method"], found["repair"], found["weights"], found["out"]) == ("weights", None, [0.5, 0.5], str(out))
    expected = it.merge(it.zoo.load(zoo)[:2], torch.zeros(1, 1, 8, 8))
    assert found["after"] == pytest.approx(expected.after, rel=1e-6)
    assert found["after"] < found["before"]
    assert found["notes"] == [
        n for n in found["notes"] if n.startswith("The loss of the merged network is larger than that of every")
    ]

    said = run(*call)[1]
    rows = [line.split() for line in said.splitlines()]
    for name, state in networks.items():
        loss, error = score(filled(zoo, state))
        assert [*name.split(), f"{loss:.4f}", f"{1 - error:.2%}"] in rows
    assert all(note in said for note in found["notes"])


def test_the_plain_mean_is_not_listed_twice(run: Run, zoo: str) -> None:
    said = run(f"{zoo}:0", f"{zoo}:1", "--data", "digits", "--method", "none")[1]
    assert "\nmerged " in said
    assert "plain mean" not in said
    assert "The loss of the merged network is larger than that of every given one: " in said


def test_what_is_learnt_is_learnt_on_training_images(run: Run, zoo: str, tmp_path: Path) -> None:
    """The same as in Python on the training part alone."""
    out = tmp_path / "merged.safetensors"
    how = ("--method", "activations", "--option", "cost=inner", "--repair", "repair", "--seed", "3")
    code, said, _ = run(f"{zoo}:0", f"{zoo}:2", "--data", "digits", "--samples", "2000", *how, "--out", out)
    assert code == 0
    a, _, c = it.zoo.load(zoo)
    data = it.zoo.data("digits").batches("train", 240)
    expected = it.merge(
        [a, c], data=data, method="activations", repair="repair", options={"cost": "inner"}, check=False
    )
    written = load_file(out)
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(written[name], value, rtol=1e-4, atol=1e-5)
    assert "2 networks merged by activations, repaired by repair\n" in said


def test_checkpoints_and_their_order(run: Run, zoo: str, file: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 9, bias=False), nn.ReLU(), nn.Linear(9, 10))
    save_file(net.state_dict(), tmp_path / "one.safetensors")
    out, two = tmp_path / "mean.safetensors", (f"{file}:net", f"{file}:net")
    how = ("--input", "1x1x8x8", "--method", "none", "--weights-of", "0.75,0.25", "--out", out)
    weights = ("--weights", tmp_path / "one.safetensors")
    results = []
    for order in ((*weights, "--weights", "-"), ("--weights", "-", *weights)):
        assert run(*two, *order, *how)[0] == 0
        results.append(load_file(out)["3.bias"])
    given = net.state_dict()["3.bias"]
    other = results[0] + results[1] - given
    torch.testing.assert_close(results[0] - results[1], 0.5 * (given - other))
    code, _, complaint = run(*two, *weights, "--input", "1x1x8x8")
    assert code == 2
    assert "2 networks and 1 checkpoint are given. Repeat --weights once for each network" in complaint


def test_batch_norm_without_a_reset_is_told(run: Run, file: str) -> None:
    two = (f"{file}:normed", f"{file}:normed", "--data", "digits")
    said = run(*two)[1]
    assert "The running statistics of BatchNorm are the mean of the given ones" in said
    said = run(*two, "--repair", "reset")[1]
    assert "running statistics" not in said
    assert ", repaired by reset" in said


def test_new_biases_are_told(run: Run, file: str, tmp_path: Path) -> None:
    """REPAIR gives the first layer a bias; the checkpoint then fits the architecture no more."""
    out = tmp_path / "merged.safetensors"
    code, said, _ = run(f"{file}:net", f"{file}:net", "--data", "digits", "--repair", "repair", "--out", out)
    assert code == 0
    assert set(load_file(out)) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert "The merged network has 1 tensor that the given ones lack (1.bias): the repair needs a bias there." in said


def test_copies_merge_into_themselves(run: Run, zoo: str, tmp_path: Path) -> None:
    model = it.zoo.load(zoo)[0]
    sym = it.symmetry(model, torch.zeros(1, 1, 8, 8))
    save_file(sym.act(sym.random(seed=4), model).state_dict(), tmp_path / "twin.safetensors")
    out, twin = tmp_path / "merged.safetensors", tmp_path / "twin.safetensors"
    call = (f"{zoo}:0", f"{zoo}:0", "--weights", "-", "--weights", twin, "--method", "scale-aware", "--out", out)
    assert run(*call)[0] == 0
    x = torch.randn(30, 1, 8, 8)
    assert torch.allclose(filled(zoo, load_file(out))(x), model(x), atol=1e-4)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["{zoo}:0"], "Two networks or more are needed to merge them; found 1."),
        (["{zoo}:0", "zoo:mlp"], "The two networks differ: '1.weight' is float32 of shape (24, 64) in the first"),
        (["{zoo}:0", "{zoo}:1", "--method", "sort"], "Unknown method 'sort'. Did you mean 'sorted"),
        (["{zoo}:0", "{zoo}:1", "--method", "none", "--option", "a=1"], "does not search and has no options."),
        (["{zoo}:0", "{zoo}:1", "--method", "activations"], "on data, and no data is given. Add --data NAME"),
        (["{zoo}:0", "{zoo}:1", "--repair", "reset"], "--repair reset measures on data, and no data is given."),
        (["{zoo}:0", "{zoo}:1", "--repair", "reset", "--data", "digits"], "repair='reset' needs BatchNorm"),
        (["{zoo}:0", "{zoo}:1", "--weights-of", "a,b"], "--weights-of 'a,b' is not a list of numbers. Write them"),
        (["{zoo}:0", "{zoo}:1", "--weights-of", "0.5,0.6"], "and add up to 1; found (0.5, 0.6) for 2 networks."),
        (["{zoo}:0", "{zoo}:1", "--option", "relative=no"], "must be True or False, but is 'no'"),
    ],
)  # fmt: skip
def test_refusals(run: Run, zoo: str, words: list[str], text: str) -> None:
    code, said, complaint = run(*(word.format(zoo=zoo) for word in words))
    assert (code, said) == (2, "")
    assert text in complaint
    assert re.match("intertwine: ", complaint)


def test_the_plain_mean_stands_there_untouched_and_mended_alike(run: Run, zoo: str) -> None:
    call = (f"{zoo}:0", f"{zoo}:1", "--data", "digits", "--repair", "repair", "--json")
    scores = {one["name"]: one for one in json.loads(run(*call)[1])["scores"]}
    assert list(scores)[:3] == ["merged", "plain mean", "plain mean, same repair"]
    a, b, _ = states(zoo)
    plain = score(filled(zoo, {name: (a[name] + b[name]) / 2 for name in a}))
    assert (scores["plain mean"]["loss"], scores["plain mean"]["error"]) == pytest.approx(plain, rel=1e-4)
    alone = json.loads(run(*call, "--method", "none")[1])["scores"]
    assert scores["plain mean, same repair"]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-6)
    said = run(*call[:-1], "--method", "none")[1]
    assert "plain mean " in said
    assert "same repair" not in said  # it is the merged one
