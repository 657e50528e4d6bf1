"""`intertwine fold`: what it prints and writes, that it is what Python gives, that it loads again, and its refusals."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import intertwine as it
from intertwine.cli import main
from intertwine.errors import InputError, MismatchError
from intertwine.fold.clustering import fold_activations, fold_kmeans
from intertwine.fold.options import PAPER_CODE, PRINTED
from intertwine.fold.result import load_folded

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[..., tuple[int, str, str]]
NETS = """
from torch import nn

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10))

def normed():
    parts = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(96, 10))

def one():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
PLANTED = {1: [(2, 5), (2, 9), (3, 4)], 3: [(0, 11)]}  # layer → (feature, its copy)
#: Parameters of 64-16-12-10, and with three features of the first and one of the second hidden layer gone.
BEFORE, AFTER = 65 * 16 + 17 * 12 + 13 * 10, 65 * 13 + 14 * 11 + 12 * 10


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    file = tmp_path / "nets.py"
    file.write_text(NETS)
    return file


@pytest.fixture
def planted(nets: Path, tmp_path: Path) -> tuple[nn.Sequential, Path]:
    """The first network with copies of features in it, all else at random; and the file of its weights."""
    torch.manual_seed(3)
    names: dict[str, Callable[[], nn.Sequential]] = {}
    exec(NETS, names)
    model = names["plain"]().eval()
    with torch.no_grad():
        for layer, pairs in PLANTED.items():
            linear = model[layer]
            assert isinstance(linear, nn.Linear)
            for one, other in pairs:
                linear.weight[other], linear.bias[other] = linear.weight[one], linear.bias[one]
    file = tmp_path / "planted.safetensors"
    save_file(model.state_dict(), file)
    return model, file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `intertwine fold`; gives exit code, standard output and standard error."""

    def done(*words: str | Path) -> tuple[int, str, str]:
        code = main(["fold", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return done


def accuracy(model: nn.Module, count: int) -> float:
    """On test digits spread over all of them, as the command takes them."""
    data = it.zoo.data("digits")
    chosen = torch.arange(count) * len(data.test_labels) // count
    with torch.no_grad():
        answers = model.eval()(data.inputs(data.test_images[chosen])).argmax(1)
    return float((answers == data.test_labels[chosen]).double().mean())


# -- what it prints and writes -----------------------------------------------------------------------------------------


def test_the_table_of_a_network_with_copies(run: Run, nets: Path, planted: tuple[nn.Sequential, Path]) -> None:
    model, weights = planted
    code, said, _ = run(f"{nets}:plain", "--weights", weights, "--beta", "1e-6", "--data", "digits", "--samples", "100")
    assert code == 0
    lines = {line.split()[0]: line.split() for line in said.splitlines() if line.split()}
    assert said.startswith(f"{nets}:plain folded\n")
    assert lines["parameters"] == ["parameters", f"{BEFORE:,}", f"{AFTER:,}", f"{AFTER / BEFORE:.1%}"]
    flops = 2 * (64 * 16 + 16 * 12 + 12 * 10), 2 * (64 * 13 + 13 * 11 + 11 * 10)
    assert lines["FLOPs"] == ["FLOPs", f"{flops[0]:,}", f"{flops[1]:,}", f"{flops[1] / flops[0]:.1%}"]
    assert lines["1"] == ["1", "16", "0", "13", "rows", "averaged,", "columns", "summed"]
    assert lines["3"][:4] == ["3", "12", "0", "11"]
    right = accuracy(model, 100)
    assert re.search(rf"^accuracy on digits +{right:.2%} +{right:.2%} *$", said, re.M)
    assert "not folded: 5.weight: it is an axis of the model's output" in said
    assert lines["time"][5] == lines["time"][7] == "ms"


def test_what_it_writes_is_the_network_again(
    run: Run, nets: Path, planted: tuple[nn.Sequential, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights = planted
    monkeypatch.chdir(nets.parent)  # the name of the network is a path from here
    out = tmp_path / "deep" / "small"
    code, said, _ = run("nets.py:plain", "--weights", weights, "--input", "1x1x8x8", "--beta", "1e-6", "--out", out)
    assert code == 0
    assert all(f"wrote {out / name}" in said for name in ("folded.safetensors", "fold.json", "complexity.svg"))
    assert (out / "complexity.svg").read_bytes().startswith(b"<?xml")
    account = json.loads((out / "fold.json").read_text())
    assert {name: change["after"] for name, change in account["widths"].items()} == {"1": 13, "3": 11}
    assert [2, 5, 9] in account["groups"]["1"]
    assert account["complexity"]["layers"][0]["classes"] == 13
    monkeypatch.chdir(tmp_path.parent)
    x = torch.randn(7, 1, 8, 8)
    for again in (load_folded(out), load_folded(out, copy.deepcopy(model), x)):
        assert again.parameters == AFTER
        torch.testing.assert_close(again.model(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="A width is given for '3', which is no wire that can be folded"):
        load_folded(out, nn.Sequential(*list(model)[:3], nn.Linear(16, 10)), x)
    wider = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    with pytest.raises(MismatchError):
        load_folded(out, wider, x)
    with pytest.raises(InputError, match=r"has no fold.json. Give a folder that `intertwine fold --out` wrote"):
        load_folded(tmp_path)
    (out / "fold.json").write_text((out / "fold.json").read_text()[:100])
    with pytest.raises(
        InputError, match=r"fold\.json is damaged or does not describe a folding .* fold the network once"
    ):
        load_folded(out)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--terms", "in+out", "--max-ratio", "0.5"], {"terms": "in+out", "max_ratio": 0.5}),
        (["--preset", "printed"], dict(PRINTED)),
        (["--preset", "paper-code", "--rows", "mean"], {**PAPER_CODE, "rows": "mean"}),
        (["--beta", "3=0.5", "--beta", "1=0.2", "--no-bias"], {"beta": {"3": 0.5, "1": 0.2}, "bias": False}),
    ],
)  # fmt: skip
def test_json_is_json_alone_and_the_same_as_python(
    run: Run, nets: Path, planted: tuple[nn.Sequential, Path], words: list[str], options: dict[str, Any]
) -> None:
    model, weights = planted
    code, said, _ = run(f"{nets}:plain", "--weights", weights, "--input", "1x1x8x8", "--json", *words)
    assert code == 0
    found = json.loads(said)
    expected = it.fold(model, torch.randn(1, 1, 8, 8), **options)
    assert found["groups"] == expected.to_dict()["groups"]
    assert found["parameters"] == expected.parameters.to_dict()
    assert found["options"] == {"beta": 0.1, **options}
    assert (found["out"], found["dataset"], found["accuracy"]) == (None, None, {})


def statistics(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of what the first convolution gives, per channel."""
    with torch.no_grad():
        hidden = model[0](x).movedim(1, 0).flatten(1).double()
    return hidden.mean(1), hidden.var(1)


