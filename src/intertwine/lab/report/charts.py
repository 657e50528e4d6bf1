"""Charts of the report as inline SVG and HTML: series with repeats averaged, line charts, bar charts, heat maps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias, TypeVar

from intertwine.lab.report.entries import Entry
from intertwine.lab.report.naming import NO_REASON, Commands, counted, link, linked, short, tick_label
from intertwine.lab.report.svg import Length, Scale, around, element, ticks
from intertwine.lab.report.views import heads, html_table, numbers, scrolled

Key = TypeVar("Key", bound=Hashable)
Cells: TypeAlias = Mapping[tuple[str, str], "Dot"]
MAX_SERIES, MAX_DESCRIBED = 12, 4
WIDTH, HEIGHT, TOP, LEFT, RIGHT = 620, 290, 30, 58, 16
COLOURS, LETTER = 10, 6.4
MAX_LAYER_NAMES, MAX_UPRIGHT_NAMES = 36, 8  # along an axis; more than MAX_UPRIGHT_NAMES are rotated
MAX_BARS = 30
MAX_LAYERS, MAX_WRITTEN = 64, 12  # of a heat map; with up to MAX_WRITTEN layers, the cells contain their numbers
INVERTED = 0.62  # above this opacity, the number in a cell has the inverse colour

# -- Series ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """A value at `x` with its interval, from `count` entries; `note` says why there is no value."""

    x: float
    value: float | None
    low: float | None
    high: float | None
    count: int
    note: str | None
    commands: tuple[int, ...]

    @property
    def words(self) -> str:
        """The value and its interval."""
        if self.value is None:
            return self.note or NO_REASON
        interval = f" ({short(self.low)} to {short(self.high)})" if None not in (self.low, self.high) else ""
        return short(self.value) + interval + (f", mean of {self.count} repeats" if self.count > 1 else "")


@dataclass(frozen=True)
class Series:
    """Dots that belong together, from left to right."""

    name: str
    dots: tuple[Dot, ...]

    @property
    def known(self) -> list[tuple[Dot, float]]:
        """The dots that have a value, with their values."""
        return [(dot, dot.value) for dot in self.dots if dot.value is not None]


def grouped(entries: Iterable[Entry], key: Callable[[Entry], Key]) -> dict[Key, list[Entry]]:
    """Entries by key; the keys are in order of appearance."""
    groups: dict[Key, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def gather(
    entries: Iterable[Entry], name: Callable[[Entry], str], x: Callable[[Entry], float], commands: Commands
) -> list[Series]:
    """One series per name; entries with the same name and x are repeats, and become one dot."""
    return [
        Series(label, tuple(dot_of(at, repeats, commands) for at, repeats in sorted(grouped(own, x).items())))
        for label, own in list(grouped(entries, name).items())[:MAX_SERIES]
    ]


def dot_of(x: float, entries: list[Entry], commands: Commands) -> Dot:
    """One dot for repeats: their mean, and the interval from the smallest to the largest."""
    values = [e.value for e in entries if e.value is not None]
    if len(values) > 1:
        mean = sum(values) / len(values)
        return Dot(x, mean, min(values), max(values), len(values), None, commands.of(entries))
    one = next((e for e in entries if e.value is not None), entries[0])
    return Dot(x, one.value, one.low, one.high, 1, one.note, commands.of(entries))


def linked_dot(dot: Dot | None) -> str:
    """The number of a dot, as a link to its commands."""
    return "" if dot is None else linked(dot.value, dot.commands, dot.note)


def describe(series: Iterable[Series], place: Callable[[float], str], leftmost: bool = False) -> str:
    """The largest (or leftmost) value of each series, the largest series first: `weights: 0.12 at conv3; …`."""
    found = []
    for one in series:
        if one.known:
            order = sorted(one.known, key=lambda item: (item[0].x, item[1]) if leftmost else (-item[1], -item[0].x))
            dot, value = order[0]
            found.append((value, f"{one.name}: {short(value)} at {place(dot.x)}".removeprefix(": ")))
    found.sort(key=lambda item: -item[0])
    more = len(found) - MAX_DESCRIBED
    return "; ".join(words for _, words in found[:MAX_DESCRIBED]) + (f"; and {more} more" if more > 0 else "")


def describe_intervals(series: Iterable[Series]) -> str:
    """A sentence on the intervals of repeats, if there are any."""
    most = max((dot.count for one in series for dot in one.dots), default=1)
    if most == 1:
        return ""
    return f" Means of up to {counted(most, 'repeat')}; the interval is from the smallest to the largest."


def describe_omitted(entries: Iterable[Entry], name: Callable[[Entry], str]) -> str:
    """A sentence on the series that `gather` leaves out, if there are any."""
    total = len({name(entry) for entry in entries})
    return f" The first {MAX_SERIES} of {total} lines are drawn." if total > MAX_SERIES else ""


# -- Line charts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    """The labels of the axes; `names` are those of x = 0, 1, 2 … if the x axis is not numeric."""

    title: str
    x: str
    y: str
    names: tuple[str, ...] = ()
    joined: bool = True

    def at(self, x: float) -> str:
        return self.names[round(x)] if self.names else short(x)


@dataclass(frozen=True)
class PlotArea:
    """The scales of a chart, and its height."""

    across: Scale
    up: Scale
    height: Length


def line_chart(axes: Axes, series: Sequence[Series], inside: str = "", under: str = "") -> str:
    """The chart, its legend and its numbers as a table. `inside`: SVG drawn on top; `under`: HTML below it."""
    area = plot_area(axes, series)
    drawn = "".join(_draw_series(i, one, axes, area, len(series)) for i, one in enumerate(series))
    content = element("title", escape(axes.title)) + _draw_axes(axes, area) + drawn + inside
    picture = element("svg", content, viewBox=f"0 0 {WIDTH} {area.height:.0f}", role="img")
    framed = scrolled(picture, axes.title, "plot" if axes.names else "plot fluid")
    by_place = [{dot.x: dot for dot in one.dots} for one in series]
    places = sorted({dot.x for one in series for dot in one.dots})
    rows = [(axes.at(x), [_with_interval(dots.get(x)) for dots in by_place]) for x in places]
    table = numbers(axes.title, axes.x, [one.name or axes.y for one in series], rows)
    return framed + under + _legend(series) + table


def plot_area(axes: Axes, series: Sequence[Series]) -> PlotArea:
    """The scales that show all dots and their intervals."""
    dots = [dot for one in series for dot, _ in one.known]
    low, high = around([v for dot in dots for v in (dot.value, dot.low, dot.high) if v is not None])
    up = Scale(low, high, HEIGHT, TOP)
    if axes.names:
        across = Scale(-0.5, len(axes.names) - 0.5, LEFT, WIDTH - RIGHT)
        longest = max(map(len, axes.names))
        upright = len(axes.names) <= MAX_UPRIGHT_NAMES and longest <= 9
        return PlotArea(across, up, HEIGHT + (44 if upright else 34 + LETTER * longest))
    left, right = around([dot.x for one in series for dot in one.dots], zero=False)
    return PlotArea(Scale(left, right, LEFT, WIDTH - RIGHT), up, HEIGHT + 44)


def _legend(series: Sequence[Series]) -> str:
    """The names of the series; the script adds the number at the slider's position."""
    if len(series) == 1 and not series[0].name:
        return ""
    items = "".join(
        f'<li><svg class="key s{i % COLOURS}" viewBox="-8 -8 16 16" aria-hidden="true">{_mark(i, 0, 0)}</svg>'
        f'{escape(one.name)} <span class="now js"></span></li>'
        for i, one in enumerate(series)
    )
    return f'<ul class="legend">{items}</ul>'


