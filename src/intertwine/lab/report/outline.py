"""The outline of a symmetry: wires by module with repeated ones joined, as data and as nested HTML lists."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import takewhile
from typing import NamedTuple

from intertwine.symmetry.wire import Frozen, Wire

# ----------------------------------------------------------------------------------------------------
# Folding: runs of things that look alike are told once, whether they repeat one by one or in turns.


MAX_PERIOD = 8


class Repetition(NamedTuple):
    """`count` turns of `period` items, from position `start` on."""

    start: int
    period: int
    count: int

    @property
    def last(self) -> int:
        """The position of the last item."""
        return self.start + self.period * self.count - 1


def repetitions(keys: Sequence[Hashable]) -> list[Repetition]:
    """Cut a sequence into runs of equal turns, the longest first; what does not repeat is a run of its own.

    >>> [tuple(run) for run in repetitions("xaaaabcbcy")]
    [(0, 1, 1), (1, 1, 4), (5, 2, 2), (9, 1, 1)]
    """
    found: list[Repetition] = []
    start = 0
    while start < len(keys):
        turns = [Repetition(start, period, _turns(keys, start, period)) for period in range(1, MAX_PERIOD + 1)]
        repeating = [run for run in turns if run.count > 1]
        run = max(repeating, key=lambda r: r.period * r.count, default=Repetition(start, 1, 1))
        found.append(run)
        start = run.last + 1
    return found


def _turns(keys: Sequence[Hashable], start: int, period: int) -> int:
    """How often the `period` items at `start` follow each other."""
    count = 1
    while (end := start + (count + 1) * period) <= len(keys) and all(
        keys[i] == keys[i - period] for i in range(end - period, end)
    ):
        count += 1
    return count


def number_free(name: str) -> str:
    """A name with its numbers blotted out: `encoder_layer_3` and `encoder_layer_4` are of one kind."""
    return re.sub(r"\d+", "#", name)


# ----------------------------------------------------------------------------------------------------
# The outline of a symmetry: wires under the module that holds them, fibres under their base, repetitions told once.


@dataclass(frozen=True)
class OutlineLine:
    """A wire, named from the section it stands in; it stands for `count` wires that look alike, up to `last`."""

    label: str
    wire: Wire
    fibres: tuple[OutlineLine, ...] = ()
    last: str = ""
    count: int = 1

    @property
    def key(self) -> Hashable:
        """What two lines that look alike share."""
        return self.label, self.count, self.wire.size, str(self.wire.group), tuple(f.key for f in self.fibres)


@dataclass(frozen=True)
class OutlineSection:
    """A module and the wires that act inside it alone. It stands for `count` modules that look alike, up to `last`.

    Where modules of several kinds take turns, the section of the run holds one section for each kind and `count` is the
    number of turns.
    """

    label: str
    lines: tuple[OutlineLine, ...] = ()
    sections: tuple[OutlineSection, ...] = ()
    last: str = ""
    count: int = 1

    @property
    def key(self) -> Hashable:
        """What two sections that look alike share, their names aside."""
        return self.count, tuple(ln.key for ln in self.lines), tuple((s.label, s.key) for s in self.sections)


def title(item: OutlineLine | OutlineSection) -> str:
    """`layers.0 … layers.23 (×24)` for a run, the plain label otherwise."""
    return f"{item.label} … {item.last} (×{item.count})" if item.count > 1 else item.label


def outline(wires: Sequence[Wire]) -> OutlineSection:
    """The root section, which holds all wires. Its label is empty."""
    names = {w.name for w in wires}
    fibres: dict[str, list[Wire]] = defaultdict(list)
    tops: list[Wire] = []
    for wire in wires:
        base = next((b for b in reversed(wire.over) if b in names), None)
        (tops if base is None else fibres[base]).append(wire)
    placed: dict[tuple[str, ...], list[OutlineLine]] = defaultdict(list)
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


def _line(wire: Wire, home: tuple[str, ...], fibres: dict[str, list[Wire]]) -> OutlineLine:
    label = wire.name.removeprefix(".".join(home) + "." if home else "")
    inner = _folded([_line(w, home, fibres) for w in fibres[wire.name]], _alike)
    return OutlineLine(label, wire, tuple(inner))


def _section(path: tuple[str, ...], placed: dict[tuple[str, ...], list[OutlineLine]]) -> OutlineSection:
    """The section of a module; a module with nothing of its own and a single section inside is told as one."""
    depth = len(path)
    names = dict.fromkeys(home[depth] for home in placed if home[:depth] == path and len(home) > depth)
    inner = _folded([_section((*path, name), placed) for name in names], _together)
    lines = _folded(placed.get(path, []), _alike)
    label = path[-1] if path else ""
    if not lines and len(inner) == 1 and path:
        only = inner[0]
        return replace(only, label=f"{label}.{only.label}", last=only.last and f"{label}.{only.last}")
    return OutlineSection(label, tuple(lines), tuple(inner))


def _folded(items: Sequence, join: Callable[[Sequence, Repetition], list]) -> list:
    """Items with the runs among them joined into one."""
    keys = [(number_free(item.label), _nameless(item)) for item in items]
    joined: list = []
    for run in repetitions(keys):
        joined += items[run.start : run.last + 1] if run.count == 1 else join(items, run)
    return joined


def _nameless(item: OutlineLine | OutlineSection) -> Hashable:
    if isinstance(item, OutlineSection):
        return item.key
    return (
        item.wire.size,
        str(item.wire.group),
        tuple((number_free(f.label), f.wire.size, str(f.wire.group)) for f in item.fibres),
    )


def _alike(lines: Sequence[OutlineLine], run: Repetition) -> list[OutlineLine]:
    """Three wires or more that look alike become one line, one for each kind where kinds take turns."""
    if run.count < 3:
        return list(lines[run.start : run.last + 1])
    behind = run.period - 1  # of the last turn, the place of each kind
    kinds = enumerate(lines[run.start : run.start + run.period])
    return [replace(kind, last=lines[run.last - behind + i].label, count=run.count) for i, kind in kinds]


def _together(sections: Sequence[OutlineSection], run: Repetition) -> list[OutlineSection]:
    first, last = sections[run.start], sections[run.last].label
    if run.period == 1 and first.count == 1:
        return [replace(first, last=last, count=run.count)]
    turn = tuple(sections[run.start : run.start + run.period])
    return [OutlineSection(first.label, (), turn, last, run.count)]


@dataclass(frozen=True)
class FrozenReason:
    """Why axes are frozen: the reason without its place in the code, how many axes, and the first of them."""

    text: str
    axes: tuple[str, ...]


def frozen_reasons(frozen: Iterable[Frozen]) -> list[FrozenReason]:
    """Frozen axes grouped by reason, the most frequent first."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for what, reason in frozen:
        grouped[_without_place(reason)].append(what)
    return sorted((FrozenReason(text, tuple(axes)) for text, axes in grouped.items()), key=lambda r: -len(r.axes))


