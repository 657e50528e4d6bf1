"""Draw the figures of docs/alignment.md again, from networks trained on digits in seconds. Needs `plot` and `data`.

python docs/alignment_figures.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib as mpl
import torch

mpl.use("svg")
import matplotlib.pyplot as plt
from figures import IMAGES, STEADY, save_figure
from matplotlib.figure import Figure

import intertwine as it
from intertwine.align.correlations import MatchedCorrelations, matched_correlations
from intertwine.figures import wrapped_title

WIDTHS = (64, 64, 64, 10)


def draw(folder: Path) -> None:
    """Two networks of different seeds, before and after alignment."""
    with tempfile.TemporaryDirectory() as place:
        zoo = it.zoo.train("mlp", seeds=range(2), data="digits", out=place, options={"widths": WIDTHS}, epochs=20)
        data = zoo.dataset()
        test, x = list(data.batches("test")), torch.zeros(1, *data.shape)
        a, b = zoo[0], zoo[1]
        moved = it.align(a, b, x).model
    with mpl.rc_context(STEADY):
        _summary(a, b, moved, test, folder / "alignment.svg")
        before, after = (matched_correlations(a, m, test, x) for m in (b, moved))
        figure = after.plot(before)
        _explain(figure, after)
        save_figure(figure, folder / "matching.svg")


def _explain(figure: Figure, found: MatchedCorrelations) -> None:
    """Say which layer a panel is of, and why some units have no colour."""
    for axes in figure.axes[:-1]:
        wire, _, mean = axes.get_title().partition("\n")
        axes.set_title(f"hidden layer {wire}, {mean}", fontsize=8)
    dead = "; ".join(f"{len(wire.dead[0])} and {len(wire.dead[1])} in hidden layer {wire.wire}" for wire in found.wires)
    blank = f"Blank rows and columns: units that do not vary, {dead}."
    wrapped_title(figure, f"{blank} Pale ones: units like none of the other network.", 9)


def _summary(a: torch.nn.Module, b: torch.nn.Module, moved: torch.nn.Module, test: list, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4))
    for label, other, colour in (("as trained", b, "C3"), ("after align", moved, "C0")):
        found = it.barrier(a, other, test, points=25)
        left.plot(found.ts, [100 * e for e in found.error or ()], color=colour, label=label)
        layers = it.connectivity(a, other, test, alphas=(0.5,)).layers
        shown = [layer.llfc[0].distance for layer in layers]
        right.plot(range(len(layers)), shown, "o-", color=colour, label=label, markersize=4)
    left.set(xlabel="t, from the first network to the second", ylabel="wrong answers, %", ylim=(0, None))
    left.set_title("On the line between two networks", loc="left", fontsize=11)
    right.set_xticks(range(len(layers)), [layer.layer for layer in layers])
    right.set(xlabel="layer", ylabel="1 − cos", ylim=(0, None))
    right.set_title("Mixed features against the mix of features", loc="left", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    save_figure(figure, path)
    plt.close(figure)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw(IMAGES)
