"""Progress: what a training tells whoever watches it. Only the command line draws a bar from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """Where a training stands.

    Attributes:
        seeds: the networks in training. epoch: epochs they have finished, of `epochs`.
        done: the fraction of the whole work that is finished, from 0 to 1.
        accuracy: mean test accuracy of these networks, where it was taken. left: seconds, as far as can be told.
    """

    seeds: tuple[int, ...]
    epoch: int
    epochs: int
    done: float
    accuracy: float | None
    left: float | None


Report = Callable[[Progress], None]


@dataclass
class Clock:
    """Counts the work of a run in epochs of networks, and estimates the time left from what this run has done."""

    total: int | float
    done: int | float = 0.0  # with what earlier runs did
    start: float = field(default_factory=time.monotonic)
    own: float = 0.0  # what this run did

    def advance(self, amount: float) -> None:
        """So many epochs of networks are done."""
        self.done += amount
        self.own += amount

    def left(self) -> float | None:
        """Seconds until the end, if the rest goes as fast."""
        if not self.own:
            return None
        return (time.monotonic() - self.start) / self.own * (self.total - self.done)
