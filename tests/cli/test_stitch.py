"""`intertwine stitch`: what it prints and writes, that it is what Python gives, and its refusals."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import intertwine as it
from intertwine.cli import main
from intertwine.cli import stitch as command
from intertwine.lab.zoo.augment import shuffled

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[..., tuple[int, str, str]]
WIDTHS = [64, 16, 12, 10]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zoo")
    it.zoo.train("mlp", seeds=[0, 1], data="digits", out=folder, epochs=8, options={"widths": WIDTHS})
    return str(folder)


@pytest.fixture
def run(zoo: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `intertwine stitch` on the two networks; gives exit code, standard output and standard error."""

    def done(*words: str | Path) -> tuple[int, str, str]:
        call = ["stitch", f"{zoo}:0", f"{zoo}:1", "--data", "digits", "--device", "cpu", *map(str, words)]
        code = main(call if "--at" in words else [*call, "--at", "2"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return done


def layers(zoo: str, seed: int) -> list[nn.Module]:
    """The layers of a network: flatten, linear, ReLU, linear, ReLU, linear."""
    return list(it.zoo.load(zoo).seed(seed).children())


def by_hand(zoo: str, at: tuple[int, int], matrix: Tensor, bias: Tensor | None = None) -> float:
    """The accuracy on all test digits of the first network up to a layer, a matrix, and the second behind a layer."""
    data = it.zoo.data("digits")
    front, back = layers(zoo, 0)[: at[0] + 1], layers(zoo, 1)[at[1] + 1 :]
    with torch.no_grad():
        hidden = functional.linear(nn.Sequential(*front)(data.inputs(data.test_images)), matrix, bias)
        answers = nn.Sequential(*back)(hidden).argmax(1)
    return float((answers == data.test_labels).double().mean())


# -- what it prints and writes -----------------------------------------------------------------------------------------


def test_the_table_of_places_and_families(run: Run, zoo: str) -> None:
    code, said, _ = run("--at", "2,4", "--family", "relu,lowrank:4", "--fit", "direct")
    assert code == 0
    whole = [by_hand(zoo, (5, 5), torch.eye(10))]  # the first network behind its last layer: all of it
    whole.append(by_hand_back(zoo))
    assert said.startswith(f"{zoo}:0 stitched into {zoo}:1\non 360 test images of digits, ")
    assert f"front network {whole[0]:.2%}, back network {whole[1]:.2%}\n" in said
    assert "\n4 stitches; penalty\n" in said
    lines = [line.split() for line in said.splitlines()]
    (accuracy,) = [line[2] for line in lines if line[:2] == ["4", "lowrank:4"]]
    (penalties,) = [line[1:] for line in lines if line[:1] == ["4"] and len(line) == 3 and line[1] != "stitches;"]
    assert float(penalties[1]) == pytest.approx(sum(whole) / 2 - float(accuracy[:-1]) / 100, abs=2e-4)
    assert next(line for line in lines if line[:2] == ["4", "lowrank:4"])[5] == "4"  # its rank


def by_hand_back(zoo: str) -> float:
    data = it.zoo.data("digits")
    with torch.no_grad():
        answers = nn.Sequential(*layers(zoo, 1))(data.inputs(data.test_images)).argmax(1)
    return float((answers == data.test_labels).double().mean())


def test_what_it_writes_does_what_it_says(run: Run, zoo: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "stitches"
    call = ("--at", "2,4=2", "--family", "linear,affine", "--epochs", "2", "--out", out)
    code, said, _ = run(*call, "--samples", "2000")
    assert code == 0
    assert all(f"wrote {out / name}" in said for name in ("maps.safetensors", "stitches.json", "stitches.svg"))
    assert (out / "stitches.svg").read_bytes().startswith(b"<?xml")
    maps, records = load_file(out / "maps.safetensors"), json.loads((out / "stitches.json").read_text())
    assert [(r["front"], r["back"], r["family"]) for r in records["stitches"]] == [
        ("2", "2", "linear"), ("2", "2", "affine"), ("4", "2", "linear"), ("4", "2", "affine"),
    ]  # fmt: skip
    for i, record in enumerate(records["stitches"]):
        at = int(record["front"]), int(record["back"])
        accuracy = by_hand(zoo, at, maps[f"{i}.matrix"], maps.get(f"{i}.bias"))
        assert record["accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert {name for name in maps if name.endswith("bias")} == {"1.bias", "3.bias"}
    again = run(*call, "--samples", "2000", "--json")  # a run that is done is taken up where it ended
    assert json.loads(again[1])["stitches"] == records["stitches"]
    code, _, complaint = run(*call, "--samples", "2000", "--seeds", "1")
    assert code == 2
    assert "holds stitches of another plan, which differs in jobs" in complaint


def test_json_is_json_alone_and_the_same_as_python(run: Run, zoo: str) -> None:
    code, said, _ = run("--family", "linear", "--epochs", "2", "--seeds", "0:2", "--option", "start=random", "--json")
    assert code == 0
    found = json.loads(said)
    assert found.keys() == {
        *("front", "back", "dataset", "samples", "front_accuracy", "back_accuracy", "stitches", "out"),
    }  # fmt: skip
    a, b = it.zoo.load(zoo)[:]
    data = it.zoo.data("digits")
    chosen = torch.arange(1000) * len(data.labels) // 1000
    train = it.zoo.data("digits").of(
        "digits", (data.images[chosen], data.labels[chosen]), (data.test_images, data.test_labels), data.mean, data.std,
        data.classes,
    )  # fmt: skip
    fed = shuffled(train, 250)
    expected = it.stitches(
        a, b, "2", "linear", data=fed, test=train.batches("test", 180), epochs=2, seeds=range(2), start="random"
    )
    assert [s["accuracy"] for s in found["stitches"]] == [one.accuracy for one in expected]
    assert [s["loss"] for s in found["stitches"]] == pytest.approx([one.scores.loss for one in expected], rel=1e-5)
    assert [s["settings"]["seed"] for s in found["stitches"]] == [0, 1]
    assert found["stitches"][0]["loss"] != found["stitches"][1]["loss"]
    assert found["stitches"][0]["settings"]["start"] == "random"
    assert (found["front"], found["dataset"], found["out"]) == (f"{zoo}:0", "digits", None)


def test_both_fits_in_one_run(run: Run) -> None:
    code, said, _ = run("--fit", "both", "--epochs", "1", "--family", "linear", "--samples", "100")
    assert code == 0
    assert re.search(r"^ +linear direct +linear task$", said, re.M)
    assert "on 100 test images of digits" in said


def test_training_images_come_in_another_order_every_epoch() -> None:
    """Folders of images are sorted by class, and a batch of one class teaches little."""
    data = it.zoo.data("digits")
    order = data.labels.argsort(stable=True)
    by_class = data.of(
        "sorted", (data.images[order], data.labels[order]), (data.test_images, data.test_labels), data.mean, data.std,
        data.classes,
    )  # fmt: skip
    fed = shuffled(by_class, 250)
    first, second = (torch.cat([labels for _, labels in fed]) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, data.labels.sort().values)
    assert all(len(labels.unique()) == 10 for _, labels in fed)


def test_many_stitches_are_told_as_a_table_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_TABLE_STITCHES", 1)
    code, said, _ = run("--fit", "direct")
    assert code == 0
    assert "\n2 stitches; penalty\n" in said
    assert "cross-entropy" not in said


def test_what_goes_around_a_cut_and_what_broke_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nets.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b, self.act, self.c = nn.Linear(64, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10)\n"
        "    def forward(self, x):\n"
        "        x = self.a(x.flatten(1))\n"
        "        return self.c(x + self.act(self.b(x)))\n"
    )
    call = ["stitch", f"{file}:Net", f"{file}:Net", "--data", "digits", "--at", "act", "--family", "linear"]
    assert main([*call, "--device", "cpu", "--fit", "direct", "--skip", "back"]) == 0
    said = capsys.readouterr().out
    assert "act*" in said
    assert "at act the back network feeds the skip connection" in said
    wild = [*call, "--device", "cpu", "--epochs", "2", "--option", "rate=1e30", "--option", "optimizer=sgd"]
    assert main(wild) == 0
    assert "diverged, linear at act: in epoch" in capsys.readouterr().out


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--family", "rellu"], "Unknown family 'rellu'. Did you mean 'relu"),
        (["--at", "2,"], "--at '' is not a stitch point. Write PATH, or FRONT=BACK"),
        (["--at", "2="], "--at '2=' is not a stitch point."),
        (["--at", "2=9"], "9"),
        (["--at", "2=4", "--family", "identity"], "16"),
        (["--option", "rat=1"], "Unknown option of stitching 'rat'. Did you mean 'rate"),
        (["--option", "rate"], "--option 'rate' is not of the form NAME=VALUE"),
        (["--option", "epochs=2", "--epochs", "3"], "--epochs 3 and --option epochs=2 cannot be given together. Leave"),
        (["--recipe", "godfry"], "Unknown recipe 'godfry'. Did you mean 'godfrey"),
        (["--seeds", "a"], "The seeds 'a' are not numbers"),
        (["--device", "tpu9"], "Unknown device 'tpu9'"),
        (["--out", "/dev/null/x"], "Results cannot be written into /dev/null/x"),
        (["--weights-b", "none.pt"], "There is no file none.pt"),
    ],
)  # fmt: skip
def test_refusals(run: Run, words: list[str], text: str) -> None:
    code, said, complaint = run(*words)
    assert (code, said) == (2, "")
    assert text in complaint


def test_data_and_places_must_be_given(zoo: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["stitch", f"{zoo}:0", f"{zoo}:1"])
    assert "the following arguments are required: --at, --data" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    code = "import sys; from intertwine.cli import main\ntry: main(['stitch', '--help'])\n"
    code += "except SystemExit: print({'torch', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: intertwine stitch" in done.stdout
    assert done.stdout.endswith("set()\n")
