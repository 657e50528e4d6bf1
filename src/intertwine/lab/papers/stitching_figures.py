"""Figures of stitching experiments in the form of the papers, drawn from rows alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

from intertwine.figures import MAX_COLUMNS, PAGE_WIDTH, legend_below, new_figure, panels_in_rows, write_cells
from intertwine.lab.papers.plan import Row, grouped
from intertwine.lab.papers.stitching_numbers import (
    ALL,
    FITS,
    NUMBERS,
    STARTS,
    PlanTable,
    curves,
    family_name,
    group_of,
    label_of,
    places,
    series_of,
    values,
    weights,
)
from intertwine.lab.papers.stitching_numbers import averages as average_numbers
from intertwine.stitch.result import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def over_places(axes: Axes, rows: Sequence[Row], what: str, label: str, **style: Any) -> None:
    """One line over the places, whiskers of one deviation."""
    order = list(places(rows))
    held = [
        (i, summary(found)) for i, place in enumerate(order) if (found := values(grouped(rows, label_of)[place], what))
    ]
    axes.errorbar(
        [i for i, _ in held], [mean for _, (mean, _) in held], [spread for _, (_, spread) in held], label=label,
        marker="o", markersize=4, capsize=3, linewidth=1.2, **style,
    )  # fmt: skip


def named(axes: Axes, rows: Sequence[Row], what: str) -> None:
    """Label the axes: places and the number."""
    names = list(places(rows).values())
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=45 if max(map(len, names)) > 4 else 0)
    axes.set_xlabel("layer" + (", * inside a residual block" if any(name.endswith("*") for name in names) else ""))
    axes.set_ylabel(NUMBERS[what][0])


def panels(
    rows: Sequence[Row], width: float | None = None, more: int = 0, across: int = MAX_COLUMNS
) -> tuple[Figure, dict[str, Axes], list[Axes]]:  # fmt: skip
    """One panel per place, and `more` behind them."""
    order = places(rows)
    across = min(across, len(order))
    figure, grid = panels_in_rows(len(order) + more, width or min(3.2, PAGE_WIDTH / across), 2.7, across)
    for axes, place in zip(grid, order, strict=False):
        axes.set_title(f"layer {order[place]}", fontsize=9)
    return figure, dict(zip(order, grid, strict=False)), grid[len(order) :]


# -- Figures over the layers --


#: A marker for each strength of a sparse map.
MARKS = "o s ^ D v P X p h".split()
#: Matrices of fewer groups have their numbers in the cells.
MOST_WRITTEN = 12


def _width(rows: Sequence[Row]) -> float:
    """Room for every place, on a page."""
    return min(PAGE_WIDTH, 3 + 0.6 * max(5, len(places(rows))))


def penalties(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Godfrey et al., figures 1, 6, 7, 12, 13: a number over the layers, one line per family; printed ones dotted."""
    what, figure = plan["settings"]["what"], new_figure(_width(rows), 4)
    axes = figure.subplots()
    for i, (name, some) in enumerate(grouped(rows, series_of(rows)).items()):
        over_places(axes, some, what, name, color=f"C{i}")
        if name in plan["printed"]:
            printed = plan["printed"][name]
            style = {"color": f"C{i}", "linewidth": 1.6, "markersize": 6}
            axes.plot(range(len(printed)), printed, "x:", label=f"{name}, printed", **style)
    named(axes, rows, what)
    legend_below(figure)
    return figure


def slopes(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Godfrey et al., figure 8: penalties of networks of one slope over the layers, and of all pairs of slopes."""
    what, name = plan["settings"]["what"], group_of(plan)
    cells = grouped(rows, lambda row: (row["front_group"], row["back_group"]))
    found = list(grouped(rows, lambda row: row["front_group"]))
    whole = all(cell in cells for cell in product(found, found)) and len(found) > 1
    figure = new_figure(8.3 if whole else 7.5, 3.6)
    left, *others = figure.subplots(1, 2 if whole else 1, squeeze=False, width_ratios=(1.2, 1) if whole else None)[0]
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
        write_cells(right, "{:.0f}") if len(found) < MOST_WRITTEN else None
        figure.colorbar(picture, ax=right, label=NUMBERS[what][0] + ", mean over layers")
    legend_below(figure, [left])
    return figure


def histograms(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Godfrey et al., figure 14: the frequency of each chosen α, one panel per layer; printed ones as lines."""
    chosen, alphas = [row for row in rows if "alpha" in row], plan["settings"]["alphas"]
    figure, axes, _ = panels(chosen)
    for place, some in grouped(chosen, label_of).items():
        shares = [100 * sum(row["alpha"] == alpha for row in some) / len(some) for alpha in alphas]
        axes[place].bar(range(len(alphas)), shares, color="#9ec5e8", label=f"ours, {len(some)} pairs")
        if (printed := plan["printed"].get(f"layer {place}")) is not None:
            axes[place].plot(range(len(alphas)), printed, "_k", markersize=18, label="printed")
        axes[place].set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas], fontsize=7)
        axes[place].set_xlabel("α")
        axes[place].set_ylim(0, 105)
    next(iter(axes.values())).set_ylabel("pairs, %")
    legend_below(figure)
    return figure


