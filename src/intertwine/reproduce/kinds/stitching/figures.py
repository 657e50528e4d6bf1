"""Stitching figures over the layers, in the form the papers have them, drawn from rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import new_figure
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.kinds.stitching.panels import named, over_places, panels
from intertwine.reproduce.kinds.stitching.readings import ALL
from intertwine.reproduce.kinds.stitching.readings import averages as average_numbers
from intertwine.reproduce.kinds.stitching.rows import (
    FITS,
    NUMBERS,
    by,
    family_name,
    group_of,
    label_of,
    places,
    series_of,
    values,
)
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Plan = Mapping[str, Any]


def penalties(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 0, figures 1, 6, 7, 12, 13: a number over the layers, one line per family; dotted what is printed."""
    what, figure = plan["settings"]["what"], new_figure(3 + 0.55 * max(5, len(places(rows))), 4)
    axes = figure.subplots()
    for i, (name, some) in enumerate(by(rows, series_of(rows)).items()):
        over_places(axes, some, what, name, color=f"C{i}")
        if name in plan["printed"]:
            printed = plan["printed"][name]
            axes.plot(range(len(printed)), printed, ":", color=f"C{i}", linewidth=1, label=f"{name}, printed")
    named(axes, rows, what)
    return figure


def slopes(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 0, figure 8: penalties of networks of one slope over the layers, and between slopes where there are all."""
    what, name = plan["settings"]["what"], group_of(plan)
    cells = by(rows, lambda row: (row["front_group"], row["back_group"]))
    found = list(by(rows, lambda row: row["front_group"]))
    whole = all(cell in cells for cell in product(found, found)) and len(found) > 1
    figure = new_figure(12 if whole else 7.5, 4.2)
    left, *others = figure.subplots(1, 2 if whole else 1, squeeze=False, width_ratios=(1.6, 1) if whole else None)[0]
    for slope in found:
        over_places(left, cells[slope, slope], what, name(cells[slope, slope][0]))
    named(left, rows, what)
    for right in others:
        table = [[summary(values(cells[a, b], what))[0] for b in found] for a in found]
        picture = right.imshow(table, cmap="viridis")
        for axis in (right.xaxis, right.yaxis):
            axis.set_ticks(range(len(found)), [f"{slope:g}" for slope in found], fontsize=8)
        right.set_xlabel("slope of the back")
        right.set_ylabel("slope of the front")
        figure.colorbar(picture, ax=right, label=NUMBERS[what][0] + ", mean over layers")
    return figure


def histograms(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 0, figure 14: how often each α was chosen, one panel per layer; lines what is printed."""
    chosen, alphas = [row for row in rows if "alpha" in row], plan["settings"]["alphas"]
    figure, axes, _ = panels(chosen)
    for place, some in by(chosen, label_of).items():
        shares = [100 * sum(row["alpha"] == alpha for row in some) / len(some) for alpha in alphas]
        axes[place].bar(range(len(alphas)), shares)
        if (printed := plan["printed"].get(f"layer {place}")) is not None:
            axes[place].plot(range(len(alphas)), printed, "_k", markersize=22, label="printed")
            axes[place].legend(fontsize=7)
        axes[place].set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas], fontsize=8)
        axes[place].set_xlabel("α")
    next(iter(axes.values())).set_ylabel("pairs, %")
    return figure