def _without_place(reason: str) -> str:
    """`conv2d at resnet.py:12 in layer1.conv1` → `conv2d`: one cause in many places is one reason."""
    line = r"(?:(?! at )[^()/])+\.py:\d+(?: in [\w.]+)?"
    return re.sub(rf" at (?:{line}|the model's forward|[\w.]+)| \({line}\)", "", reason)


# ----------------------------------------------------------------------------------------------------
# The wires of a symmetry as HTML: nested lists, the look of which is that of the page they stand in.


def wires_html(section: OutlineSection) -> str:
    """An outline as nested lists."""
    return f'<div class="wires">{_section_page(section)}</div>'


def _section_page(section: OutlineSection) -> str:
    inner = "".join(f"<li><b>{escape(title(s))}</b>{_section_page(s)}</li>" for s in section.sections)
    return f"<ul>{''.join(map(_line_page, section.lines))}{inner}</ul>"


def _line_page(line: OutlineLine) -> str:
    wire = line.wire
    fibres = f"<ul>{''.join(map(_line_page, line.fibres))}</ul>" if line.fibres else ""
    size, group = f'<span class="size">{wire.size}</span>', f'<span class="group">{escape(str(wire.group))}</span>'
    return f"<li>{escape(title(line))}{size}{group}{fibres}</li>"
