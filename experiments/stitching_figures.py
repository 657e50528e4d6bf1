"""The stitching figures in the form the papers have them, drawn from the rows of a result file alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stitching_rows import (
    FITS,
    NUMBERS,
    Row,
    by,
    curves,
    family_name,
    label_of,
    named,
    over_places,
    panels,
    places,
    values,
)

from intertwine.errors import InputError
from intertwine.features.pictures import new_figure
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Plan = dict[str, Any]


def draw_penalties(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 0, figures 1, 6, 7, 12, 13: a number over the layers, one line per family; dotted what is printed."""
    figure = new_figure(3 + 0.55 * max(5, len(places(rows))), 4)
    axes = figure.subplots()
    for i, (name, some) in enumerate(by(rows, family_name).items()):
        over_places(axes, some, plan["what"], name, color=f"C{i}")
        for family in {row["family"] for row in some} & set(plan["printed"]):
            numbers = plan["printed"][family]
            axes.plot(range(len(numbers)), numbers, ":", color=f"C{i}", linewidth=1, label=f"{name}, printed")
    named(axes, rows, plan["what"])
    return figure


def draw_slopes(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 0, figure 8: penalties of networks of one slope over the layers, and between slopes, mean over layers."""
    what = plan["what"]
    figure = new_figure(12, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    slopes = list(by(rows, lambda row: row["front_group"]))
    for slope in slopes:
        same = [row for row in rows if row["front_group"] == row["back_group"] == slope]
        over_places(left, same, what, f"slope {slope:g}")
    named(left, rows, what)
    cells = by(rows, lambda row: (row["front_group"], row["back_group"]))
    table = [[summary(values(cells[a, b], what))[0] for b in slopes] for a in slopes]
    picture = right.imshow(table, cmap="viridis")
    for axis in (right.xaxis, right.yaxis):
        axis.set_ticks(range(len(slopes)), [f"{slope:g}" for slope in slopes], fontsize=8)
    right.set_xlabel("slope of the back")
    right.set_ylabel("slope of the front")
    figure.colorbar(picture, ax=right, label=NUMBERS[what][0] + ", mean over layers")
    return figure


def draw_histograms(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 0, figure 14: how often each α was chosen, one panel per layer."""
    chosen = [row for row in rows if "alpha" in row]
    alphas = plan["stitching"]["alphas"]
    figure, axes, _ = panels(chosen)
    for place, some in by(chosen, label_of).items():
        counts = [sum(row["alpha"] == alpha for row in some) for alpha in alphas]
        axes[place].bar(range(len(alphas)), counts)
        axes[place].set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas], fontsize=8)
        axes[place].set_xlabel("α")
    next(iter(axes.values())).set_ylabel("pairs")
    return figure