def sparsity(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Godfrey et al., figure 15, Csiszárik et al., figure 8: a number against sparsity, and some matrices.

    Values are means over pairs. Each strength λ has its own marker, since labels would overlap.
    """
    what, matrices = plan["settings"]["what"], shown_matrices(rows)
    across = 2 if len(places(rows)) > 2 else MAX_COLUMNS
    figure, axes, below = panels(rows, more=len(matrices), across=across)
    marks = _marks(rows)
    for place, some in grouped(rows, label_of).items():
        for i, kind in enumerate(dict.fromkeys(map(_sparse_kind, rows))):
            _strengths(axes[place], [row for row in some if _sparse_kind(row) == kind], what, f"C{i}", kind, marks)
        if printed := _printed(plan, place):
            axes[place].plot(*zip(*printed, strict=True), "x", color="0.4", label="printed")
        axes[place].set_xlabel("zeros, %")
        axes[place].set_ylabel(NUMBERS[what][0])
        axes[place].margins(x=0.06, y=0.08)
    for name, mark in marks.items():
        next(iter(axes.values())).plot([], [], mark, color="0.4", markersize=5, label=name)
    for panel, row in zip(below, matrices, strict=True):
        edge = max(abs(value) for line in row["matrix"] for value in line) or 1
        panel.imshow(row["matrix"], cmap="RdBu_r", vmin=-edge, vmax=edge, interpolation="nearest")
        panel.set_title(f"layer {row['label']}, {family_name(row)}: {row['sparsity']:.0%} zeros", fontsize=8)
    legend_below(figure)
    return figure


def shown_matrices(rows: Sequence[Row]) -> list[Row]:
    """Per place, the row whose matrix the figure shows: the sparsest of those trained with a penalty."""
    found = grouped([row for row in rows if "matrix" in row], label_of)
    return [
        max(some, key=lambda row: (row["family"].startswith("sparse"), row["fit"] == "task", row["sparsity"]))
        for some in found.values()
    ]


def _marks(rows: Sequence[Row]) -> dict[str, str]:
    """Strength in words → its marker, from the weakest to the strongest."""
    strengths = {family_name(row): _strength(row) for row in rows if row["family"].startswith("sparse")}
    return dict(zip(sorted(strengths, key=lambda name: strengths[name]), cycle(MARKS), strict=False))


def _strength(row: Row) -> float:
    """The number in a family such as "sparse:0.1+bias"."""
    return float(row["family"].removesuffix("+bias").partition(":")[2])


def _strengths(
    axes: Axes, rows: Sequence[Row], what: str, colour: str, label: str, marks: Mapping[str, str]
) -> None:  # fmt: skip
    """The maps of one kind: a line through its strengths, each with its marker; a kind without any is a dot."""
    points = {name: _point(some, what) for name, some in grouped(rows, family_name).items()}
    if not points:
        return
    dot = "" if any(name in marks for name in points) else "*"
    axes.plot(*zip(*sorted(points.values()), strict=True), color=colour, marker=dot, linewidth=1, label=label)
    for name, point in points.items():
        if name in marks:
            axes.plot(*point, marks[name], color=colour, markersize=5, alpha=0.8)


def _point(rows: Sequence[Row], what: str) -> tuple[float, float]:
    return 100 * summary([row["sparsity"] for row in rows])[0], summary(values(rows, what))[0]


def _sparse_kind(row: Row) -> str:
    name = "ℓ1" if row["family"].startswith("sparse") else family_name(row)
    return f"{name}, {FITS[row['fit']]}"


def _printed(plan: PlanTable, place: str) -> list[tuple[float, float]]:
    """The printed (zeros, number) of every series at a place."""
    here = {
        name: value
        for name, some in plan["printed"].items()
        for label, value in zip(plan["labels"], some, strict=True)
        if label == place and value is not None
    }
    return [(here[f"{name}, zeros"], value) for name, value in here.items() if f"{name}, zeros" in here]


def layers(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Csiszárik et al., figure 2: relative accuracy and, dashed, cross-entropy to model 2 over the layers, per fit."""
    plain = [row for row in rows if row["family"] == "identity"]
    fitted = [row for row in rows if row["family"] != "identity"]
    figure = new_figure(_width(rows), 4)
    left = figure.subplots()
    right = left.twinx()
    for i, (fit, some) in enumerate(grouped(fitted, lambda row: row["fit"]).items()):
        over_places(left, some, "relative_accuracy", f"{FITS[fit]}: relative accuracy", color=f"C{i}")
        over_places(right, some, "cross_entropy", f"{FITS[fit]}: cross-entropy", color=f"C{i}", linestyle="--")
    named(left, fitted, "relative_accuracy")
    legend_below(figure)
    right.set_ylabel("cross-entropy, dashed")
    if plain:
        mean, spread = summary(values(plain, "cross_entropy"))
        left.set_title(f"without a map: cross-entropy {mean:.2f} ± {spread:.2f}", fontsize=9)
    return figure


def fronts(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """A number over the layers, one line per data set that the front networks were trained on."""
    what, figure = plan["settings"]["what"], new_figure(_width(rows), 4)
    axes = figure.subplots()
    for name, some in grouped(rows, group_of(plan)).items():
        over_places(axes, some, what, f"front: {name}")
    named(axes, rows, what)
    legend_below(figure)
    return figure


def several(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Several numbers of the same stitches over the layers."""
    figure = new_figure(_width(rows), 4)
    axes = figure.subplots()
    for what, line in zip(plan["settings"]["what"], cycle(("-", "--", ":")), strict=False):  # lines may coincide
        over_places(axes, rows, what, NUMBERS[what][0], linestyle=line)
    named(axes, rows, plan["settings"]["what"][0])
    axes.set_ylabel("")
    legend_below(figure)
    return figure


def averages(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Numbers of the text: the mean over all layers, ours and printed."""
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
    legend_below(figure)
    return figure


# -- Figures with one panel per layer --


def groups(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Csiszárik et al., figure 3: a number against an option of the networks, such as their width."""
    (option,) = plan["networks"]["vary"]
    return _against(rows, plan["settings"]["what"], option, lambda row: row["front_group"])


def ranks(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Csiszárik et al., figure 7: a number against the rank, task loss beside reduced-rank regression."""
    return _against(rows, plan["settings"]["what"], "rank", lambda row: int(_strength(row)))


def _against(rows: Sequence[Row], what: str, name: str, x: Callable[[Row], Any]) -> Figure:
    """One panel per layer, one line per fit."""
    figure, axes, _ = panels(rows)
    for place, some in grouped(rows, label_of).items():
        for fit, group in grouped(some, lambda row: row["fit"]).items():
            _band(
                axes[place], {at: values(ones, what) for at, ones in grouped(group, x).items()}, FITS[fit], marker="o"
            )
        axes[place].set_xlabel(name)
        axes[place].set_xticks(sorted({x(row) for row in some}))
    first = next(iter(axes.values()))
    first.set_ylabel(NUMBERS[what][0])
    legend_below(figure)
    return figure


def _band(axes: Axes, points: Mapping[Any, Sequence[float]], label: str | None, **style: Any) -> None:
    """Means over x, and a band of one deviation."""
    held = {at: summary(points[at]) for at in sorted(points) if points[at]}
    low, high = ([mean + sign * spread for mean, spread in held.values()] for sign in (-1, 1))
    (drawn,) = axes.plot(list(held), [mean for mean, _ in held.values()], markersize=4, label=label, **style)
    axes.fill_between(list(held), low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)


def starts(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Csiszárik et al., figure 6: histograms of a number by the start of the training."""
    what = plan["settings"]["what"]
    figure, axes, _ = panels(rows)
    for place, some in grouped(rows, label_of).items():
        found = grouped(some, lambda row: STARTS[row["start"]])
        axes[place].hist([values(ones, what) for ones in found.values()], bins=20, label=list(found))
        axes[place].set_xlabel(NUMBERS[what][0])
    first = next(iter(axes.values()))
    first.set_ylabel("stitches")
    legend_below(figure)
    return figure


def iterations(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Csiszárik et al., figures 4 and 5: numbers over the training, means with a band, and two single runs."""
    names, kinds = plan["settings"]["what"], weights(rows)
    figure, grid = panels_in_rows(len(names), 2.75, 3.0, 3)
    for axes, name in zip(grid, names, strict=True):
        for i, (weight, some) in enumerate(kinds.items()):
            clock, runs = curves(some, name)
            times = sorted(set.intersection(*(set(run) for run in runs)))
            points = {time: [run[time] for run in runs] for time in times}
            _band(axes, points, f"{weight} of the CKA" if weight else "mean", color=f"C{i}")
            for run, style in zip(runs, (":", "--"), strict=False):
                axes.plot(times, [run[time] for time in times], style, color=f"C{i}", linewidth=0.8)
            axes.set_xlabel(clock)
        axes.set_ylabel(NUMBERS[name][0])
    grid[0].fill_between([], [], color="0.8", label="one standard deviation")
    for run, style in (("first", ":"), ("second", "--")):
        grid[0].plot([], [], style, color="0.4", linewidth=0.8, label=f"the {run} run alone")
    legend_below(figure)
    return figure


def lines(plan: PlanTable, rows: Sequence[Row]) -> Figure:
    """Csiszárik et al., experiment 6: relative accuracy along the lines between stitches, one panel per layer."""
    figure, axes, _ = panels(rows)
    for row in rows:
        if "line" in row:
            style = {"linewidth": 0.8, "color": "C0", "alpha": 0.7, "label": "lines between two stitches"}
            axes[row["label"]].plot(row["shares"], row["line"], **style)
    good = plan["settings"].get("good", 0.8)
    for one in axes.values():
        one.axhline(good, color="0.6", linewidth=0.8, linestyle=":", label=f"{good:g}, the limit of a good stitch")
        one.set_ylim(0, 1.05)
        one.set_xlabel("λ, share of the first stitch")
    next(iter(axes.values())).set_ylabel(NUMBERS["relative_accuracy"][0])
    legend_below(figure)
    return figure