def _mark(number: int, x: Length, y: Length) -> str:
    """The mark of a series; its shape differs too, for readers who cannot see colours."""
    outline = ("", "m-4-4h8v8h-8z", "m0-5l5 9h-10z", "m0-5l5 5-5 5-5-5z")[number % 4]
    return element("path", d=f"M{x:.1f} {y:.1f}{outline}") if outline else element("circle", cx=x, cy=y, r=4)


def _draw_series(number: int, series: Series, axes: Axes, area: PlotArea, count: int) -> str:
    # dots of one layer stand side by side, so that their intervals do not overlap
    aside = 0.0 if axes.joined else (number - (count - 1) / 2) * min(0.7 / count, 0.16)
    places = [(dot, area.across(dot.x + aside), area.up(value)) for dot, value in series.known]
    parts: list[str] = []
    if axes.joined and len(places) > 1:
        line = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in places)
        parts += [_draw_band(places, area), element("polyline", points=line)]
    else:
        parts += [_draw_whisker(dot, x, area) for dot, x, _ in places]
    parts += [_link_mark(series, dot, axes, _mark(number, x, y)) for dot, x, y in places]
    for dot in series.dots:
        if dot.value is None:
            x, y = area.across(dot.x + aside) - 4, HEIGHT - 12.0
            cross = f"<path class='missing' d='M{x:.1f} {y:.1f}l8 8m0-8l-8 8'/>"
            parts.append(_link_mark(series, dot, axes, cross))
    return element("g", "".join(parts), class_=f"s{number % COLOURS}")


