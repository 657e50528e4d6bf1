"""How networks, pairs, options and numbers are written in a report, and the link from every number to its command."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from intertwine.lab.report.entries import Entry, TaskRecord
from intertwine.lab.report.svg import Length

UNNAMED_OPTIONS = ("family", "method")  # options whose value is clear without the option's name
UNFOLDED_COMMANDS = 12  # a longer list of commands is folded
NO_REASON = "no value, and no reason was given"


@dataclass(frozen=True)
class Names:
    """Names within one section, without what all its tasks have in common."""

    zoos: bool  # whether there are several
    options: tuple[str, ...]  # those that differ

    @classmethod
    def of(cls, entries: Iterable[Entry], besides: tuple[str, ...] = ()) -> Names:
        """The names for some entries; options in `besides` are shown in another way."""
        tasks = list({id(e.task): e.task for e in entries}.values())
        values: dict[str, set[str]] = {}
        for name in dict.fromkeys(name for task in tasks for name in task.options if name not in besides):
            values[name] = {json.dumps(task.options.get(name), sort_keys=True) for task in tasks}
        differing = [name for name in values if len(values[name]) > 1]
        first = [name for name in UNNAMED_OPTIONS if name in differing]
        rest = [name for name in differing if name not in UNNAMED_OPTIONS]
        return cls(len({task.text("zoo") for task in tasks}) > 1, (*first, *rest))

    def pair(self, entry: Entry, between: str = "→") -> str:
        """`a → b`; one name if there is no second network."""
        names = [self._name(entry.task, column) for column in ("a", "b") if entry.task.text(column)]
        return f" {between} ".join(names) or self.network(entry)

    def network(self, entry: Entry) -> str:
        """The first network."""
        return self._name(entry.task, "a")

    def in_full(self, entry: Entry) -> str:
        """The first network and the options that differ."""
        return ", ".join(part for part in (self.network(entry), self.settings(entry)) if part)

    def settings(self, entry: Entry) -> str:
        """The options that differ: `weights, beta=0.1`."""
        values = [(name, entry.task.options.get(name)) for name in self.options]
        return ", ".join(
            # "none" needs the name of its option
            written(value) if name in UNNAMED_OPTIONS and value not in (None, "none") else f"{name}={written(value)}"
            for name, value in values
        )

    def _name(self, task: TaskRecord, column: str) -> str:
        """The network, with its zoo if there are several zoos or the name is a number."""
        name, zoo = task.text(column), task.text("zoo")
        if not name:
            return zoo or "one network"
        needs_zoo = zoo and not name.startswith(f"{zoo}:") and (self.zoos or name.isdigit())
        return f"{zoo} {name}" if needs_zoo else name


def written(value: object) -> str:
    """The value of an option.

    >>> written("linear"), written(True), written([1, 2])
    ('linear', 'yes', '[1, 2]')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, ensure_ascii=False)


def short(value: Length | None) -> str:
    """A number with four digits; a dash for None.

    >>> short(0.123456), short(1234567.0), short(0.0), short(None)
    ('0.1235', '1,234,567', '0', '–')
    >>> short(0.99998)  # not rounded up to 1
    '0.9999'
    """
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    return (f"{value:.4g}" if not 0.9999 < value < 1 else "0.9999").replace("-", "−", 1)


def tick_label(value: Length) -> str:
    """A number beside an axis, in at most seven letters.

    >>> tick_label(0.25), tick_label(12500.0), tick_label(10_000_000.0), tick_label(-2.5e8), tick_label(3e20)
    ('0.25', '12,500', '10 M', '−250 M', '3e+20')
    """
    if abs(value) < 100_000:
        return short(value)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1000 * size:
            return f"{short(value / size)} {letter}"
    return f"{value:.3g}".replace("-", "−", 1)


def duration(seconds: Length) -> str:
    """A duration as text.

    >>> duration(0.25), duration(75), duration(7265)
    ('0.25 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(count: int, one: str, many: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "task"), counted(1200, "task"), counted(2, "study", "studies")
    ('1 task', '1,200 tasks', '2 studies')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


class Commands:
    """The commands that the page links to, numbered in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, command: str | None) -> int | None:
        """The number of a command.

        >>> commands = Commands()
        >>> commands.number("intertwine fold a"), commands.number("intertwine fold b"), commands.number(None)
        (0, 1, None)
        """
        return None if command is None else self._numbers.setdefault(command, len(self._numbers))

    def of(self, entries: Iterable[Entry]) -> tuple[int, ...]:
        """The numbers of the commands of some entries, each once."""
        numbers = (self.number(entry.task.command) for entry in entries)
        return tuple(dict.fromkeys(n for n in numbers if n is not None))

    def section(self) -> str:
        """The list of commands, the target of the links."""
        if not self._numbers:
            return "<p>The records contain no commands.</p>"
        items = "".join(f'<li id="c{n}"><code>{escape(text)}</code></li>' for text, n in self._numbers.items())
        listed = f'<ol class="commands" start="0">{items}</ol>'
        if len(self._numbers) <= UNFOLDED_COMMANDS:
            return listed
        return f"<details><summary>{counted(len(self._numbers), 'command')}</summary>{listed}</details>"


def link(numbers: tuple[int, ...]) -> str:
    """The attributes of a link to commands: its target is the first, and the script shows all of them."""
    several = f' data-c="{" ".join(map(str, numbers))}"' if len(numbers) > 1 else ""
    return f'href="#c{numbers[0]}"{several}'


def linked(value: float | None, numbers: tuple[int, ...], note: str | None = None) -> str:
    """A number as a link to its commands, or a dash with the reason why there is none."""
    if value is None:
        return f'<span class="none" title="{escape(note or NO_REASON, quote=True)}">–</span>'
    return f"<a {link(numbers)}>{short(value)}</a>" if numbers else short(value)
