"""The outline of a symmetry: wires by module with repetitions joined, as data and as nested HTML lists."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import takewhile
from typing import NamedTuple

from intertwine.symmetry.wire import Frozen, Wire

MAX_PERIOD = 8


class Repetition(NamedTuple):
    """`count` repeats of `period` items, from position `start` on."""

    start: int
    period: int
    count: int

    @property
    def last(self) -> int:
        """The position of the last item."""
        return self.start + self.period * self.count - 1


def repetitions(keys: Sequence[Hashable]) -> list[Repetition]:
    """Divide a sequence into runs of equal groups, the longest first; an item that does not repeat is its own run.

    >>> [tuple(run) for run in repetitions("xaaaabcbcy")]
    [(0, 1, 1), (1, 1, 4), (5, 2, 2), (9, 1, 1)]
    """
    runs: list[Repetition] = []
    start = 0
    while start < len(keys):
        candidates = [Repetition(start, period, _repeats(keys, start, period)) for period in range(1, MAX_PERIOD + 1)]
        repeating = [run for run in candidates if run.count > 1]
        run = max(repeating, key=lambda r: r.period * r.count, default=Repetition(start, 1, 1))
        runs.append(run)
        start = run.last + 1
    return runs


def _repeats(keys: Sequence[Hashable], start: int, period: int) -> int:
    """How often the `period` items at `start` repeat."""
    count = 1
    while (end := start + (count + 1) * period) <= len(keys) and all(
        keys[i] == keys[i - period] for i in range(end - period, end)
    ):
        count += 1
    return count


def number_free(name: str) -> str:
    """A name with its numbers replaced, equal for `encoder_layer_3` and `encoder_layer_4`."""
    return re.sub(r"\d+", "#", name)


@dataclass(frozen=True)
class OutlineLine:
    """A wire, named relative to its section, with its dependent wires; it represents `count` wires, up to `last`."""

    label: str
    wire: Wire
    dependents: tuple[OutlineLine, ...] = ()
    last: str = ""
    count: int = 1

    @property
    def key(self) -> Hashable:
        """Equal for lines that look alike."""
        return self.label, self.count, self.wire.size, str(self.wire.group), tuple(d.key for d in self.dependents)


@dataclass(frozen=True)
class OutlineSection:
    """A module and the wires that act only inside it; it represents `count` similar modules, up to `last`.

    If modules of several kinds alternate, the section has one section per kind, and `count` is the number of rounds.
    """

    label: str
    lines: tuple[OutlineLine, ...] = ()
    sections: tuple[OutlineSection, ...] = ()
    last: str = ""
    count: int = 1

    @property
    def key(self) -> Hashable:
        """Equal for sections that look alike, apart from their names."""
        return self.count, tuple(ln.key for ln in self.lines), tuple((s.label, s.key) for s in self.sections)


def title(item: OutlineLine | OutlineSection) -> str:
    """`layers.0 … layers.23 (×24)` for a run, the label otherwise."""
    return f"{item.label} … {item.last} (×{item.count})" if item.count > 1 else item.label


def outline(wires: Sequence[Wire]) -> OutlineSection:
    """The root section, which holds all wires; its label is empty."""
    names = {w.name for w in wires}
    dependents: dict[str, list[Wire]] = defaultdict(list)
    tops: list[Wire] = []
    for wire in wires:
        base = next((b for b in reversed(wire.over) if b in names), None)
        (tops if base is None else dependents[base]).append(wire)
    placed: dict[tuple[str, ...], list[OutlineLine]] = defaultdict(list)
    for wire in tops:
        home = _home(wire, dependents)
        placed[home].append(_line(wire, home, dependents))
    return replace(_section((), placed), label="")


def _home(wire: Wire, dependents: dict[str, list[Wire]]) -> tuple[str, ...]:
    """The innermost module in which the wire and its dependents act, and which the wire's name starts with."""
    paths = [slot.parameter.split(".")[:-1] for w in _family(wire, dependents) for slot in w.slots]
    home = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    while home and not wire.name.startswith(".".join(home) + "."):
        home = home[:-1]
    return tuple(home)


def _family(wire: Wire, dependents: dict[str, list[Wire]]) -> list[Wire]:
    return [wire, *(w for dependent in dependents[wire.name] for w in _family(dependent, dependents))]


