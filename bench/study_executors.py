"""Costs of executors: overhead per task, and speed-up of two workers over one in a loop that only computes.

Overhead: 1,000 tasks of 10 ms sleep each on one worker; the time of a task beyond its sleep, against the same loop
without an executor, the floor. For Ray, the first task is left out, because starting takes seconds. Speed-up: tasks
that only compute, on two workers against one, each with one thread, from the first outcome on. The speed-up needs two
idle cores: `two plain processes` is the speed-up of two processes without an executor, and `busy` is the share of their
time that two workers spend inside tasks.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from intertwine.lab.study.executors import EXECUTORS, executor

#: Milliseconds per task, less than that.
OVERHEAD = {"serial": 1.0, "processes": 5.0, "ray": 10.0}
SPEEDUP = 1.8
TASKS, SLEEP = 1000, 0.01


def sleep(task: int, shared: Mapping[str, Any]) -> int:
    """A task that only sleeps."""
    time.sleep(shared["seconds"])
    return task


def compute(task: int, shared: Mapping[str, Any]) -> float:
    """A task that keeps a core busy; returns its seconds."""
    start, total = time.perf_counter(), 0
    for number in range(shared["steps"]):
        total += number & 7
    return time.perf_counter() - start


def overhead(name: str, tasks: int = TASKS) -> dict[str, Any]:
    """Time per task beyond its sleep, on one worker, with starting and ending (Ray: from its first outcome on)."""
    start = time.perf_counter()
    for task in range(tasks):
        sleep(task, {"seconds": SLEEP})
    bare = (time.perf_counter() - start) / tasks
    start = time.perf_counter()
    times = [time.perf_counter() for _ in executor(name, workers=1).run(range(tasks), sleep, {"seconds": SLEEP})]
    whole = time.perf_counter() - start
    running = (times[-1] - times[0]) / (tasks - 1) - bare
    per_task = running if name == "ray" else whole / tasks - bare
    return {
        "what": f"overhead of a task of 10 ms, {name}", "value": 1e3 * per_task, "bar": OVERHEAD[name], "at": "most",
        "unit": "ms", "ratio": (bare + per_task) / bare, "after_start_ms": 1e3 * running, "whole_s": whole,
        "tasks": tasks,
    }  # fmt: skip


def measure_overhead(names: Sequence[str] = EXECUTORS) -> Iterator[dict[str, Any]]:
    """A row per executor."""
    return (overhead(name) for name in names)


def steps_for(seconds: float) -> int:
    """The number of steps of `compute` in a given time on this machine."""
    start = time.perf_counter()
    compute(0, {"steps": 2_000_000})
    return int(2_000_000 * seconds / (time.perf_counter() - start))


def rate(name: str, workers: int, tasks: int, steps: int) -> tuple[float, float]:
    """Tasks per second once every worker has finished one, and the share of that time inside tasks."""
    outcomes = executor(name, workers=workers, threads=1).run(range(tasks), compute, {"steps": steps})
    found = [(time.perf_counter(), outcome.result or 0.0) for outcome in outcomes]
    begin, later = found[workers - 1][0], found[workers:]
    span = found[-1][0] - begin
    return len(later) / span, sum(seconds for _, seconds in later) / (workers * span)


def speedup(name: str, floor: float, tasks: int = 60, seconds: float = 0.1, rounds: int = 3) -> dict[str, Any]:
    """Two workers against one in alternating rounds, under equal load; the median of the rounds."""
    steps = steps_for(seconds)
    pairs = [(rate(name, 1, tasks, steps), rate(name, 2, tasks, steps)) for _ in range(rounds)]
    return {
        "what": f"loop: two workers, {name}", "value": statistics.median(two[0] / one[0] for one, two in pairs),
        "bar": SPEEDUP, "at": "least", "unit": "×", "floor": floor,
        "busy": statistics.median(two[1] for _, two in pairs), "tasks": tasks,
    }  # fmt: skip


def plain_speedup(seconds: float = 3.0) -> float:
    """The speed-up of two independent processes over one, an upper bound for executors."""
    steps = steps_for(seconds)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from study_executors import compute; "
    code += f"print(compute(0, {{'steps': {steps}}}))"

    def spent(number: int) -> float:
        running = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(number)
        ]
        return max(float(one.communicate()[0]) for one in running)

    return 2 * spent(1) / spent(2)


def measure_speedup(names: Sequence[str] = ("processes", "ray")) -> Iterator[dict[str, Any]]:
    """The machine itself, then a row per executor."""
    floor = plain_speedup()
    yield {"what": "loop: two plain processes", "value": floor, "unit": "×"}
    yield from (speedup(name, floor) for name in names)
