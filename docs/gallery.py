"""Draw the picture at the top of the README, docs/images/front.svg, and photograph a report, docs/images/report.png.

python docs/gallery.py                     needs the extras `plot` and `data`
python docs/gallery.py out/report.html     the same, and the report of `make demo`; needs playwright and chromium
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor, nn

mpl.use("svg")
import matplotlib.pyplot as plt
from figures import IMAGES, STEADY, save_figure, small_palette
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import intertwine as it
from intertwine.symmetry.symmetry import Symmetry

WIDTHS = (64, 64, 64, 10)
SHOWN = 8


@dataclass(frozen=True)
class Story:
    """Two networks, the second moved onto the first, and what was found on the way."""

    a: nn.Module
    b: nn.Module
    moved: nn.Module
    test: list
    symmetry: Symmetry
    error: float


def story() -> Story:
    """Train the two networks; decay makes their first layers clear enough to be looked at."""
    with tempfile.TemporaryDirectory() as place:
        options = {"widths": WIDTHS}
        zoo = it.zoo.train(
            "mlp", seeds=range(2), data="digits", out=place, options=options, epochs=30, weight_decay=1e-2
        )
        data, a, b = zoo.dataset(), zoo[0], zoo[1]
        x = torch.zeros(1, *data.shape)
    symmetry = it.symmetry(a, x)
    certificate = symmetry.certify(a, torch.rand(8, *data.shape, generator=torch.Generator().manual_seed(0)))
    test = list(data.batches("test"))
    return Story(a, b, it.align(a, b, x).model, test, symmetry, certificate.max_error)


def first_weights(model: nn.Module) -> Tensor:
    """The first layer as pictures, one per unit."""
    return next(model.parameters()).detach().reshape(-1, 8, 8)


def draw_units(cells: np.ndarray, found: Story) -> None:
    """The units that fit best, in the order of the first network; each has a colour scale of its own."""
    rows = {"network A": found.a, "network B,\nas trained": found.b, "network B,\naligned to A": found.moved}
    a, moved = first_weights(found.a), first_weights(found.moved)
    cosines = torch.cosine_similarity(a.flatten(1), moved.flatten(1))
    best = cosines.argsort(descending=True)[:SHOWN].tolist()
    for row, (name, model) in zip(cells, rows.items(), strict=True):
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8)
        for cell, unit in zip(row, first_weights(model)[best], strict=True):
            reach = float(unit.abs().max())
            cell.imshow(unit, cmap="RdBu_r", vmin=-reach, vmax=reach)
            cell.set(xticks=[], yticks=[])
            cell.spines[:].set_color("0.8")
    for cell, unit in zip(cells[-1], best, strict=True):
        cell.set_xlabel(f"{cosines[unit]:.2f}", fontsize=8.5, color="0.35", labelpad=3)


def draw_line(axes: Axes, found: Story) -> None:
    """Wrong answers of the networks between the two."""
    for name, other, colour in (("B as trained", found.b, "C3"), ("B aligned", found.moved, "C0")):
        line = it.barrier(found.a, other, found.test, points=25)
        errors = [100 * error for error in line.error or ()]
        middle = errors[len(errors) // 2]
        axes.plot(line.ts, errors, color=colour, linewidth=2)
        place = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{name}: {middle:.0f} %", (0.5, middle), color=colour, **place)
    axes.set(ylabel="wrong answers, %", ylim=(0, 27), xlim=(0, 1))
    axes.set_xticks([0, 0.5, 1], ["A", "mean of both", "B"])
    axes.spines[["top", "right"]].set_visible(False)


def titles(figure: Figure, found: Story) -> None:
    """What was found, in words; the numbers are those of the networks in the picture."""
    wires = found.symmetry.wires
    above = f"Found in the network: {wires[0].group} on each of {len(wires)} hidden layers."
    proved = f"Proved: random elements change its outputs by {found.error:.0e}."
    figure.text(0.01, 0.93, f"{above}  {proved}", fontsize=11)
    figure.text(0.01, 0.82, "Two trainings, the same features in another order", fontsize=11, weight="bold")
    figure.text(0.655, 0.82, "Once aligned, their mean works", fontsize=11, weight="bold")
    figure.text(0.096, 0.06, "cosine with A", fontsize=8.5, color="0.35", ha="right")


def draw(path: Path) -> None:
    """The whole picture, on white, so that it can be read on a dark page too."""
    found = story()
    with mpl.rc_context(STEADY):
        figure = plt.figure(figsize=(10.4, 3.7))
        titles(figure, found)
        left = figure.add_gridspec(3, SHOWN, left=0.105, right=0.6, bottom=0.09, top=0.78, hspace=0.12, wspace=0.1)
        draw_units(left.subplots(), found)
        right = figure.add_gridspec(1, 1, left=0.7, right=0.97, bottom=0.11, top=0.77)
        draw_line(right.subplots(), found)
        save_figure(figure, path, largest=60_000)  # the first picture of the README stays sharp at any size
        plt.close(figure)


def photograph(report: Path, path: Path) -> None:
    """The middle of the demo's report as a browser shows it: similarity and barriers, below its menu."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 1365})
        page.goto(report.resolve().as_uri())
        page.evaluate("window.scrollTo(0, document.getElementById('similarity-h').offsetTop - 110)")
        page.screenshot(path=path)
        browser.close()
    small_palette(path)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw(IMAGES / "front.svg")
    for report in sys.argv[1:]:
        photograph(Path(report), IMAGES / "report.png")