def test_statistics_are_reset_on_training_images(run: Run, nets: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    call = (f"{nets}:normed", "--beta", "0.5", "--data", "digits", "--samples", "200", "--batch", "200", "--reset")
    code, said, _ = run(*call, "--out", out)
    assert code == 0
    small = load_folded(out).model
    assert isinstance(small, nn.Sequential)
    norm, data = small[1], it.zoo.data("digits")
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.num_features < 8
    chosen = torch.arange(200) * len(data.labels) // 200
    mean, variance = statistics(small, data.inputs(data.images[chosen]))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var.double(), variance, rtol=1e-3, atol=1e-5)
    assert "accuracy on digits, statistics reset" in said
    account = json.loads((out / "fold.json").read_text())
    assert set(account["accuracy"]) == {"before", "after", "after, statistics reset"}
    assert account["accuracy"]["after, statistics reset"] == pytest.approx(accuracy(small, 200))


def test_a_network_of_a_zoo_sees_its_own_normalisation(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "zoo"
    it.zoo.train("mlp", seeds=[4], data="digits", out=folder, epochs=8, options={"widths": [64, 16, 10]})
    code, said, _ = run(f"{folder}:4", "--beta", "0.01", "--data", "digits", "--samples", "360", "--json")
    assert code == 0
    assert json.loads(said)["accuracy"]["before"] == pytest.approx(it.zoo.load(folder).records[0].accuracy)


# -- to a size, to an accuracy, and in other ways ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained perceptron for digits."""
    folder = tmp_path_factory.mktemp("learnt")
    it.zoo.train("mlp", seeds=[0], data="digits", out=folder, epochs=8, options={"widths": [64, 48, 32, 10]})
    return folder


def held_out(folder: Path, samples: int) -> tuple[Tensor, Tensor]:
    """Every second of some training digits spread over all of them."""
    data = it.zoo.load(folder).dataset()
    chosen = torch.arange(samples) * len(data.labels) // samples
    return data.inputs(data.images[chosen[1::2]]), data.labels[chosen[1::2]]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--parameters", "0.4"], {"parameters": 0.4}),
        (["--parameters", "2000"], {"parameters": 2000.0}),
        (["--parameters", "0.4", "--how", "merge"], {"parameters": 0.4, "how": "merge"}),
    ],
)
def test_to_a_number_of_parameters(run: Run, learnt: Path, words: list[str], options: dict[str, Any]) -> None:
    code, said, _ = run(f"{learnt}:0", *words, "--input", "1x1x8x8", "--json")
    assert code == 0
    found = json.loads(said)
    expected = it.fold_to(it.zoo.load(learnt)[0], torch.randn(1, 1, 8, 8), **options)
    whole = 65 * 48 + 49 * 32 + 33 * 10
    assert found["parameters"] == expected.parameters.to_dict()
    assert found["parameters"]["before"] == whole
    asked = options["parameters"]
    assert found["parameters"]["after"] <= (asked if asked > 1 else asked * whole)
    assert found["groups"] == expected.to_dict()["groups"]
    assert found["options"] == {"how": "absorb", "with_data": False, **options}
    merges = options.get("how") == "merge"
    assert (found["complexity"] is not None) == merges
    assert found["betas"] == (expected.to_dict()["betas"] if merges else {})
    assert bool(found["betas"]) == merges


