"""`intertwine compare`: two networks out of a zoo on the command line."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import intertwine as it
from intertwine.cli import main
from intertwine.cli.compare import _show


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zoo")
    it.zoo.train("mlp", seeds=[0, 3], data="digits", out=folder, epochs=1, options={"widths": [64, 12, 8, 10]})
    return str(folder)


def test_the_table(zoo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{zoo}:0", f"{zoo}:3", "--measure", "linear_cka", "--measure", "cca"]) == 0
    out = capsys.readouterr().out
    assert ": 6 × 6 layers by linear_cka, cca, 360 samples, channels\n" in out
    assert "\nlinear_cka\n" in out
    assert "1.000" in out


def test_000_D5_unrelated_features_stand_beside_procrustes_values(zoo: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["compare", f"{zoo}:0", f"{zoo}:3", "--measure", "relu_procrustes", "--measure", "cca", "--layer", "2"]
    assert main(call) == 0
    first, second = capsys.readouterr().out.split("\ncca\n")
    assert re.search(r"2 +0\.\d{3} \(0\.\d{3}\)", first)
    assert "in brackets: the same features with shuffled samples, unrelated" in first
    assert "(" not in second
    assert main([*call, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert 0.25 < rows[0]["baseline"] < rows[0]["value"]
    assert rows[1]["baseline"] is None


def test_json_is_the_same_as_python(zoo: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["compare", f"{zoo}:0", f"{zoo}:3", "--json", "--layer", "2", "--layer-b", "2", "--layer-b", "4"]
    assert main([*call, "--samples", "100", "--batch", "30", "--policy", "pool"]) == 0
    found = json.loads(capsys.readouterr().out)
    (a, b), data = it.zoo.load(zoo)[:], it.zoo.data("digits").spread(100)
    expected = it.compare(a, b, data.batches("test", 100), "2", policy="pool", layers_b=["2", "4"])
    assert [row["value"] for row in found["results"]] == pytest.approx(expected.matrix().flatten().tolist(), abs=1e-6)
    assert found["second"] == ["2", "4"]


def test_images_are_seen_as_the_networks_learnt_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"widths": [64, 12, 8, 10]}
    zoo = it.zoo.train("mlp", seeds=[0, 1], data="digits", out=tmp_path, recipe="chen", epochs=1, options=options)
    assert main(["compare", f"{tmp_path}:0", f"{tmp_path}:1", "--json", "--layer", "2"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    values = [
        it.compare(zoo[0], zoo[1], data.batches("test", 180), "2").result("2", "2").value
        for data in (zoo.dataset(), it.zoo.data("digits"))
    ]
    assert row["value"] == pytest.approx(values[0], abs=1e-6)
    assert row["value"] != pytest.approx(values[1], abs=1e-3)


def test_a_heat_map(zoo: str, tmp_path: Path) -> None:
    assert main(["compare", f"{zoo}:0", f"{zoo}:0", "--svg", str(tmp_path / "deep" / "map.svg")]) == 0
    assert "<svg" in (tmp_path / "deep" / "map.svg").read_text(encoding="utf-8")


def test_many_layers_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of all pairs would be wider than the terminal: each layer gets the one that is nearest."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(8)))
    _show(it.compare(net, net, [(torch.randn(30, 6), None)], measures=["linear_cka", "cca"]), "A", "B")
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["layer", "same", "layer", "most", "similar", "value"]
    assert lines[4].split() == ["0.0", "1.000", "0.0", "1.000"]
    assert len(lines) >= 3 + 2 * 17


def test_images_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["compare", "zoo:resnet20", "zoo:resnet20", "--data", "digits"]
    assert main(call) == 2
    assert "The forward of zoo:resnet20 raises RuntimeError when called with float32 1×1×8×8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (["{zoo}:1", "{zoo}:0"], "holds no network of seed 1; it holds (0, 3)"),
        (["{zoo}:first", "{zoo}:0"], "names no seed of the zoo {zoo}. Give one, such as"),
        (["{zoo}", "{zoo}:0"], "is a zoo of 2 networks. Write {zoo}:0 for the one of seed 0"),
        (
            ["{zoo}:0", "{zoo}:0", "--measure", "cka"],
            "Unknown measure 'cka'. Did you mean 'rbf_cka', 'relu_cka', 'linear_cka",
        ),
        (["{zoo}:0", "{zoo}:0", "--layer", "9"], "'9'"),
        (["{zoo}:0", "{zoo}:0", "--data", "didgits"], "Did you mean 'digits'?"),
    ],
)
def test_errors(zoo: str, call: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *(part.format(zoo=zoo) for part in call)]) == 2
    assert text.format(zoo=zoo) in capsys.readouterr().err


def test_images_of_another_size_name_the_data_set(zoo: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (folder / name).mkdir(parents=True)
        for i in range(4):
            Image.new("L", (5, 5), i * 9).save(folder / name / f"{i}.png")
    for command in ("compare", "align"):
        assert main([command, f"{zoo}:0", f"{zoo}:3", "--data", f"folder:{folder}"]) == 2
        complaint = capsys.readouterr().err
        assert "choose a data set that fits it by --data, such as digits, which it was trained on." in complaint
        assert "--input" not in complaint


def test_a_heat_map_of_another_kind_is_refused(zoo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{zoo}:0", f"{zoo}:0", "--svg", "map.png"]) == 2
    assert "map.png. Choose a name that ends in .svg." in capsys.readouterr().err
