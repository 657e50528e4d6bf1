"""Networks kept in float64: what commands and studies call them with is in float64 too."""

from pathlib import Path
from typing import Any

import pytest
import torch

import intertwine as it
from intertwine.cli import main
from intertwine.models import load
from intertwine.study.plan import Part, Plan, ZooPlan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place, options = tmp_path_factory.mktemp("zoos") / "exact", {"widths": (64, 16, 10)}
    return it.zoo.train("mlp", seeds=[0, 1], data="digits", out=place, options=options, epochs=2, precision="float64")


@pytest.mark.parametrize("inputs", [(), ("1x1x8x8",)])
def test_inputs_are_of_the_networks_kind(inputs: tuple[str, ...], zoo: Any) -> None:
    loaded = load(f"{zoo.folder}:0", None, inputs)
    assert loaded.inputs == ("float64 1×1×8×8",)
    assert torch.equal(loaded.model(*loaded.args), zoo[0](*loaded.args))


def test_inputs_of_a_users_file_too(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x, ids):\n"
        "        return super().forward(x)[ids]\n"
        "def net(): return Net(3, 2, dtype=torch.float64)\n"
        "def example_inputs(): return (torch.ones(4, 3),), {'ids': torch.tensor([1, 2])}\n"
    )
    loaded = load(f"{tmp_path / 'nets.py'}:net")
    assert loaded.inputs == ("float64 4×3", "ids: int64 2")  # ids stay whole numbers


@pytest.mark.parametrize(
    "line",
    [
        "inspect {zoo}:0", "canonicalize {zoo}:0", "compare {zoo}:0 {zoo}:1", "align {zoo}:0 {zoo}:1",
        "align {zoo}:0 {zoo}:1 --method activations --data digits", "merge {zoo}:0 {zoo}:1 --data digits",
        "barrier {zoo}:0 {zoo}:1 --data digits --points 3", "fold {zoo}:0 --parameters 0.6 --data digits",
        "stitch {zoo}:0 {zoo}:1 --at 2 --data digits",
    ],
)  # fmt: skip
def test_commands(line: str, zoo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.format(zoo=zoo.folder).split()) == 0, capsys.readouterr().err


def test_a_study_and_its_report(zoo: Any, tmp_path: Path) -> None:
    pytest.importorskip("polars")
    one = {"zoos": ("z",), "networks": (0,)}
    parts = (
        Part("canonical", **one), Part("symmetry", **one), Part("complexity", **one),
        Part("fold", **one, options={"at": [0.6]}, grid={"method": ("fold_to", "merge", "fold", "prune")}),
        Part("barrier", ("z",), pairs=((0, 1),), options={"method": "weights", "points": 3}),
    )  # fmt: skip
    study = it.study.run(Plan("exact", {"z": ZooPlan(folder=str(zoo.folder))}, parts), out=tmp_path / "s")
    assert (study.tasks, study.errors) == (8, {})
    found = {(row["verb"], row["quantity"]): row["value"] for row in study.frame().to_dicts()}
    assert found["canonical", "changed_predictions"] == 0
    assert found["canonical", "way_back_error"] < 1e-12  # single precision is at 1e-7
    assert "S_16" in it.report.write(study, tmp_path / "r.html").read_text()
