"""Tests of executors: one outcome per task, retries after dead workers, and no process outlives its driver."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executor_work import (
    Deadly,
    Noted,
    Stubborn,
    alive,
    all_ended,
    gpu_seen,
    heavy,
    nap,
    scale,
    surroundings,
    troubled,
    unpicklable_in_the_driver,
    unpicklable_result,
)

from intertwine.errors import InputError
from intertwine.lab.study.executors import executor
from intertwine.lab.study.executors.base import Executor, Outcome, Serial
from intertwine.lab.study.executors.pool import Processes

ROOT = Path(__file__).parents[3]
BOTH = pytest.mark.parametrize("runner", [Serial(), Processes(2)], ids=["serial", "processes"])


def by_task(outcomes: Iterator[Outcome[Any, Any]]) -> dict[Any, Outcome[Any, Any]]:
    """Outcomes by task; there is one for each."""
    found = list(outcomes)
    assert len({outcome.task for outcome in found}) == len(found)
    return {outcome.task: outcome for outcome in found}


# -- All executors -----------------------------------------------------------------------------------------------------


@BOTH
def test_every_task_has_its_outcome(runner: Executor) -> None:
    found = by_task(runner.run(range(20), scale, {"factor": 3}))
    assert {task: outcome.result for task, outcome in found.items()} == {task: 3 * task for task in range(20)}
    assert {outcome.attempts for outcome in found.values()} == {1}


@BOTH
def test_an_exception_is_an_error_without_a_retry(runner: Executor, tmp_path: Path) -> None:
    found = by_task(runner.run(["raise once", "leave", "fine"], troubled, {"folder": tmp_path}))
    assert found["fine"].result == "fine"
    error = found["raise once"].error or ""
    assert (found["raise once"].result, found["raise once"].attempts) == (None, 1)
    assert error.splitlines()[-1] == "KeyError: 'raise once'"
    assert "executor_work.py" in error
    assert "executors" not in error, "the frames of the executor are removed"
    assert (found["leave"].error or "").endswith("SystemExit: leave: no more")


@BOTH
def test_no_tasks(runner: Executor) -> None:
    assert list(runner.run([], scale, {"factor": 1})) == []


@BOTH
def test_tasks_are_read_lazily(runner: Executor) -> None:
    read = []
    outcomes = runner.run((read.append(task) or task for task in range(100)), scale, {"factor": 1})
    next(outcomes)
    assert len(read) <= (1 if isinstance(runner, Serial) else 2 * 2 + 1)
    assert len(list(outcomes)) == 99


@BOTH
def test_an_error_of_the_iterable_is_raised(runner: Executor) -> None:
    def tasks() -> Iterator[int]:
        yield 1
        raise RuntimeError("the list broke off")

    with pytest.raises(RuntimeError, match="the list broke off"):
        list(runner.run(tasks(), scale, {"factor": 1}))


# -- Processes ---------------------------------------------------------------------------------------------------------


def test_outcomes_come_in_the_order_of_finishing() -> None:
    found = [outcome.task for outcome in Processes(2).run([1.5, 0.0, 0.1], nap, {})]
    assert found[-1] == 1.5


def test_idle_workers_take_tasks_that_wait_behind_a_long_one() -> None:
    found = [outcome.task for outcome in Processes(2).run([1.5, 0.3, 0.01, 0.02], nap, {})]
    assert found[-1] == 1.5, "the task behind it was not recalled"
    assert sorted(found) == [0.01, 0.02, 0.3, 1.5]


def test_shared_data_is_sent_to_each_worker_once(tmp_path: Path) -> None:
    found = list(Processes(2).run([0.02] * 40, nap, {"note": Noted(tmp_path / "readers")}))
    readers = (tmp_path / "readers").read_text().split()
    assert len(readers) == len(set(readers)) == 2
    assert {str(outcome.result) for outcome in found} <= set(readers)


def test_large_tasks_and_results_do_not_block_each_other() -> None:
    tasks = [bytes([number]) * 3_000_000 + b"end" for number in range(8)]
    found = by_task(Processes(2).run(tasks, heavy, {}))
    assert all(outcome.result == task[::-1] for task, outcome in found.items())


def test_the_task_of_a_dead_worker_is_retried(tmp_path: Path) -> None:
    tasks = ["kill once", "exit", "exit once", *map(str, range(20))]
    found = by_task(Processes(2).run(tasks, troubled, {"folder": tmp_path}))
    assert (found["kill once"].result, found["kill once"].attempts) == ("kill once, then well", 2)
    assert (found["exit once"].result, found["exit once"].attempts) == ("exit once, then well", 2)
    assert found["exit"].error == (
        "The worker died 3 times during this task (exit code 3). If memory ran out, use fewer workers."
    )
    assert found["exit"].attempts == 3
    assert all(found[str(number)].result == str(number) and found[str(number)].attempts == 1 for number in range(20))


def test_a_worker_killed_from_outside_loses_no_task() -> None:
    outcomes = Processes(2).run([0.05] * 20, nap, {})
    first = next(outcomes)
    assert first.result is not None
    os.kill(first.result, signal.SIGKILL)
    rest = list(outcomes)
    assert len(rest) == 19
    assert all(outcome.error is None for outcome in rest)
    assert sum(outcome.attempts - 1 for outcome in rest) <= 1


def test_a_dead_worker_with_a_living_child_is_noticed(tmp_path: Path) -> None:
    found = by_task(Processes(1).run(["fork once", "fine"], troubled, {"folder": tmp_path}))
    child = int((tmp_path / "child").read_text())
    assert alive(child), "the child must keep the connection open"
    os.kill(child, signal.SIGKILL)
    assert (found["fork once"].result, found["fork once"].attempts) == ("fork once, then well", 2)
    assert found["fine"].attempts == 1


def test_a_worker_killed_while_it_starts_is_replaced(tmp_path: Path) -> None:
    found = list(Processes(1).run([2], scale, {"factor": 2, "deadly": Deadly(tmp_path, 2)}))
    assert [(outcome.result, outcome.attempts) for outcome in found] == [(4, 1)]
    assert len(list(tmp_path.iterdir())) == 2


def test_workers_that_never_start_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ended before it was ready \(killed by SIGKILL\).*use fewer workers"):
        list(Processes(1).run([2], scale, {"deadly": Deadly(tmp_path, 99)}))
    assert len(list(tmp_path.iterdir())) == 5


def test_objects_that_cannot_be_pickled() -> None:
    with pytest.raises(InputError, match=r"'.*<lambda>' and its shared data must be picklable.*serial executor"):
        Processes(1).run([1], lambda task, shared: task, {})
    tasks: list[Any] = [lambda: 1, 5]
    found = list(Processes(1).run(tasks, scale, {"factor": 2}))
    assert sorted((outcome.result, outcome.attempts) for outcome in found if outcome.error is None) == [(10, 1)]
    refused = next(outcome for outcome in found if outcome.error is not None)
    assert "pickle" in (refused.error or "")
    (outcome,) = Processes(1).run([1], unpicklable_result, {})
    assert "Can't pickle local object" in (outcome.error or "") or "Can't get local object" in (outcome.error or "")
    (outcome,) = Processes(1).run([1], unpicklable_in_the_driver, {})
    assert (outcome.error or "").endswith("UnpicklingError: made for another process")


def test_work_that_workers_cannot_unpickle_is_an_error() -> None:
    outcomes = Processes(1).run([1], scale, {"factor": Stubborn(os.getpid())})
    with pytest.raises(
        InputError, match=r"workers cannot unpickle the work(.|\n)*UnpicklingError: made for another process"
    ):
        list(outcomes)


# -- Threads and GPUs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "shared"), [(1, {}), (5, {"a tensor": torch.ones(1)})], ids=["later", "at once"])
def test_workers_use_their_number_of_threads(threads: int, shared: dict[str, Any]) -> None:
    # torch reads the variables when a task loads it (but never uses more threads than cores); if the shared data loads
    # it, the worker sets the threads.
    (outcome,) = Processes(1, threads=threads).run([1], surroundings, shared)
    assert outcome.result is not None
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "torch")
    assert [outcome.result[name] for name in names] == [str(threads), str(threads), threads]


def test_cores_are_divided_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    (outcome,) = Processes(3).run([1], surroundings, {"a tensor": torch.ones(1)})
    assert outcome.result is not None
    assert (outcome.result["OMP_NUM_THREADS"], outcome.result["torch"]) == ("2", 2)
    assert os.environ["OMP_NUM_THREADS"] == "5", "the driver's own environment is restored"


def test_gpus_are_divided_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    found = [outcome.result for outcome in Processes(3, gpus=2, threads=1).run([0.3] * 9, gpu_seen, {})]
    seen = dict(pair for pair in found if pair is not None)
    assert sorted(map(str, seen.values())) == ["4", "4", "6"]
    with pytest.raises(InputError, match="gpus is 4, but torch finds 3 on this machine"):
        executor("processes", gpus=4)


def test_serial_sets_threads_while_a_task_runs() -> None:
    before = torch.get_num_threads()
    (outcome,) = Serial(threads=before + 1).run([1], surroundings, {})
    assert outcome.result is not None
    assert (outcome.result["torch"], torch.get_num_threads()) == (before + 1, before)


# -- Ends of processes -------------------------------------------------------------------------------------------------


def test_closing_early_ends_the_workers() -> None:
    outcomes = Processes(2).run([0.05, 0.05, 0.05, *[60.0] * 10], nap, {})
    pids = {next(outcomes).result, next(outcomes).result}
    outcomes.close()  # type: ignore[attr-defined]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "ended, and reaped by their driver"


def script(folder: Path, code: str) -> Path:
    """A script that runs `code` under `if __name__ == "__main__":`; workers append their process ids to `pids`."""
    file = folder / "driver.py"
    body = "\n".join(f"    {line}" for line in code.splitlines())
    file.write_text(
        "import os, signal, sys, time\nfrom executor_work import nap, spin, Noted\n"
        "from intertwine.lab.study.executors.pool import Processes\nfrom pathlib import Path\n"
        f"note = Path({str(folder / 'pids')!r})\nif __name__ == '__main__':\n{body}\n"
    )
    return file


def started(file: Path) -> subprocess.Popen[str]:
    """Run the script in its own session, as in a terminal."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests/support", ROOT / "src")))}
    return subprocess.Popen(
        [sys.executable, str(file)], env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def workers_of(folder: Path) -> set[int]:
    """The two workers, once both have read the shared data."""
    note, end = folder / "pids", time.monotonic() + 30
    while not note.exists() or len(note.read_text().split()) < 2:
        assert time.monotonic() < end, "the workers did not start"
        time.sleep(0.05)
    return {int(pid) for pid in note.read_text().split()}


@pytest.mark.parametrize(
    ("work", "before"),
    [("nap", ""), ("spin", ""), ("nap", "if os.fork() == 0:\n    time.sleep(20)\n    os._exit(0)")],
    ids=["asleep", "busy", "a child holds the connection"],
)
def test_workers_end_when_the_driver_is_killed(tmp_path: Path, work: str, before: str) -> None:
    code = f"outcomes = Processes(2).run([0, 0] + [10**9] * 4, {work}, {{'note': Noted(note)}})\nnext(outcomes)\n"
    driver = started(script(tmp_path, f"{code}{before}\nfor _ in outcomes: pass"))
    pids = workers_of(tmp_path)
    time.sleep(0.3)
    assert all(map(alive, pids))
    driver.kill()
    assert all_ended(pids, within=5)
    os.killpg(driver.pid, signal.SIGKILL) if before else None
    driver.communicate()


def test_ctrl_c_ends_the_workers_silently(tmp_path: Path) -> None:
    driver = started(script(tmp_path, "for _ in Processes(2).run([99.0] * 9, nap, {'note': Noted(note)}): pass"))
    pids = workers_of(tmp_path)
    time.sleep(0.3)
    os.killpg(driver.pid, signal.SIGINT)  # what a terminal does
    _, errors = driver.communicate(timeout=20)
    assert all_ended(pids, within=0.5)
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "Process-" not in errors


@pytest.mark.parametrize("when", ["starting", "working"])
def test_workers_ignore_ctrl_c(tmp_path: Path, when: str) -> None:
    shared = "{'note': Noted(note)}" if when == "working" else "{}"
    file = script(tmp_path, f"for outcome in Processes(2).run([1.0] * 2, nap, {shared}): print(outcome.attempts)")
    if when == "starting":
        with file.open("a") as lines:
            lines.write("else:\n    with note.open('a') as lines: print(os.getpid(), file=lines)\n    time.sleep(1)\n")
    driver = started(file)
    for pid in workers_of(tmp_path):
        os.kill(pid, signal.SIGINT)
    assert driver.communicate(timeout=30) == ("1\n1\n", "")


def test_an_open_run_does_not_keep_python_from_ending(tmp_path: Path) -> None:
    code = "outcomes = Processes(2).run([0.01] * 99, nap, {'note': Noted(note)})\nprint(next(outcomes).attempts)"
    driver = started(script(tmp_path, code))
    said, errors = driver.communicate(timeout=30)
    assert (driver.returncode, said, errors) == (0, "1\n", "")


def test_a_script_without_a_main_guard_is_an_error(tmp_path: Path) -> None:
    file = script(tmp_path, "list(Processes(1).run([1], nap, {}))")
    file.write_text(file.read_text().replace("if __name__ == '__main__':", "if True:"))
    _, errors = started(file).communicate(timeout=30)
    last = errors.rstrip().splitlines()[-1]
    assert "InputError: A worker process ended before it was ready (exit code 1)" in last
    assert 'put the call under `if __name__ == "__main__":`' in last


# -- The function `executor` -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "proceses"}, r"Unknown executor 'proceses'. Did you mean 'processes'\?.*serial, proc"),
        ({"name": "processes", "workers": 0}, "workers must be at least 1, but is 0"),
        ({"name": "processes", "threads": 0}, "threads must be at least 1, but is 0"),
        ({"name": "processes", "gpus": -1}, "gpus must be at least 0, but is -1"),
        (
            {"name": "processes", "address": "a:1"},
            "address='a:1' has no effect with processes: only ray joins a cluster",
        ),
        ({"name": "serial", "workers": 2}, "serial runs one task at a time, but workers is 2. Use processes"),
        ({"name": "serial", "gpus": 1}, "serial runs in this process and uses its GPUs, but gpus is 1"),
    ],
)
def test_invalid_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        executor(**options)


def test_the_chosen_executor() -> None:
    assert executor("serial", workers=1, threads=2) == Serial(2)
    assert executor("processes", workers=3, threads=2) == Processes(3, 0, 2)
    assert pickle.loads(pickle.dumps(executor("processes"))) == Processes()
