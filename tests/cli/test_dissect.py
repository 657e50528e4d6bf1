"""`intertwine dissect`: planted units are found, what it prints and writes, a Broden folder, and its refusals."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import intertwine as it
from intertwine.cli import main
from intertwine.errors import InputError
from intertwine.inspect.dissect import dissect
from intertwine.inspect.top_images import DIM, draw_units
from intertwine.lab.zoo.datasets.concepts import concept_images

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[..., tuple[int, str, str]]
NETS = """
import torch
from torch import nn

class Net(nn.Module):
    '''Four units: red, green, blue, and nothing but noise; then a head.'''
    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.head = nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Linear(4, 2)
        with torch.no_grad():
            self.conv.weight[:, :, 0, 0] = torch.tensor(
                [[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0], [0.0, 0.0, 0.0]]
            )
            self.conv.bias.zero_()
    def forward(self, x):
        return self.head(self.relu(self.conv(x)).mean((2, 3)))

def example_inputs():
    return torch.zeros(1, 3, 32, 32)

def grey():
    return nn.Sequential(nn.Conv2d(1, 2, 3))
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    file = tmp_path / "nets.py"
    file.write_text(NETS)
    return f"{file}:Net"


@pytest.fixture
def run(net: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `intertwine dissect` on the planted network; gives exit code, standard output and standard error."""

    def done(*words: str | Path) -> tuple[int, str, str]:
        call = ["--at", "relu", "--samples", "60", "--device", "cpu", "--share", "0.02"]
        code = main(["dissect", net, *call, *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return done


def planted(net: str) -> nn.Module:
    names: dict[str, type[nn.Module]] = {}
    exec(NETS, names)
    return names["Net"]().eval()


# -- what it prints and writes -----------------------------------------------------------------------------------------


def test_planted_units_are_named_in_their_own_basis(run: Run) -> None:
    code, said, _ = run("--seeds", "0:2")
    assert code == 0
    lines = [line.split() for line in said.splitlines()]
    assert lines[1][:8] == "4 units, 60 images of synthetic concepts, 14".split()
    assert lines[3] == [
        *("α", "rotation", "units", "share", "by", "chance", "above", "chance", "colour", "texture", "shape", "part"),
    ]  # fmt: skip
    assert [line[:2] for line in lines[4:9]] == [["0", "–"], ["0.5", "0"], ["0.5", "1"], ["1", "0"], ["1", "1"]]
    assert lines[4][2:4] == ["3", "75.0%"]
    assert lines[4][6:8] == ["3", "(3)"]
    best = {tuple(line[:3]) for line in lines if line[2:3] == ["colour"]}
    assert best == {("0", "red", "colour"), ("1", "green", "colour"), ("2", "blue", "colour")}
    assert "under the null (masks of other images), 95 % of units stay below " in said


def test_json_is_json_alone_and_the_same_as_python(run: Run, net: str) -> None:
    code, said, _ = run("--rotation", "0,1", "--json", "--null", "2", "--level", "0.1")
    assert code == 0
    found = json.loads(said)
    pictures, model = concept_images(60, 1), planted(net)
    for record, alpha in zip(found["dissections"], (0, 1), strict=True):
        turn = it.rotation(4, 1, 0, torch.float32) if alpha else None
        expected = dissect(
            model, "relu", pictures.inputs(), pictures.concepts, turn, share=0.02, null=2, level=0.1
        ).to_dict()
        assert (record["alpha"], record["seed"], record["rotated"]) == (alpha, 0, bool(alpha))
        assert record["by_category"] == expected["by_category"]
        overlaps = [[unit["iou"] for unit in one["units"]] for one in (record, expected)]
        assert overlaps[0] == pytest.approx(overlaps[1], abs=5e-3)  # pixels that meet the threshold
        assert record["null_95"] == pytest.approx(expected["null_95"], abs=1e-3)
    assert (found["concepts"], found["out"]) == ("synthetic concepts", None)


def test_what_it_writes(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "found"
    code, said, _ = run("--rotation", "0,0.25", "--out", out, "--units", "2")
    assert code == 0
    bases = [f"{kind}-{alpha}" for alpha in ("0", "0.25") for kind in ("categories", "concepts", "units")]
    names = {"dissection.json", "fractions.svg", *(f"{b}.{'png' if 'units' in b else 'svg'}" for b in bases)}
    assert {file.name for file in out.iterdir() if not file.name.startswith(".")} == names
    assert all(f"wrote {out / name}" in said for name in names)
    assert (out / "units-0.png").read_bytes().startswith(b"\x89PNG")
    held = json.loads((out / "dissection.json").read_text())
    assert [one["alpha"] for one in held["dissections"]] == [0.0, 0.25]


def test_normalisation_is_the_networks_own(run: Run, net: str, tmp_path: Path) -> None:
    """Dark colours seem none to a network that is told the wrong mean; thresholds move with the inputs."""
    rows = [json.loads(run("--rotation", "0", "--json", *words)[1])["dissections"][0]["units"] for words in (
        (), ("--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25"),
    )]  # fmt: skip
    pixels = concept_images(60, 1).images.movedim(-1, 1).double() / 255
    for found, (mean, std) in zip(rows, ((110 / 255, 60 / 255), (0.5, 0.25)), strict=True):
        x = (pixels - mean) / std
        red = (x[:, 0] - x[:, 1] - x[:, 2]).clamp(min=0)
        assert found[0]["threshold"] == pytest.approx(np.quantile(red.numpy(), 0.98), rel=1e-4)


def test_a_network_of_a_zoo_sees_pictures_as_it_learnt_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = concept_images(80).dataset(20).normalised([0] * 3, [255] * 3)
    it.zoo.train("resnet20", seeds=[0], data=data, out=tmp_path, epochs=1, device="cpu", options={"width": 0.25})
    call = ["dissect", f"{tmp_path}:0", "--at", "layer1", "--samples", "20", "--rotation", "0", "--device", "cpu"]
    assert main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["dissections"][0]
    pictures = concept_images(20, 1)
    x = pictures.images.movedim(-1, 1).float() / 255
    expected = dissect(it.zoo.load(tmp_path)[0].eval(), "layer1", x, pictures.concepts)
    assert [unit["threshold"] for unit in found["units"]] == pytest.approx(
        [unit.threshold for unit in expected.units], rel=1e-3
    )


# -- Broden ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broden(tmp_path: Path) -> Path:
    """Twelve images, left half red or green, right half blue, labelled so; two are another part."""
    from PIL import Image

    place = tmp_path / "tiny-broden"
    (place / "images").mkdir(parents=True)
    rows = []
    for i in range(12):
        pixels, labels = np.zeros((32, 32, 3), np.uint8), np.zeros((32, 32, 3), np.uint8)
        pixels[:, :16, i % 2], pixels[:, 16:, 2] = 200 + i, 200 + i
        labels[:, :16, 0], labels[:, 16:, 0] = 1 + i % 2, 3
        Image.fromarray(pixels).save(place / "images" / f"{i}.png")
        Image.fromarray(labels).save(place / "images" / f"{i}_color.png")
        rows.append([f"{i}.png", "val" if i > 9 else "train", 32, 32, 32, 32, f"{i}_color.png"])
    tables = {
        "index": [["image", "split", "ih", "iw", "sh", "sw", "color"], *rows],
        "category": [["name"], ["color"]],
        "label": [["number", "name", "category"], *([i + 1, n, "color(4)"] for i, n in enumerate(("r", "g", "b")))],
    }
    for name, table in tables.items():
        with (place / f"{name}.csv").open("w", newline="", encoding="utf-8") as lines:
            csv.writer(lines).writerows(table)
    return place


def test_a_broden_folder(run: Run, broden: Path) -> None:
    words = ("--concepts", broden, "--rotation", "0", "--json", "--share", "0.2", "--split", "train")
    code, said, _ = run(*words)
    assert code == 0
    found = json.loads(said)["dissections"][0]
    assert found["images"] == 10
    assert [unit["concept"] for unit in found["units"][:3]] == ["r", "g", "b"]
    code, said, _ = run(*words, "--samples", "4", "--null", "0")
    assert json.loads(said)["dissections"][0]["images"] == 4
    code, said, complaint = run("--concepts", broden, "--split", "test")
    assert code == 2
    assert "The split 'test' of" in complaint
    assert "index.csv has train, val." in complaint


# -- pictures of units -------------------------------------------------------------------------------------------------


def test_000_g74_units_with_their_masks(net: str) -> None:
    pictures, model = concept_images(30, 1), planted(net)
    x = pictures.inputs()
    turn = it.rotation(4, 0.5, 0, torch.float32)
    for rotation in (None, turn):
        found = dissect(model, "relu", x, pictures.concepts, rotation, share=0.02, null=0)
        figure = draw_units(model, x, found, rotation, units=[2, 0], count=3)
        assert [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()] == [
            f"{found.units[u].unit}: {found.units[u].concept}\n{found.units[u].iou:.3f}" for u in (2, 0)
        ]
        values = torch.relu(functional.conv2d(x, model.conv.weight)).detach()  # pyrefly: ignore
        values = values if rotation is None else torch.einsum("uc,nchw->nuhw", rotation, values)
        for row, unit in enumerate((2, 0)):
            best = values[:, unit].flatten(1).amax(1).argsort(descending=True)[:3]
            for column, image in enumerate(best.tolist()):
                shown = torch.as_tensor(np.asarray(figure.axes[3 * row + column].images[0].get_array()))
                assert torch.allclose(shown, by_hand(x[image], values[image, unit], found.units[unit].threshold))


def by_hand(image: Tensor, values: Tensor, threshold: float) -> Tensor:
    """Pixels from 0 to 1, a quarter as bright where the unit is not above its threshold."""
    bright = (image - image.min()) / (image.max() - image.min())
    return torch.stack([torch.where(values > threshold, one, DIM * one) for one in bright], -1)


def test_pictures_of_units_that_are_not_there(net: str) -> None:
    pictures, model = concept_images(10, 1), planted(net)
    found = dissect(model, "relu", pictures.inputs(), pictures.concepts, null=0)
    with pytest.raises(InputError, match=r"Unknown units \[7\]. The dissection of 'relu' has units 0 to 3"):
        draw_units(model, pictures.inputs(), found, units=[0, 7])
    with pytest.raises(InputError, match="There are no units to draw"):
        draw_units(model, pictures.inputs(), found, units=0)


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rotation", "0,a"], "--rotation '0,a' is not a list of numbers. Write them with commas between"),
        (["--rotation", "inf"], "alpha must be a finite number, but is inf"),
        (["--seeds", "a"], "The seeds 'a' are not numbers"),
        (["--at", "rellu"], "rellu"),
        (["--at", "head"], "'head'"),
        (["--concepts", "none"], "none is no Broden folder: it has no category.csv."),
        (["--split", "val"], "--split val needs a Broden folder; synthetic pictures have no parts."),
        (["--mean", "0,0,0"], "--mean and --std belong together: give both"),
        (["--mean", "0,0", "--std", "1,1,1"], "--mean 0,0 is not three numbers. Write 0.5,0.5,0.5"),
        (["--mean", "0,0,0", "--std", "1,1,0"], "--std 1,1,0 is not three numbers above 0. Write 0.5,0.5,0.5"),
        (["--input", "1x3x32x24"], "Synthetic pictures are squares of at least 16×16, but"),
        (["--share", "2"], "share must be between 0 and 1, such as 0.005, but is 2.0"),
        (["--null", "99"], "null must be at least 0 and less than the number of images"),
        (["--out", "/dev/null/x"], "Results cannot be written into /dev/null/x"),
        (["--device", "tpu9"], "Unknown device 'tpu9'"),
    ],
)  # fmt: skip
def test_refusals(run: Run, words: list[str], text: str) -> None:
    code, said, complaint = run(*words)
    assert (code, said) == (2, "")
    assert text in complaint


def test_networks_that_see_no_colours_are_refused(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    grey = net.replace(":Net", ":grey")
    assert main(["dissect", grey, "--at", "0", "--input", "1x1x32x32", "--device", "cpu"]) == 2
    assert "dissection needs images with three colours. Give a network of images" in capsys.readouterr().err


def test_a_place_must_be_given(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["dissect", net])
    assert "the following arguments are required: --at" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    code = "import sys; from intertwine.cli import main\ntry: main(['dissect', '--help'])\n"
    code += "except SystemExit: print({'torch', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: intertwine dissect" in done.stdout
    assert done.stdout.endswith("set()\n")
