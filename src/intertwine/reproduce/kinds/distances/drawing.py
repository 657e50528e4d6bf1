"""The figure of the thesis's experiment, from the rows alone: distances by method, and lines between networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import new_figure
from intertwine.reproduce.kinds.distances.stacked_order import UNSORTED, WEIGHTS
from intertwine.reproduce.kinds.distances.table import LAYERS, by_method, series
from intertwine.reproduce.kinds.registry import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Label, colour, and where the bar sits in its row.
BARS = {"w1": ("first layer, W₁", "#3b6fb6", -0.19), "w2": ("second layer, W₂", "#d1742f", 0.19)}
CURVES = {
    UNSORTED: ("as trained", "#7f7f7f", "o"),
    "nodesort 10": ("NodeSort, p = 10", "#8c5fb0", "s"),
    WEIGHTS: ("weight matching", "#2e8b57", "D"),
}


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Distances on the left, with what Table 1 prints as hollow bars; lines between two networks on the right."""
    figure = new_figure(10.5, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _distances(left, plan, rows)
    _lines(right, rows)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _distances(axes: Axes, plan: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Mean distance of each method relative to unsorted, with a thin line from the nearest to the farthest pair."""
    found = by_method(rows, "some_pairs")
    names = [name for name in found if name != UNSORTED]
    for layer, (label, colour, offset) in BARS.items():
        one = found[UNSORTED][layer]["mean"]
        for place, name in enumerate(names):
            mean, least, most = (found[name][layer][number] / one for number in ("mean", "min", "max"))
            axes.barh(place + offset, mean, height=0.36, color=colour, label=None if place else label)
            axes.plot([least, most], [place + offset] * 2, color="black", linewidth=1)
            _change(axes, mean, most, place + offset)
    first = ["thesis, Table 1"] if _printed(axes, plan) else []
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(-len(first), len(names)), [*first, *(_label(name) for name in names)])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18)
    axes.set_xlabel("mean distance between two networks (1 = unsorted)")
    axes.set_title(f"Distances of trained networks ({found[UNSORTED]['w1']['count']} pairs)", loc="left", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.99), ncols=2, frameon=False, fontsize=9, borderaxespad=0.2)


def _printed(axes: Axes, plan: Mapping[str, Any]) -> bool:
    """What Table 1 prints, above the measured bars; whether there was anything to draw."""
    ordered = next((name for name in plan["printed"] if name.startswith("sorted")), None)
    if ordered is None:
        return False
    before, after = (dict(zip(plan["labels"], plan["printed"][name], strict=True)) for name in (UNSORTED, ordered))
    for layer, (_, colour, offset) in BARS.items():
        ratio = after[f"{LAYERS[layer]} mean"] / before[f"{LAYERS[layer]} mean"]
        axes.barh(offset - 1, ratio, height=0.36, facecolor="none", edgecolor=colour, hatch="////")
        _change(axes, ratio, ratio, offset - 1)
    return True


def _change(axes: Axes, mean: float, end: float, height: float) -> None:
    """The change in per cent behind a bar, or behind the line at 1 where they would meet."""
    place = end if end < 0.85 else max(end, 1.0)
    axes.text(place + 0.012, height, f"{mean - 1:+.1%}".replace("-", "−"), va="center", fontsize=8.5)


def _label(name: str) -> str:
    return series(name).removeprefix("sorted, ").replace("p =", "NodeSort, p =")


def _lines(axes: Axes, rows: Sequence[Row]) -> None:
    """Accuracy on the straight line between two networks: the mean over pairs, and all pairs as a band."""
    found = by_method(rows, "curves")
    for name, (label, colour, marker) in CURVES.items():
        if name in found:
            row = found[name]
            band = {end: [100 * value for value in row["accuracy"][end]] for end in ("mean", "min", "max")}
            axes.fill_between(row["t"], band["min"], band["max"], color=colour, alpha=0.15, linewidth=0)
            axes.plot(row["t"], band["mean"], color=colour, marker=marker, markersize=4, label=label)
    axes.set_xlim(0, 1)
    axes.set_xlabel("position on the straight line from network A (0) to B (1)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"On the line between two networks ({found[UNSORTED]['pairs']} pairs)", loc="left", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.99), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)
