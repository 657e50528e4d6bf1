"""Similarities as the paper draws them: values over the layers with printed ones dotted, and heat maps of CKA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import new_figure
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.kinds.similarity.cka import KERNELS
from intertwine.reproduce.kinds.similarity.numbers import DEAD, means, numbers
from intertwine.reproduce.kinds.similarity.procrustes import MEASURES
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAN = float("nan")


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """The figure of a plan."""
    return _lines(plan, rows) if plan["settings"]["family"] == "procrustes" else _heat_maps(plan, rows)


def _lines(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Left as printed, with the printed values dotted; right corrected; grey what unrelated features score."""
    labels, found = list(plan["settings"]["at"]), numbers(plan, rows)
    figure = new_figure(4 + 0.8 * max(5, len(labels)), 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    for i, series in enumerate(MEASURES):
        for axes in (left,) if series.endswith("as printed") else (right,):
            _line(axes, labels, found.get(series, {}), color=f"C{i}", label=series)
            _line(axes, labels, found.get(f"{series}, unrelated", {}), color=f"C{i}", alpha=0.35, linestyle="--")
        if series in plan["printed"]:
            left.plot(range(len(labels)), plan["printed"][series], ":", color=f"C{i}", label=f"{series}: the paper's")
    shares = [summary(found.get(DEAD, {}).get(label, [0.0]))[0] for label in labels]
    right.bar(range(len(labels)), shares, color="0.85", zorder=0, label="share of dead channels")
    for axes in (left, right):
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.set_xlabel("layer" + (", * inside a residual block" if any("*" in label for label in labels) else ""))
        axes.legend(fontsize=7)
    left.set_ylabel("similarity; dashed: unrelated features")
    return figure


def _line(axes: Axes, labels: Sequence[str], values: Mapping[str, Sequence[float]], **style: Any) -> None:
    held = [(i, summary(values[label])) for i, label in enumerate(labels) if values.get(label)]
    axes.errorbar(
        [i for i, _ in held], [mean for _, (mean, _) in held], [spread for _, (_, spread) in held], marker="o",
        markersize=3, capsize=2, linewidth=1.2, **style,
    )  # fmt: skip


def _heat_maps(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """One map per kernel, all on the scale from 0 to 1; below, what is printed where the paper gives the numbers."""
    labels = list(plan["settings"]["at"])
    printed = {series: _printed(plan, series, labels) for series in KERNELS}
    lines = 2 if any(printed.values()) else 1
    size = 1.6 + 0.16 * len(labels)
    figure = new_figure(len(KERNELS) * (size + 0.5), lines * size)
    grid = figure.subplots(lines, len(KERNELS), squeeze=False)
    found = means(rows)
    for column, series in enumerate(KERNELS):
        _heat_map(grid[0, column], found.get(series, []), labels, series)
        if lines == 2:
            _heat_map(grid[1, column], printed[series], labels, f"{series}: the paper's")
    figure.colorbar(grid[0, 0].images[0], ax=grid, shrink=0.8)
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
        axis.set_ticks(range(len(labels)), labels, fontsize=7 if len(labels) < 8 else 5)
    if len(labels) < 8:
        for i, line in enumerate(matrix):
            for j, value in enumerate(line):
                axes.text(
                    j, i, "" if value is None else f"{value:.2f}", ha="center", va="center", fontsize=7, color="w"
                )
