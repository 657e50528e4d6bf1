"""Tasks for the tests of executors. Every worker process imports this module, so it loads little."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Shared = Mapping[str, Any]


def scale(task: float, shared: Shared) -> float:
    """Multiply the task by a shared factor."""
    return task * shared["factor"]


def nap(task: float, shared: Shared) -> int:
    """Sleep so many seconds; returns the process id."""
    time.sleep(task)
    return os.getpid()


def troubled(task: str, shared: Shared) -> str:
    """Tasks that fail in different ways; those named "... once" succeed the second time."""
    if task.endswith("once"):
        mark = Path(shared["folder"]) / task.replace(" ", "-")
        if mark.exists():
            return f"{task}, then well"
        mark.touch()
    if task.startswith("raise"):
        raise KeyError(task)
    if task.startswith("leave"):
        sys.exit(f"{task}: no more")
    if task.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if task.startswith("exit"):
        os._exit(3)
    if task.startswith("fork"):
        _leave_a_child_behind(Path(shared["folder"]) / "child")
    return task


def _leave_a_child_behind(note: Path) -> None:
    """Start a child that keeps its parent's files open, then kill the parent."""
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    note.write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def surroundings(task: int, shared: Shared) -> dict[str, Any]:
    """The threads of a worker."""
    import torch

    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: os.environ.get(name) for name in names} | {"torch": torch.get_num_threads()}


def anything(task: Any, shared: Shared) -> None:
    """Do nothing."""


def either(task: str, shared: Shared) -> tuple[str, int]:
    """`troubled`, with the process id."""
    time.sleep(0.05)
    return troubled(task, shared), os.getpid()


def slow_after_the_first(task: int, shared: Shared) -> dict[str, Any]:
    """Tasks that take minutes, except the first."""
    if task > 0:
        time.sleep(300)
    return surroundings(task, shared) | {"pid": os.getpid()}


def gpu_seen(task: float, shared: Shared) -> tuple[int, str | None]:
    """The process id and the visible GPUs; slow enough for every worker to get a task."""
    time.sleep(task)
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")


def heavy(task: bytes, shared: Shared) -> bytes:
    """Return as many bytes as the task has."""
    time.sleep(0.05)
    return task[::-1]


def unpicklable_result(task: int, shared: Shared) -> Any:
    """A result that cannot be pickled."""
    return lambda: task


def spin(task: int, shared: Shared) -> int:
    """Pure Python computation, which holds the interpreter lock."""
    total = 0
    for number in range(task):
        total += number & 7
    return total


def unpicklable_in_the_driver(task: int, shared: Shared) -> Any:
    """A result that the driver cannot unpickle."""
    return Stubborn(os.getpid())


class Stubborn:
    """Can be pickled, but unpickled only in the process that created it."""

    def __init__(self, home: int) -> None:
        self.home = home

    def __reduce__(self) -> tuple[Any, ...]:
        return (_only_at, (self.home,))


def _only_at(home: int) -> Stubborn:
    if os.getpid() != home:
        raise pickle.UnpicklingError("made for another process")
    return Stubborn(home)


class Noted:
    """Shared data that writes the process id to a file whenever it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (_noted, (self.file,))


def _noted(file: Path) -> Noted:
    with file.open("a") as lines:
        lines.write(f"{os.getpid()}\n")
    return Noted(file)


class Deadly:
    """Shared data that kills the first `times` processes that unpickle it."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def __reduce__(self) -> tuple[Any, ...]:
        return (_deadly, (self.folder, self.times))


def _deadly(folder: Path, times: int) -> Deadly:
    marks = len(list(folder.iterdir()))
    if marks < times:
        (folder / str(marks)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Deadly(folder, times)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_ended(pids: set[int], within: float) -> bool:
    """Whether every process ends within so many seconds."""
    end = time.monotonic() + within
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
