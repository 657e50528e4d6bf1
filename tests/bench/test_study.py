"""bench/study.py: its figures are right, kills are real and counted, and the page shows the stored results."""

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pages import DOCS, script

from intertwine.lab.study.executors.base import Outcome, Serial
from intertwine.lab.study.records import FinishedTask, ResultRow
from intertwine.lab.study.store import Store

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import study as bench
import study_executors
import study_kills
import study_plans
import study_speedup
import study_store

pytest.importorskip("polars")
pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = (DOCS / "studies.md").read_text(encoding="utf-8")
#: In place of a study: stores a line every 20 ms until there are enough, with a worker of its own that only sleeps.
DRIVER = """
import multiprocessing, sys, time
from pathlib import Path

def main(folder):
    journals = folder / "journals"
    journals.mkdir(parents=True, exist_ok=True)
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    while sum(path.read_bytes().count(b"\\n") for path in journals.glob("*")) < 12:
        with (journals / "1.jsonl").open("a") as file:
            file.write("task\\n")
        time.sleep(0.02)
    worker.kill()

if __name__ == "__main__":
    main(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return study_plans.prepared(tmp_path_factory.mktemp("plan"), 20)


# -- kills -------------------------------------------------------------------------------------------------------------


def test_drivers_and_workers_are_killed_until_no_kills_are_left(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    killer = study_kills.Killer(random.Random(0), 0.2, 8, "--multiprocessing-fork")
    studies = 0
    while killer.left:
        studies += 1
        place = tmp_path / str(studies)
        line = [sys.executable, str(tmp_path / "driver.py"), str(place)]
        killer.finish(line, lambda at=place: study_kills.journal_lines(at), tmp_path / "log")
        assert study_kills.journal_lines(place) == 12  # it was let through to its end
    victims = [who for who, _ in killer.kills]
    assert len(victims) == 8
    assert set(victims) == {"driver", "worker"}
    assert killer.starts == victims.count("driver") + studies
    assert "working" in {doing for _, doing in killer.kills}


@pytest.mark.parametrize(("code", "counted"), [("pass", 0), ("import os; os.kill(os.getpid(), 9)", 1)])
def test_a_kill_that_came_too_late_is_not_counted(code: str, counted: int) -> None:
    killer = study_kills.Killer(random.Random(0), 0.2, 0, "none", kills=[("driver", "ending")])
    killer._uncount_if_too_late(subprocess.Popen([sys.executable, "-c", code]))
    assert (len(killer.kills), killer.left) == (counted, 1 - counted)


def test_a_command_that_fails_by_itself_is_told(tmp_path: Path) -> None:
    killer = study_kills.Killer(random.Random(0), 0.2, 0, "none")
    with pytest.raises(SystemExit, match="nobody had killed it:\nno such plan"):
        killer.finish([sys.executable, "-c", "import sys; sys.exit('no such plan')"], lambda: 0, tmp_path / "log")
    assert killer.starts == study_kills.PATIENCE


def finished(key: str, *values: float) -> FinishedTask:
    return FinishedTask(
        key, {"verb": "fold"}, tuple(ResultRow("penalty", v, index=float(i)) for i, v in enumerate(values)), 1.0
    )


def table(folder: Path, *tasks: FinishedTask) -> study_kills.Rows:
    with Store(folder, "s", {"verb": "fold"}) as store:
        for task in tasks:
            store.add(task)
    return study_kills.by_task(store.frame())


@pytest.mark.parametrize(
    ("tasks", "wrong"),
    [
        ([("b", 3.0), ("a", math.nan, 0.5)], {}),  # the order of tasks is nobody's business
        ([("a", math.nan, 0.5)], {"lost": 1}),
        ([("a", math.nan, 0.5), ("b", 3.0), ("c", 1.0)], {"added": 1}),
        ([("a", math.nan, math.nextafter(0.5, 1)), ("b", 3.0)], {"changed": 1}),
        ([("a", 0.5, math.nan), ("b", 3.0, 3.0)], {"changed": 2}),
    ],
)
def test_differences_are_seen_to_the_last_bit(tasks: list[Any], wrong: dict[str, int], tmp_path: Path) -> None:
    whole = table(tmp_path / "whole", finished("a", math.nan, 0.5), finished("b", 3.0))
    found = table(tmp_path / "found", *(finished(*task) for task in tasks))
    assert study_kills.differences(found, whole) == {"lost": 0, "added": 0, "changed": 0} | wrong


def test_signs_of_zeros_are_told_apart(tmp_path: Path) -> None:
    a, b = (table(tmp_path / str(zero), finished("a", zero)) for zero in (0.0, -0.0))
    assert study_kills.differences(a, b)["changed"] == 1


def test_tasks_that_two_runs_have_stored_are_seen(tmp_path: Path) -> None:
    for keys in ("ab", "bc"):
        with Store(tmp_path, "s", {"verb": "fold"}) as store:
            for key in keys:
                store.add(finished(key, 1.0))
            store.add(FinishedTask("d", {"verb": "fold"}, (), 1.0, error="tried again, as it should be"))
            store.compact()
    assert len(list(tmp_path.glob("shards/*.parquet"))) == 2
    assert study_kills.stored_twice(tmp_path.glob("shards/*.parquet")) == 1


@pytest.mark.slow
def test_a_study_that_is_killed_has_the_results_of_one_that_is_not() -> None:
    (row,) = study_kills.measure({"processes": 3, "ray": 0}, 20, 1)
    assert (row["value"], sum(row["kills"].values())) == (0, 3)
    assert row["compared"] == 20 * row["studies"] > 0
    assert row["starts"] == row["kills"].get("driver", 0) + row["studies"]


# -- times -------------------------------------------------------------------------------------------------------------


def test_the_plan_has_as_many_tasks_as_asked(plan: Path) -> None:
    assert len(set(study_speedup.keys_of(plan))) == 20
    assert len(study_speedup.keys_of(study_plans.prepared(plan.parent, 60))) == 60


def test_a_study_is_timed_with_one_thread_for_each_worker(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from intertwine.lab.study import running

    asked: list[dict[str, Any]] = []

    def found(name: str, **options: Any) -> Serial:
        asked.append(options)
        return Serial()

    monkeypatch.setattr(running, "find_executor", found)
    two = study_speedup.keys_of(plan)[-2:]
    timed = study_speedup.timed(plan, plan.parent / "timed", "processes", 1, two)
    assert [(options["workers"], options["threads"]) for options in asked] == [(1, 1)]
    assert running.find_executor is found  # put back
    assert len(timed.finished) == 2
    assert timed.begun < timed.finished[0] < timed.finished[-1] < timed.ended


def test_rates_are_of_what_comes_after_the_first_task() -> None:
    timed = study_speedup.Timed(0.0, [5.0, 6.0, 9.0], 10.0)
    assert (timed.rate, timed.whole) == (0.5, 10.0)


@pytest.mark.slow
def test_two_workers_and_two_plain_processes_are_measured() -> None:
    floor, tasks, whole = study_speedup.measure(("processes",), 20)
    assert floor["value"] > 0
    assert "bar" not in floor
    assert tasks["floor"] == whole["floor"] == floor["value"]
    assert whole["value"] == whole["one_s"] / whole["two_s"]
    assert tasks["tasks"] == 20


def test_overhead_is_what_a_task_takes_beyond_its_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(tasks: range, work: Any, shared: Any) -> Iterator[Outcome[int, int]]:
        for task in tasks:
            time.sleep(0.05)
            yield Outcome(task, work(task, shared))

    monkeypatch.setattr(study_executors, "executor", lambda name, workers: SimpleNamespace(run=slow))
    row = study_executors.overhead("processes", 5)
    assert row["value"] > 30
    assert row["ratio"] > 2
    assert not bench.judged(row)["ok"]


def test_rows_have_their_bar_and_floor() -> None:
    rows = [bench.judged(row) for row in study_store.rows(study_store.measure(1000))]
    assert [row["bar"] for row in rows] == [10.0] * 4
    assert all(row["ok"] and row["ratio"] > 0 for row in rows)


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "bar", "at", "ok"),
    [(1.8, 1.8, "least", True), (1.79, 1.8, "least", False), (0.9, 1.0, "most", True), (1.0, 1.0, "most", False),
     (0, 0, "most", True), (1, 0, "most", False), (5.0, None, None, True)],
)  # fmt: skip
def test_bars(value: float, bar: float | None, at: str | None, ok: bool) -> None:
    assert bench.judged({"what": "x", "value": value, "bar": bar, "at": at, "unit": "s"})["ok"] == ok


def test_a_part_measured_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    file, made = tmp_path / "r.json", bench.about(0.5)
    old, new = ({"what": what, "value": 2.0, "bar": 1.8, "at": "least", "unit": "×"} for what in ("old", "new"))
    bench.kept(file, "rows", [bench.judged(old)], made)
    bench.kept(file, "speedup", [bench.judged(old | {"floor": 4.0})], made)
    held = bench.kept(file, "rows", [bench.judged(new)], made)
    assert json.loads(file.read_text()) == held
    assert [(row["part"], row["what"]) for row in held["rows"]] == [("speedup", "old"), ("rows", "new")]
    page = bench.page(held)
    assert "| old | ≥ 1.8 × | 2.00 × | 0.50 | yes |\n| new | ≥ 1.8 × | 2.00 × |  | yes |" in page
    assert page.count("Measured on") == 1
    assert "`rows` (load 0.5 before it), `speedup`" in page


def test_rows_are_kept_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(asked: Any) -> Iterator[dict[str, Any]]:
        yield {"what": "first", "value": 1.0, "bar": 10.0, "at": "most", "unit": "s"}
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "rows", stopped)
    monkeypatch.setattr(sys, "argv", ["study.py", "rows", "--out", str(tmp_path / "r.json")])
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    assert "| first | < 10 s | 1.00 s |  | yes |" in capsys.readouterr().out
    held = json.loads((tmp_path / "r.json").read_text())
    assert [row["what"] for row in held["rows"]] == ["first"]
    assert held["made"]["rows"]["command"].startswith("python bench/study.py rows --out")


def test_tasks_come_by_the_twenty(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.parser().parse_args(["--tasks", "40"]).tasks == 40
    with pytest.raises(SystemExit):
        bench.parser().parse_args(["kills", "--tasks", "30"])
    assert "give a multiple of that, not 30" in capsys.readouterr().err


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """The script that writes the tables."""
    return script("results")


def test_the_table_is_what_was_measured(results: ModuleType) -> None:
    assert results.written_studies(PAGE) == PAGE, "run: python docs/results.py"


def test_a_benchmark_that_has_not_run_is_said_in_words(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "none.json")
    assert "Nothing is measured yet: `python bench/study.py` does it." in results.written_studies(PAGE)