def _line(wire: Wire, home: tuple[str, ...], dependents: dict[str, list[Wire]]) -> OutlineLine:
    label = wire.name.removeprefix(".".join(home) + "." if home else "")
    inner = _joined([_line(w, home, dependents) for w in dependents[wire.name]], _join_lines)
    return OutlineLine(label, wire, tuple(inner))


def _section(path: tuple[str, ...], placed: dict[tuple[str, ...], list[OutlineLine]]) -> OutlineSection:
    """The section of a module; a module without wires of its own and with a single section is merged with it."""
    depth = len(path)
    names = dict.fromkeys(home[depth] for home in placed if home[:depth] == path and len(home) > depth)
    inner = _joined([_section((*path, name), placed) for name in names], _join_sections)
    lines = _joined(placed.get(path, []), _join_lines)
    label = path[-1] if path else ""
    if not lines and len(inner) == 1 and path:
        only = inner[0]
        return replace(only, label=f"{label}.{only.label}", last=only.last and f"{label}.{only.last}")
    return OutlineSection(label, tuple(lines), tuple(inner))


def _joined(items: Sequence, join: Callable[[Sequence, Repetition], list]) -> list:
    """Items, with runs joined by `join`."""
    joined: list = []
    for run in repetitions([(number_free(item.label), _content(item)) for item in items]):
        joined += items[run.start : run.last + 1] if run.count == 1 else join(items, run)
    return joined


def _content(item: OutlineLine | OutlineSection) -> Hashable:
    """What items that look alike have in common, apart from numbers in names."""
    if isinstance(item, OutlineSection):
        return item.key
    inner = tuple((number_free(d.label), d.wire.size, str(d.wire.group)) for d in item.dependents)
    return item.wire.size, str(item.wire.group), inner


def _join_lines(lines: Sequence[OutlineLine], run: Repetition) -> list[OutlineLine]:
    """Three or more similar wires become one line per kind."""
    if run.count < 3:
        return list(lines[run.start : run.last + 1])
    last_round = run.last - run.period + 1
    return [replace(lines[run.start + i], last=lines[last_round + i].label, count=run.count) for i in range(run.period)]


def _join_sections(sections: Sequence[OutlineSection], run: Repetition) -> list[OutlineSection]:
    first, last = sections[run.start], sections[run.last].label
    if run.period == 1 and first.count == 1:
        return [replace(first, last=last, count=run.count)]
    kinds = tuple(sections[run.start : run.start + run.period])
    return [OutlineSection(first.label, (), kinds, last, run.count)]


@dataclass(frozen=True)
class FrozenReason:
    """A reason without its place in the code, and the axes that are frozen for it."""

    text: str
    axes: tuple[str, ...]


def frozen_reasons(frozen: Iterable[Frozen]) -> list[FrozenReason]:
    """Frozen axes grouped by reason, the most frequent first."""
    line = r"(?:(?! at )[^()/])+\.py:\d+(?: in [\w.]+)?"
    place = re.compile(rf" at (?:{line}|the model's forward|[\w.]+)| \({line}\)")
    grouped: dict[str, list[str]] = defaultdict(list)
    for what, reason in frozen:
        grouped[place.sub("", reason)].append(what)  # `conv2d at resnet.py:12 in layer1.conv1` → `conv2d`
    return sorted((FrozenReason(text, tuple(axes)) for text, axes in grouped.items()), key=lambda r: -len(r.axes))


def wires_html(section: OutlineSection) -> str:
    """An outline as nested HTML lists."""
    return f'<div class="wires">{_section_html(section)}</div>'


def _section_html(section: OutlineSection) -> str:
    inner = "".join(f"<li><b>{escape(title(s))}</b>{_section_html(s)}</li>" for s in section.sections)
    return f"<ul>{''.join(map(_line_html, section.lines))}{inner}</ul>"


def _line_html(line: OutlineLine) -> str:
    inner = f"<ul>{''.join(map(_line_html, line.dependents))}</ul>" if line.dependents else ""
    size, group = f'<span class="size">{line.wire.size}</span>', escape(str(line.wire.group))
    return f'<li>{escape(title(line))}{size}<span class="group">{group}</span>{inner}</li>'
