"""The wire graph as a picture: modules as boxes from top to bottom, wires as coloured rails that join the boxes they act on.

Every axis of a parameter is a cell in the colour of its wire, grey where it is frozen. Repeated blocks are drawn once,
in a dashed frame. The picture is plain SVG: it needs no other program and no network, and it can be read aloud.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from torch import nn

from intertwine.report.boxes import Box, Folded, Frame, Row, Segment, fold
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.wire import Wire

PALETTE = ("#0b6fb8", "#d1495b", "#2e8b57", "#b8860b", "#7b4fb3", "#0f8b8d", "#c2571a", "#b03a8c", "#5b7a1f", "#4a5fc1")
INK, FAINT, GREY, EDGE = "#1f2933", "#69737d", "#e4e7eb", "#cbd2d9"
ROW, GAP, STEP, LANE, MARGIN, INDENT = 22, 5, 16, 14, 24, 12
CHARACTER = 6.7  # width of a letter of the 11-pixel monospace type
LONGEST_NAME, MOST_SEGMENTS = 46, 24


def wire_graph(symmetry: Symmetry, model: nn.Module, title: str = "") -> str:
    """Draw the wires of a symmetry over the parameters of its model.

    Args:
        symmetry: the symmetry of the model. model: gives names, order and shapes. title: stands above the picture.

    Returns:
        A standalone SVG document. Each wire, or the one that stands for it in a folded block, is an element with the
        attribute `data-wire`.
    """
    return _Picture(symmetry, fold(symmetry, model), title or type(model).__name__).svg()


@dataclass(frozen=True)
class _Place:
    """Where a box stands: its top and height, the frames around it, and the height at which each wire leaves it."""

    box: Box
    name: str
    top: float
    height: float
    depth: int
    exits: Mapping[str, float]


class _Picture:
    def __init__(self, symmetry: Symmetry, folded: Folded, title: str) -> None:
        self.symmetry, self.folded, self.title = symmetry, folded, title
        self.wires: dict[str, Wire] = {w.name: w for w in symmetry.wires}
        self.rows_of: dict[str, list[int]] = {}
        for position, box in enumerate(folded.boxes):
            for wire in box.wires:
                self.rows_of.setdefault(wire, []).append(position)
        self.drawn = sorted(self.rows_of, key=lambda w: (self.rows_of[w][0], list(self.wires).index(w)))
        self.counts = {w: sum(r == w for r in folded.representative.values()) for w in self.drawn}
        self.colour = _colours(self.drawn, self.rows_of)
        self.lane = _lanes(self.drawn, self.rows_of)
        self.measure()

    # -- where things stand ----------------------------------------------------------------------------------------

    def measure(self) -> None:
        depth = max((f.depth + 1 for f in self.folded.frames), default=0)
        self.left = MARGIN + INDENT * depth
        self.names = [_shortened(self.local(box.path, i)) or "(the model)" for i, box in enumerate(self.folded.boxes)]
        widest = max((len(n) for n in self.names), default=0)
        rows = [row for box in self.folded.boxes for row in box.rows]
        captions = max((len(_caption(box, row)) for box in self.folded.boxes for row in box.rows), default=0)
        self.captions = self.left + 10 + widest * CHARACTER + 14
        self.cells = self.captions + captions * CHARACTER + (10 if captions else 0)
        titles = max((len(f.text) + 6 for f in self.folded.frames), default=0)
        wide = max((_width(row) for row in rows), default=0)
        self.right = max(self.cells + wide + 10, self.left + titles * CHARACTER)
        self.rails = self.right + INDENT * depth + 16
        self.labels = self.rails + LANE * (max(self.lane.values(), default=-1) + 1) + 12
        self.places: list[_Place] = []
        y: float = 112
        for position, box in enumerate(self.folded.boxes):
            y += sum(22 for f in self.folded.frames if f.start == position)
            y += sum(12 for f in self.folded.frames if f.end == position)
            inside = [f.depth + 1 for f in self.folded.frames if f.start <= position < f.end]
            steps = [self.step(w, position) for w in box.wires]
            height = max(ROW * len(box.rows), sum(steps)) + 4
            above = (height - sum(steps)) / 2
            exits = {w: y + above + sum(steps[:i]) + steps[i] / 2 for i, w in enumerate(box.wires)}
            self.places.append(_Place(box, self.names[position], y, height, max(inside, default=0), exits))
            y += height + GAP
        self.height = y + sum(12 for f in self.folded.frames if f.end == len(self.folded.boxes)) + MARGIN
        labels = max((len(self.label(w)) for w in self.drawn), default=0)
        self.width = max(self.labels + labels * CHARACTER, 16.0 + len(self.title) * 11, 940) + MARGIN

    def step(self, wire: str, position: int) -> float:
        """The room a wire needs beside a box: a line for its label where it begins, less where it only passes."""
        crowded = len(self.folded.boxes[position].wires) > 8
        return STEP if self.rows_of[wire][0] == position else 6 if crowded else 11

    def local(self, name: str, position: int) -> str:
        """A name as seen from inside the innermost frame around a box."""
        around = [f.path for f in self.folded.frames if f.start <= position < f.end and f.path]
        path = max(around, key=len, default="")
        return name.removeprefix(f"{path}.") if path and name != path else name

    def label(self, wire: str) -> str:
        """`↳ blocks.0.attn.qkv[0]/inner  64  (S_64)³  ×12`: an arrow for a fibre, and how many wires it stands for."""
        w = self.wires[wire]
        many = f"  ×{self.counts[wire]}" if self.counts[wire] > 1 else ""
        base = next((b for b in reversed(w.over) if b in self.rows_of), None)
        beside = base is not None and self.rows_of[base][0] == self.rows_of[wire][0]
        over = f"  over {_shortened(base)}" if base is not None and not beside else ""
        return f"{'↳ ' if w.over else ''}{_shortened(wire)}  {w.size}  {w.group}{over}{many}"

    # -- drawing ---------------------------------------------------------------------------------------------------

    def svg(self) -> str:
        width, height = round(self.width), round(self.height)
        told = (
            f"{len(self.symmetry.wires)} wires over {len(self.folded.boxes)} boxes. Boxes are modules with parameters, in the "
            "order of the model; each axis of a parameter is a cell in the colour of the wire that acts on it, grey if frozen. "
            + "; ".join(f"{self.label(w)} acts on {', '.join(self.names[i] for i in self.rows_of[w])}" for w in self.drawn)
        )
        body = [
            *map(self.frame, self.folded.frames),
            *map(self.wire, self.drawn),
            *map(self.box, self.places),
            *self.head(),
        ]
        return "\n".join(
            [
                '<?xml version="1.0" encoding="UTF-8"?>',
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="picture-title picture-desc" '
                'font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="11">',
                f'<title id="picture-title">Wire graph of {escape(self.title)}</title>',
                f'<desc id="picture-desc">{escape(told)}</desc>',
                f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
                *body,
                "</svg>\n",
            ]
        )

    def head(self) -> Iterable[str]:
        """Title, one line of numbers, and the legend."""
        numbers = f"{len(self.symmetry.wires)} wires · e^{self.symmetry.log_order:,.0f} permutations"
        numbers += f" · {self.symmetry.dimension:,} continuous dimensions" if self.symmetry.dimension else ""
        yield _text(MARGIN, 32, self.title, size=17, weight=600)
        yield _text(MARGIN, 52, numbers, FAINT)
        x: float = MARGIN
        for wires, text in ((("a",), "axis a wire moves"), (("a", "b"), "two wires in one axis"), ((), "frozen axis")):
            yield _cell(x, 66, (Segment(8, wires),), {"a": PALETTE[0], "b": PALETTE[1]})
            yield _text(x + 36, 81, text, FAINT)
            x += 36 + len(text) * CHARACTER + 18
        yield f'<path d="M{x} 77h22" stroke="{PALETTE[0]}" stroke-width="3" stroke-linecap="round"/>'
        yield f'<circle cx="{x + 11}" cy="77" r="3.6" fill="#ffffff" stroke="{PALETTE[0]}" stroke-width="2"/>'
        text = "wire, dots where it acts"
        yield _text(x + 30, 81, text, FAINT)
        x += 30 + len(text) * CHARACTER + 18
        if self.folded.frames:
            yield f'<rect x="{x}" y="68" width="22" height="18" rx="4" fill="none" stroke="{FAINT}" stroke-dasharray="4 3"/>'
            yield _text(x + 30, 81, "repeated block, drawn once", FAINT)

    def frame(self, frame: Frame) -> str:
        first, last = self.places[frame.start], self.places[frame.end - 1]
        inner = max((f.depth for f in self.folded.frames if frame.start <= f.start and f.end <= frame.end), default=0)
        deeper = inner - frame.depth
        x = self.left - INDENT * (deeper + 1)
        above = 22 * sum(f.start == frame.start and f.depth >= frame.depth for f in self.folded.frames)
        below = 8 + 12 * sum(f.end == frame.end and f.depth > frame.depth for f in self.folded.frames)
        top, bottom = first.top - above, last.top + last.height + below
        width = self.right + INDENT * (deeper + 1) - x
        text = _text(x + 8, top + 14, f"{frame.text}  ×{frame.count}", INK, weight=600)
        line = f'stroke="{FAINT}" stroke-dasharray="4 3"'
        return f'<rect x="{x}" y="{top:g}" width="{width:g}" height="{bottom - top:g}" rx="7" fill="#f7f9fb" {line}/>{text}'

    def wire(self, name: str) -> str:
        """A rail from the first box the wire acts on to the last, a branch and a dot at each, and the label."""
        wire, colour = self.wires[name], self.colour[name]
        x = self.rails + LANE * self.lane[name]
        ys = [self.places[i].exits[name] for i in self.rows_of[name]]
        alike = [n for n, r in self.folded.representative.items() if r == name]
        hint = f"{name}: {wire.size} indices, {wire.group}, {len(wire.slots)} places"
        hint += f"; stands for {len(alike)} wires, {alike[0]} to {alike[-1]}" if len(alike) > 1 else ""
        parts = [f"<g data-wire={quoteattr(name)}><title>{escape(hint)}</title>"]
        start = f"M{x:g} {ys[0]:g}H{self.labels - 4:g}"
        parts.append(f'<path d="{start}" stroke="{colour}" stroke-width="1" stroke-dasharray="1 3" fill="none"/>')
        parts.append(f'<path d="M{x:g} {ys[0]:g}V{ys[-1]:g}" stroke="{colour}" stroke-width="3" stroke-linecap="round"/>')
        branches = "".join(f"M{self.right:g} {y:g}H{x:g}" for y in ys)
        parts.append(f'<path d="{branches}" stroke="{colour}" stroke-width="1.4"/>')
        parts += [f'<circle cx="{x:g}" cy="{y:g}" r="3.6" fill="#ffffff" stroke="{colour}" stroke-width="2"/>' for y in ys]
        parts.append(_text(self.labels, ys[0] + 4, self.label(name), colour, weight=600))
        return "".join(parts) + "</g>"

    def box(self, place: _Place) -> str:
        x, middle = self.left, place.top + place.height / 2
        outline = f'fill="#ffffff" stroke="{EDGE}"'
        parts = [f'<g><rect x="{x}" y="{place.top:g}" width="{self.right - x:g}" height="{place.height:g}" rx="5" {outline}/>']
        parts.append(f"<title>{escape(place.box.path)}</title>")
        parts.append(_text(x + 10, middle + 4, place.name, INK, weight=600))
        top = middle - ROW * len(place.box.rows) / 2
        for i, row in enumerate(place.box.rows):
            caption = _caption(place.box, row)
            parts.append(_text(self.captions, top + ROW * i + 15, caption, FAINT) if caption else "")
            parts.append(self.axes(row, top + ROW * i))
        return "".join(parts) + "</g>"

    def axes(self, row: Row, top: float) -> str:
        x, parts = self.cells, []
        for i, axis in enumerate(row.axes):
            if i:
                parts.append(_text(x - 9, top + 15, "×", FAINT))
            parts.append(_cell(x, top, axis, self.colour))
            x += _cell_width(axis) + 12
        return "".join(parts)


def _colours(drawn: Sequence[str], rows: Mapping[str, list[int]]) -> dict[str, str]:
    """A colour per wire; wires that are near each other differ as long as the palette allows."""
    colours: dict[str, str] = {}
    used = dict.fromkeys(PALETTE, -(10**9))  # colour → the last row where it was needed
    for wire in drawn:
        colour = min(PALETTE, key=lambda c: used[c])
        colours[wire] = colour
        used[colour] = rows[wire][-1] + len(colours) / 10**6
    return colours


def _lanes(drawn: Sequence[str], rows: Mapping[str, list[int]]) -> dict[str, int]:
    """A lane per wire so that no two rails lie upon each other; long rails run next to the boxes."""
    lanes: dict[str, int] = {}
    taken: list[list[tuple[int, int]]] = []
    for wire in sorted(drawn, key=lambda w: rows[w][0] - rows[w][-1]):
        first, last = rows[wire][0], rows[wire][-1]
        free = (i for i, spans in enumerate(taken) if all(last < a or b < first for a, b in spans))
        lane = next(free, len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((first, last))
        lanes[wire] = lane
    return lanes


def _caption(box: Box, row: Row) -> str:
    """The names of a row's parameters, unless they are what every layer has."""
    if len(box.rows) == 1 and row.names[0] == "weight":
        return ""
    text = ", ".join(row.names)
    return text if len(text) <= 26 else f"{row.names[0]} … {row.names[-1]}" if len(row.names) > 1 else _shortened(text, 26)


