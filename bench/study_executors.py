"""What executors cost: overhead per task, and how much faster two workers are than one.

    python bench/study_executors.py                     # all of it, a few minutes
    python bench/study_executors.py serial processes    # without Ray

Overhead: 1,000 tasks of 10 ms sleep each on one worker; what a task takes beyond its sleep as the same loop measures it
without an executor. Of Ray, the first task is left out: starting it takes seconds. Speed-up: tasks that only compute,
on two workers beside one, each in one thread, from the first outcome on, so that starting is left out here too. The
speed-up needs two cores with nothing else to do: `two plain processes` is what the machine itself gives two processes
with no executor, and `busy` is the share of their time that two workers spent inside tasks, whatever else ran here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from intertwine.study.executors import EXECUTORS, executor

RESULTS = Path(__file__).parent / "results" / "study_executors.json"
#: Seconds per task, at most.
OVERHEAD = {"serial": 1e-3, "processes": 5e-3, "ray": 10e-3}
SPEEDUP = 1.8
TASKS, SLEEP = 1000, 0.01


def sleep(task: int, shared: Mapping[str, Any]) -> int:
    """A task that only takes time."""
    time.sleep(shared["seconds"])
    return task


def compute(task: int, shared: Mapping[str, Any]) -> float:
    """A task that keeps a core busy; the seconds it took."""
    start, total = time.perf_counter(), 0
    for number in range(shared["steps"]):
        total += number & 7
    return time.perf_counter() - start


def overhead(name: str, tasks: int = TASKS) -> dict[str, Any]:
    """Seconds per task beyond its sleep, on one worker, with starting and ending (Ray: from its first outcome on)."""
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
        "what": f"overhead, {name}", "value": per_task, "running": running, "bar": OVERHEAD[name],
        "good": per_task < OVERHEAD[name], "whole": whole, "tasks": tasks,
    }  # fmt: skip


def steps_for(seconds: float) -> int:
    """How many steps `compute` does in so much time here."""
    start = time.perf_counter()
    compute(0, {"steps": 2_000_000})
    return int(2_000_000 * seconds / (time.perf_counter() - start))


def rate(name: str, workers: int, tasks: int, steps: int) -> tuple[float, float]:
    """Tasks per second once every worker has finished one, and the share of that time that they spent inside tasks."""
    outcomes = executor(name, workers=workers, threads=1).run(range(tasks), compute, {"steps": steps})
    found = [(time.perf_counter(), outcome.result or 0.0) for outcome in outcomes]
    begin, later = found[workers - 1][0], found[workers:]
    span = found[-1][0] - begin
    return len(later) / span, sum(seconds for _, seconds in later) / (workers * span)


def speedup(name: str, tasks: int = 60, seconds: float = 0.1, rounds: int = 3) -> dict[str, Any]:
    """Two workers beside one, in turn, so that both meet the machine in the same mood; the middle of the rounds."""
    steps = steps_for(seconds)
    pairs = [(rate(name, 1, tasks, steps), rate(name, 2, tasks, steps)) for _ in range(rounds)]
    ratio = statistics.median(two[0] / one[0] for one, two in pairs)
    busy = statistics.median(two[1] for _, two in pairs)
    return {"what": f"two workers, {name}", "value": ratio, "busy": busy, "bar": SPEEDUP, "good": ratio >= SPEEDUP}


def machine(seconds: float = 3.0) -> dict[str, Any]:
    """What the machine gives two processes that know nothing of each other, beside one: no executor does better."""
    steps = steps_for(seconds)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from study_executors import compute; "
    code += f"import time; s = time.perf_counter(); compute(0, {{'steps': {steps}}}); print(time.perf_counter() - s)"

    def spent(number: int) -> float:
        running = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(number)
        ]
        return max(float(one.communicate()[0]) for one in running)

    return {"what": "two plain processes", "value": 2 * spent(1) / spent(2), "bar": None, "good": True}


def measured(names: list[str]) -> Iterator[dict[str, Any]]:
    """Every row, as it is measured."""
    for name in names:
        yield overhead(name)
    yield machine()
    for name in names:
        if name != "serial":
            yield speedup(name)


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    if row["what"].startswith("overhead"):
        value, bar = f"{1e3 * row['value']:.2f} ms", f"< {1e3 * row['bar']:.0f} ms"
    else:
        value, bar = f"{row['value']:.2f} ×", f"≥ {row['bar']} ×" if row["bar"] else ""
        value += f", busy {row['busy']:.0%}" if "busy" in row else ""
    return f"| {row['what']} | {value} | {bar} | {'yes' if row['good'] else 'NO'} |"


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(EXECUTORS), help=f"of {', '.join(EXECUTORS)}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    print("| what | measured | bar | good |\n|---|---|---|---|")
    rows = {}
    for row in measured(asked.names):
        print(line(row), flush=True)
        rows[row["what"]] = row
    from intertwine.files import write_json  # here, as workers import this file too, and torch with that one

    kept = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    write_json(asked.out, kept | rows)


if __name__ == "__main__":
    main()
