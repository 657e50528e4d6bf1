"""The boxes of the wire graph: modules that hold parameters, the wires on each axis, repeated blocks folded.

Blocks are folded when they hold the same parameters, the same shapes, and wires of their own in the same places; a wire
that leaves the block must be one and the same wire in all of them.
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
    """A stretch of an axis: how many positions, and the wires that act there (none: it is frozen)."""

    size: int
    wires: tuple[str, ...]


AxisSegments: TypeAlias = tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True)
class ParameterRow:
    """Parameters of one module that have one shape and one set of wires, as one row of axes."""

    names: tuple[str, ...]
    axes: AxisSegments

    @property
    def wires(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w for axis in self.axes for segment in axis for w in segment.wires))


@dataclass(frozen=True)
class Box:
    """A module that holds parameters."""

    path: str
    rows: tuple[ParameterRow, ...]

    @property
    def wires(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w for row in self.rows for w in row.wires))


@dataclass(frozen=True)
class BlockFrame:
    """Boxes `start` to `end` stand for `count` blocks, the first of which lies at `path`."""

    text: str
    path: str
    start: int
    end: int
    depth: int
    count: int


@dataclass(frozen=True)
class FoldedBoxes:
    """The boxes to draw, the frames around the repeated ones, and for every wire the one that is drawn for it."""

    boxes: tuple[Box, ...]
    frames: tuple[BlockFrame, ...]
    representative: Mapping[str, str]


def boxes_of(symmetry: Symmetry, model: nn.Module) -> list[Box]:
    """One box per module that holds parameters (or buffers that a wire moves), in the model's own order."""
    moved = {slot.parameter for wire in symmetry.wires for slot in wire.slots}
    buffers = [(name, b) for name, b in model.named_buffers() if name in moved]
    modules: dict[str, dict[str, AxisSegments]] = defaultdict(dict)
    for name, tensor in [*model.named_parameters(), *buffers]:
        path, _, own = name.rpartition(".")
        modules[path][own] = _axes(symmetry, name, tuple(tensor.shape))
    return [Box(path, _rows(tensors)) for path, tensors in modules.items()]


def _axes(symmetry: Symmetry, name: str, shape: tuple[int, ...]) -> AxisSegments:
    layout = symmetry.layouts.get(name)
    if layout is None:  # the symmetry says nothing about it
        return tuple((Segment(size, ()),) for size in shape)
    wires = {w.name for w in symmetry.wires}
    names = [s.name if s.name in wires else None for s in symmetry.wire_specs]
    return tuple(_merged(_segments(tree, names)) for tree in layout.axes)


def _segments(tree: LayoutAxis, names: Sequence[str | None]) -> list[Segment]:
    """The blocks of an axis in order; factors that are flattened into one axis share their block."""
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


def _merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Neighbours with the same wires as one segment."""
    merged: list[Segment] = []
    for segment in segments:
        size = merged.pop().size if merged and merged[-1].wires == segment.wires else 0
        merged.append(Segment(size + segment.size, segment.wires))
    return tuple(merged)


def _rows(tensors: Mapping[str, AxisSegments]) -> tuple[ParameterRow, ...]:
    """Parameters with equal axes share a row; vectors that only repeat the wires of the matrices are left out."""
    names: dict[AxisSegments, list[str]] = defaultdict(list)
    for name, axes in tensors.items():
        names[axes].append(name)
    rows = [ParameterRow(tuple(n), axes) for axes, n in names.items()]
    large = [row for row in rows if len(row.axes) > 1]
    seen = {w for row in large for w in row.wires}
    return tuple(row for row in rows if row in large or not large or set(row.wires) - seen)


# -- folding -----------------------------------------------------------------------------------------------------------


@dataclass
class _Folder:
    wires: Mapping[str, Wire]
    boxes: list[Box] = field(default_factory=list)
    frames: list[BlockFrame] = field(default_factory=list)
    representative: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, boxes: Sequence[Box], depth: int) -> None:
        """Emit the boxes at and below `path`, each run of equal children once."""
        self.boxes += [b for b in boxes if b.path == path]
        children = _children(path, [b for b in boxes if b.path != path])
        names = list(children)
        keys = [(number_free(name), self.key(_join(path, name), children[name])) for name in names]
        for run in repetitions(keys):
            start = len(self.boxes)
            turn = names[run.start : run.start + run.period]
            # two layers alike (norm1, norm2) are no block
            repeats = run.count > 2 or (run.count == 2 and sum(len(children[name]) for name in turn) > 1)
            for name in turn if repeats else names[run.start : run.last + 1]:
                self.add(_join(path, name), children[name], depth + repeats)
            if repeats:
                first, last = _join(path, names[run.start]), _join(path, names[run.last])
                here = first if run.period == 1 else path
                self.frames.append(BlockFrame(f"{first} … {last}", here, start, len(self.boxes), depth, run.count))
                self.match(path, names, children, run.start, run.period, run.last)

    def match(
        self, path: str, names: list[str], children: dict[str, list[Box]], start: int, period: int, last: int
    ) -> None:
        """Let the wires of the first turn stand for those of the others."""
        for position in range(start + period, last + 1):
            name, model = names[position], names[start + (position - start) % period]
            theirs = self.own(_join(path, name), children[name])
            ours = self.own(_join(path, model), children[model])
            self.representative |= dict(zip(theirs, ours, strict=True))

    def own(self, path: str, boxes: Iterable[Box]) -> list[str]:
        """The wires that act nowhere but below `path`, in order of appearance."""
        seen = dict.fromkeys(w for box in boxes for w in box.wires)
        return [w for w in seen if all(slot.parameter.startswith(f"{path}.") for slot in self.wires[w].slots)]

    def key(self, path: str, boxes: Sequence[Box]) -> Hashable:
        """The contents of a block, its own wires known by number, size and group, the others by name."""
        number = {w: (i, self.wires[w].size, str(self.wires[w].group)) for i, w in enumerate(self.own(path, boxes))}
        return tuple(
            (box.path.removeprefix(path), row.names, tuple(_axis_key(axis, number) for axis in row.axes))
            for box in boxes
            for row in box.rows
        )


def _axis_key(axis: Iterable[Segment], number: Mapping[str, Hashable]) -> Hashable:
    return tuple((s.size, tuple(number.get(w, w) for w in s.wires)) for s in axis)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _children(path: str, boxes: Iterable[Box]) -> dict[str, list[Box]]:
    """Boxes below `path` by the next part of their name."""
    children: dict[str, list[Box]] = defaultdict(list)
    for box in boxes:
        rest = box.path.removeprefix(f"{path}." if path else "")
        children[rest.split(".")[0]].append(box)
    return children


def fold_boxes(symmetry: Symmetry, model: nn.Module) -> FoldedBoxes:
    """The boxes of a model with its repeated blocks told once."""
    folder = _Folder({w.name: w for w in symmetry.wires})
    folder.add("", boxes_of(symmetry, model), 0)
    drawn = {name: _resolve(name, folder.representative) for name in folder.wires}
    frames = sorted(folder.frames, key=lambda f: (f.start, f.depth))
    return FoldedBoxes(tuple(folder.boxes), tuple(frames), drawn)


def _resolve(name: str, representative: Mapping[str, str]) -> str:
    while name in representative and representative[name] != name:
        name = representative[name]
    return name
