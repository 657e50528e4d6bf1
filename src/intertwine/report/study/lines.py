"""Line charts: series of dots over a number or over layers, drawn as inline SVG in the colours of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from intertwine.report.study.commands import link, linked
from intertwine.report.study.curves import Dot, Series
from intertwine.report.study.naming import short, tick
from intertwine.report.study.scales import Scale, around, ticks
from intertwine.report.study.views import numbers, scrolled
from intertwine.report.svg import Length, element

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
class Frame:
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
    return framed + under + legend(series) + _table(axes, series)


def frame_of(axes: Axes, series: Sequence[Series]) -> Frame:
    """The scales that show all dots and their intervals."""
    dots = [dot for one in series for dot in one.known]
    low, high = around([v for dot in dots for v in (dot.value, dot.low, dot.high) if v is not None])
    up = Scale(low, high, HEIGHT, TOP)
    if axes.names:
        across = Scale(-0.5, len(axes.names) - 0.5, LEFT, WIDTH - RIGHT)
        upright = len(axes.names) <= ROOMY and max(map(len, axes.names)) <= 9
        return Frame(across, up, HEIGHT + (44 if upright else 34 + LETTER * max(map(len, axes.names))))
    left, right = around([dot.x for one in series for dot in one.dots], zero=False)
    return Frame(Scale(left, right, LEFT, WIDTH - RIGHT), up, HEIGHT + 44)


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


def _series(number: int, series: Series, axes: Axes, frame: Frame, count: int) -> str:
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


def _band(places: Sequence[tuple[Dot, Length, Length]], frame: Frame) -> str:
    ends = [(x, dot.low, dot.high) for dot, x, _ in places if dot.low is not None and dot.high is not None]
    if len(ends) < 2:
        return ""
    upper = [f"{x:.1f},{frame.up(high):.1f}" for x, _, high in ends]
    lower = [f"{x:.1f},{frame.up(low):.1f}" for x, low, _ in reversed(ends)]
    return element("polygon", points=" ".join(upper + lower))


def _whisker(dot: Dot, x: Length, frame: Frame) -> str:
    if dot.low is None or dot.high is None:
        return ""
    low, high = frame.up(dot.low), frame.up(dot.high)
    return element("path", d=f"M{x:.1f} {low:.1f}V{high:.1f}m-4 0h8M{x - 4:.1f} {low:.1f}h8", **{"class": "whisker"})


def _grid(axes: Axes, frame: Frame) -> str:
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


def _table(axes: Axes, series: Sequence[Series]) -> str:
    """One row per place, one column per series."""
    places = sorted({dot.x for one in series for dot in one.dots})
    found = [{dot.x: dot for dot in one.dots} for one in series]
    rows = [(axes.names[round(x)] if axes.names else short(x), [_cell(dots.get(x)) for dots in found]) for x in places]
    return numbers(axes.title, axes.x, [one.name or axes.y for one in series], rows)


def _cell(dot: Dot | None) -> str:
    if dot is None:
        return ""
    interval = f" <small>{short(dot.low)} … {short(dot.high)}</small>" if None not in (dot.low, dot.high) else ""
    return linked(dot.value, dot.commands, dot.note) + interval