def _link_mark(series: Series, dot: Dot, axes: Axes, mark: str) -> str:
    """A mark with a tooltip and a link to its commands."""
    at = axes.at(dot.x) if axes.names else f"{axes.x} {short(dot.x)}"
    words = element("title", escape(": ".join(part for part in (series.name, at, dot.words) if part)))
    drawn = element("g", words + mark)
    return f'<a tabindex="-1" {link(dot.commands)}>{drawn}</a>' if dot.commands else drawn


def _draw_band(places: Sequence[tuple[Dot, Length, Length]], area: PlotArea) -> str:
    ends = [(x, dot.low, dot.high) for dot, x, _ in places if dot.low is not None and dot.high is not None]
    if len(ends) < 2:
        return ""
    upper = [f"{x:.1f},{area.up(high):.1f}" for x, _, high in ends]
    lower = [f"{x:.1f},{area.up(low):.1f}" for x, low, _ in reversed(ends)]
    return element("polygon", points=" ".join(upper + lower))


def _draw_whisker(dot: Dot, x: Length, area: PlotArea) -> str:
    if dot.low is None or dot.high is None:
        return ""
    low, high = area.up(dot.low), area.up(dot.high)
    return element("path", d=f"M{x:.1f} {low:.1f}V{high:.1f}m-4 0h8M{x - 4:.1f} {low:.1f}h8", class_="whisker")


