"""How networks, pairs, options and numbers are written in a report, and the link from every number to its command."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from intertwine.lab.report.entries import Entry, TaskRecord
from intertwine.lab.report.svg import Length

# ----------------------------------------------------------------------------------------------------
# Names: how pairs, networks, options and numbers are written, with no more words than tell them apart.


PLAIN = ("family", "method")  # options whose value needs no name beside it


@dataclass(frozen=True)
class Names:
    """Names within one section: what is the same in all of it is left out."""

    zoos: bool  # whether there are several
    options: tuple[str, ...]  # those that differ

    @classmethod
    def of(cls, entries: Iterable[Entry], besides: tuple[str, ...] = ()) -> Names:
        """`besides`: options that are shown in some other way."""
        tasks = list({id(e.task): e.task for e in entries}.values())
        found: dict[str, set[str]] = {}
        for name in dict.fromkeys(name for task in tasks for name in task.options if name not in besides):
            found[name] = {json.dumps(task.options.get(name), sort_keys=True) for task in tasks}
        first = [name for name in PLAIN if name in found]
        rest = [name for name in found if name not in PLAIN]
        several = tuple(name for name in (*first, *rest) if len(found[name]) > 1)
        return cls(len({task.text("zoo") for task in tasks}) > 1, several)

    def pair(self, entry: Entry, between: str = "→") -> str:
        """`a → b`; one name alone where there is no second network."""
        named = [self._name(entry.task, column) for column in ("a", "b") if entry.task.text(column)]
        return f" {between} ".join(named) or self._name(entry.task, "a")

    def network(self, entry: Entry) -> str:
        """The first network alone."""
        return self._name(entry.task, "a")

    def in_full(self, entry: Entry) -> str:
        """The first network, and the options that tell its task from others."""
        return ", ".join(part for part in (self.network(entry), self.settings(entry)) if part)

    def settings(self, entry: Entry) -> str:
        """The options that tell this task from others: `weights, beta=0.1`."""
        values = [(name, entry.task.options.get(name)) for name in self.options]
        return ", ".join(
            # "none" alone would say too little
            written(value) if name in PLAIN and value not in (None, "none") else f"{name}={written(value)}"
            for name, value in values
        )

    def _name(self, task: TaskRecord, column: str) -> str:
        """The network, with its zoo in front where there are several zoos or where the name is a bare number."""
        name, zoo = task.text(column), task.text("zoo")
        if not name:
            return zoo or "one network"
        said = name.startswith(f"{zoo}:")
        return f"{zoo} {name}" if zoo and not said and (self.zoos or name.isdigit()) else name


def written(value: object) -> str:
    """The value of an option.

    >>> written("linear"), written(True), written([1, 2])
    ('linear', 'yes', '[1, 2]')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, ensure_ascii=False)


def short(value: Length | None) -> str:
    """A number in four digits; a dash where there is none.

    >>> short(0.123456), short(1234567.0), short(0.0), short(None)
    ('0.1235', '1,234,567', '0', '–')
    >>> short(0.99998)  # a share of 1 is all of it
    '0.9999'
    """
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    return (f"{value:.4g}" if not 0.9999 < value < 1 else "0.9999").replace("-", "−", 1)


def tick(value: Length) -> str:
    """A number beside an axis, where there is room for seven letters.

    >>> tick(0.25), tick(12500.0), tick(10_000_000.0), tick(-2.5e8), tick(3e20)
    ('0.25', '12,500', '10 M', '−250 M', '3e+20')
    """
    if abs(value) < 100_000:
        return short(value)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1000 * size:
            return f"{short(value / size)} {letter}"
    return f"{value:.3g}".replace("-", "−", 1)


def duration(seconds: Length) -> str:
    """A time in words.

    >>> duration(0.25), duration(75), duration(7265)
    ('0.25 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 task`, `1,200 tasks`.

    >>> counted(1, "task"), counted(1200, "task"), counted(2, "study", "studies")
    ('1 task', '1,200 tasks', '2 studies')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# ----------------------------------------------------------------------------------------------------
# Commands: every number in the report links to the command that made it; each command is written once.


FEW = 12  # as many commands are shown unfolded


class Commands:
    """The commands that something on the page links to, numbered as they are first needed."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, command: str | None) -> int | None:
        """The number of a command; None where the record names none.

        >>> commands = Commands()
        >>> commands.number("intertwine fold a"), commands.number("intertwine fold b"), commands.number(None)
        (0, 1, None)
        """
        return None if command is None else self._numbers.setdefault(command, len(self._numbers))

    def of(self, entries: Iterable[Entry]) -> tuple[int, ...]:
        """The numbers of the commands behind some entries, each once."""
        numbers = (self.number(entry.task.command) for entry in entries)
        return tuple(dict.fromkeys(n for n in numbers if n is not None))

    def section(self) -> str:
        """The list that the links lead to."""
        if not self._numbers:
            return "<p>The records name no commands.</p>"
        made = "".join(f'<li id="c{n}"><code>{escape(text)}</code></li>' for text, n in self._numbers.items())
        listed = f'<ol class="commands" start="0">{made}</ol>'
        if len(self._numbers) <= FEW:
            return listed
        return f"<details><summary>{counted(len(self._numbers), 'command')}</summary>{listed}</details>"


def link(numbers: tuple[int, ...]) -> str:
    """The attributes of a link to some commands: the first as its target, all of them for the script."""
    several = f' data-c="{" ".join(map(str, numbers))}"' if len(numbers) > 1 else ""
    return f'href="#c{numbers[0]}"{several}'


def linked(value: float | None, numbers: tuple[int, ...], note: str | None = None) -> str:
    """A number as a link to its commands; where there is no number, a dash that says why."""
    if value is None:
        reason = escape(note or "no value, and no reason was given", quote=True)
        return f'<span class="none" title="{reason}">–</span>'
    return f"<a {link(numbers)}>{short(value)}</a>" if numbers else short(value)
