"""Tasks one after another in this process: for small studies, and for looking into one that fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from intertwine.study.executors.base import Outcome, R, Shared, T, Work, attempt
from intertwine.study.executors.pinning import torch_threads


@dataclass(frozen=True)
class Serial:
    """Runs tasks one after another; `threads` are torch's while a task runs, by default as many as it has.

    >>> from intertwine.study.executors.serial import Serial
    >>> def work(task, shared):
    ...     return task * shared["factor"]
    >>> [(outcome.task, outcome.result) for outcome in Serial().run([2, 3], work, {"factor": 10})]
    [(2, 20), (3, 30)]
    """

    threads: int | None = None

    def run(self, tasks: Iterable[T], work: Work[T, R], shared: Shared) -> Iterator[Outcome[T, R]]:
        """See `Executor.run`."""
        for task in tasks:
            with torch_threads(self.threads):
                result, error = attempt(work, task, shared)
            yield Outcome(task, result, error)