def sparsity(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 0, figure 15; paper 1, figure 8: a number against sparsity, means over pairs, and some of the matrices."""
    what, shown = plan["settings"]["what"], [row for row in rows if "matrix" in row]
    matrices = by(shown, label_of)
    figure, axes, below = panels(rows, more=len(matrices))
    for place, some in by(rows, label_of).items():
        for kind, group in by(some, _sparse_kind).items():
            points = [_point(one, what) for one in by(group, family_name).values()]
            axes[place].plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, linewidth=1, label=kind)
            for one in by(group, family_name).values():
                if one[0]["family"].startswith("sparse"):
                    strength = family_name(one[0]).removeprefix("ℓ1, ")
                    axes[place].annotate(strength, _point(one, what), fontsize=6)
        if printed := _printed(plan, place):
            axes[place].plot(*zip(*printed, strict=True), "x", color="0.4", label="printed")
        axes[place].set_xlabel("zeros, %")
        axes[place].set_ylabel(NUMBERS[what][0])
    next(iter(axes.values())).legend(fontsize=7)
    for panel, some in zip(below, matrices.values(), strict=True):
        row = max(some, key=lambda row: (row["family"].startswith("sparse"), row["fit"] == "task", row["sparsity"]))
        edge = max(abs(value) for line in row["matrix"] for value in line) or 1
        panel.imshow(row["matrix"], cmap="RdBu_r", vmin=-edge, vmax=edge, interpolation="nearest")
        panel.set_title(f"{family_name(row)}, {row['sparsity']:.0%} zeros", fontsize=8)
    return figure


def _point(rows: Sequence[Row], what: str) -> tuple[float, float]:
    return 100 * summary([row["sparsity"] for row in rows])[0], summary(values(rows, what))[0]


def _sparse_kind(row: Row) -> str:
    name = "ℓ1" if row["family"].startswith("sparse") else family_name(row)
    return f"{name}, {FITS[row['fit']]}"


def _printed(plan: Plan, place: str) -> list[tuple[float, float]]:
    """The printed (zeros, number) of every series at a place."""
    here = {
        name: value
        for name, some in plan["printed"].items()
        for label, value in zip(plan["labels"], some, strict=True)
        if label == place and value is not None
    }
    return [(here[f"{name}, zeros"], value) for name, value in here.items() if f"{name}, zeros" in here]


def layers(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, figure 2: relative accuracy and, dashed, cross-entropy to Model 2 over the layers, per fit."""
    plain = [row for row in rows if row["family"] == "identity"]
    fitted = [row for row in rows if row["family"] != "identity"]
    figure = new_figure(3 + 0.6 * max(5, len(places(rows))), 4)
    left = figure.subplots()
    right = left.twinx()
    for i, (fit, some) in enumerate(by(fitted, lambda row: row["fit"]).items()):
        over_places(left, some, "relative_accuracy", FITS[fit], color=f"C{i}")
        over_places(right, some, "cross_entropy", FITS[fit], color=f"C{i}", linestyle="--")
    named(left, fitted, "relative_accuracy")
    right.set_ylabel("cross-entropy, dashed")
    if plain:
        mean, spread = summary(values(plain, "cross_entropy"))
        left.set_title(f"without a map: cross-entropy {mean:.2f} ± {spread:.2f}", fontsize=9)
    return figure


def fronts(plan: Plan, rows: Sequence[Row]) -> Figure:
    """A number over the layers, one line per data set that the front networks were trained on."""
    what, figure = plan["settings"]["what"], new_figure(3 + 0.8 * max(5, len(places(rows))), 4)
    axes = figure.subplots()
    for name, some in by(rows, group_of(plan)).items():
        over_places(axes, some, what, f"front: {name}")
    named(axes, rows, what)
    return figure


def several(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Several numbers of the same stitches over the layers."""
    figure = new_figure(3 + 0.55 * max(5, len(places(rows))), 4)
    axes = figure.subplots()
    for what in plan["settings"]["what"]:
        over_places(axes, rows, what, NUMBERS[what][0])
    named(axes, rows, plan["settings"]["what"][0])
    axes.set_ylabel("")
    return figure


def averages(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Numbers of the text: the mean over all layers, and what is printed."""
    found = average_numbers(plan, rows)
    figure = new_figure(1.6 + 1.5 * len(found), 3.4)
    axes = figure.subplots()
    for i, (name, held) in enumerate(found.items()):
        mean, spread = summary(held[ALL])
        axes.errorbar([i], [mean], [spread], marker="o", capsize=4, color="C0", label="ours" if i == 0 else None)
        for value in plan["printed"].get(name, []):
            axes.errorbar(
                [i + 0.15], [value], [plan["spread"].get(name, [0])[0]], marker="x", capsize=4, color="0.4",
                label="printed",
            )  # fmt: skip
    axes.set_xticks(range(len(found)), list(found), fontsize=8)
    axes.set_xlim(-0.5, len(found) - 0.4)
    axes.set_ylabel(NUMBERS[plan["settings"]["what"]][0] + ", " + ALL)
    axes.legend(fontsize=8)
    return figure
