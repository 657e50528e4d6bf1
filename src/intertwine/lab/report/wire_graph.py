"""The wire graph as SVG: modules as boxes from top to bottom, wires as coloured lines between them.

Every axis of a parameter is a cell in the colour of its wire, grey if it is frozen. Repeated blocks are drawn once, in
a dashed frame. The picture needs no other program and no network, and has a description for screen readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from torch import nn

from intertwine.lab.report.svg import CHARACTER, EDGE, FAINT, GREY, INK, PALETTE, PAPER, Length, document, element, text
from intertwine.lab.report.wire_boxes import BlockFrame, Box, FoldedBoxes, ParameterRow, Segment, fold_boxes
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.wire import Wire

CELL_HEIGHT, CELL_GAP = 22, 12
MANY_BLOCKS = 24  # an axis with more blocks is drawn without gaps between them
MARGIN, TOP, LANE = 24, 112, 14
GAP, INDENT, FRAME_TITLE, FRAME_FOOT = 5, 12, 22, 12  # between boxes; of a frame: its sides, head and foot
LABEL, PASSING, CROWDED = 16, 11, 6  # height of a wire beside a box: where it starts, where it passes, among many
LONGEST_NAME, LONGEST_CAPTION = 46, 30


def wire_graph(symmetry: Symmetry, model: nn.Module, title: str = "") -> str:
    """Draw the wires of a symmetry over the parameters of its model.

    Args:
        symmetry: of the model.
        model: for names, order and shapes.
        title: above the picture; by default the class of the model.

    Returns:
        A standalone SVG document. Each drawn wire is an element with the attribute `data-wire`.
    """
    return _Picture(symmetry, fold_boxes(symmetry, model), title or type(model).__name__).svg()


@dataclass(frozen=True)
class _Place:
    """The position of a box, its displayed name, and the height at which each of its wires leaves it."""

    box: Box
    name: str
    top: Length
    height: Length
    exits: Mapping[str, Length]

    @property
    def bottom(self) -> Length:
        return self.top + self.height


class _Picture:
    """The layout of the picture; its columns from left to right: names, captions, cells, lines, labels."""

    def __init__(self, symmetry: Symmetry, folded: FoldedBoxes, title: str) -> None:
        self.symmetry, self.title = symmetry, title
        self.frames, self.representative = folded.frames, folded.representative
        self.wires: dict[str, Wire] = {w.name: w for w in symmetry.wires}
        self.acts: dict[str, list[int]] = {}  # wire → positions of the boxes it acts on
        for position, box in enumerate(folded.boxes):
            for wire in box.wires:
                self.acts.setdefault(wire, []).append(position)
        order = {name: i for i, name in enumerate(self.wires)}
        self.drawn = sorted(self.acts, key=lambda w: (self.acts[w][0], order[w]))
        self.colours, self.lanes = _colours(self.drawn, self.acts), _lanes(self.drawn, self.acts)
        self.places = list(self.stack(folded.boxes))
        self.measure()

    # -- Layout --------------------------------------------------------------------------------------------------------

    def stack(self, boxes: Sequence[Box]) -> Iterator[_Place]:
        y: Length = TOP
        for position, box in enumerate(boxes):
            y += FRAME_TITLE * sum(f.start == position for f in self.frames)
            y += FRAME_FOOT * sum(f.end == position for f in self.frames)
            passing = CROWDED if len(box.wires) > 8 else PASSING
            steps = {w: LABEL if self.acts[w][0] == position else passing for w in box.wires}
            height = max(CELL_HEIGHT * len(box.rows), sum(steps.values())) + 4
            exits, exit = {}, y + (height - sum(steps.values())) / 2
            for wire, step in steps.items():
                exits[wire] = exit + step / 2
                exit += step
            around = [f.path for f in self.frames if f.start <= position < f.end and f.path]
            frame = max(around, key=len, default="")  # names are relative to the innermost frame
            name = box.path.removeprefix(f"{frame}." if frame else "")
            yield _Place(box, _shortened(name) or "(the model)", y, height, exits)
            y += height + GAP

    def measure(self) -> None:
        rows = [(p.box, row) for p in self.places for row in p.box.rows]
        depth = max((f.depth + 1 for f in self.frames), default=0)
        captions = max((len(_caption(box, row)) for box, row in rows), default=0)
        titles = max((len(_frame_title(f)) for f in self.frames), default=0)
        self.left = MARGIN + INDENT * depth
        self.captions = self.left + 24 + max((len(p.name) for p in self.places), default=0) * CHARACTER
        self.cells = self.captions + (captions * CHARACTER + 10 if captions else 0)
        widest = max((row_width(row) for _, row in rows), default=0)
        self.right = max(self.cells + widest + 10, self.left + titles * CHARACTER)
        self.lines = self.right + INDENT * depth + 16
        self.labels = self.lines + LANE * (max(self.lanes.values(), default=-1) + 1) + 12
        labels = max((len(self.label(w)) for w in self.drawn), default=0)
        legend = MARGIN + sum(width + 26 + len(words) * CHARACTER for _, width, words in self.legend())
        self.width = round(max(self.labels + labels * CHARACTER, MARGIN + len(self.title) * 11, legend) + MARGIN)
        feet = FRAME_FOOT * sum(f.end == len(self.places) for f in self.frames)
        self.height = round(max((p.bottom for p in self.places), default=TOP) + feet + MARGIN)

    # -- Text ----------------------------------------------------------------------------------------------------------

    def label(self, wire: str) -> str:
        """`↳ blocks.0.attn.qkv[0]/inner  64  (S_64)³  ×12`: ↳ for a dependent wire, × for the wires it represents."""
        w = self.wires[wire]
        count = len(self.alike(wire))
        base = next((b for b in reversed(w.over) if b in self.acts), None)
        elsewhere = base is not None and self.acts[base][0] != self.acts[wire][0]
        over = f"  over {_shortened(base)}" if base is not None and elsewhere else ""
        return f"{'↳ ' * bool(w.over)}{_shortened(wire)}  {w.size}  {w.group}{over}{f'  ×{count}' if count > 1 else ''}"

    def alike(self, wire: str) -> list[str]:
        """The wires that this one represents, including itself."""
        return [name for name, drawn in self.representative.items() if drawn == wire]

    def description(self) -> str:
        acts = (f"{self.label(w)} acts on {', '.join(self.places[i].name for i in self.acts[w])}." for w in self.drawn)
        return (
            f"{len(self.wires)} wires over {len(self.places)} boxes. A box is a module with parameters, in the order "
            "of the model. Each axis of a parameter is a cell in the colour of the wire that acts on it, grey if it is "
            f"frozen. {' '.join(acts)}"
        )

    # -- Drawing -------------------------------------------------------------------------------------------------------

    def svg(self) -> str:
        body = [*map(self.draw_frame, self.frames), *map(self.draw_wire, self.drawn), *map(self.draw_box, self.places)]
        body += self.draw_head()
        return document(self.width, self.height, f"Wire graph of {self.title}", self.description(), "\n".join(body))

    def draw_head(self) -> Iterator[str]:
        """The title, a line of numbers, and the legend."""
        numbers = f"{len(self.wires)} wires · e^{self.symmetry.log_order:,.0f} permutations"
        numbers += f" · {self.symmetry.dimension:,} continuous dimensions" if self.symmetry.dimension else ""
        yield text(MARGIN, 32, self.title, INK, font_size=17, font_weight=600)
        yield text(MARGIN, 52, numbers, FAINT)
        x: Length = MARGIN
        for symbol, width, words in self.legend():
            yield element("g", symbol, transform=f"translate({x:.1f} 66)")
            yield text(x + width + 8, 81, words, FAINT)
            x += width + 26 + len(words) * CHARACTER

    def legend(self) -> Iterator[tuple[str, Length, str]]:
        """Symbols, their widths and meanings."""
        colours = {"a": PALETTE[0], "b": PALETTE[1]}
        yield cell(0, 0, [Segment(8, ("a",))], colours), 26, "axis a wire moves"
        axes = [axis for p in self.places for row in p.box.rows for axis in row.axes]
        if any(len(axis) > 1 or len(axis[0].wires) > 1 for axis in axes):
            yield cell(0, 0, [Segment(8, ("a", "b"))], colours), 26, "several wires in one axis"
        yield cell(0, 0, [Segment(8, ())], colours), 26, "frozen axis"
        line = element("path", d="M0 11h22", stroke=PALETTE[0], stroke_width=3, stroke_linecap="round")
        yield line + _dot(11, 11, PALETTE[0]), 22, "wire, dots where it acts"
        if self.frames:
            dashed = {"fill": "none", "stroke": FAINT, "stroke_dasharray": "4 3"}
            yield element("rect", x=0, y=2, width=22, height=18, rx=4, **dashed), 22, "repeated block, drawn once"

    def draw_frame(self, frame: BlockFrame) -> str:
        inside = [f for f in self.frames if frame.start <= f.start and f.end <= frame.end and f.depth >= frame.depth]
        side = INDENT * (max(f.depth for f in inside) - frame.depth + 1)
        top = self.places[frame.start].top - FRAME_TITLE * sum(f.start == frame.start for f in inside)
        bottom = self.places[frame.end - 1].bottom + 8 + FRAME_FOOT * sum(f.end == frame.end for f in inside[1:])
        x, width = self.left - side, self.right - self.left + 2 * side
        line = {"fill": "#f7f9fb", "stroke": FAINT, "stroke_dasharray": "4 3"}
        box = element("rect", x=x, y=top, width=width, height=bottom - top, rx=7, **line)
        return box + text(x + 8, top + 14, _frame_title(frame), INK, font_weight=600)

    def draw_wire(self, name: str) -> str:
        """A line from the first to the last box that the wire acts on, with a branch and a dot at each, and a label."""
        colour, x = self.colours[name], self.lines + LANE * self.lanes[name]
        ys = [self.places[i].exits[name] for i in self.acts[name]]
        wire, alike = self.wires[name], self.alike(name)
        many = f"; represents {len(alike)} wires, {alike[0]} to {alike[-1]}" if len(alike) > 1 else ""
        hint = f"{name}: {wire.size} indices, {wire.group}, acts in {len(wire.slots)} places{many}"
        leader = f"M{x:.1f} {ys[0]:.1f}H{self.labels - 4:.1f}"
        trunk = f"M{x:.1f} {ys[0]:.1f}V{ys[-1]:.1f}"
        branches = "".join(f"M{self.right:.1f} {y:.1f}H{x:.1f}" for y in ys)
        parts = [
            element("title", escape(hint)),
            element("path", d=leader, stroke=colour, stroke_dasharray="1 3"),
            element("path", d=trunk, stroke=colour, stroke_width=3, stroke_linecap="round"),
            element("path", d=branches, stroke=colour, stroke_width="1.4"),
            *(_dot(x, y, colour) for y in ys),
            text(self.labels, ys[0] + 4, self.label(name), colour, font_weight=600),
        ]
        return element("g", "".join(parts), data_wire=name)

    def draw_box(self, place: _Place) -> str:
        middle = place.top + place.height / 2
        size = {"x": self.left, "y": place.top, "width": self.right - self.left, "height": place.height}
        parts = [
            element("title", escape(place.box.path or "parameters of the model itself")),
            element("rect", **size, rx=5, fill=PAPER, stroke=EDGE),
            text(self.left + 10, middle + 4, place.name, INK, font_weight=600),
        ]
        y = middle - CELL_HEIGHT * len(place.box.rows) / 2
        for row in place.box.rows:
            caption = _caption(place.box, row)
            parts += [text(self.captions, y + 15, caption, FAINT)] if caption else []
            parts.append(row_cells(self.cells, y, row, self.colours))
            y += CELL_HEIGHT
        return element("g", "".join(parts))


def _dot(x: Length, y: Length, colour: str) -> str:
    return element("circle", cx=x, cy=y, r="3.6", fill=PAPER, stroke=colour, stroke_width=2)


def _colours(drawn: Sequence[str], acts: Mapping[str, list[int]]) -> dict[str, str]:
    """A colour per wire: the least recently used one, so that neighbours differ."""
    colours: dict[str, str] = {}
    used = dict.fromkeys(PALETTE, (-1, -1))  # colour → the last box of its last wire
    for wire in drawn:
        colours[wire] = min(PALETTE, key=lambda colour: used[colour])
        used[colours[wire]] = (acts[wire][-1], len(colours))
    return colours


def _lanes(drawn: Sequence[str], acts: Mapping[str, list[int]]) -> dict[str, int]:
    """A lane per wire, so that no two lines overlap; long lines are next to the boxes."""
    lanes: dict[str, int] = {}
    spans: list[list[tuple[int, int]]] = []
    for wire in sorted(drawn, key=lambda w: acts[w][0] - acts[w][-1]):
        first, last = acts[wire][0], acts[wire][-1]
        free = (i for i, used in enumerate(spans) if all(last < a or b < first for a, b in used))
        lane = next(free, len(spans))
        spans += [[]] if lane == len(spans) else []
        spans[lane].append((first, last))
        lanes[wire] = lane
    return lanes


def _frame_title(frame: BlockFrame) -> str:
    return f"{frame.text}  ×{frame.count}"


def _caption(box: Box, row: ParameterRow) -> str:
    """The names of a row's parameters, unless it is the only weight."""
    words = ", ".join(row.names)
    if len(box.rows) == 1 and row.names[0] == "weight":
        return ""
    if len(words) > LONGEST_CAPTION and len(row.names) > 1:
        words = f"{row.names[0]} … {row.names[-1]}"
    return _shortened(words, LONGEST_CAPTION)


