"""Draw the figures of docs/stitching.md again, from networks trained on digits in seconds. Needs `plot` and `data`.

python docs/stitching_figures.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from figures import IMAGES, STEADY, save_figure

import intertwine as it
from intertwine.figures import wrapped_title

CUTS = ["2", "4", "6"]
FAMILIES = ["relu", "lowrank:1", "lowrank:2", "lowrank:4", "affine"]


def draw(folder: Path) -> None:
    """Three pairs of perceptrons: penalties by layer and family, and one stitch by itself."""
    options = {"widths": (64, 64, 64, 64, 10)}
    with tempfile.TemporaryDirectory() as place:
        zoo = it.zoo.train("mlp", seeds=range(6), data="digits", out=place, options=options, epochs=8)
        data = zoo.dataset()
        shared = {"data": data.batches("train", 100), "test": data.batches("test")}
        pairs = [(zoo[i], zoo[i + 1]) for i in (0, 2, 4)]
    found = [
        one for front, back in pairs for one in it.stitches(front, back, CUTS, FAMILIES, epochs=10, rate=1e-2, **shared)
    ]
    with mpl.rc_context(STEADY):
        many = it.stitches(*pairs[0], CUTS, FAMILIES, fit="direct", **shared)
        figure = type(many)(found).plot()
        wrapped_title(figure, f"What a stitch costs in accuracy, by layer and family: {len(pairs)} pairs")
        save_figure(figure, folder / "stitching.svg")
        one = it.stitch(
            *pairs[0], "4", "linear", epochs=9, score_every=1, trace_every=4, targets="soft", rate=3e-3, **shared
        )
        save_figure(one.plot(), folder / "stitch.svg")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw(IMAGES)
