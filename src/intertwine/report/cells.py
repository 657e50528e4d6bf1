"""Cells: the axes of a parameter in the wire graph, each in the colour of the wire on it, grey where it is frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from intertwine.report.boxes import Row, Segment
from intertwine.report.svg import CHARACTER, EDGE, FAINT, GREY, INK, PAPER, Length, element, text

HEIGHT, GAP = 22, 12
MANY_BLOCKS = 24  # from here on the blocks of an axis are drawn without gaps


def row_width(row: Row) -> Length:
    """The width of the cells of a row."""
    return sum(cell_width(axis) + GAP for axis in row.axes) - GAP


def row_cells(x: Length, y: Length, row: Row, colours: Mapping[str, str]) -> str:
    """The axes of a row, one cell each, with × between them."""
    parts: list[str] = []
    for i, axis in enumerate(row.axes):
        parts += [text(x - GAP / 2, y + 15, "×", FAINT, text_anchor="middle")] if i else []
        parts.append(cell(x, y, axis, colours))
        x += cell_width(axis) + GAP
    return "".join(parts)


def cell_width(axis: Sequence[Segment]) -> Length:
    """Room for the size in figures, and for the blocks of the axis."""
    size = sum(segment.size for segment in axis)
    return max(26, len(str(size)) * CHARACTER + 12, {1: 0, 2: 44, 3: 60}.get(len(axis), 72))


def cell(x: Length, y: Length, axis: Sequence[Segment], colours: Mapping[str, str]) -> str:
    """One axis: its size on the colour of its wire, or above bars when it has several blocks or wires."""
    width, size = cell_width(axis), sum(segment.size for segment in axis)
    wires = [wire for segment in axis for wire in segment.wires]
    place = {"x": x, "y": y + 2.5, "width": width, "height": 17, "rx": 2}
    middle = x + width / 2
    if not wires:
        ground = element("rect", **place, fill=GREY, stroke=EDGE)
        return ground + text(middle, y + 15, str(size), FAINT, text_anchor="middle")
    if len(wires) == 1 and len(axis) == 1:
        ground = element("rect", **place, fill=colours[wires[0]], fill_opacity="0.3", stroke=colours[wires[0]])
        return ground + text(middle, y + 15, str(size), INK, text_anchor="middle")
    ground = element("rect", **place, fill=PAPER, stroke=FAINT)
    bars = "".join(_bars(x + 1, y + 13.5, width - 2, axis, colours))
    return ground + bars + text(middle, y + 11.5, str(size), INK, text_anchor="middle", font_size=10)


def _bars(x: Length, y: Length, width: Length, axis: Sequence[Segment], colours: Mapping[str, str]) -> Iterator[str]:
    """A bar per block of the axis, one stripe for each wire in it."""
    share = width / len(axis)
    gap = 1.0 if len(axis) < MANY_BLOCKS else 0.0
    for position, segment in enumerate(axis):
        stripes = [colours[w] for w in segment.wires] or [GREY]
        tall = 5.5 / len(stripes)
        for i, colour in enumerate(stripes):
            yield element("rect", x=x + share * position, y=y + tall * i, width=share - gap, height=tall, fill=colour)
