"""Heat maps: one number per pair of layers, the deeper the colour the larger; missing ones are hatched and say why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeAlias

from intertwine.report.study.commands import link, linked
from intertwine.report.study.curves import Dot
from intertwine.report.study.naming import short
from intertwine.report.study.scales import Scale
from intertwine.report.study.views import numbers, scrolled
from intertwine.report.svg import Length, element

LETTER, MOST_LAYERS, MOST_WRITTEN = 6.4, 64, 12  # up to MOST_WRITTEN layers a side, the numbers stand in the cells
INVERTED = 0.62  # deeper than this, light numbers read better than dark ones (in dark mode the other way round)
Cells: TypeAlias = Mapping[tuple[str, str], Dot]
Box: TypeAlias = tuple[Length, Length, Length, Length]  # x, y, width, height


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], cells: Cells, ends: tuple[float, float]) -> str:
    """The picture, its scale, and its numbers as a table. `ends`: what the palest and the deepest colour stand for."""
    side, wide = _side(max(len(rows), len(columns)))
    left, top = 12 + LETTER * max(map(len, rows)), 8
    bottom = top + side * len(rows)
    width = max(left + wide * len(columns) + 8, left + 150)
    height = bottom + 16 + LETTER * max(map(len, columns)) + 44
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


def _row(row: str, line: list[tuple[str, Dot | None]], box: Box, depth: Scale, small: bool) -> str:
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


def _cell(name: str, dot: Dot, box: Box, depth: Scale, written: bool) -> str:
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
