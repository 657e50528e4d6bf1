"""Chart sections of the report: similarity, barriers, layerwise measures, folding and dissection."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from intertwine.lab.report.charts import (
    HEIGHT,
    TOP,
    Axes,
    Dot,
    Series,
    bar_chart,
    beyond,
    describe_largest,
    dot_of,
    frame_of,
    gather,
    grouped,
    heat_map,
    line_chart,
    spread,
    thinned,
)
from intertwine.lab.report.entries import Entry, StudyResults
from intertwine.lab.report.naming import Commands, Names, counted, linked, short
from intertwine.lab.report.svg import around, element
from intertwine.lab.report.views import PageSection, View, family, scrolled

# ----------------------------------------------------------------------------------------------------
# Similarity: for every measure and pair of networks, a heat map of layers against layers.


SIMILARITY_SWITCHES = ("measure", "networks", "options")


def similarity(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """The section; None where no layers were compared."""
    entries = [e for e in results.of("compare") if e.layer is not None and e.other_layer is not None]
    if not entries:
        return None
    names = Names.of(entries, besides=("measure",))  # the quantity names it already
    groups = grouped(entries, lambda e: (e.quantity, names.pair(e, "×"), names.settings(e)))
    by_measure = grouped(entries, lambda e: e.quantity)
    # one scale per measure: pictures of different pairs can be compared by eye
    ends = {name: around([e.value for e in own if e.value is not None], count=20) for name, own in by_measure.items()}

    def views() -> Iterator[View]:
        for choice, own in groups.items():
            yield _view_similarity(choice, own, ends[choice[0]], commands)

    return PageSection("similarity", "Similarity of layers", family(SIMILARITY_SWITCHES, views(), len(groups), most))


def _view_similarity(
    choice: tuple[str, str, str], entries: list[Entry], ends: tuple[float, float], commands: Commands
) -> View:
    measure, pair, settings = choice
    rows, left_out = thinned(list(dict.fromkeys(e.layer or "" for e in entries)))
    columns, _ = thinned(list(dict.fromkeys(e.other_layer or "" for e in entries)))
    wanted = [e for e in entries if e.layer in set(rows) and e.other_layer in set(columns)]
    places = grouped(wanted, lambda e: (e.layer or "", e.other_layer or ""))
    cells = {place: dot_of(0.0, own, commands) for place, own in places.items()}
    title = f"{measure} between the layers of {pair}" + (f" ({settings})" if settings else "")
    return View(choice, f"{title}. {_told(cells)}{left_out}", heat_map(title, rows, columns, cells, ends), len(cells))


def _told(cells: dict[tuple[str, str], Dot]) -> str:
    """The extremes, and how many cells are empty."""
    known = {place: dot.value for place, dot in cells.items() if dot.value is not None}
    empty = len(cells) - len(known)
    reasons = f" {empty} of {len(cells)} have no value; point at them for the reason." if empty else ""
    if not known:
        return f"No pair of layers has a value.{reasons}"
    (top, most), (bottom, least) = max(known.items(), key=lambda i: i[1]), min(known.items(), key=lambda i: i[1])
    return f"Highest {short(most)} at {' × '.join(top)}, lowest {short(least)} at {' × '.join(bottom)}.{reasons}"


# ----------------------------------------------------------------------------------------------------
# Barriers: loss and error along the line between two networks, with a slider, and the barrier of every pair.


BARRIER_SWITCHES = ("quantity", "networks")
MOST_BARRIERS = 100  # rows of their table


def barriers(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """The section; None where no barrier was measured."""
    entries = results.of("barrier")
    curves = [e for e in entries if e.index is not None]
    heights = [e for e in entries if e.index is None and e.quantity.endswith("_barrier")]
    if not curves and not heights:
        return None
    names = Names.of(entries)
    groups = grouped(curves, lambda e: (_kind(e), names.pair(e)))

    def views() -> Iterator[View]:
        for choice, own in groups.items():
            yield _view(choice, own, names, commands)

    drawn = family(BARRIER_SWITCHES, views(), len(groups), most) if curves else ""
    return PageSection("barrier", "Barriers", drawn + (_heights(heights, names, commands) if heights else ""))


def _kind(entry: Entry) -> str:
    """`error` for `error_reset`: what is measured, without how."""
    return entry.quantity.partition("_")[0]


def _way(entry: Entry, names: Names) -> str:
    """How the networks between were made: the options, and what the quantity adds to its kind."""
    added = entry.quantity.partition("_")[2].removesuffix("barrier").strip("_").replace("_", " ")
    return ", ".join(part for part in (names.settings(entry), added) if part)


def _view(choice: tuple[str, str], entries: list[Entry], names: Names, commands: Commands) -> View:
    kind, pair = choice
    series = gather(entries, lambda e: _way(e, names), lambda e: e.index or 0.0, commands)
    first, _, second = pair.partition(" → ")
    title = f"The {kind} of the networks between {first} (t = 0) and {second} (t = 1)"
    axes = Axes(title, "t", kind)
    worst = describe_largest(_highest(series))
    said = f" Highest: {worst}." if worst else " No point has a value."
    body = line_chart(axes, series, '<g class="marker js"></g>', _slider(axes, series))
    caption = f"{title}.{said}{spread(series)}{beyond(entries, lambda e: _way(e, names))}"
    return View(choice, caption, body, sum(len(one.dots) for one in series))


def _highest(series: list[Series]) -> Iterator[tuple[Series, float, str]]:
    """Of each series its highest value, and where."""
    for one in series:
        top = max(((dot.value, dot.x) for dot in one.known if dot.value is not None), default=None)
        if top is not None:
            yield one, top[0], f" at t = {short(top[1])}"


def _slider(axes: Axes, series: Sequence[Series]) -> str:
    """A slider over t with what the script needs to move the marker: places in the picture and the numbers there."""
    frame = frame_of(axes, series)
    alphas = sorted({dot.x for one in series for dot in one.dots})
    found = [{dot.x: dot for dot in one.known} for one in series]
    at = [[dots.get(alpha) for alpha in alphas] for dots in found]
    data = {
        "alpha": alphas,
        "x": [round(frame.across(alpha), 1) for alpha in alphas],
        "top": TOP,
        "bottom": HEIGHT,
        "value": [[dot and dot.value for dot in line] for line in at],
        "y": [[dot and dot.value is not None and round(frame.up(dot.value), 1) for dot in line] for line in at],
        "command": [[list(dot.commands) if dot else [] for dot in line] for line in at],
    }
    slide = element("input", type="range", min=0, max=len(alphas) - 1, step=1, value=str((len(alphas) - 1) // 2))
    held = escape(json.dumps(data, separators=(",", ":")), quote=True)
    return f'<div class="slider js" data-curves="{held}"><label>t {slide}</label> <output></output></div>'


def _heights(entries: list[Entry], names: Names, commands: Commands) -> str:
    """One row per pair and way of mixing, one column per quantity."""
    kinds = list(grouped(entries, _kind))
    rows = grouped(entries, lambda e: (names.pair(e), _way(e, names)))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("networks", "mixed", *kinds))
    body = []
    for (pair, way), own in list(rows.items())[:MOST_BARRIERS]:
        found = {kind: dot_of(0.0, those, commands) for kind, those in grouped(own, _kind).items()}
        dots = [found.get(kind) for kind in kinds]
        cells = "".join(f"<td>{linked(dot.value, dot.commands, dot.note) if dot else ''}</td>" for dot in dots)
        body.append(f'<tr><th scope="row">{escape(pair)}</th><td>{escape(way)}</td>{cells}</tr>')
    said = f'<p class="said">{MOST_BARRIERS} of {len(rows):,} rows.</p>' if len(rows) > MOST_BARRIERS else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    told = "Barriers: how far the worst network between two networks lies above the line between the two."
    return f"<p>{told}</p>{scrolled(table, 'Barriers')}{said}"


# ----------------------------------------------------------------------------------------------------
# Layer by layer: linear connectivity of features, penalties of stitching, and complexity.


@dataclass(frozen=True)
class LayerwisePlot:
    """What one section draws over the layers. `describe_largest`: the title, in which {} stands for the networks."""

    verb: str
    quantity: str
    heading: str
    told: str
    pairs: bool  # of networks; single networks otherwise
    joined: bool  # by a line
    beside: str = ""  # a quantity to compare with, the same whatever the options


LLFC = LayerwisePlot(
    "connectivity",
    "llfc",
    "Linear connectivity of features",
    "How far the features of the mixed network are from the mixed features (llfc), {}",
    pairs=True,
    joined=True,
)
STITCHING = LayerwisePlot(
    "stitch",
    "penalty",
    "Stitching",
    "Accuracy lost (penalty) by stitching at each layer, front → back: {}",
    pairs=True,
    joined=False,
)
COMPLEXITY = LayerwisePlot(
    "complexity",
    "classes",
    "Complexity",
    "Features that are not equivalent to each other (classes) in each layer of {}",
    pairs=False,
    joined=True,
    beside="width",
)


def layerwise(kind: LayerwisePlot) -> Callable[[StudyResults, Commands, int], PageSection | None]:
    """The maker of one section."""

    def section(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
        entries = [e for e in results.of(kind.verb, kind.quantity, kind.beside) if e.layer is not None]
        if not entries:
            return None
        names = Names.of(entries)
        groups = grouped(entries, names.pair if kind.pairs else names.network)

        def views() -> Iterator[View]:
            for label, own in groups.items():
                yield _view_layerwise(kind, label, own, names, commands)

        return PageSection(kind.verb, kind.heading, family(("networks",), views(), len(groups), most))

    return section


def _view_layerwise(kind: LayerwisePlot, label: str, entries: list[Entry], names: Names, commands: Commands) -> View:
    first = entries[0].task
    entries = [e for e in entries if e.quantity == kind.quantity or e.task is first]
    layers = list(dict.fromkeys(e.layer or "" for e in entries))
    place = {layer: float(i) for i, layer in enumerate(layers)}
    alphas = len({e.index for e in entries}) > 1

    def name(entry: Entry) -> str:
        if entry.quantity == kind.beside:
            return kind.beside
        alpha = f"α={short(entry.index)}" if alphas and entry.index is not None else ""
        said = ", ".join(part for part in (names.settings(entry), alpha) if part)
        return said or (kind.quantity if kind.beside else "")  # beside another line it needs a name of its own

    series = gather(entries, name, lambda e: place[e.layer or ""], commands)
    title = kind.told.format(label)
    axes = Axes(title, "layer", kind.quantity, tuple(layers), kind.joined)
    largest = describe_largest(_largest(series, layers))
    said = f" Largest: {largest}." if largest else " No layer has a value."
    caption = f"{title}.{said}{_interval(series)}{beyond(entries, name)}"
    return View((label,), caption, line_chart(axes, series), sum(len(one.dots) for one in series))


def _largest(series: list[Series], layers: list[str]) -> Iterator[tuple[Series, float, str]]:
    """Of each series its largest value and the layer it is at."""
    for one in series:
        best = max(((dot.value, dot.x) for dot in one.known if dot.value is not None), default=None)
        if best is not None:
            yield one, best[0], f" at {layers[round(best[1])]}"


def _interval(series: list[Series]) -> str:
    """What the bars are: the repeats' spread, or the interval that the verb gave."""
    given = any(dot.low is not None for one in series for dot in one.dots)
    return spread(series) or (" The bars are the interval of each number." if given else "")


