"""Commands: every number in the report links to the command that made it; each command is written once."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from intertwine.report.study.entries import Entry
from intertwine.report.study.naming import counted, short

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
