"""The executor interface, task outcomes and their error messages, and the serial executor."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from intertwine.errors import InputError
from intertwine.lab.study.executors.resources import torch_threads

T = TypeVar("T")
R = TypeVar("R")
#: What all tasks share, by name.
Shared = Mapping[str, Any]
#: The function of a module that runs a task: (task, shared) → result.
Work = Callable[[T, Shared], R]

#: How often a task is started before it fails because its workers die.
ATTEMPTS = 3
#: Tasks in each worker: the one that runs, and the next one, so that the worker need not wait for the driver.
TASKS_PER_WORKER = 2
TRACEBACK_LINES = 12
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """The outcome of one task.

    Attributes:
        result: the return value; None if there is an `error`.
        error: the last lines of the traceback, or how often workers died during the task.
        attempts: how often the task was started; more than 1 if a worker died.

    >>> Outcome("fold", 0.5).error is None
    True
    """

    task: T
    result: R | None = None
    error: str | None = None
    attempts: int = 1


@runtime_checkable
class Executor(Protocol):
    """Runs tasks."""

    def run(self, tasks: Iterable[T], work: Work[T, R], shared: Shared) -> Iterator[Outcome[T, R]]:
        """The outcome of every task, in order of completion.

        Tasks are read from the iterable as workers become free. An exception in `work` becomes an outcome with an
        error. Closing the iterator stops the tasks that still run.

        Args:
            tasks: the inputs of `work`.
            work: a function of a module, called with a task and `shared`.
            shared: what all tasks need, such as data sets; it is sent to every worker once.
        """
        ...


@dataclass
class TaskMessage:
    """A pickled task on its way to a worker."""

    task: Any
    data: bytes
    number: int = 0
    attempts: int = 1


def pickle_task(task: Any, number: int = 0) -> TaskMessage | Outcome[Any, Any]:
    """The message for a task, or the outcome of one that cannot be pickled."""
    try:
        return TaskMessage(task, pickle.dumps(task), number)
    except Exception as error:  # noqa: BLE001 - a foreign object may raise anything when it is pickled
        return Outcome(task, error=format_error(error))


def run_task_safely(work: Work[T, R], task: T, shared: Shared) -> tuple[R | None, str | None]:
    """The result of a task, or its error message.

    >>> def work(task, shared):
    ...     return shared["names"][task]
    >>> run_task_safely(work, 0, {"names": ["digits"]})
    ('digits', None)
    >>> run_task_safely(work, 7, {"names": ["digits"]})[1].splitlines()[-1]
    'IndexError: list index out of range'
    """
    try:
        return work(task, shared), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a task may raise anything
        return None, format_error(error)


def run_pickled(work: Work[Any, Any], task: bytes, shared: Shared) -> tuple[bytes, str | None]:
    """In a worker: `run_task_safely` with a pickled task and a pickled result.

    >>> result, error = run_pickled(lambda task, shared: 2 * task, pickle.dumps(4), {})
    >>> pickle.loads(result), error
    (8, None)
    """

    def pickled(data: bytes, shared: Shared) -> bytes:
        return pickle.dumps(work(pickle.loads(data), shared))

    result, error = run_task_safely(pickled, task, shared)
    return result or b"", error


def unpickle_outcome(message: TaskMessage, result: bytes, error: str | None) -> Outcome[Any, Any]:
    """In the driver: the outcome of a task, from the return values of `run_pickled`.

    >>> unpickle_outcome(TaskMessage("task", b""), b"", "no memory").error
    'no memory'
    """
    if error is None:
        try:
            return Outcome(message.task, pickle.loads(result), attempts=message.attempts)
        except Exception as problem:  # noqa: BLE001 - unpickling runs foreign code
            error = format_error(problem)
    return Outcome(message.task, error=error, attempts=message.attempts)


def format_error(error: BaseException) -> str:
    """The last lines of a traceback, without the frames of the executors.

    >>> format_error(KeyError("layer1")).splitlines()[-1]
    "KeyError: 'layer1'"
    """
    report = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in report.stack if Path(frame.filename).parent != HERE]
    report.stack = traceback.StackSummary.from_list(frames)
    lines = "".join(report.format()).rstrip().splitlines()
    return "\n".join(lines if len(lines) <= TRACEBACK_LINES else ["…", *lines[-TRACEBACK_LINES:]])


def retries_exhausted(how: str) -> str:
    """The error of a task whose workers died `ATTEMPTS` times.

    >>> retries_exhausted("killed by SIGKILL")
    'The worker died 3 times during this task (killed by SIGKILL). If memory ran out, use fewer workers.'
    """
    return f"The worker died {ATTEMPTS} times during this task ({how}). If memory ran out, use fewer workers."


def not_picklable(work: Work[Any, Any], reason: object) -> InputError:
    """The error for work that cannot be sent to other processes."""
    return InputError(
        f"{getattr(work, '__qualname__', work)!r} and its shared data must be picklable to reach the workers "
        f"({reason}). Use a function of a module, and share data instead of open files, locks or local functions; or "
        "use the serial executor."
    )


@dataclass(frozen=True)
class Serial:
    """Runs tasks one after another in this process, with `threads` of torch (by default those it has).

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
                result, error = run_task_safely(work, task, shared)
            yield Outcome(task, result, error)