# ----------------------------------------------------------------------------------------------------
# Folding: accuracy of a network made smaller, over the share of its parameters that is left.


HOW_FAR = ("beta", "budget", "max_ratio", "share")


def folding(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """The section; None where nothing was folded."""
    entries = [e for e in results.of("fold", "accuracy") if e.index is not None]
    if not entries:
        return None
    # an option that sets how far to fold gives points of one curve, not curves of its own
    names = Names.of(entries, besides=_along(entries))
    groups = grouped(entries, names.network)

    def views() -> Iterator[View]:
        for label, own in groups.items():
            yield _view_folding(label, own, names, commands)

    return PageSection("fold", "Folding", family(("network",), views(), len(groups), most))


def _along(entries: list[Entry]) -> tuple[str, ...]:
    """The options that say how far to fold, where each task gives one point; none where a task gives a whole curve."""
    tasks = grouped(entries, lambda e: e.task.number)
    return HOW_FAR if all(len(own) == 1 for own in tasks.values()) else ()


def _view_folding(label: str, entries: list[Entry], names: Names, commands: Commands) -> View:
    series = gather(entries, names.settings, lambda e: e.index or 0.0, commands)
    title = f"Accuracy of {label} over the share of its parameters that is left"
    smallest = describe_largest(_smallest(series))
    said = f" Where least is left: {smallest}." if smallest else " No point has a value."
    body = line_chart(Axes(title, "share of parameters", "accuracy"), series)
    caption = f"{title}.{said}{spread(series)}{beyond(entries, names.settings)}"
    return View((label,), caption, body, sum(len(one.dots) for one in series))


def _smallest(series: list[Series]) -> Iterator[tuple[Series, float, str]]:
    """Of each series the value at the smallest share, and that share."""
    for one in series:
        least = min(((dot.x, dot.value) for dot in one.known if dot.value is not None), default=None)
        if least is not None:
            yield one, least[1], f" at {short(least[0])}"


# ----------------------------------------------------------------------------------------------------
# Dissection: how many units of a layer answer to each concept, as bars.


DISSECTION_SWITCHES = ("network", "layer", "options")


def dissection(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """The section; None where nothing was dissected."""
    entries = results.of("dissect", "units")
    if not entries:
        return None
    names = Names.of(entries, besides=("concept",))
    groups = grouped(entries, lambda e: (names.network(e), e.layer or "", names.settings(e)))

    def views() -> Iterator[View]:
        for choice, own in groups.items():
            yield _view_dissection(choice, own, _shares(results, choice, names), commands)

    return PageSection("dissect", "Dissection", family(DISSECTION_SWITCHES, views(), len(groups), most))


def _concept(entry: Entry) -> str:
    """What the units answer to: an option of the task, or the note beside a number."""
    return str(entry.task.options.get("concept") or (entry.note if entry.value is not None else None) or "all concepts")


def _shares(results: StudyResults, choice: tuple[str, str, str], names: Names) -> str:
    """How many of all units that is, and how many would be by chance; empty where that was not measured."""
    own = [e for e in results.of("dissect") if (names.network(e), e.layer or "", names.settings(e)) == choice]
    found = {e.quantity: e.value for e in own}
    real, chance = found.get("fraction"), found.get("fraction_by_chance")
    by_chance = "" if chance is None else f" ({chance:.0%} by chance)"
    return "" if real is None else f" That is {real:.0%} of its units{by_chance}."


def _view_dissection(choice: tuple[str, str, str], entries: list[Entry], shares: str, commands: Commands) -> View:
    network, layer, settings = choice
    bars = [(name, dot_of(0.0, own, commands)) for name, own in grouped(entries, _concept).items()]
    total = sum(dot.value or 0.0 for _, dot in bars)
    where = f"layer {layer} of {network}" if layer else network
    title = f"Units of {where} by concept" + (f" ({settings})" if settings else "")
    name, top = max(bars, key=lambda bar: bar[1].value or 0.0)
    said = f"{short(total)} units answer to {counted(len(bars), 'concept')}; most to {name} ({short(top.value)})."
    return View(choice, f"{title}. {said}{shares}", bar_chart("concept", "units", bars), len(bars))
