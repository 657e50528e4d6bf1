"""Tasks in processes of this machine: each with its share of the cores, and its GPU where some are asked for."""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from intertwine.errors import InputError
from intertwine.study.executors.base import Outcome, R, Shared, T, Work
from intertwine.study.executors.crew import Crew
from intertwine.study.executors.pinning import GPU_VARIABLE, crew_size, gpu_names, thread_environment, threads_each


@dataclass(frozen=True)
class Processes:
    """Runs tasks in fresh processes, which end with this one.

    A script that uses it needs `if __name__ == "__main__":`, as Python reads the script again in every worker.

    >>> from intertwine.study.executors.processes import Processes
    >>> Processes(workers=2)
    Processes(workers=2, gpus=0, threads=None)
    """

    workers: int | None = None
    gpus: int = 0
    threads: int | None = None

    def check(self) -> None:
        """Refuse GPUs that are not there."""
        gpu_names(self.gpus)

    def run(self, tasks: Iterable[T], work: Work[T, R], shared: Shared) -> Iterator[Outcome[T, R]]:
        """See `Executor.run`."""
        payload = _packed(work, shared)
        workers = crew_size(self.workers, self.gpus)
        threads = threads_each(workers, self.threads)
        names = gpu_names(self.gpus)
        places = [thread_environment(threads) for _ in range(workers)]
        for number, place in enumerate(places):
            if names:
                place[GPU_VARIABLE] = names[number % len(names)]
        return _outcomes(Crew(places, threads, payload, iter(tasks)))


def _packed(work: Work[Any, Any], shared: Shared) -> bytes:
    try:
        return pickle.dumps((work, shared))
    except Exception as error:
        raise InputError(
            f"The work {getattr(work, '__qualname__', work)!r} and what its tasks share must be picklable to reach "
            f"other processes, and they are not: {error}. Take a function of a module, and share data, not open files "
            "or functions made on the spot; or use the serial executor."
        ) from error


def _outcomes(crew: Crew) -> Iterator[Outcome[Any, Any]]:
    # Python waits for its processes before it collects generators, so one left open would keep it from ever ending.
    atexit.register(crew.end)
    try:
        yield from crew.outcomes()
    finally:
        atexit.unregister(crew.end)
