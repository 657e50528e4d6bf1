"""Lines: where in a TOML file a table or a key stands, so that a refused plan can say which line to change."""

from __future__ import annotations

import re

_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_ENTRY = re.compile(r"\s*\[\[([^\[\]]+)\]\]\s*(#.*)?$")
_KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")
Place = tuple[str | int, ...]


class Lines:
    """Line numbers by place, such as ("parts", 1, "verb"); a place that is not there has that of what it is in.

    Example:
        >>> lines = Lines('name = "a"\\n\\n[[parts]]\\nverb = "fold"\\n\\n[[parts]]\\nverb = "compare"')
        >>> lines.of("parts", 1, "verb"), lines.of("parts", 1, "beta"), lines.of("zoos")
        (7, 6, 1)
    """

    def __init__(self, text: str) -> None:
        self._found: dict[Place, int] = {(): 1}
        counts: dict[Place, int] = {}
        head: Place = ()
        for number, line in enumerate(text.splitlines(), 1):
            if match := _ENTRY.match(line):
                name = self._within(match[1], counts)
                counts[name] = counts.get(name, -1) + 1
                head = (*name, counts[name])
                self._found.setdefault(name, number)
                self._found[head] = number
            elif match := _TABLE.match(line):
                head = self._within(match[1], counts)
                self._found.setdefault(head, number)
            elif match := _KEY.match(line):
                self._found.setdefault((*head, *_parts(match[1])), number)

    @staticmethod
    def _within(dotted: str, counts: dict[Place, int]) -> Place:
        """The place a header names: behind the name of a list of tables it is in the last of them."""
        place: Place = ()
        names = _parts(dotted)
        for i, name in enumerate(names):
            place = (*place, name)
            if place in counts and i < len(names) - 1:
                place = (*place, counts[place])
        return place

    def of(self, *place: str | int) -> int:
        """The line of a place, or of the nearest thing around it."""
        while place not in self._found:
            place = place[:-1]
        return self._found[place]


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