def _shortened(name: str, longest: int = LONGEST_NAME) -> str:
    return name if len(name) <= longest else f"…{name[1 - longest :]}"


# -- Cells -------------------------------------------------------------------------------------------------------------


def row_width(row: ParameterRow) -> Length:
    """The width of a row of cells."""
    return sum(cell_width(axis) + CELL_GAP for axis in row.axes) - CELL_GAP


def row_cells(x: Length, y: Length, row: ParameterRow, colours: Mapping[str, str]) -> str:
    """One cell per axis, with × between them."""
    parts: list[str] = []
    for i, axis in enumerate(row.axes):
        parts += [text(x - CELL_GAP / 2, y + 15, "×", FAINT, text_anchor="middle")] if i else []
        parts.append(cell(x, y, axis, colours))
        x += cell_width(axis) + CELL_GAP
    return "".join(parts)


def cell_width(axis: Sequence[Segment]) -> Length:
    """Enough for the digits of the size, and for the blocks of the axis."""
    size = sum(segment.size for segment in axis)
    return max(26, len(str(size)) * CHARACTER + 12, {1: 0, 2: 44, 3: 60}.get(len(axis), 72))


def cell(x: Length, y: Length, axis: Sequence[Segment], colours: Mapping[str, str]) -> str:
    """One axis: its size on the colour of its wire, or above bars if it has several blocks or wires."""
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
    """A bar per block of the axis, with one stripe per wire."""
    share = width / len(axis)
    gap = 1.0 if len(axis) < MANY_BLOCKS else 0.0
    for position, segment in enumerate(axis):
        stripes = [colours[w] for w in segment.wires] or [GREY]
        tall = 5.5 / len(stripes)
        for i, colour in enumerate(stripes):
            yield element("rect", x=x + share * position, y=y + tall * i, width=share - gap, height=tall, fill=colour)
