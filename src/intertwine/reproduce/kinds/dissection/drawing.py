"""The figures of a dissection in the paper's form: interpretable units against α, and concepts by category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import key_below, new_figure
from intertwine.inspect.dissection_pictures import draw_fractions
from intertwine.reproduce.kinds.dissection.fractions import curves
from intertwine.reproduce.kinds.registry import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Fractions against α, one line per kind of network; with `form = "categories"`, figure 18 instead."""
    if plan["settings"]["form"] == "categories":
        return draw_categories(rows)
    chance = {kind: fmean(row["chance"] for row in rows if row["kind"] == kind) for kind in curves(rows)}
    figure = draw_fractions(curves(rows), chance)
    figure.set_size_inches(6.4, 3.8)  # room for the title
    return figure


def draw_categories(rows: Sequence[Row]) -> Figure:
    """Different concepts by category, stacked, one bar per α: the mean over networks and rotations."""
    kinds = list(curves(rows))
    figure = new_figure(0.8 + 3.6 * len(kinds), 3.6)
    grid: Any = figure.subplots(1, len(kinds), sharey=True, squeeze=False)
    for axes, kind in zip(grid[0], kinds, strict=True):
        _stacked(axes, [row for row in rows if row["kind"] == kind])
        axes.set_title(kind, fontsize=9)
    grid[0][0].set_ylabel("different concepts", fontsize=9)
    key_below(figure)
    return figure


def _stacked(axes: Axes, rows: Sequence[Row]) -> None:
    alphas = sorted({row["alpha"] for row in rows})
    below = [0.0] * len(alphas)
    for category in rows[0]["by_category"]:
        heights = [fmean(row["by_category"][category] for row in rows if row["alpha"] == alpha) for alpha in alphas]
        axes.bar([f"{alpha:g}" for alpha in alphas], heights, bottom=below, label=category)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xlabel("α, the power of the rotation", fontsize=9)