def _shortened(name: str, longest: int = LONGEST_NAME) -> str:
    return name if len(name) <= longest else f"…{name[1 - longest :]}"


def _cell_width(axis: Sequence[Segment]) -> float:
    size = sum(segment.size for segment in axis)
    return max(26, len(str(size)) * CHARACTER + 12, {1: 0, 2: 44, 3: 60}.get(len(axis), 72))


def _width(row: Row) -> float:
    return sum(_cell_width(axis) + 12 for axis in row.axes) - 12


def _cell(x: float, y: float, axis: Sequence[Segment], colours: Mapping[str, str]) -> str:
    """An axis: its size on the colour of its wire, or above bars for its blocks and their wires; grey if frozen."""
    width, size = _cell_width(axis), sum(segment.size for segment in axis)
    wires = [w for segment in axis for w in segment.wires]
    single = len(axis) == 1 and len(wires) == 1
    ground = colours[wires[0]] if single else "#ffffff" if wires else GREY
    edge = colours[wires[0]] if single else FAINT if wires else EDGE
    tint = ' fill-opacity="0.3"' if single else ""
    box = f'x="{x:.1f}" y="{y + 2.5:.1f}" width="{width:.1f}" height="17" rx="2"'
    parts = [f'<rect {box} fill="{ground}"{tint} stroke="{edge}"/>']
    if wires and not single:
        parts += _bars(x + 1, y + 13, width - 2, axis, colours)
    base = y + (15 if single or not wires else 12)
    ink, type_size = INK if wires else FAINT, 11 if single or not wires else 10
    parts.append(f'<text x="{x + width / 2:.1f}" y="{base:.1f}" fill="{ink}" font-size="{type_size}" text-anchor="middle">{size}</text>')
    return "".join(parts)


def _bars(x: float, y: float, width: float, axis: Sequence[Segment], colours: Mapping[str, str]) -> Iterator[str]:
    """A bar per block of the axis, one stripe for each wire in it."""
    share = width / len(axis)
    gap = 1.0 if len(axis) < MOST_SEGMENTS else 0.0
    for position, segment in enumerate(axis):
        stripes = [colours[w] for w in segment.wires] or [GREY]
        for i, colour in enumerate(stripes):
            tall = 6 / len(stripes)
            place = f'x="{x + share * position:.1f}" y="{y + tall * i:.1f}" width="{share - gap:.1f}" height="{tall:.1f}"'
            yield f'<rect {place} fill="{colour}"/>'


def _text(x: float, y: float, text: str, colour: str = INK, size: int = 11, weight: int = 400) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}" font-weight="{weight}" xml:space="preserve">{escape(text)}</text>'
