"""Pictures of connectivity: distances layer by layer, one panel per way, and the line between the networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import ACROSS, key_below, name_ticks, new_figure
from intertwine.reproduce.kinds.registry import Row
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Form → what of a layer → its words and how its line looks.
LINES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "features": {"llfc": ("mix", "o-"), "baseline": ("the two networks", "k--")},
    "conditions": {
        "additivity": ("weak additivity, 1 − cos", "o-"),
        "commutativity": ("commutativity, residual", "s-"),
        "sign_agreement": ("same sign", "^:"),
    },
    "factors": {
        "weights_apart": ("W_A − W_B", "o-"),
        "inputs_apart": ("H_A − H_B", "s-"),
        "commutativity": ("their product", "k^-"),
    },
}
#: What belongs to the pair alone, whatever α is.
WHOLE = ("baseline", "commutativity", "sign_agreement", "weights_apart", "inputs_apart")


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """One panel per way over the layers, means over pairs; with the form "features" the line of errors below each."""
    form, ways = plan["settings"]["form"], list(dict.fromkeys((row["way"], row["statistics"]) for row in rows))
    high, across = 2 if form == "features" else 1, max(2, min(ACROSS, len(ways)))
    deep = high * ceil(len(ways) / across)
    figure = new_figure(2.1 * across, 2 * deep)
    grid = figure.subplots(deep, across, squeeze=False)
    for spare in grid.flat:
        spare.set_visible(False)
    for number, (way, statistics) in enumerate(ways):
        own = [row for row in rows if (row["way"], row["statistics"]) == (way, statistics)]
        place, column = high * (number // across), number % across
        upper = _shown(grid[place, column], beside=grid[0, 0])
        _layers(upper, form, [row for row in own if "layer" in row])
        upper.set_title(f"{way}{', statistics reset' if statistics == 'reset' else ''}", fontsize=8)
        upper.set_ylabel("" if column else "1 − cos" if form == "features" else "relative size")
        if high > 1:
            lower = _shown(grid[place + 1, column], beside=grid[1, 0])
            _line(lower, [row for row in own if "t" in row])
            lower.set_ylabel("" if column else "error, %")
    key_below(figure, [grid[0, 0]])
    return figure


def _shown(axes: Axes, beside: Axes) -> Axes:
    """A panel that is used, on the scale of the first of its kind."""
    axes.set_visible(True)
    if axes is not beside:
        axes.sharey(beside)
    return axes


def _layers(axes: Axes, form: str, rows: Sequence[Row]) -> None:
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    alphas = sorted({row["alpha"] for row in rows})
    for name, (words, style) in LINES[form].items():
        for alpha in alphas[:1] if name in WHOLE else alphas:
            values: dict[int, list[float]] = {}
            for row in rows:
                if row["alpha"] == alpha and name in row:
                    values.setdefault(layers.index(row["layer"]), []).append(row[name])
            points = {x: summary(some)[0] for x, some in values.items()}
            label = words if name in WHOLE else f"{words}, α = {alpha:g}"
            axes.plot(list(points), list(points.values()), style, markersize=3, linewidth=1, label=label)
    name_ticks(axes, layers)
    axes.set_xlabel("layer", fontsize=7)


def _line(axes: Axes, rows: Sequence[Row]) -> None:
    """The error along the line, every pair."""
    for pair in dict.fromkeys(row["pair"] for row in rows):
        own = [row for row in rows if row["pair"] == pair]
        axes.plot([row["t"] for row in own], [100 * row["error"] for row in own], "-", color="C0", linewidth=1)
    axes.set_xlabel("from network A to network B", fontsize=7)
