"""Parts of stitching figures: lines over the layers, and panels side by side, one per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import ACROSS, panels_in_rows
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.kinds.stitching.rows import NUMBERS, by, label_of, places, values
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_INSIDE = 5  # lines whose names still fit into the picture


def over_places(axes: Axes, rows: Sequence[Row], what: str, label: str, **style: Any) -> None:
    """One line over the places, whiskers of one deviation."""
    order = list(places(rows))
    held = [(i, summary(found)) for i, place in enumerate(order) if (found := values(by(rows, label_of)[place], what))]
    axes.errorbar(
        [i for i, _ in held], [mean for _, (mean, _) in held], [spread for _, (_, spread) in held], label=label,
        marker="o", markersize=4, capsize=3, linewidth=1.2, **style,
    )  # fmt: skip


def named(axes: Axes, rows: Sequence[Row], what: str) -> None:
    """The places under the axis, the number beside it, and a legend."""
    names = list(places(rows).values())
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=45 if max(map(len, names)) > 4 else 0)
    axes.set_xlabel("layer" + (", * inside a residual block" if any(name.endswith("*") for name in names) else ""))
    axes.set_ylabel(NUMBERS[what][0])
    many = len(axes.get_legend_handles_labels()[0]) > MOST_INSIDE
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if many else {}
    axes.legend(fontsize=8, **beside)


def panels(rows: Sequence[Row], width: float = 3.0, more: int = 0) -> tuple[Figure, dict[str, Axes], list[Axes]]:
    """One panel per place, and some more behind them."""
    order = places(rows)
    figure, grid = panels_in_rows(len(order) + more, width, 3.0, min(ACROSS, len(order)))
    for axes, place in zip(grid, order, strict=False):
        axes.set_title(f"layer {order[place]}", fontsize=9)
    return figure, dict(zip(order, grid, strict=False)), grid[len(order) :]