def draw_sparsity(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 0, figure 15; paper 1, figure 8: a number against sparsity, means over pairs, and some of the matrices."""
    what, shown = plan["what"], [row for row in rows if "matrix" in row]
    figure, axes, below = panels(rows, below=1 if shown else 0)
    for place, some in by(rows, label_of).items():
        for kind, group in by(some, _sparse_kind).items():
            points = []
            for one in by(group, family_name).values():
                (x, _), (y, _) = summary([row["sparsity"] for row in one]), summary(values(one, what))
                points.append((x, y))
                if one[0]["family"].startswith("sparse"):
                    axes[place].annotate(family_name(one[0]).removeprefix("ℓ1, "), (x, y), fontsize=6)
            axes[place].plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, linewidth=1, label=kind)
        axes[place].set_xlabel("sparsity")
        axes[place].set_ylabel(NUMBERS[what][0])
    next(iter(axes.values())).legend(fontsize=7)
    for column, some in zip(zip(*below, strict=True), by(shown, label_of).values(), strict=True):
        row = max(some, key=lambda row: (row["family"].startswith("sparse"), row["fit"] == "task", row["sparsity"]))
        edge = max(abs(value) for line in row["matrix"] for value in line) or 1
        column[0].imshow(row["matrix"], cmap="RdBu_r", vmin=-edge, vmax=edge, interpolation="nearest")
        column[0].set_title(f"{family_name(row)}, {row['sparsity']:.0%} zeros", fontsize=8)
    return figure


def _sparse_kind(row: Row) -> str:
    name = "ℓ1" if row["family"].startswith("sparse") else family_name(row)
    return f"{name}, {FITS[row['fit']]}"


def draw_layers(plan: Plan, rows: Sequence[Row]) -> Figure:
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


def draw_widths(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, figure 3: a number against the width of the networks, one panel per layer."""
    return _lines(rows, plan["what"], "width", lambda row: row["front_group"], lambda row: FITS[row["fit"]])


def draw_ranks(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, figure 7: a number against the rank, task loss beside reduced-rank regression."""
    return _lines(rows, plan["what"], "rank", _rank, lambda row: FITS[row["fit"]])


def _rank(row: Row) -> int:
    """Of a family such as "lowrank:4+bias"."""
    return int(row["family"].removesuffix("+bias").partition(":")[2])


def _lines(
    rows: Sequence[Row], what: str, name: str, x: Callable[[Row], Any], line: Callable[[Row], str]
) -> Figure:  # fmt: skip
    figure, axes, _ = panels(rows)
    for place, some in by(rows, label_of).items():
        for label, group in by(some, line).items():
            points = {at: summary(found) for at, ones in by(group, x).items() if (found := values(ones, what))}
            xs = sorted(points)
            low, high = ([points[at][0] + sign * points[at][1] for at in xs] for sign in (-1, 1))
            (drawn,) = axes[place].plot(xs, [points[at][0] for at in xs], marker="o", markersize=4, label=label)
            axes[place].fill_between(xs, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
        axes[place].set_xlabel(name)
        axes[place].set_xticks(sorted({x(row) for row in some}))
    first = next(iter(axes.values()))
    first.set_ylabel(NUMBERS[what][0])
    first.legend(fontsize=8)
    return figure


def draw_starts(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, figure 6: histograms of a number by where the training started."""
    names = {"direct": "least squares", "random": "random"}
    figure, axes, _ = panels(rows)
    for place, some in by(rows, label_of).items():
        starts = by(some, lambda row: names[row["start"]])
        axes[place].hist([values(ones, plan["what"]) for ones in starts.values()], bins=20, label=list(starts))
        axes[place].set_xlabel(NUMBERS[plan["what"]][0])
    first = next(iter(axes.values()))
    first.set_ylabel("stitches")
    first.legend(fontsize=8)
    return figure


def draw_iterations(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, figures 4 and 5: numbers over the training, means with a band, and two single runs."""
    names = plan["what"]
    figure = new_figure(3.6 * len(names), 3.4)
    grid = figure.subplots(1, len(names), squeeze=False)[0]
    several = len(by(rows, lambda row: row["cka"])) > 1
    for axes, name in zip(grid, names, strict=True):
        for i, (weight, some) in enumerate(by(rows, lambda row: row["cka"]).items()):
            clock, runs = curves(some, name)
            times = sorted(set.intersection(*(set(run) for run in runs)))
            band = [summary([run[t] for run in runs]) for t in times]
            axes.plot(
                times, [m for m, _ in band], color=f"C{i}", label=f"weight of CKA {weight:g}" if several else None
            )
            axes.fill_between(times, [m - s for m, s in band], [m + s for m, s in band], color=f"C{i}", alpha=0.2)
            for run, style in zip(runs, (":", "--"), strict=False):
                axes.plot(times, [run[t] for t in times], style, color=f"C{i}", linewidth=0.8)
            axes.set_xlabel(clock)
        axes.set_ylabel(NUMBERS[name][0])
    if several:
        grid[0].legend(fontsize=8)
    return figure


FORMS: dict[str, Callable[[Plan, Sequence[Row]], Figure]] = {
    "penalties": draw_penalties,
    "slopes": draw_slopes,
    "histograms": draw_histograms,
    "sparsity": draw_sparsity,
    "layers": draw_layers,
    "widths": draw_widths,
    "ranks": draw_ranks,
    "starts": draw_starts,
    "iterations": draw_iterations,
}


def draw(result: dict[str, Any]) -> Figure:
    """The figure of a result."""
    plan = result["manifest"]["plan"]
    if plan["form"] not in FORMS:
        raise InputError(f"{plan['name']} is to be drawn as {plan['form']!r}; there are {', '.join(FORMS)}.")
    figure = FORMS[plan["form"]](plan, result["rows"])
    figure.suptitle(plan["title"] + (" (small stand-in)" if plan["small"] else ""), fontsize=10)
    return figure
