"""Similarities as the paper draws them: values over the layers with printed ones dotted, and heat maps of CKA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import PAGE, key_below, new_figure, panels_in_rows, write_cells
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.kinds.similarity.cka import KERNELS
from intertwine.reproduce.kinds.similarity.numbers import DEAD, means, numbers
from intertwine.reproduce.kinds.similarity.procrustes import MEASURES
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAN = float("nan")
#: Maps of fewer layers have their numbers in the cells.
SMALL = 8


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """The figure of a plan."""
    return _lines(plan, rows) if plan["settings"]["family"] == "procrustes" else _heat_maps(plan, rows)


def _lines(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Above as printed, with the printed values dotted; below corrected; pale what unrelated features score."""
    labels, found = list(plan["settings"]["at"]), numbers(plan, rows)
    figure = new_figure(min(PAGE, 5.1 + 0.26 * max(5, len(labels))), 5.2)
    above, below = figure.subplots(2, 1, sharex=True, sharey=True)
    for i, series in enumerate(MEASURES):
        axes = above if series.endswith("as printed") else below
        _line(axes, labels, found.get(series, {}), color=f"C{i}", label=series)
        _line(axes, labels, found.get(f"{series}, unrelated", {}), color=f"C{i}", alpha=0.35, linestyle="--")
        if series in plan["printed"]:
            told = f"{series}: the paper's"
            above.plot(range(len(labels)), plan["printed"][series], "x:", color=f"C{i}", markersize=4, label=told)
    shares = [summary(found.get(DEAD, {}).get(label, [0.0]))[0] for label in labels]
    below.bar(range(len(labels)), shares, color="0.85", zorder=0, label="share of dead channels")
    below.set_xticks(range(len(labels)), labels, fontsize=8)
    below.set_xlabel("layer" + (", * inside a residual block" if any("*" in label for label in labels) else ""))
    above.plot([], [], "o--", color="0.4", alpha=0.5, markersize=3, label="pale: unrelated features")
    for axes in (above, below):
        axes.set_ylabel("similarity")
    key_below(figure)
    return figure


def _line(axes: Axes, labels: Sequence[str], values: Mapping[str, Sequence[float]], **style: Any) -> None:
    held = [(i, summary(values[label])) for i, label in enumerate(labels) if values.get(label)]
    axes.errorbar(
        [i for i, _ in held], [mean for _, (mean, _) in held], [spread for _, (_, spread) in held], marker="o",
        markersize=3, capsize=2, linewidth=1.2, **style,
    )  # fmt: skip


def _heat_maps(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """One map per kernel, all on the scale from 0 to 1; below, what is printed where the paper gives the numbers.

    Maps of many layers are two a row, so that their names can be read.
    """
    labels = list(plan["settings"]["at"])
    printed = {series: _printed(plan, series, labels) for series in KERNELS}
    found = means(rows)
    shown: list[tuple[str, Any]] = [(series, found.get(series, [])) for series in KERNELS]
    if any(printed.values()):
        shown += [(f"{series}: the paper's", printed[series]) for series in KERNELS]
    across, size = (len(KERNELS), 2.0) if len(labels) < SMALL else (2, 3.8)
    figure, panels = panels_in_rows(len(shown), size, size, across)
    for axes, (title, matrix) in zip(panels, shown, strict=True):
        _heat_map(axes, matrix, labels, title)
    figure.colorbar(panels[0].images[0], ax=panels, shrink=0.8, label="CKA")
    return figure


def _printed(plan: Mapping[str, Any], series: str, labels: Sequence[str]) -> list[list[float | None]]:
    held = [plan["printed"].get(f"{series}, {label}") for label in labels]
    return [] if any(line is None for line in held) else [line for line in held if line is not None]


def _heat_map(axes: Axes, matrix: Sequence[Sequence[float | None]], labels: Sequence[str], title: str) -> None:
    if not matrix:
        axes.axis("off")
        return
    axes.imshow([[NAN if v is None else v for v in line] for line in matrix], vmin=0, vmax=1, cmap="viridis")
    axes.set_title(title, fontsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(len(labels)), labels, fontsize=7)
    axes.set_xlabel("layer", fontsize=7)
    if len(labels) < SMALL:
        write_cells(axes)
    else:
        axes.tick_params(axis="x", rotation=90)
