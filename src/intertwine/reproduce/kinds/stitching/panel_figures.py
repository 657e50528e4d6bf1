"""Stitching figures with one panel per layer: numbers against widths, ranks, starts, time, or along a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import key_below, panels_in_rows
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.kinds.stitching.panels import panels
from intertwine.reproduce.kinds.stitching.rows import FITS, NUMBERS, STARTS, by, curves, label_of, values, weights
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Plan = Mapping[str, Any]


def groups(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, figure 3: a number against an option of the networks, such as their width."""
    (option,) = plan["networks"]["vary"]
    return _against(rows, plan["settings"]["what"], option, lambda row: row["front_group"])


def ranks(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, figure 7: a number against the rank, task loss beside reduced-rank regression."""
    return _against(rows, plan["settings"]["what"], "rank", _rank)


def _rank(row: Row) -> int:
    """Of a family such as "lowrank:4+bias"."""
    return int(row["family"].removesuffix("+bias").partition(":")[2])


def _against(rows: Sequence[Row], what: str, name: str, x: Callable[[Row], Any]) -> Figure:
    """One panel per layer, one line per fit."""
    figure, axes, _ = panels(rows)
    for place, some in by(rows, label_of).items():
        for fit, group in by(some, lambda row: row["fit"]).items():
            _band(axes[place], {at: values(ones, what) for at, ones in by(group, x).items()}, FITS[fit], marker="o")
        axes[place].set_xlabel(name)
        axes[place].set_xticks(sorted({x(row) for row in some}))
    first = next(iter(axes.values()))
    first.set_ylabel(NUMBERS[what][0])
    key_below(figure)
    return figure


def _band(axes: Axes, points: Mapping[Any, Sequence[float]], label: str | None, **style: Any) -> None:
    """Means over x, and a band of one deviation."""
    held = {at: summary(points[at]) for at in sorted(points) if points[at]}
    low, high = ([mean + sign * spread for mean, spread in held.values()] for sign in (-1, 1))
    (drawn,) = axes.plot(list(held), [mean for mean, _ in held.values()], markersize=4, label=label, **style)
    axes.fill_between(list(held), low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)


def starts(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, figure 6: histograms of a number by where the training started."""
    what = plan["settings"]["what"]
    figure, axes, _ = panels(rows)
    for place, some in by(rows, label_of).items():
        found = by(some, lambda row: STARTS[row["start"]])
        axes[place].hist([values(ones, what) for ones in found.values()], bins=20, label=list(found))
        axes[place].set_xlabel(NUMBERS[what][0])
    first = next(iter(axes.values()))
    first.set_ylabel("stitches")
    key_below(figure)
    return figure


def iterations(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, figures 4 and 5: numbers over the training, means with a band, and two single runs."""
    names, kinds = plan["settings"]["what"], weights(rows)
    figure, grid = panels_in_rows(len(names), 2.75, 3.0, 3)
    for axes, name in zip(grid, names, strict=True):
        for i, (weight, some) in enumerate(kinds.items()):
            clock, runs = curves(some, name)
            times = sorted(set.intersection(*(set(run) for run in runs)))
            _band(
                axes,
                {time: [run[time] for run in runs] for time in times},
                f"{weight} of the CKA" if weight else "mean",
                color=f"C{i}",
            )
            for run, style in zip(runs, (":", "--"), strict=False):
                axes.plot(times, [run[time] for time in times], style, color=f"C{i}", linewidth=0.8)
            axes.set_xlabel(clock)
        axes.set_ylabel(NUMBERS[name][0])
    grid[0].fill_between([], [], color="0.8", label="one standard deviation")
    for run, style in (("first", ":"), ("second", "--")):
        grid[0].plot([], [], style, color="0.4", linewidth=0.8, label=f"the {run} run alone")
    key_below(figure)
    return figure


def lines(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Paper 1, experiment 6: relative accuracy along the lines between stitches, one panel per layer."""
    figure, axes, _ = panels(rows)
    for row in rows:
        if "line" in row:
            told = "from one stitch to another, a line for each two"
            axes[row["label"]].plot(row["shares"], row["line"], linewidth=0.8, color="C0", alpha=0.7, label=told)
    good = plan["settings"].get("good", 0.8)
    for one in axes.values():
        one.axhline(good, color="0.6", linewidth=0.8, linestyle=":", label=f"{good:g}, from where a stitch is good")
        one.set_ylim(0, 1.05)
        one.set_xlabel("λ, share of the first stitch")
    next(iter(axes.values())).set_ylabel(NUMBERS["relative_accuracy"][0])
    key_below(figure)
    return figure
