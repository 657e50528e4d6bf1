"""Parts of stitching figures: lines over the layers, and panels side by side, one per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import ACROSS, PAGE, panels_in_rows
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.kinds.stitching.rows import NUMBERS, by, label_of, places, values
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def over_places(axes: Axes, rows: Sequence[Row], what: str, label: str, **style: Any) -> None:
    """One line over the places, whiskers of one deviation."""
    order = list(places(rows))
    held = [(i, summary(found)) for i, place in enumerate(order) if (found := values(by(rows, label_of)[place], what))]
    axes.errorbar(
        [i for i, _ in held], [mean for _, (mean, _) in held], [spread for _, (_, spread) in held], label=label,
        marker="o", markersize=4, capsize=3, linewidth=1.2, **style,
    )  # fmt: skip


def named(axes: Axes, rows: Sequence[Row], what: str) -> None:
    """The places under the axis, and the number beside it."""
    names = list(places(rows).values())
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=45 if max(map(len, names)) > 4 else 0)
    axes.set_xlabel("layer" + (", * inside a residual block" if any(name.endswith("*") for name in names) else ""))
    axes.set_ylabel(NUMBERS[what][0])


def panels(
    rows: Sequence[Row], width: float | None = None, more: int = 0, across: int = ACROSS
) -> tuple[Figure, dict[str, Axes], list[Axes]]:  # fmt: skip
    """One panel per place, and some more behind them."""
    order = places(rows)
    across = min(across, len(order))
    figure, grid = panels_in_rows(len(order) + more, width or min(3.2, PAGE / across), 2.7, across)
    for axes, place in zip(grid, order, strict=False):
        axes.set_title(f"layer {order[place]}", fontsize=9)
    return figure, dict(zip(order, grid, strict=False)), grid[len(order) :]
