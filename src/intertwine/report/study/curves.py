"""Curves: entries gathered into series of dots; repeats of one task become one dot with its spread."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from intertwine.report.study.commands import Commands
from intertwine.report.study.entries import Entry
from intertwine.report.study.naming import counted, short

Key = TypeVar("Key", bound=Hashable)
MOST_SERIES, MOST_TOLD = 12, 4


@dataclass(frozen=True)
class Dot:
    """A value at `x` with an interval, from `count` entries; `note` where there is no value."""

    x: float
    value: float | None
    low: float | None
    high: float | None
    count: int
    note: str | None
    commands: tuple[int, ...]

    @property
    def words(self) -> str:
        """The value and its interval."""
        if self.value is None:
            return self.note or "no value, and no reason was given"
        spread = f" ({short(self.low)} to {short(self.high)})" if None not in (self.low, self.high) else ""
        return short(self.value) + spread + (f", mean of {self.count} repeats" if self.count > 1 else "")


@dataclass(frozen=True)
class Series:
    """Dots that belong together, from left to right."""

    name: str
    dots: tuple[Dot, ...]

    @property
    def known(self) -> list[Dot]:
        """The dots that have a value."""
        return [dot for dot in self.dots if dot.value is not None]


def grouped(entries: Iterable[Entry], key: Callable[[Entry], Key]) -> dict[Key, list[Entry]]:
    """Entries by key, in the order in which the keys first come."""
    found: dict[Key, list[Entry]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def gather(
    entries: Iterable[Entry], name: Callable[[Entry], str], x: Callable[[Entry], float], commands: Commands
) -> list[Series]:
    """One series per name. Entries at one place of a series differ only in the repeat; their mean stands for them."""
    return [
        Series(label, tuple(dot_of(at, those, commands) for at, those in sorted(grouped(own, x).items())))
        for label, own in list(grouped(entries, name).items())[:MOST_SERIES]
    ]


def beyond(entries: Iterable[Entry], name: Callable[[Entry], str]) -> str:
    """A sentence on the series that `gather` leaves out; empty where it leaves none."""
    total = len({name(entry) for entry in entries})
    return f" The first {MOST_SERIES} of {total} lines are drawn." if total > MOST_SERIES else ""


def told(found: Iterable[tuple[Series, float, str]]) -> str:
    """The series with the largest numbers, in words: `weights: 0.12 at conv3; …`."""
    ordered = sorted(found, key=lambda item: -item[1])
    words = [f"{one.name}: {short(value)}{place}".removeprefix(": ") for one, value, place in ordered[:MOST_TOLD]]
    more = len(ordered) - MOST_TOLD
    return "; ".join(words) + (f"; and {more} more" if more > 0 else "")


def spread(series: Iterable[Series]) -> str:
    """A sentence on what the intervals are; empty where there are none."""
    dots = [dot for one in series for dot in one.dots]
    most = max((dot.count for dot in dots), default=1)
    if most > 1:
        return f" Means of up to {counted(most, 'repeat')}; the interval is from the smallest to the largest."
    return ""


def dot_of(x: float, entries: list[Entry], commands: Commands) -> Dot:
    """One dot for entries that differ only in the repeat: their mean, from the smallest to the largest."""
    values = [e.value for e in entries if e.value is not None]
    numbers = commands.of(entries)
    if len(values) > 1:
        return Dot(x, sum(values) / len(values), min(values), max(values), len(values), None, numbers)
    one = next((e for e in entries if e.value is not None), entries[0])
    return Dot(x, one.value, one.low, one.high, 1, one.note, numbers)
