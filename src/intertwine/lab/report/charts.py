"""Charts of the report as inline SVG and HTML: series with repeats averaged, line charts, bar charts, heat maps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias, TypeVar

from intertwine.lab.report.entries import Entry
from intertwine.lab.report.naming import Commands, counted, link, linked, short, tick
from intertwine.lab.report.svg import Length, Scale, around, element, ticks
from intertwine.lab.report.views import numbers, scrolled

# ----------------------------------------------------------------------------------------------------
# Curves: entries gathered into series of dots; repeats of one task become one dot with its spread.


Key = TypeVar("Key", bound=Hashable)
MOST_SERIES, MOST_TOLD = 12, 4


@dataclass(frozen=True)
class Dot:
    """A value at `x` with an interval, from `count` entries; `note` where there is no value."""

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
            return self.note or "no value, and no reason was given"
        spread = f" ({short(self.low)} to {short(self.high)})" if None not in (self.low, self.high) else ""
        return short(self.value) + spread + (f", mean of {self.count} repeats" if self.count > 1 else "")


@dataclass(frozen=True)
class Series:
    """Dots that belong together, from left to right."""

    name: str
    dots: tuple[Dot, ...]

    @property
    def known(self) -> list[Dot]:
        """The dots that have a value."""
        return [dot for dot in self.dots if dot.value is not None]


def grouped(entries: Iterable[Entry], key: Callable[[Entry], Key]) -> dict[Key, list[Entry]]:
    """Entries by key, in the order in which the keys first come."""
    found: dict[Key, list[Entry]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def gather(
    entries: Iterable[Entry], name: Callable[[Entry], str], x: Callable[[Entry], float], commands: Commands
) -> list[Series]:
    """One series per name. Entries at one place of a series differ only in the repeat; their mean stands for them."""
    return [
        Series(label, tuple(dot_of(at, those, commands) for at, those in sorted(grouped(own, x).items())))
        for label, own in list(grouped(entries, name).items())[:MOST_SERIES]
    ]


def beyond(entries: Iterable[Entry], name: Callable[[Entry], str]) -> str:
    """A sentence on the series that `gather` leaves out; empty where it leaves none."""
    total = len({name(entry) for entry in entries})
    return f" The first {MOST_SERIES} of {total} lines are drawn." if total > MOST_SERIES else ""


def describe_largest(found: Iterable[tuple[Series, float, str]]) -> str:
    """The series with the largest numbers, in words: `weights: 0.12 at conv3; …`."""
    ordered = sorted(found, key=lambda item: -item[1])
    words = [f"{one.name}: {short(value)}{place}".removeprefix(": ") for one, value, place in ordered[:MOST_TOLD]]
    more = len(ordered) - MOST_TOLD
    return "; ".join(words) + (f"; and {more} more" if more > 0 else "")


def spread(series: Iterable[Series]) -> str:
    """A sentence on what the intervals are; empty where there are none."""
    dots = [dot for one in series for dot in one.dots]
    most = max((dot.count for dot in dots), default=1)
    if most > 1:
        return f" Means of up to {counted(most, 'repeat')}; the interval is from the smallest to the largest."
    return ""


def dot_of(x: float, entries: list[Entry], commands: Commands) -> Dot:
    """One dot for entries that differ only in the repeat: their mean, from the smallest to the largest."""
    values = [e.value for e in entries if e.value is not None]
    numbers = commands.of(entries)
    if len(values) > 1:
        return Dot(x, sum(values) / len(values), min(values), max(values), len(values), None, numbers)
    one = next((e for e in entries if e.value is not None), entries[0])
    return Dot(x, one.value, one.low, one.high, 1, one.note, numbers)


# ----------------------------------------------------------------------------------------------------
# Line charts: series of dots over a number or over layers, drawn as inline SVG in the colours of the page.


WIDTH, HEIGHT, TOP, LEFT, RIGHT = 620, 290, 30, 58, 16
COLOURS, LETTER = 10, 6.4
MOST_NAMES, ROOMY = 36, 8  # as many layers are named along an axis; up to ROOMY of them stand upright


@dataclass(frozen=True)
class Axes:
    """What stands along the axes. `names`: of the places 0, 1, 2 … where the x axis has no numbers."""

    title: str
    x: str
    y: str
    names: tuple[str, ...] = ()
    joined: bool = True


@dataclass(frozen=True)
class PlotArea:
    """Where numbers lie in the picture."""

    across: Scale
    up: Scale
    height: Length


def line_chart(axes: Axes, series: Sequence[Series], inside: str = "", under: str = "") -> str:
    """The picture, its legend and its numbers as a table. `inside`: SVG drawn on top; `under`: HTML below it."""
    frame = frame_of(axes, series)
    drawn = "".join(_series(i, one, axes, frame, len(series)) for i, one in enumerate(series))
    picture = element(
        "svg",
        element("title", escape(axes.title)) + _grid(axes, frame) + drawn + inside,
        viewBox=f"0 0 {WIDTH} {frame.height:.0f}",
        role="img",
    )
    framed = scrolled(picture, axes.title, "plot" if axes.names else "plot fluid")
    return framed + under + legend(series) + _table_lines(axes, series)


def frame_of(axes: Axes, series: Sequence[Series]) -> PlotArea:
    """The scales that show all dots and their intervals."""
    dots = [dot for one in series for dot in one.known]
    low, high = around([v for dot in dots for v in (dot.value, dot.low, dot.high) if v is not None])
    up = Scale(low, high, HEIGHT, TOP)
    if axes.names:
        across = Scale(-0.5, len(axes.names) - 0.5, LEFT, WIDTH - RIGHT)
        upright = len(axes.names) <= ROOMY and max(map(len, axes.names)) <= 9
        return PlotArea(across, up, HEIGHT + (44 if upright else 34 + LETTER * max(map(len, axes.names))))
    left, right = around([dot.x for one in series for dot in one.dots], zero=False)
    return PlotArea(Scale(left, right, LEFT, WIDTH - RIGHT), up, HEIGHT + 44)


def legend(series: Sequence[Series]) -> str:
    """The names of the series beside their marks; the script writes the number under the slider behind them."""
    if len(series) == 1 and not series[0].name:
        return ""
    made = "".join(
        f'<li><svg class="key s{i % COLOURS}" viewBox="-8 -8 16 16" aria-hidden="true">{shape(i, 0, 0)}</svg>'
        f'{escape(one.name)} <span class="now js"></span></li>'
        for i, one in enumerate(series)
    )
    return f'<ul class="legend">{made}</ul>'


def shape(number: int, x: Length, y: Length) -> str:
    """The mark of a series, so that its colour is not the only thing that tells it."""
    outlines = ("", "m-4-4h8v8h-8z", "m0-5l5 9h-10z", "m0-5l5 5-5 5-5-5z")
    path = outlines[number % len(outlines)]
    return element("path", d=f"M{x:.1f} {y:.1f}{path}") if path else element("circle", cx=x, cy=y, r=4)


def _series(number: int, series: Series, axes: Axes, frame: PlotArea, count: int) -> str:
    # dots over one layer stand side by side, so that their intervals do not hide each other
    aside = 0.0 if axes.joined else (number - (count - 1) / 2) * min(0.7 / count, 0.16)
    places = [(dot, frame.across(dot.x + aside), frame.up(dot.value)) for dot in series.known if dot.value is not None]
    line = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in places)
    parts = [_band(places, frame), element("polyline", points=line)] if axes.joined and len(places) > 1 else []
    if not axes.joined or len(places) == 1:
        parts += [_whisker(dot, x, frame) for dot, x, _ in places]
    parts += [_marked(series, dot, axes, shape(number, x, y)) for dot, x, y in places]
    missing = [(dot, frame.across(dot.x + aside)) for dot in series.dots if dot.value is None]
    cross = "<path class='missing' d='M{0:.1f} {1:.1f}l8 8m0-8l-8 8'/>"
    parts += [_marked(series, dot, axes, cross.format(x - 4, HEIGHT - 12.0)) for dot, x in missing]
    return element("g", "".join(parts), **{"class": f"s{number % COLOURS}"})


def _marked(series: Series, dot: Dot, axes: Axes, mark: str) -> str:
    """A mark that says its number under the pointer and links to its command."""
    at = axes.names[round(dot.x)] if axes.names else f"{axes.x} {short(dot.x)}"
    words = element("title", escape(": ".join(part for part in (series.name, at, dot.words) if part)))
    drawn = element("g", words + mark)
    return f'<a tabindex="-1" {link(dot.commands)}>{drawn}</a>' if dot.commands else drawn


def _band(places: Sequence[tuple[Dot, Length, Length]], frame: PlotArea) -> str:
    ends = [(x, dot.low, dot.high) for dot, x, _ in places if dot.low is not None and dot.high is not None]
    if len(ends) < 2:
        return ""
    upper = [f"{x:.1f},{frame.up(high):.1f}" for x, _, high in ends]
    lower = [f"{x:.1f},{frame.up(low):.1f}" for x, low, _ in reversed(ends)]
    return element("polygon", points=" ".join(upper + lower))


def _whisker(dot: Dot, x: Length, frame: PlotArea) -> str:
    if dot.low is None or dot.high is None:
        return ""
    low, high = frame.up(dot.low), frame.up(dot.high)
    return element("path", d=f"M{x:.1f} {low:.1f}V{high:.1f}m-4 0h8M{x - 4:.1f} {low:.1f}h8", **{"class": "whisker"})


def _grid(axes: Axes, frame: PlotArea) -> str:
    """Lines and numbers of the axes, and what they measure."""
    parts = [_words(LEFT - 44, TOP - 16, axes.y, "what"), _words(WIDTH - RIGHT, frame.height - 5, axes.x, "what end")]
    for value in ticks(frame.up.low, frame.up.high):
        y = frame.up(value)
        kind = "axis" if value == max(0.0, frame.up.low) else "grid"
        parts += [element("path", d=f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", **{"class": kind})]
        parts += [_words(LEFT - 8, y + 4, tick(value), "end")]
    if not axes.names:
        marks = ticks(frame.across.low, frame.across.high)
        return "".join(parts + [_words(frame.across(v), HEIGHT + 20, tick(v), "middle") for v in marks])
    every = -(-len(axes.names) // MOST_NAMES)
    upright = frame.height == HEIGHT + 44
    for i, name in enumerate(axes.names[::every]):
        x = frame.across(float(i * every))
        if upright:
            parts.append(_words(x, HEIGHT + 20, name, "middle"))
        else:
            turn = f"rotate(-90 {x + 4:.1f} {HEIGHT + 8})"
            parts.append(element("text", escape(name), x=x + 4, y=HEIGHT + 8, transform=turn, **{"class": "end"}))
    return "".join(parts)


def _words(x: Length, y: Length, words: str, kind: str) -> str:
    return element("text", escape(words), x=x, y=y, **{"class": kind})


def _table_lines(axes: Axes, series: Sequence[Series]) -> str:
    """One row per place, one column per series."""
    places = sorted({dot.x for one in series for dot in one.dots})
    found = [{dot.x: dot for dot in one.dots} for one in series]
    rows = [
        (axes.names[round(x)] if axes.names else short(x), [_cell_lines(dots.get(x)) for dots in found]) for x in places
    ]
    return numbers(axes.title, axes.x, [one.name or axes.y for one in series], rows)


def _cell_lines(dot: Dot | None) -> str:
    if dot is None:
        return ""
    interval = f" <small>{short(dot.low)} … {short(dot.high)}</small>" if None not in (dot.low, dot.high) else ""
    return linked(dot.value, dot.commands, dot.note) + interval


# ----------------------------------------------------------------------------------------------------
# Bars: counts by name, the largest first, drawn as a table whose bars grow with the page.


MOST_BARS = 30


def bar_chart(heading: str, unit: str, bars: Sequence[tuple[str, Dot]]) -> str:
    """One row per name: a bar and its number. Names beyond the largest are folded away."""
    ordered = sorted(bars, key=lambda bar: -(bar[1].value or 0.0))
    longest = max((dot.value or 0.0 for _, dot in ordered), default=0.0) or 1.0
    shown = _table(heading, unit, ordered[:MOST_BARS], longest)
    rest = ordered[MOST_BARS:]
    if not rest:
        return shown
    return f"{shown}<details><summary>{len(rest)} more</summary>{_table(heading, unit, rest, longest)}</details>"


def _table(heading: str, unit: str, bars: Sequence[tuple[str, Dot]], longest: float) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{linked(dot.value, dot.commands, dot.note)}</td>'
        f'<td class="bar"><span style="width:{max(0.0, dot.value or 0.0) / longest:.1%}"></span></td></tr>'
        for name, dot in bars
    )
    head = f'<th scope="col">{escape(heading)}</th><th scope="col">{escape(unit)}</th><td></td>'
    return f'<table class="bars"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


# ----------------------------------------------------------------------------------------------------
# Heat maps: one number per pair of layers, the deeper the colour the larger; missing ones are hatched and say why.


HEAT_LETTER, MOST_LAYERS, MOST_WRITTEN = 6.4, 64, 12  # up to MOST_WRITTEN layers a side, the numbers stand in the cells
INVERTED = 0.62  # deeper than this, light numbers read better than dark ones (in dark mode the other way round)
Cells: TypeAlias = Mapping[tuple[str, str], Dot]
Rectangle: TypeAlias = tuple[Length, Length, Length, Length]  # x, y, width, height


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], cells: Cells, ends: tuple[float, float]) -> str:
    """The picture, its scale, and its numbers as a table. `ends`: what the palest and the deepest colour stand for."""
    side, wide = _side(max(len(rows), len(columns)))
    left, top = 12 + HEAT_LETTER * max(map(len, rows)), 8
    bottom = top + side * len(rows)
    width = max(left + wide * len(columns) + 8, left + 150)
    height = bottom + 16 + HEAT_LETTER * max(map(len, columns)) + 44
    depth = Scale(*ends, 0.0, 1.0)
    parts = [element("title", escape(title))]
    for i, row in enumerate(rows):
        parts.append(element("text", escape(row), x=left - 6, y=top + side * i + side / 2 + 4, **{"class": "end"}))
        line = [(column, cells.get((row, column))) for column in columns]
        parts.append(_row(row, line, (left, top + side * i, wide, side), depth, len(rows) <= MOST_WRITTEN))
    for j, column in enumerate(columns):
        x, y = left + wide * j + wide / 2 + 4, bottom + 6
        turn = f"rotate(-90 {x:.1f} {y:.1f})"
        parts.append(element("text", escape(column), x=x, y=y, transform=turn, **{"class": "end"}))
    parts.append(_scale(left, height - 26, ends))
    view = f"0 0 {width:.0f} {height:.0f}"
    picture = element("svg", "".join(parts), viewBox=view, width=round(width), height=round(height), role="img")
    table = [(row, [_number(cells.get((row, column))) for column in columns]) for row in rows]
    return scrolled(picture, title, "plot heat") + numbers(title, "layer", columns, table)


def thinned(layers: Sequence[str]) -> tuple[list[str], str]:
    """Layers that fit into a picture, and a sentence where some are left out."""
    every = -(-len(layers) // MOST_LAYERS)
    return list(layers[::every]), f" One layer in {every} is drawn." if every > 1 else ""


def _side(layers: int) -> tuple[Length, Length]:
    """Height and width of a cell: wide enough for a number where numbers are written."""
    return (30, 44) if layers <= MOST_WRITTEN else (20, 20) if layers <= 32 else (12, 12)


def _row(row: str, line: list[tuple[str, Dot | None]], box: Rectangle, depth: Scale, small: bool) -> str:
    """The cells of one row. Neighbours that one command made share one link, to keep the page small."""
    x, y, width, height = box
    parts: list[str] = []
    opened: tuple[int, ...] = ()
    for column, dot in line:
        numbers_of = dot.commands if dot is not None else ()
        if numbers_of != opened:
            parts += ["</a>"] if opened else []
            parts += [f'<a tabindex="-1" {link(numbers_of)}>'] if numbers_of else []
            opened = numbers_of
        if dot is not None:
            parts.append(_cell(f"{row} × {column}", dot, (x, y, width, height), depth, small and width > 40))
        x += width
    return "".join(parts) + ("</a>" if opened else "")


def _cell(name: str, dot: Dot, box: Rectangle, depth: Scale, written: bool) -> str:
    x, y, width, height = box
    title = element("title", escape(f"{name}: {dot.words}"))
    place = {"x": x, "y": y, "width": width - 1, "height": height - 1}
    if dot.value is None:
        cross = element("path", d=f"M{x:.1f} {y + height - 1:.1f}L{x + width - 1:.1f} {y:.1f}", **{"class": "missing"})
        return element("g", title + element("rect", **place, **{"class": "gap"}) + cross)
    share = min(1.0, max(0.0, depth(dot.value)))
    drawn = element("rect", title, **place, **{"class": "h", "fill-opacity": f"{share:.2f}"})
    if not written:
        return drawn
    kind = "cell on" if share > INVERTED else "cell"
    return drawn + element("text", f"{dot.value:.2f}", x=x + (width - 1) / 2, y=y + height / 2 + 4, **{"class": kind})


def _scale(x: Length, y: Length, ends: tuple[float, float]) -> str:
    """A strip of colours between its two numbers."""
    steps = "".join(
        element("rect", x=x + 10 * i, y=y, width=10, height=9, **{"class": "h", "fill-opacity": f"{i / 13:.2f}"})
        for i in range(14)
    )
    outline = element("rect", x=x, y=y, width=140, height=9, **{"class": "outline"})
    low = element("text", short(ends[0]), x=x, y=y + 22)
    return steps + outline + low + element("text", short(ends[1]), x=x + 140, y=y + 22, **{"class": "end"})


def _number(dot: Dot | None) -> str:
    return "" if dot is None else linked(dot.value, dot.commands, dot.note)
