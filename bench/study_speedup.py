"""A CPU-bound study on two workers against one, end to end: real verbs on small networks, `study.run` and its store.

Every worker has one thread, also when it is alone, because it would otherwise use both cores. *Tasks* is the rate from
the first finished task on; *whole* includes the start of the workers. `two plain processes` do half of the tasks each
without an executor, against one that does them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from study_plans import prepared

from intertwine.lab.study.executors.resources import thread_environment

#: About forty seconds of one thread, plus three for the start.
TASKS = 600
SPEEDUP = 1.8
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Timed:
    """The times of start, end and every finished task of a study, on a clock that processes share."""

    begun: float
    finished: Sequence[float]
    ended: float

    @property
    def whole(self) -> float:
        return self.ended - self.begun

    @property
    def rate(self) -> float:
        """Tasks per second after the first."""
        return (len(self.finished) - 1) / (self.finished[-1] - self.finished[0])


def timed(plan: Path, out: Path, executor: str, workers: int | None, only: Sequence[str] = ()) -> Timed:
    """Run a study with one thread for each worker; `study.run` gives a single worker all cores."""
    from intertwine.lab.study import running

    moments: list[float] = []
    one_thread = partial(running.find_executor, threads=1)
    begun = time.monotonic()
    with mock.patch.object(running, "find_executor", one_thread):
        told = running.run(
            plan, executor, out=out, workers=workers, only=only, progress=lambda _: moments.append(time.monotonic())
        )
    assert not told.errors, told.errors
    return Timed(begun, moments, time.monotonic())


def plain(plan: str, out: str, keys: str) -> None:
    """In a separate process: run the tasks of a file and print the time of each."""
    found = timed(Path(plan), Path(out), "serial", None, json.loads(Path(keys).read_text()))
    print(json.dumps([found.begun, list(found.finished), found.ended]))


def together(plan: Path, folder: Path, shares: Sequence[Sequence[str]]) -> Timed:
    """Run plain processes in parallel, one for each share of the tasks, and combine their times."""
    begin = f"import sys; sys.path.insert(0, {str(HERE)!r}); from study_speedup import plain; plain(*sys.argv[1:])"
    running = []
    for number, share in enumerate(shares):
        keys = folder / f"keys-{len(shares)}-{number}.json"
        keys.write_text(json.dumps(share))
        line = [sys.executable, "-c", begin, str(plan), str(keys.with_suffix("")), str(keys)]
        pinned = {**os.environ, **thread_environment(1)}
        running.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=pinned))
    found = [Timed(*json.loads(process.communicate()[0].splitlines()[-1])) for process in running]
    moments = sorted(moment for one in found for moment in one.finished)
    return Timed(min(one.begun for one in found), moments, max(one.ended for one in found))


def keys_of(plan: Path) -> list[str]:
    """The keys of a plan's tasks."""
    from intertwine.lab.study.plan import read_plan
    from intertwine.lab.study.tasks import expand
    from intertwine.lab.study.zoos import known_zoos

    read = read_plan(plan)
    return [task.key for task in expand(read, known_zoos(read, plan.parent))]


def measure(executors: Sequence[str] = ("processes", "ray"), tasks: int = TASKS) -> Iterator[dict[str, Any]]:
    """Two rows per executor: tasks after the first, and the whole with its start."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plan = prepared(folder, tasks)
        keys = keys_of(plan)
        one, two = together(plan, folder, [keys]), together(plan, folder, [keys[::2], keys[1::2]])
        floor = two.rate / one.rate
        yield {"what": "study: two plain processes", "value": floor, "unit": "×", "tasks": tasks, "one_s": one.whole}
        for name in executors:
            one, two = (timed(plan, folder / f"{name}-{workers}", name, workers) for workers in (1, 2))
            yield _row(f"study: two workers, {name}, tasks", two.rate / one.rate, floor, one, two)
            yield _row(f"study: two workers, {name}, whole", one.whole / two.whole, floor, one, two)


def _row(what: str, value: float, floor: float, one: Timed, two: Timed) -> dict[str, Any]:
    return {
        "what": what, "value": value, "bar": SPEEDUP, "at": "least", "unit": "×", "floor": floor,
        "tasks": len(one.finished), "one_s": one.whole, "two_s": two.whole,
    }  # fmt: skip
