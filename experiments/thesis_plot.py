"""The picture of the thesis's experiment, drawn from the result file alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stacked_order import ACTIVATIONS, LEXICOGRAPHIC, UNSORTED, WEIGHTS

from intertwine.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Label, colour, and where the bar sits in its row.
LAYERS = {"w1": ("first layer, W₁", "#3b6fb6", -0.19), "w2": ("second layer, W₂", "#d1742f", 0.19)}
CURVES = {
    UNSORTED: ("as trained", "#7f7f7f", "o"),
    "nodesort 10": ("NodeSort, p = 10", "#8c5fb0", "s"),
    WEIGHTS: ("weight matching", "#2e8b57", "D"),
}


def draw(result: Path, picture: Path) -> None:
    """Write the picture; the ending of its name chooses the format."""
    if not result.is_file():
        raise InputError(
            f"asked to draw {result}, which does not exist; run the experiment first, or pass --out FILE.json"
        )
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("the picture needs matplotlib, which is not installed; pip install matplotlib") from error
    numbers = json.loads(result.read_text(encoding="utf-8"))
    settings = {"svg.hashsalt": "intertwine", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(10.5, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        distances(left, numbers)
        lines(right, numbers)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def distances(axes: Axes, result: dict[str, Any]) -> None:
    """Mean distance of each method relative to unsorted, with a thin line from the nearest to the farthest pair."""
    rows = result["some_pairs"]
    names = [name for name in rows if name != UNSORTED]
    for layer, (label, colour, offset) in LAYERS.items():
        one = rows[UNSORTED][layer]["mean"]
        for place, name in enumerate(names):
            mean, least, most = (rows[name][layer][number] / one for number in ("mean", "min", "max"))
            axes.barh(place + offset, mean, height=0.36, color=colour, label=None if place else label)
            axes.plot([least, most], [place + offset] * 2, color="black", linewidth=1)
            _change(axes, mean, most, place + offset)
    _printed(axes, result)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    first = [-1] if result["manifest"]["plan"]["printed"] else []
    axes.set_yticks([*first, *range(len(names))], [*(["thesis, Table 1"] if first else []), *map(_label, names)])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18)
    axes.set_xlabel("mean distance between two networks (1 = unsorted)")
    axes.set_title(f"Distances of trained networks ({rows[UNSORTED]['w1']['count']} pairs)", loc="left", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.99), ncols=2, frameon=False, fontsize=9, borderaxespad=0.2)


def _printed(axes: Axes, result: dict[str, Any]) -> None:
    """What Table 1 prints, as hollow bars above the measured ones."""
    for layer, entry in result["manifest"]["plan"]["printed"].items():
        _, colour, offset = LAYERS[layer]
        ratio = entry["sorted"]["mean"] / entry[UNSORTED]["mean"]
        axes.barh(offset - 1, ratio, height=0.36, facecolor="none", edgecolor=colour, hatch="////")
        _change(axes, ratio, ratio, offset - 1)


def _change(axes: Axes, mean: float, end: float, height: float) -> None:
    """The change in per cent behind a bar, or behind the line at 1 where they would meet."""
    place = end if end < 0.85 else max(end, 1.0)
    axes.text(place + 0.012, height, f"{mean - 1:+.1%}".replace("-", "−"), va="center", fontsize=8.5)


def _label(name: str) -> str:
    plain = {LEXICOGRAPHIC: "lexicographic", WEIGHTS: "weight matching", ACTIVATIONS: "activation matching"}
    return plain.get(name, name.replace("nodesort ", "NodeSort, p = "))


def lines(axes: Axes, result: dict[str, Any]) -> None:
    """Accuracy on the straight line between two networks: the mean over pairs, and all pairs as a band."""
    curves = result["curves"]
    for name, (label, colour, marker) in CURVES.items():
        if name in curves:
            band = {end: [100 * value for value in curves[name]["accuracy"][end]] for end in ("mean", "min", "max")}
            axes.fill_between(curves["t"], band["min"], band["max"], color=colour, alpha=0.15, linewidth=0)
            axes.plot(curves["t"], band["mean"], color=colour, marker=marker, markersize=4, label=label)
    axes.set_xlim(0, 1)
    axes.set_xlabel("position on the straight line from network A (0) to B (1)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"On the line between two networks ({curves['pairs']} pairs)", loc="left", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.99), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)
