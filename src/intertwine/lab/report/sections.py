"""Chart sections of the report: similarity, barriers, layer-wise measures, folding and dissection.

Every section function takes the results, the commands of the page and the number of marks to draw; it returns None if
the study has no results for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from intertwine.lab.report import charts
from intertwine.lab.report.charts import Axes, Dot, Series, grouped
from intertwine.lab.report.entries import Entry, StudyResults
from intertwine.lab.report.naming import Commands, Names, counted, short
from intertwine.lab.report.svg import around, element
from intertwine.lab.report.views import PageSection, View, family, heads, html_table, scrolled

MAX_BARRIERS = 100  # rows of their table
#: Options of folding that set how small the network becomes.
FOLD_AMOUNTS = ("beta", "budget", "max_ratio", "share")


# -- Similarity --------------------------------------------------------------------------------------------------------


def similarity(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """A heat map of layers against layers for every measure and pair of networks."""
    entries = [e for e in results.of("compare") if e.layer is not None and e.other_layer is not None]
    if not entries:
        return None
    names = Names.of(entries, besides=("measure",))  # the quantity is the measure
    groups = grouped(entries, lambda e: (e.quantity, names.pair(e, "×"), names.settings(e)))
    # one scale per measure, so that the pictures of different pairs can be compared
    ends = {
        name: around([e.value for e in own if e.value is not None], count=20)
        for name, own in grouped(entries, lambda e: e.quantity).items()
    }
    views = (_similarity_view(choice, own, ends[choice[0]], commands) for choice, own in groups.items())
    drawn = family(("measure", "networks", "options"), views, len(groups), most)
    return PageSection("similarity", "Similarity of layers", drawn)


def _similarity_view(
    choice: tuple[str, str, str], entries: list[Entry], ends: tuple[float, float], commands: Commands
) -> View:
    measure, pair, settings = choice
    rows, left_out = charts.thinned(list(dict.fromkeys(e.layer or "" for e in entries)))
    columns, _ = charts.thinned(list(dict.fromkeys(e.other_layer or "" for e in entries)))
    shown = [e for e in entries if e.layer in set(rows) and e.other_layer in set(columns)]
    by_layers = grouped(shown, lambda e: (e.layer or "", e.other_layer or ""))
    cells = {layers: charts.dot_of(0.0, own, commands) for layers, own in by_layers.items()}
    title = f"{measure} between the layers of {pair}" + (f" ({settings})" if settings else "")
    caption = f"{title}. {describe_cells(cells)}{left_out}"
    return View(choice, caption, charts.heat_map(title, rows, columns, cells, ends), len(cells))


def describe_cells(cells: dict[tuple[str, str], Dot]) -> str:
    """The extreme values of a heat map, and the number of empty cells."""
    known = {layers: dot.value for layers, dot in cells.items() if dot.value is not None}
    empty = len(cells) - len(known)
    reasons = f" {empty} of {len(cells)} have no value; hover over them for the reason." if empty else ""
    if not known:
        return f"No pair of layers has a value.{reasons}"
    (top, most), (bottom, least) = max(known.items(), key=lambda i: i[1]), min(known.items(), key=lambda i: i[1])
    return f"Highest {short(most)} at {' × '.join(top)}, lowest {short(least)} at {' × '.join(bottom)}.{reasons}"


# -- Barriers ----------------------------------------------------------------------------------------------------------


def barriers(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """Loss and error along the line between two networks, with a slider, and the barrier of every pair."""
    entries = results.of("barrier")
    curves = [e for e in entries if e.index is not None]
    heights = [e for e in entries if e.index is None and e.quantity.endswith("_barrier")]
    if not curves and not heights:
        return None
    names = Names.of(entries)
    groups = grouped(curves, lambda e: (_kind(e), names.pair(e)))
    views = (_barrier_view(choice, own, names, commands) for choice, own in groups.items())
    drawn = family(("quantity", "networks"), views, len(groups), most) if curves else ""
    return PageSection("barrier", "Barriers", drawn + (_barrier_table(heights, names, commands) if heights else ""))


def _kind(entry: Entry) -> str:
    """`error` of `error_reset`: what is measured, without how."""
    return entry.quantity.partition("_")[0]


def _method(entry: Entry, names: Names) -> str:
    """How the interpolated networks are made: the options, and the suffix of the quantity."""
    suffix = entry.quantity.partition("_")[2].removesuffix("barrier").strip("_").replace("_", " ")
    return ", ".join(part for part in (names.settings(entry), suffix) if part)


def _barrier_view(choice: tuple[str, str], entries: list[Entry], names: Names, commands: Commands) -> View:
    kind, pair = choice
    series = charts.gather(entries, lambda e: _method(e, names), lambda e: e.index or 0.0, commands)
    first, _, second = pair.partition(" → ")
    axes = Axes(f"The {kind} of the networks between {first} (t = 0) and {second} (t = 1)", "t", kind)
    worst = charts.describe(series, lambda t: f"t = {short(t)}")
    end = charts.describe_intervals(series) + charts.describe_omitted(entries, lambda e: _method(e, names))
    chart = charts.line_chart(axes, series, '<g class="marker js"></g>', _slider(axes, series))
    return _line_view(choice, axes, series, f" Highest: {worst}." if worst else " No point has a value.", end, chart)


def _line_view(
    choice: tuple[str, ...], axes: Axes, series: Sequence[Series], highlight: str, end: str, chart: str = ""
) -> View:
    caption = f"{axes.title}.{highlight}{end}"
    return View(choice, caption, chart or charts.line_chart(axes, series), sum(len(one.dots) for one in series))


def _slider(axes: Axes, series: Sequence[Series]) -> str:
    """A slider over t, with the positions and the numbers that the script shows."""
    area = charts.plot_area(axes, series)
    ts = sorted({dot.x for one in series for dot in one.dots})
    known = [{dot.x: (dot, value) for dot, value in one.known} for one in series]
    at = [[dots.get(t) for t in ts] for dots in known]
    data = {
        "alpha": ts,
        "x": [round(area.across(t), 1) for t in ts],
        "top": charts.TOP,
        "bottom": charts.HEIGHT,
        "value": [[found and found[1] for found in line] for line in at],
        "y": [[found and round(area.up(found[1]), 1) for found in line] for line in at],
        "command": [[list(found[0].commands) if found else [] for found in line] for line in at],
    }
    slider = element("input", type="range", min=0, max=len(ts) - 1, step=1, value=str((len(ts) - 1) // 2))
    curves = escape(json.dumps(data, separators=(",", ":")), quote=True)
    return f'<div class="slider js" data-curves="{curves}"><label>t {slider}</label> <output></output></div>'


def _barrier_table(entries: list[Entry], names: Names, commands: Commands) -> str:
    """One row per pair and method, one column per quantity."""
    kinds = list(grouped(entries, _kind))
    groups = grouped(entries, lambda e: (names.pair(e), _method(e, names)))
    rows = []
    for (pair, method), own in list(groups.items())[:MAX_BARRIERS]:
        dots = {kind: charts.dot_of(0.0, repeats, commands) for kind, repeats in grouped(own, _kind).items()}
        cells = "".join(f"<td>{charts.linked_dot(dots.get(kind))}</td>" for kind in kinds)
        rows.append(f'<th scope="row">{escape(pair)}</th><td>{escape(method)}</td>{cells}')
    left_out = f'<p class="said">{MAX_BARRIERS} of {len(groups):,} rows.</p>' if len(groups) > MAX_BARRIERS else ""
    table = html_table(heads(("networks", "method", *kinds)), rows)
    text = "Barriers: the largest difference between the curve and the straight line between its ends."
    return f"<p>{text}</p>{scrolled(table, 'Barriers')}{left_out}"


# -- Layer-wise measures -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerwisePlot:
    """A section with a chart over the layers; in `title`, {} stands for the networks."""

    verb: str
    quantity: str
    heading: str
    title: str
    pairs: bool  # of networks; single networks otherwise
    joined: bool  # by a line
    reference: str = ""  # a quantity to compare with, which does not depend on the options


LLFC = LayerwisePlot(
    "connectivity", "llfc", "Linear connectivity of features",
    "Distance of the features of the average from the average of the features (llfc), {}", pairs=True, joined=True,
)  # fmt: skip
STITCHING = LayerwisePlot(
    "stitch", "penalty", "Stitching", "Accuracy lost (penalty) by stitching at each layer, front → back: {}",
    pairs=True, joined=False,
)  # fmt: skip
COMPLEXITY = LayerwisePlot(
    "complexity", "classes", "Complexity", "Non-equivalent features (classes) in each layer of {}",
    pairs=False, joined=True, reference="width",
)  # fmt: skip


def layerwise(plot: LayerwisePlot) -> Callable[[StudyResults, Commands, int], PageSection | None]:
    """The function that makes one section."""

    def section(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
        entries = [e for e in results.of(plot.verb, plot.quantity, plot.reference) if e.layer is not None]
        if not entries:
            return None
        names = Names.of(entries)
        groups = grouped(entries, names.pair if plot.pairs else names.network)
        views = (_layerwise_view(plot, label, own, names, commands) for label, own in groups.items())
        return PageSection(plot.verb, plot.heading, family(("networks",), views, len(groups), most))

    return section


def _layerwise_view(plot: LayerwisePlot, label: str, entries: list[Entry], names: Names, commands: Commands) -> View:
    first = entries[0].task
    entries = [e for e in entries if e.quantity == plot.quantity or e.task is first]
    layers = list(dict.fromkeys(e.layer or "" for e in entries))
    alphas = len({e.index for e in entries}) > 1

    def name(entry: Entry) -> str:
        if entry.quantity == plot.reference:
            return plot.reference
        alpha = f"α={short(entry.index)}" if alphas and entry.index is not None else ""
        parts = ", ".join(part for part in (names.settings(entry), alpha) if part)
        return parts or (plot.quantity if plot.reference else "")  # with a reference line, it needs a name

    series = charts.gather(entries, name, lambda e: float(layers.index(e.layer or "")), commands)
    axes = Axes(plot.title.format(label), "layer", plot.quantity, tuple(layers), plot.joined)
    largest = charts.describe(series, axes.at)
    intervals = charts.describe_intervals(series)
    if not intervals and any(dot.low is not None for one in series for dot in one.dots):
        intervals = " The bars are the interval of each number."
    end = intervals + charts.describe_omitted(entries, name)
    return _line_view((label,), axes, series, f" Largest: {largest}." if largest else " No layer has a value.", end)


# -- Folding -----------------------------------------------------------------------------------------------------------


def folding(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """Accuracy of smaller networks over the share of parameters left."""
    entries = [e for e in results.of("fold", "accuracy") if e.index is not None]
    if not entries:
        return None
    # if every task gives one point, the options that set the size are points of one curve, not several curves
    one_point = all(len(own) == 1 for own in grouped(entries, lambda e: e.task.number).values())
    names = Names.of(entries, besides=FOLD_AMOUNTS if one_point else ())
    groups = grouped(entries, names.network)
    views = (_folding_view(label, own, names, commands) for label, own in groups.items())
    return PageSection("fold", "Folding", family(("network",), views, len(groups), most))


def _folding_view(label: str, entries: list[Entry], names: Names, commands: Commands) -> View:
    series = charts.gather(entries, names.settings, lambda e: e.index or 0.0, commands)
    axes = Axes(f"Accuracy of {label} over the share of parameters left", "share of parameters", "accuracy")
    smallest = charts.describe(series, short, leftmost=True)
    highlight = f" Smallest networks: {smallest}." if smallest else " No point has a value."
    end = charts.describe_intervals(series) + charts.describe_omitted(entries, names.settings)
    return _line_view((label,), axes, series, highlight, end)


# -- Dissection --------------------------------------------------------------------------------------------------------


def dissection(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """The number of units of a layer that match each concept, as bars."""
    entries = results.of("dissect", "units")
    if not entries:
        return None
    names = Names.of(entries, besides=("concept",))

    def choice_of(entry: Entry) -> tuple[str, str, str]:
        return names.network(entry), entry.layer or "", names.settings(entry)

    groups, everything = grouped(entries, choice_of), grouped(results.of("dissect"), choice_of)
    views = (_dissection_view(choice, own, everything[choice], commands) for choice, own in groups.items())
    return PageSection("dissect", "Dissection", family(("network", "layer", "options"), views, len(groups), most))


def _concept(entry: Entry) -> str:
    """The concept: an option of the task, or the note of a number."""
    return str(entry.task.options.get("concept") or (entry.note if entry.value is not None else None) or "all concepts")


def _dissection_view(
    choice: tuple[str, str, str], units: list[Entry], entries: list[Entry], commands: Commands
) -> View:
    network, layer, settings = choice
    bars = [(name, charts.dot_of(0.0, own, commands)) for name, own in grouped(units, _concept).items()]
    total = sum(dot.value or 0.0 for _, dot in bars)
    where = f"layer {layer} of {network}" if layer else network
    title = f"Units of {where} by concept" + (f" ({settings})" if settings else "")
    name, top = max(bars, key=lambda bar: bar[1].value or 0.0)
    counts = f"{short(total)} units match {counted(len(bars), 'concept')}; most match {name} ({short(top.value)})."
    values = {e.quantity: e.value for e in entries}
    fraction, chance = values.get("fraction"), values.get("fraction_by_chance")
    by_chance = "" if chance is None else f" ({chance:.0%} by chance)"
    share = "" if fraction is None else f" That is {fraction:.0%} of its units{by_chance}."
    return View(choice, f"{title}. {counts}{share}", charts.bar_chart("concept", "units", bars), len(bars))
