"""Repeatedly killed studies: their results must be those of an undisturbed one.

The command `intertwine study run` runs on two workers. At random times, SIGKILL goes to the driver or to one of its
workers, with equal probability. A killed driver is restarted with the same command. A study that ends before all kills
is followed by another one in a new folder, and the last one may finish. Then every table is compared with that of an
undisturbed run, key by key and bit by bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study_plans import prepared

#: Columns on cost and origin of a result, which differ from run to run.
COSTS = ("seconds", "peak_mib", "made_at", "git", "command")
#: A part of the command line of workers.
WORKERS = {"processes": "--multiprocessing-fork", "ray": "ray::"}
#: The longest time between two kills, as a share of the time of an undisturbed run.
REACH = 0.2
#: Consecutive failures without a kill that end the benchmark.
PATIENCE = 2

Rows = dict[str, list[tuple[Any, ...]]]


# -- killing -----------------------------------------------------------------------------------------------------------


@dataclass
class Killer:
    """Runs commands until they succeed, with kills meanwhile until no kills are left.

    Attributes:
        reach: longest time between two kills, in seconds. left: remaining kills. worker: a part of the command line of
            workers. kills: the killed processes and the state of the run. starts: number of started commands.
    """

    chance: random.Random
    reach: float
    left: int
    worker: str
    kills: list[tuple[str, str]] = field(default_factory=list)
    starts: int = 0

    def finish(self, line: Sequence[str], stored: Callable[[], int], log: Path) -> None:
        """Start a command until it succeeds; `stored` returns the number of tasks in its journals."""
        unprovoked = 0
        while unprovoked < PATIENCE:
            before = len(self.kills)
            if self._run(line, stored, log) == 0:
                return
            unprovoked = unprovoked + 1 if len(self.kills) == before else 0
        raise SystemExit(f"{' '.join(line)} failed, and nobody had killed it:\n{log.read_text(errors='replace')}")

    def _run(self, line: Sequence[str], stored: Callable[[], int], log: Path) -> int:
        self.starts += 1
        before = stored()
        with log.open("wb") as output:
            driver = subprocess.Popen(line, stdout=output, stderr=output)
        while self.left and self._moment(driver, stored):
            if self._kill(driver, stored() - before):
                self._uncount_if_too_late(driver)
                break
        return driver.wait()

    def _uncount_if_too_late(self, driver: subprocess.Popen[bytes]) -> None:
        """Do not count a signal to a driver that has just succeeded."""
        if driver.wait() == 0:
            self.kills.pop()
            self.left += 1

    def _moment(self, driver: subprocess.Popen[bytes], stored: Callable[[], int]) -> bool:
        """Wait for a random time; False if the driver ends before.

        Every second kill waits for one more stored task: starting takes longer than most tasks, and would otherwise be
        killed too often.
        """
        mark = stored() if self.chance.random() < 0.5 else -1
        while stored() <= mark and driver.poll() is None:
            time.sleep(0.01)
        try:
            driver.wait(self.chance.uniform(0, self.reach))
        except subprocess.TimeoutExpired:
            return True
        return False

    def _kill(self, driver: subprocess.Popen[bytes], new: int) -> bool:
        """Kill the driver or a worker; returns whether it was the driver. `new`: tasks stored since its start."""
        crew = [pid for pid in descendants(driver.pid) if self.worker in command(pid)]
        of_crew = bool(crew) and self.chance.random() < 0.5
        try:
            os.kill(self.chance.choice(crew) if of_crew else driver.pid, signal.SIGKILL)
        except ProcessLookupError:  # the worker has just ended by itself
            return False
        self.left -= 1
        # Journals become shards at the end of a run, so that fewer tasks are in journals then than at its start.
        doing = "starting" if new == 0 else "working" if new > 0 else "ending"
        self.kills.append(("worker" if of_crew else "driver", doing))
        return not of_crew


def descendants(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(path).split():
            yield int(child)
            yield from descendants(int(child))


def command(pid: int) -> str:
    """The command line of a process; empty once it is dead."""
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has just ended
        return ""


# -- comparing ---------------------------------------------------------------------------------------------------------


def by_task(frame: Any) -> Rows:
    """The sorted rows of every task, numbers as bits, without the cost columns."""
    found: Rows = {}
    for row in frame.drop(COSTS).to_dicts():
        cells = (value.hex() if isinstance(value, float) else value for value in row.values())
        found.setdefault(row["key"], []).append(tuple(cells))
    return {key: sorted(rows, key=repr) for key, rows in found.items()}


def differences(found: Rows, whole: Rows) -> dict[str, int]:
    """The number of missing, additional and different tasks."""
    return {
        "lost": len(whole.keys() - found.keys()),
        "added": len(found.keys() - whole.keys()),
        "changed": sum(found[key] != whole[key] for key in found.keys() & whole.keys()),
    }


def stored_twice(files: Iterable[Path]) -> int:
    """The number of tasks with results of more than one run; the table shows one, but work was repeated."""
    import polars as pl

    runs = (pl.read_parquet(file, columns=["key", "error"]) for file in files)
    counts = Counter(key for run in runs for key in run.filter(run["error"].is_null())["key"].unique())
    return sum(count > 1 for count in counts.values())


def journal_lines(study: Path) -> int:
    """The number of tasks in the journals of a study."""
    return sum(path.read_bytes().count(b"\n") for path in study.glob("journals/*.jsonl"))


# -- the benchmark -----------------------------------------------------------------------------------------------------


def measure(kills: dict[str, int], tasks: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row per executor; `kills` is the number for each."""
    from intertwine.lab.study.store import Store

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plan = prepared(folder, tasks)
        start = time.perf_counter()
        subprocess.run(_line(plan, "processes", folder / "whole"), check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        whole = by_task(Store.existing(folder / "whole").frame())
        assert len(whole) == tasks
        for executor, count in ((name, count) for name, count in kills.items() if count):
            killer = Killer(random.Random(seed), REACH * seconds, count, WORKERS[executor])
            yield _row(killer, executor, tasks, list(_tormented(killer, plan, executor, whole)), seconds)


def _line(plan: Path, executor: str, out: Path) -> list[str]:
    run = [sys.executable, "-m", "intertwine.cli", "study", "run", str(plan), "--out", str(out)]
    return [*run, "--executor", executor, "--workers", "2"]


def _tormented(killer: Killer, plan: Path, executor: str, whole: Rows) -> Iterator[dict[str, int]]:
    """The errors in each of as many studies as the kills need."""
    from intertwine.lab.study.store import Store

    while killer.left:
        out = Path(tempfile.mkdtemp(dir=plan.parent)) / "study"
        killer.finish(_line(plan, executor, out), lambda place=out: journal_lines(place), out.parent / "log")
        wrong = differences(by_task(Store.existing(out).frame()), whole)
        print(f"{executor}: a study is finished, {len(killer.kills)} kills so far, {killer.left} to come", flush=True)
        yield wrong | {"twice": stored_twice(out.glob("shards/*.parquet"))}


def _row(
    killer: Killer, executor: str, tasks: int, studies: Sequence[dict[str, int]], undisturbed: float
) -> dict[str, Any]:
    wrong = {what: sum(study[what] for study in studies) for what in studies[0]}
    who, when = (Counter(kill[i] for kill in killer.kills) for i in (0, 1))
    return {
        "what": f"{len(killer.kills)} kills of studies of {tasks} tasks, {executor}", "value": sum(wrong.values()),
        "bar": 0, "at": "most", "unit": "tasks that differ", "kills": dict(who), "while": dict(when),
        "studies": len(studies), "starts": killer.starts, "compared": tasks * len(studies), **wrong,
        "undisturbed_s": undisturbed,
    }  # fmt: skip
