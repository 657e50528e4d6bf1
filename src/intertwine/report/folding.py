"""Folding: runs of things that look alike are told once, whether they repeat one by one or in turns."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

LONGEST_TURN = 8


class Run(NamedTuple):
    """`count` turns of `period` items, from position `start` on."""

    start: int
    period: int
    count: int

    @property
    def last(self) -> int:
        """The position of the last item."""
        return self.start + self.period * self.count - 1


def runs(keys: Sequence[Hashable]) -> list[Run]:
    """Cut a sequence into runs of equal turns, the longest first; what does not repeat is a run of its own.

    >>> [tuple(run) for run in runs("xaaaabcbcy")]
    [(0, 1, 1), (1, 1, 4), (5, 2, 2), (9, 1, 1)]
    """
    found: list[Run] = []
    start = 0
    while start < len(keys):
        turns = [Run(start, period, _turns(keys, start, period)) for period in range(1, LONGEST_TURN + 1)]
        repeating = [run for run in turns if run.count > 1]
        run = max(repeating, key=lambda r: r.period * r.count, default=Run(start, 1, 1))
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


def template(name: str) -> str:
    """A name with its numbers blotted out: `encoder_layer_3` and `encoder_layer_4` are of one kind."""
    return re.sub(r"\d+", "#", name)