def test_absorbing_can_look_at_training_images(run: Run, learnt: Path) -> None:
    words = (f"{learnt}:0", "--parameters", "0.3", "--data", "digits", "--samples", "300", "--batch", "150", "--json")
    blind, seeing = (json.loads(run(*words, *more)[1]) for more in ((), ("--with-data",)))
    held = it.zoo.load(learnt)
    data = held.dataset()
    chosen = torch.arange(300) * len(data.labels) // 300
    batches = [(data.inputs(data.images[part]), data.labels[part]) for part in chosen.split(150)]
    expected = it.fold_to(held[0], torch.randn(1, 1, 8, 8), parameters=0.3, data=batches)
    assert seeing["groups"] == expected.to_dict()["groups"] != blind["groups"]
    assert (seeing["options"]["with_data"], blind["options"]["with_data"]) == (True, False)
    assert seeing["held_out"] is None


def test_to_an_accuracy_on_training_images_set_apart(run: Run, learnt: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    words = ("--floor", "0.9", "--data", "digits", "--samples", "400", "--out", out)
    code, said, complaint = run(f"{learnt}:0", *words)
    assert code == 0
    model, (x, labels) = it.zoo.load(learnt)[0], held_out(learnt, 400)
    expected = it.fold_to(model, torch.randn(1, 1, 8, 8), floor=0.9, held_out=[(x, labels)])
    small = load_folded(out)
    assert small.parameters == expected.parameters.after < expected.parameters.before
    with torch.no_grad():
        shares = [float((m(x).argmax(1) == labels).double().mean()) for m in (model, small.model)]
    assert shares[1] >= 0.9
    assert re.search(rf"accuracy on 200 held-out training images +{shares[0]:.2%} +{shares[1]:.2%}", said)
    assert "features expressed by those left" in said
    account = json.loads((out / "fold.json").read_text())
    assert account["held_out"] == {"images": 200, "before": pytest.approx(shares[0]), "after": pytest.approx(shares[1])}
    assert account["complexity"] is None
    assert not (out / "complexity.svg").exists()
    assert "trying" not in said + complaint  # the bar goes, and stands nowhere but in a terminal


def test_a_floor_with_statistics_reset_resets_on_the_other_half(run: Run, nets: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    words = ("--floor", "0.01", "--reset", "--how", "merge", "--data", "digits", "--samples", "400", "--batch", "400")
    code, said, _ = run(f"{nets}:normed", *words, "--out", out)
    assert code == 0
    small = load_folded(out).model
    assert isinstance(small, nn.Sequential)
    data = it.zoo.data("digits")
    chosen = (torch.arange(400) * len(data.labels) // 400)[::2]
    mean, variance = statistics(small, data.inputs(data.images[chosen]))
    norm = small[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var.double(), variance, rtol=1e-3, atol=1e-5)
    account = json.loads((out / "fold.json").read_text())
    assert set(account["accuracy"]) == {"before", "after, statistics reset"}
    assert re.search(r"^layer +features +dead +left +beta +how *$", said, re.M)


def test_in_clusters_and_by_activations(run: Run, learnt: Path) -> None:
    model, x = it.zoo.load(learnt)[0], torch.randn(1, 1, 8, 8)
    code, said, _ = run(f"{learnt}:0", "--method", "kmeans", "--widths", "0.5", "--input", "1x1x8x8", "--json")
    assert code == 0
    found = json.loads(said)
    assert found["groups"] == fold_kmeans(model, x, widths=0.5).to_dict()["groups"]
    assert found["options"] == {"method": "kmeans", "widths": 0.5}
    names = list(found["widths"])
    words = ("--method", "activations", "--data", "digits", "--samples", "200", "--batch", "200", "--json")
    code, said, _ = run(f"{learnt}:0", *words, "--widths", f"{names[0]}=20", "--widths", f"{names[1]}=30")
    assert code == 0
    found = json.loads(said)
    data = it.zoo.load(learnt).dataset()
    chosen = torch.arange(200) * len(data.labels) // 200
    batches = [(data.inputs(data.images[chosen]), data.labels[chosen])]
    expected = fold_activations(model, batches, widths={names[0]: 20, names[1]: 30})
    assert found["groups"] == expected.to_dict()["groups"]
    assert [change["after"] for change in found["widths"].values()] == [20, 30]
    assert found["flops"]["before"] == 2 * (64 * 48 + 48 * 32 + 32 * 10)  # of one image
    assert json.loads(run(f"{learnt}:0", *words)[1])["options"] == {"method": "activations", "beta": 0.1}


def test_nothing_to_fold_and_nothing_near_enough_are_told(run: Run, nets: Path, tmp_path: Path) -> None:
    code, said, _ = run(f"{nets}:one", "--input", "1x1x8x8", "--out", tmp_path / "same")
    assert code == 0
    assert "nothing to fold: no layer has features that may be merged" in said
    assert "complexity.svg" not in said
    assert load_folded(tmp_path / "same").parameters == 650
    code, said, _ = run(f"{nets}:plain", "--input", "1x1x8x8", "--beta", "1e-9")
    assert code == 0
    assert "nothing was merged: no two features are near enough; a larger --beta merges more" in said


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--beta", "1"], "beta must be above 0 and below 1, but is 1.0. It is a share of a distance"),
        (["--beta", "x"], "--beta x is not a number. Write one such as 0.1, or LAYER=NUMBER for one layer."),
        (["--beta", "0.1", "--beta", "0.2"], "--beta is given 2 times (0.1 0.2). Give one number for all layers"),
        (["--beta", "0.1", "--beta", "1=0.2"], "--beta is given 2 times (0.1 1=0.2)."),
        (["--beta", "2=0.1"], "A beta is given for '2', which is no wire that can be folded. "),
        (["--max-ratio", "2"], "max_ratio must be above 0 and at most 1, or None, but is 2.0. It is the largest share"),
        (
            ["--parameters", "0.5", "--floor", "0.9"],
            "--parameters and --floor cannot be given together: either decides the size. Leave one",
        ),
        (
            ["--parameters", "0.5", "--beta", "0.1"],
            "--beta has no effect on --parameters or --floor; it belongs to "
            "folding by --beta and --method activations. Leave one of them out",
        ),
        (["--floor", "0.5", "--method", "kmeans"], "--method has no effect on --parameters or --floor"),
        (
            ["--floor", "0.5", "--no-bias"],
            "--no-bias has no effect on --parameters or --floor; it belongs to folding by",
        ),
        (["--how", "merge"], "--how has no effect on folding by --beta; it belongs to --parameters or --floor."),
        (
            ["--method", "kmeans", "--widths", "0.5", "--max-ratio", "0.5"],
            "--max-ratio has no effect on --method kmeans",
        ),
        (["--method", "kmeans"], "--method kmeans needs the number of features to keep. Add --widths 0.5"),
        (["--method", "kmeans", "--widths", "1"], "widths must be above 0 and below 1, the share of its"),
        (["--method", "kmeans", "--widths", "1=0.5"], "or LAYER=NUMBER, a whole number of features, for one layer."),
        (["--method", "activations"], "--method activations compares activations on training images, and no"),
        (
            ["--method", "activations", "--data", "digits", "--beta", "0.1", "--widths", "0.5"],
            "--beta and --widths cannot be given together",
        ),
        (["--floor", "0.9"], "--floor is an accuracy on images, and no data is given. Add --data NAME"),
        (["--floor", "1.5", "--data", "digits"], "floor must be an accuracy, above 0 and at most 1, but is 1.5."),
        (["--floor", "0.99", "--data", "digits"], "An accuracy of 0.99 cannot be kept: the network itself"),
        (["--floor", "0.9", "--data", "digits", "--samples", "1"], "cannot be split into two halves. Allow more by"),
        (["--parameters", "0.5", "--with-data"], "--with-data uses training images, and no data is given."),
        (["--parameters", "0.5", "--with-data", "--how", "merge"], "--how merge, which compares weights alone."),
        (["--parameters", "10"], "10 of 1,374 parameters cannot be reached: 87 are left when every wire"),
        (["--reset"], "--reset measures BatchNorm statistics on data, and no data is given. Add --data NAME"),
        (["--reset", "--data", "digits"], "has none. Leave it out."),
        (["--data-folder", "x"], "--data-folder x is given without a data set. Add --data NAME."),
        (["--weights", "none.pt"], "There is no file none.pt"),
        (["--out", "/dev/null/x"], "Results cannot be written into /dev/null/x"),
    ],
)
def test_refusals(run: Run, nets: Path, words: list[str], text: str) -> None:
    code, said, complaint = run(f"{nets}:plain", "--input", "1x1x8x8", *words)
    assert (code, said) == (2, "")
    assert text in complaint


def test_a_width_written_into_the_forward_is_refused_with_its_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "stiff.py"
    file.write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Conv2d(1, 4, 3), nn.Linear(144, 2)\n"
        "    def forward(self, x):\n"
        "        return self.b(self.a(x).relu().reshape(-1, 144))\n"
    )
    code, said, complaint = run(f"{file}:Net", "--input", "1x1x8x8", "--beta", "0.9")
    assert (code, said) == (2, "")
    assert "stiff.py:7 (return self.b(self.a(x).relu().reshape(-1, 144)))" in complaint


def test_choices_are_told(run: Run, nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(f"{nets}:plain", "--preset", "prnted")
    assert (
        "Unknown value 'prnted' for --preset. Did you mean 'printed'? Choose one of: printed, paper-code."
        in capsys.readouterr().err
    )


def test_help_does_not_import_torch() -> None:
    code = "import sys; from intertwine.cli import main\ntry: main(['fold', '--help'])\n"
    code += "except SystemExit: print({'torch', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: intertwine fold" in done.stdout
    assert done.stdout.endswith("set()\n")