def _draw_axes(axes: Axes, area: PlotArea) -> str:
    """Grid lines, their numbers or names, and the labels of the axes."""
    parts = [_label(LEFT - 44, TOP - 16, axes.y, "what"), _label(WIDTH - RIGHT, area.height - 5, axes.x, "what end")]
    for value in ticks(area.up.low, area.up.high):
        y = area.up(value)
        kind = "axis" if value == max(0.0, area.up.low) else "grid"
        parts.append(element("path", d=f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", class_=kind))
        parts.append(_label(LEFT - 8, y + 4, tick_label(value), "end"))
    if axes.names:
        every = -(-len(axes.names) // MAX_LAYER_NAMES)
        labels = [(float(i), axes.names[i]) for i in range(0, len(axes.names), every)]
    else:
        labels = [(value, tick_label(value)) for value in ticks(area.across.low, area.across.high)]
    for value, words in labels:
        x = area.across(value)
        upright = area.height == HEIGHT + 44
        parts.append(
            _label(x, HEIGHT + 20, words, "middle")
            if upright
            else _label(x + 4, HEIGHT + 8, words, "end", rotated=True)
        )
    return "".join(parts)


def _label(x: Length, y: Length, words: str, kind: str, rotated: bool = False) -> str:
    rotation = {"transform": f"rotate(-90 {x:.1f} {y:.1f})"} if rotated else {}
    return element("text", escape(words), x=x, y=y, **rotation, class_=kind)


def _with_interval(dot: Dot | None) -> str:
    has_interval = dot is not None and None not in (dot.low, dot.high)
    return linked_dot(dot) + (f" <small>{short(dot.low)} … {short(dot.high)}</small>" if has_interval else "")


# -- Bar charts --------------------------------------------------------------------------------------------------------


def bar_chart(heading: str, unit: str, bars: Sequence[tuple[str, Dot]]) -> str:
    """A table with one row per name, the largest first: a bar and its number; a long table is folded."""
    ordered = sorted(bars, key=lambda bar: -(bar[1].value or 0.0))
    longest = max((dot.value or 0.0 for _, dot in ordered), default=0.0) or 1.0
    rows = [
        f'<th scope="row">{escape(name)}</th><td>{linked_dot(dot)}</td>'
        f'<td class="bar"><span style="width:{max(0.0, dot.value or 0.0) / longest:.1%}"></span></td>'
        for name, dot in ordered
    ]
    head = heads((heading, unit)) + "<td></td>"
    first, rest = (
        html_table(head, part).replace("<table>", '<table class="bars">', 1)
        for part in (rows[:MAX_BARS], rows[MAX_BARS:])
    )
    folded = f"<details><summary>{len(rows) - MAX_BARS} more</summary>{rest}</details>"
    return first + (folded if len(rows) > MAX_BARS else "")


# -- Heat maps ---------------------------------------------------------------------------------------------------------


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], cells: Cells, ends: tuple[float, float]) -> str:
    """The picture, its colour scale, and a table. `ends`: the values of the lightest and the darkest colour."""
    layers = max(len(rows), len(columns))
    side, wide = (
        (30, 44) if layers <= MAX_WRITTEN else (20, 20) if layers <= 32 else (12, 12)
    )  # height and width of a cell
    left, top = 12 + LETTER * max(map(len, rows)), 8
    bottom = top + side * len(rows)
    width = max(left + wide * len(columns) + 8, left + 150)
    height = bottom + 16 + LETTER * max(map(len, columns)) + 44
    depth, written = Scale(*ends, 0.0, 1.0), len(rows) <= MAX_WRITTEN and wide > 40
    parts = [element("title", escape(title))]
    for i, row in enumerate(rows):
        parts.append(_label(left - 6, top + side * i + side / 2 + 4, row, "end"))
        commands: tuple[int, ...] = ()
        for j, column in enumerate(columns):
            dot = cells.get((row, column))
            own = dot.commands if dot is not None else ()
            if own != commands:  # neighbours with the same commands share a link, to keep the page small
                parts.append("</a>" if commands else "")
                parts.append(f'<a tabindex="-1" {link(own)}>' if own else "")
                commands = own
            if dot is not None:
                box = {"x": left + wide * j, "y": top + side * i, "width": wide - 1, "height": side - 1}
                parts.append(_draw_cell(f"{row} × {column}", dot, box, depth, written))
        parts.append("</a>" if commands else "")
    parts += [_label(left + wide * j + wide / 2 + 4, bottom + 6, name, "end", True) for j, name in enumerate(columns)]
    parts.append(_draw_colours(left, height - 26, ends))
    view = f"0 0 {width:.0f} {height:.0f}"
    picture = element("svg", "".join(parts), viewBox=view, width=round(width), height=round(height), role="img")
    table = [(row, [linked_dot(cells.get((row, column))) for column in columns]) for row in rows]
    return scrolled(picture, title, "plot heat") + numbers(title, "layer", columns, table)


def thinned(layers: Sequence[str]) -> tuple[list[str], str]:
    """The layers that fit into a picture, and a sentence if some are left out."""
    every = -(-len(layers) // MAX_LAYERS)
    return list(layers[::every]), f" One layer in {every} is drawn." if every > 1 else ""


def _draw_cell(name: str, dot: Dot, box: Mapping[str, Length], depth: Scale, written: bool) -> str:
    x, y, width, height = box.values()
    title = element("title", escape(f"{name}: {dot.words}"))
    if dot.value is None:
        cross = element("path", d=f"M{x:.1f} {y + height:.1f}L{x + width:.1f} {y:.1f}", class_="missing")
        return element("g", title + element("rect", "", **box, class_="gap") + cross)
    share = min(1.0, max(0.0, depth(dot.value)))
    drawn = element("rect", title, **box, class_="h", fill_opacity=f"{share:.2f}")
    if not written:
        return drawn
    return drawn + _label(
        x + width / 2, y + height / 2 + 4.5, f"{dot.value:.2f}", "cell on" if share > INVERTED else "cell"
    )


def _draw_colours(x: Length, y: Length, ends: tuple[float, float]) -> str:
    """The colour scale between its two numbers."""
    steps = "".join(
        element("rect", x=x + 10 * i, y=y, width=10, height=9, class_="h", fill_opacity=f"{i / 13:.2f}")
        for i in range(14)
    )
    outline = element("rect", x=x, y=y, width=140, height=9, class_="outline")
    low = element("text", short(ends[0]), x=x, y=y + 22)
    return steps + outline + low + _label(x + 140, y + 22, short(ends[1]), "end")
