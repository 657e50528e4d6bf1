"""docs/inspection.md: its tables are what was measured, its example runs, its claims hold in the kept rows."""

import re
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest
import torch
from pages import DOCS, run_example, script
from torch import nn

from intertwine.inspect.dissection import Dissection
from intertwine.inspect.guided import GuidedMaps
from intertwine.inspect.rotation import rotation
from intertwine.inspect.rotation_scan import RotationScan, rotation_scan

PAGE = (DOCS / "inspection.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The script that writes the tables."""
    return script("inspection_tables")


@pytest.fixture(scope="module")
def rows(tables: ModuleType) -> list[dict[str, Any]]:
    return tables.read_rows()


def test_the_tables_are_what_was_measured(tables: ModuleType) -> None:
    assert tables.written(PAGE) == PAGE, "run: python docs/results.py"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_example(PAGE)
    own, scan, maps = names["own"], names["scan"], names["maps"]
    assert isinstance(own, Dissection)
    assert isinstance(scan, RotationScan)
    assert isinstance(maps, GuidedMaps)
    assert own.null is not None
    assert set(scan.curve) == {0.0, 0.5, 1.0}
    assert scan.curve[0.0] == [own.fraction] * 2
    assert maps.warning is None
    assert "Dissection(" in capsys.readouterr().out


def test_the_command_of_the_page_is_understood() -> None:
    from intertwine.cli import parser

    (line,) = re.findall(r"`intertwine (dissect MODEL [^`]*)`", PAGE)
    options = parser().parse_args(line.split())
    assert (options.at, options.rotation, options.out) == ("layer4", "0,0.5,1", "found")


def test_pictures_are_there_and_drawn_by_the_script() -> None:
    found = re.findall(r"\]\((images/[\w.-]+)\)", PAGE)
    drawn = (DOCS / "inspection_figures.py").read_text(encoding="utf-8")
    assert found
    for picture in found:
        assert (DOCS / picture).is_file()
        assert f'"{picture.removeprefix("images/inspection_").removesuffix(".svg")}"' in drawn


def test_files_that_the_page_names_are_there() -> None:
    for name in re.findall(r"`(?:python )?((?:experiments|bench|docs)/[\w./-]+)", PAGE):
        assert (DOCS.parent / name).is_file(), name


# -- 000-G73: interpretable units against α ----------------------------------------------------------------------------


def fractions(rows: list[dict[str, Any]], kind: str, at: str, alpha: float, network: int | None = None) -> float:
    some = [
        row["fraction"] for row in rows
        if (row["kind"], row["at"], row["alpha"]) == (kind, at, alpha) and network in (None, row["network"])
    ]  # fmt: skip
    return mean(some)


def test_000_g73_what_the_page_says_of_the_trend_is_in_the_rows(rows: list[dict[str, Any]]) -> None:
    relu, none = "with residual ReLU", "without"
    networks = {row["network"] for row in rows}
    assert len(networks) == 3
    falls = {
        (kind, network): fractions(rows, kind, "layer3", 1.0, network) - fractions(rows, kind, "layer3", 0.0, network)
        for kind in (relu, none) for network in networks
    }  # fmt: skip
    assert all(falls[relu, network] < -0.05 for network in networks)
    assert abs(mean(falls[none, network] for network in networks)) < 0.05
    assert sum(falls[none, network] < -0.05 for network in networks) == 1  # "one of them falls too"
    assert fractions(rows, none, "layer3", 0.0) < fractions(rows, relu, "layer3", 0.0) - 0.1
    for kind in (relu, none):  # the paper's curve rises
        inside = [fractions(rows, kind, "layer3.2.relu1", alpha) for alpha in (0.0, 1.0)]
        assert inside[1] < inside[0]
    assert max(row["chance"] for row in rows) < 0.01


class Turned(nn.Module):
    """Rectified units of one concept each, as they are or in a basis turned at random."""

    def __init__(self, units: int, turned: bool) -> None:
        super().__init__()
        matrix = rotation(units, 1, 5, torch.float32) if turned else torch.eye(units)
        self.relu, self.mix = nn.ReLU(), nn.Conv2d(units, units, 1, bias=False)
        self.mix.weight = nn.Parameter(matrix[:, :, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.relu(x))


def test_000_g73_only_a_basis_in_which_units_are_rectified_is_special() -> None:
    """The trend where it is known: units of rare events, one each, fall as the basis turns; a turned basis stays."""
    g = torch.Generator().manual_seed(0)
    masks = torch.rand(40, 24, 10, 10, generator=g) < 0.02
    x = torch.where(masks, 2.0, -1.0) + 0.3 * torch.randn(40, 24, 10, 10, generator=g)
    curves = {
        turned: {alpha: mean(some) for alpha, some in rotation_scan(
            Turned(24, turned), "mix", x, masks, [0, 0.5, 1], seeds=[0, 1], share=0.02, level=0.5
        ).curve.items()}
        for turned in (False, True)
    }  # fmt: skip
    own, level = curves[False], curves[True]
    assert own[0.0] == 1.0
    assert own[0.5] < own[0.0]
    assert own[1.0] < own[0.5]
    assert own[1.0] < 0.5
    assert max(level.values()) - min(level.values()) < 0.25
    assert level[0.0] < 0.5


def test_the_published_reading_of_angles_does_not_end_at_q() -> None:
    """What the first figure shows, from the script that draws it."""
    sys.path.insert(0, str(DOCS))
    try:
        drawing = script("inspection_figures")
    finally:
        sys.path.remove(str(DOCS))
    q = rotation(64, 1, 0).numpy()
    length = float((q**2).sum() ** 0.5)
    assert float(((drawing.published_power(q, 1.0) - q) ** 2).sum() ** 0.5) > 0.5 * length
    assert abs(drawing.published_power(q, 0.0) - torch.eye(64).numpy()).max() < 1e-12
