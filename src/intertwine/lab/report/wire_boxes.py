"""The boxes of the wire graph: modules with parameters, the wires on each axis, and repeated blocks folded.

Blocks are folded if they have the same parameters and shapes, and wires of their own in the same places. A wire that
leaves the block must be the same wire in all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from intertwine.lab.report.outline import number_free, repetitions
from intertwine.symmetry.geometry import LayoutAxis, ProductAxis, SumAxis, WireAxis
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.wire import Wire


@dataclass(frozen=True)
class Segment:
    """A part of an axis: its size, and the wires that act on it (none if it is frozen)."""

    size: int
    wires: tuple[str, ...]


AxisSegments: TypeAlias = tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True)
class ParameterRow:
    """Parameters of one module with the same shape and wires, drawn as one row of axes."""

    names: tuple[str, ...]
    axes: AxisSegments

    @property
    def wires(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w for axis in self.axes for segment in axis for w in segment.wires))


@dataclass(frozen=True)
class Box:
    """A module with parameters."""

    path: str
    rows: tuple[ParameterRow, ...]

    @property
    def wires(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w for row in self.rows for w in row.wires))


@dataclass(frozen=True)
class BlockFrame:
    """Boxes `start` to `end` represent `count` blocks, the first of which is at `path`."""

    text: str
    path: str
    start: int
    end: int
    depth: int
    count: int


@dataclass(frozen=True)
class FoldedBoxes:
    """The boxes to draw, the frames around repeated ones, and the wire that is drawn for each wire."""

    boxes: tuple[Box, ...]
    frames: tuple[BlockFrame, ...]
    representative: Mapping[str, str]


def boxes_of(symmetry: Symmetry, model: nn.Module) -> list[Box]:
    """One box per module with parameters (or buffers that a wire changes), in the order of the model."""
    moved = {slot.parameter for wire in symmetry.wires for slot in wire.slots}
    buffers = [(name, b) for name, b in model.named_buffers() if name in moved]
    modules: dict[str, dict[str, AxisSegments]] = defaultdict(dict)
    for name, tensor in [*model.named_parameters(), *buffers]:
        path, _, own = name.rpartition(".")
        modules[path][own] = _axes(symmetry, name, tuple(tensor.shape))
    return [Box(path, _rows(tensors)) for path, tensors in modules.items()]


def _axes(symmetry: Symmetry, name: str, shape: tuple[int, ...]) -> AxisSegments:
    layout = symmetry.layouts.get(name)
    if layout is None:  # not part of the symmetry
        return tuple((Segment(size, ()),) for size in shape)
    wires = {w.name for w in symmetry.wires}
    names = [s.name if s.name in wires else None for s in symmetry.wire_specs]
    axes = []
    for tree in layout.axes:
        merged: list[Segment] = []
        for segment in _segments(tree, names):  # neighbours with the same wires are merged
            size = merged.pop().size if merged and merged[-1].wires == segment.wires else 0
            merged.append(Segment(size + segment.size, segment.wires))
        axes.append(tuple(merged))
    return tuple(axes)


def _segments(tree: LayoutAxis, names: Sequence[str | None]) -> list[Segment]:
    """The blocks of an axis in order; the factors of a flattened axis share a block."""
    if isinstance(tree, SumAxis):
        return [segment for part in tree.parts for segment in _segments(part, names)]
    if isinstance(tree, ProductAxis):
        blocks = [Segment(1, ())]
        for part in tree.parts:
            inner = _segments(part, names)
            blocks = [Segment(a.size * b.size, (*a.wires, *b.wires)) for a in blocks for b in inner]
        return blocks
    name = names[tree.wire] if isinstance(tree, WireAxis) else None
    return [Segment(tree.size, () if name is None else (name,))]


def _rows(tensors: Mapping[str, AxisSegments]) -> tuple[ParameterRow, ...]:
    """Parameters with equal axes share a row; vectors that only repeat the wires of matrices are left out."""
    names: dict[AxisSegments, list[str]] = defaultdict(list)
    for name, axes in tensors.items():
        names[axes].append(name)
    rows = [ParameterRow(tuple(n), axes) for axes, n in names.items()]
    large = [row for row in rows if len(row.axes) > 1]
    seen = {w for row in large for w in row.wires}
    return tuple(row for row in rows if row in large or not large or set(row.wires) - seen)


# -- Folding -----------------------------------------------------------------------------------------------------------


def fold_boxes(symmetry: Symmetry, model: nn.Module) -> FoldedBoxes:
    """The boxes of a model, with repeated blocks drawn once."""
    folder = _Folder({w.name: w for w in symmetry.wires})
    folder.add("", boxes_of(symmetry, model), 0)
    drawn = {}
    for wire in folder.wires:
        drawn[wire] = wire
        while (other := folder.representative.get(drawn[wire], drawn[wire])) != drawn[wire]:
            drawn[wire] = other
    frames = sorted(folder.frames, key=lambda f: (f.start, f.depth))
    return FoldedBoxes(tuple(folder.boxes), tuple(frames), drawn)


@dataclass
class _Folder:
    wires: Mapping[str, Wire]
    boxes: list[Box] = field(default_factory=list)
    frames: list[BlockFrame] = field(default_factory=list)
    representative: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, boxes: Sequence[Box], depth: int) -> None:
        """Add the boxes at and below `path`, each run of equal children once."""
        self.boxes += [b for b in boxes if b.path == path]
        prefix = f"{path}." if path else ""
        children: dict[str, list[Box]] = defaultdict(list)
        for box in boxes:
            if box.path != path:
                children[prefix + box.path.removeprefix(prefix).split(".")[0]].append(box)
        paths = list(children)
        for run in repetitions([(number_free(p.removeprefix(prefix)), self.key(p, children[p])) for p in paths]):
            start = len(self.boxes)
            first = paths[run.start : run.start + run.period]
            # two equal layers (norm1, norm2) are not a block
            repeats = run.count > 2 or (run.count == 2 and sum(len(children[p]) for p in first) > 1)
            for child in first if repeats else paths[run.start : run.last + 1]:
                self.add(child, children[child], depth + repeats)
            if repeats:
                text, home = f"{first[0]} … {paths[run.last]}", first[0] if run.period == 1 else path
                self.frames.append(BlockFrame(text, home, start, len(self.boxes), depth, run.count))
                for position in range(run.start + run.period, run.last + 1):  # the first round represents the others
                    other, drawn = paths[position], first[(position - run.start) % run.period]
                    pairs = zip(self.own(other, children[other]), self.own(drawn, children[drawn]), strict=True)
                    self.representative |= dict(pairs)

    def own(self, path: str, boxes: Iterable[Box]) -> list[str]:
        """The wires that act only below `path`, in order of appearance."""
        seen = dict.fromkeys(w for box in boxes for w in box.wires)
        return [w for w in seen if all(slot.parameter.startswith(f"{path}.") for slot in self.wires[w].slots)]

    def key(self, path: str, boxes: Sequence[Box]) -> Hashable:
        """The content of a block: its own wires by number, size and group, the others by name."""
        number = {w: (i, self.wires[w].size, str(self.wires[w].group)) for i, w in enumerate(self.own(path, boxes))}

        def axis_key(axis: Iterable[Segment]) -> Hashable:
            return tuple((s.size, tuple(number.get(w, w) for w in s.wires)) for s in axis)

        rows = [(box, row) for box in boxes for row in box.rows]
        return tuple((box.path.removeprefix(path), row.names, tuple(map(axis_key, row.axes))) for box, row in rows)
