"""The outline of a symmetry: wires under the module that holds them, fibres under their base, repetitions told once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from intertwine.report.folding import Run, runs, template
from intertwine.symmetry.wire import Frozen, Wire


@dataclass(frozen=True)
class Line:
    """A wire, named from the section it stands in; it stands for `count` wires that look alike, up to `last`."""

    label: str
    wire: Wire
    fibres: tuple[Line, ...] = ()
    last: str = ""
    count: int = 1

    @property
    def key(self) -> Hashable:
        """What two lines that look alike share."""
        return self.label, self.count, self.wire.size, str(self.wire.group), tuple(f.key for f in self.fibres)


@dataclass(frozen=True)
class Section:
    """A module and the wires that act inside it alone. It stands for `count` modules that look alike, up to `last`.

    Where modules of several kinds take turns, the section of the run holds one section for each kind and `count` is the
    number of turns.
    """

    label: str
    lines: tuple[Line, ...] = ()
    sections: tuple[Section, ...] = ()
    last: str = ""
    count: int = 1

    @property
    def key(self) -> Hashable:
        """What two sections that look alike share, their names aside."""
        return self.count, tuple(ln.key for ln in self.lines), tuple((s.label, s.key) for s in self.sections)


def title(item: Line | Section) -> str:
    """`layers.0 … layers.23 (×24)` for a run, the plain label otherwise."""
    return f"{item.label} … {item.last} (×{item.count})" if item.count > 1 else item.label


def outline(wires: Sequence[Wire]) -> Section:
    """The root section, which holds all wires. Its label is empty."""
    names = {w.name for w in wires}
    fibres: dict[str, list[Wire]] = defaultdict(list)
    tops: list[Wire] = []
    for wire in wires:
        base = next((b for b in reversed(wire.over) if b in names), None)
        (tops if base is None else fibres[base]).append(wire)
    placed: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for wire in tops:
        home = _home(wire, fibres)
        placed[home].append(_line(wire, home, fibres))
    return replace(_section((), placed), label="")


def _home(wire: Wire, fibres: dict[str, list[Wire]]) -> tuple[str, ...]:
    """The deepest module in which the wire and all its fibres act, as long as the wire's name still says more."""
    paths = [slot.parameter.split(".")[:-1] for w in _family(wire, fibres) for slot in w.slots]
    home = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    while home and not wire.name.startswith(".".join(home) + "."):
        home = home[:-1]
    return tuple(home)


def _family(wire: Wire, fibres: dict[str, list[Wire]]) -> list[Wire]:
    return [wire, *(w for fibre in fibres[wire.name] for w in _family(fibre, fibres))]


def _line(wire: Wire, home: tuple[str, ...], fibres: dict[str, list[Wire]]) -> Line:
    label = wire.name.removeprefix(".".join(home) + "." if home else "")
    inner = _folded([_line(w, home, fibres) for w in fibres[wire.name]], _alike)
    return Line(label, wire, tuple(inner))


def _section(path: tuple[str, ...], placed: dict[tuple[str, ...], list[Line]]) -> Section:
    """The section of a module; a module with nothing of its own and a single section inside is told as one."""
    depth = len(path)
    names = dict.fromkeys(home[depth] for home in placed if home[:depth] == path and len(home) > depth)
    inner = _folded([_section((*path, name), placed) for name in names], _together)
    lines = _folded(placed.get(path, []), _alike)
    label = path[-1] if path else ""
    if not lines and len(inner) == 1 and path:
        only = inner[0]
        return replace(only, label=f"{label}.{only.label}", last=only.last and f"{label}.{only.last}")
    return Section(label, tuple(lines), tuple(inner))


def _folded(items: Sequence, join: Callable[[Sequence, Run], list]) -> list:
    """Items with the runs among them joined into one."""
    keys = [(template(item.label), _nameless(item)) for item in items]
    joined: list = []
    for run in runs(keys):
        joined += items[run.start : run.last + 1] if run.count == 1 else join(items, run)
    return joined


def _nameless(item: Line | Section) -> Hashable:
    if isinstance(item, Section):
        return item.key
    return (
        item.wire.size,
        str(item.wire.group),
        tuple((template(f.label), f.wire.size, str(f.wire.group)) for f in item.fibres),
    )


def _alike(lines: Sequence[Line], run: Run) -> list[Line]:
    """Three wires or more that look alike become one line, one for each kind where kinds take turns."""
    if run.count < 3:
        return list(lines[run.start : run.last + 1])
    behind = run.period - 1  # of the last turn, the place of each kind
    kinds = enumerate(lines[run.start : run.start + run.period])
    return [replace(kind, last=lines[run.last - behind + i].label, count=run.count) for i, kind in kinds]


def _together(sections: Sequence[Section], run: Run) -> list[Section]:
    first, last = sections[run.start], sections[run.last].label
    if run.period == 1 and first.count == 1:
        return [replace(first, last=last, count=run.count)]
    turn = tuple(sections[run.start : run.start + run.period])
    return [Section(first.label, (), turn, last, run.count)]


@dataclass(frozen=True)
class Reason:
    """Why axes are frozen: the reason without its place in the code, how many axes, and the first of them."""

    text: str
    axes: tuple[str, ...]


def reasons(frozen: Iterable[Frozen]) -> list[Reason]:
    """Frozen axes grouped by reason, the most frequent first."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for what, reason in frozen:
        grouped[_without_place(reason)].append(what)
    return sorted((Reason(text, tuple(axes)) for text, axes in grouped.items()), key=lambda r: -len(r.axes))


def _without_place(reason: str) -> str:
    """`conv2d at resnet.py:12 in layer1.conv1` → `conv2d`: one cause in many places is one reason."""
    line = r"(?:(?! at )[^()/])+\.py:\d+(?: in [\w.]+)?"
    return re.sub(rf" at (?:{line}|the model's forward|[\w.]+)| \({line}\)", "", reason)
