"""The executor interface, task outcomes and error texts, and the serial executor."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from intertwine.lab.study.executors.resources import torch_threads

# ----------------------------------------------------------------------------------------------------
# What every executor keeps to: tasks in, outcomes out in the order of finishing; errors are told, deaths retried.


T = TypeVar("T")
R = TypeVar("R")

#: How often a task is begun before its worker's deaths are held against it.
ATTEMPTS = 3
#: How many tasks a worker has at most: the one that runs and the next, so that it need not wait for the driver.
TASKS_PER_WORKER = 2
#: How much of a traceback is told.
TRACEBACK_LINES = 12
HERE = Path(__file__).parent

#: What all tasks share, by name.
Shared = Mapping[str, Any]
#: What runs a task: a function of a module, given the task and what all tasks share.
Work = Callable[[T, Shared], R]


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """What became of one task.

    Attributes:
        result: what `work` returned; None where `error` says why there is nothing.
        error: the last lines of the traceback, or how often workers died over the task.
        attempts: how often the task was begun; more than 1 where a worker died.

    >>> from intertwine.lab.study.executors.base import Outcome
    >>> Outcome("fold", 0.5).error is None
    True
    """

    task: T
    result: R | None = None
    error: str | None = None
    attempts: int = 1


@runtime_checkable
class Executor(Protocol):
    """Runs tasks somewhere."""

    def run(self, tasks: Iterable[T], work: Work[T, R], shared: Shared) -> Iterator[Outcome[T, R]]:
        """The outcome of every task, in the order of finishing.

        Tasks are taken from the iterable as workers become free. An exception in `work` is an outcome with an error.
        Closing the iterator early ends what still runs.

        Args:
            work: a function of a module, called with a task and `shared`; whatever it leaves behind stays with its
                worker.
            shared: what all tasks need, such as data sets; it goes to every worker once.
        """
        ...


def attempt(work: Work[T, R], task: T, shared: Shared) -> tuple[R | None, str | None]:
    """The result of a task, or its error in words.

    >>> from intertwine.lab.study.executors.base import attempt
    >>> def work(task, shared):
    ...     return shared["names"][task]
    >>> attempt(work, 0, {"names": ["digits"]})
    ('digits', None)
    >>> attempt(work, 7, {"names": ["digits"]})[1].splitlines()[-1]
    'IndexError: list index out of range'
    """
    try:
        return work(task, shared), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a task may raise anything, and its words are handed on
        return None, format_error(error)


def run_pickled(work: Work[Any, Any], task: bytes, shared: Shared) -> tuple[bytes, str | None]:
    """In a worker: `attempt` for a pickled task; the result is pickled, and what cannot be is the task's error.

    >>> import pickle
    >>> from intertwine.lab.study.executors.base import run_pickled
    >>> result, error = run_pickled(lambda task, shared: 2 * task, pickle.dumps(4), {})
    >>> pickle.loads(result), error
    (8, None)
    """

    def whole(data: bytes, shared: Shared) -> bytes:
        return pickle.dumps(work(pickle.loads(data), shared))

    result, error = attempt(whole, task, shared)
    return result or b"", error


def unpickle_outcome(task: T, result: bytes, error: str | None, attempts: int) -> Outcome[T, Any]:
    """In the driver: the outcome, from what `run_pickled` gave.

    >>> from intertwine.lab.study.executors.base import unpickle_outcome
    >>> unpickle_outcome("task", b"", "no memory", 1).error
    'no memory'
    """
    if error is None:
        try:
            return Outcome(task, pickle.loads(result), attempts=attempts)
        except Exception as problem:  # noqa: BLE001 - reading a pickle runs foreign code
            error = format_error(problem)
    return Outcome(task, error=error, attempts=attempts)


def format_error(error: BaseException) -> str:
    """The last lines of an error's traceback, without the executors' own.

    >>> from intertwine.lab.study.executors.base import format_error
    >>> format_error(KeyError("layer1")).splitlines()[-1]
    "KeyError: 'layer1'"
    """
    report = traceback.TracebackException.from_exception(error)
    theirs = [frame for frame in report.stack if Path(frame.filename).parent != HERE]
    report.stack = traceback.StackSummary.from_list(theirs)
    lines = "".join(report.format()).rstrip().splitlines()
    return "\n".join(lines if len(lines) <= TRACEBACK_LINES else ["…", *lines[-TRACEBACK_LINES:]])


def retries_exhausted(attempts: int, how: str) -> str:
    """What is said of a task over which worker after worker died.

    >>> from intertwine.lab.study.executors.base import retries_exhausted
    >>> retries_exhausted(3, "killed by SIGKILL")
    'The worker died 3 times over this task (killed by SIGKILL). If memory ran out, take fewer workers.'
    """
    return f"The worker died {attempts} times over this task ({how}). If memory ran out, take fewer workers."


# ----------------------------------------------------------------------------------------------------
# Tasks one after another in this process: for small studies, and for looking into one that fails.


@dataclass(frozen=True)
class Serial:
    """Runs tasks one after another; `threads` are torch's while a task runs, by default as many as it has.

    >>> from intertwine.lab.study.executors.base import Serial
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
