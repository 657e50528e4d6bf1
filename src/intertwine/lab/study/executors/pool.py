"""A pool of worker processes on this machine that replaces workers which die and retries their tasks."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from intertwine.errors import InputError
from intertwine.lab.study.executors.base import (
    ATTEMPTS,
    TASKS_PER_WORKER,
    Outcome,
    R,
    Shared,
    T,
    Work,
    format_error,
    retries_exhausted,
    unpickle_outcome,
)
from intertwine.lab.study.executors.resources import (
    GPU_VARIABLE,
    environment,
    gpu_names,
    pool_size,
    thread_environment,
    threads_each,
)
from intertwine.lab.study.executors.worker import (
    BACK,
    BROKEN,
    DONE,
    HELLO,
    POLL_SECONDS,
    READY,
    STOP,
    TASK,
    WORK,
    serve,
)

# ----------------------------------------------------------------------------------------------------
# The driver's side of worker processes: who has which task, who is idle, and who has died.


#: How many workers in a row may be killed before they are ready.
MAX_FAILED_STARTS = 5
#: Seconds a worker gets to end by itself.
SHUTDOWN_SECONDS = 5.0
#: What a worker is to the driver.
STARTING, AT_WORK, GONE = "starting", "at work", "gone"


@dataclass
class TaskMessage:
    """A task on its way."""

    number: int
    task: Any
    data: bytes
    attempts: int = 1


@dataclass
class Worker:
    """One process; `parcels` are the tasks it has, in the order it does them."""

    place: int
    process: BaseProcess
    connection: Connection
    state: str = STARTING
    parcels: dict[int, TaskMessage] = field(default_factory=dict)
    asked_back: bool = False

    def send(self, *letter: Any) -> None:
        """To the worker; one that has just died is buried when its connection is read to its end."""
        try:
            self.connection.send_bytes(pickle.dumps(letter))
        except OSError:
            self.state = GONE if self.state == AT_WORK else self.state

    def end(self, patience: float) -> str:
        """Wait so long for the process to end, then kill it; how it ended."""
        self.process.join(patience)
        self.process.kill()
        self.process.join()
        self.connection.close()
        code = self.process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class ProcessPool:
    """Up to one worker per place, fed from an iterator of tasks.

    Args:
        places: the environment of each worker. payload: the work and what its tasks share, pickled.
    """

    def __init__(self, places: Sequence[Mapping[str, str]], threads: int, payload: bytes, tasks: Iterator[Any]) -> None:
        self._places, self._threads, self._payload, self._tasks = places, threads, payload, tasks
        self._workers: list[Worker] = []
        self._waiting: deque[TaskMessage] = deque()
        self._settled: deque[Outcome[Any, Any]] = deque()
        self._taken = self._killed_early = 0

    def outcomes(self) -> Iterator[Outcome[Any, Any]]:
        """The outcome of every task; closed early, it ends the workers."""
        try:
            while self._give_out():
                if not self._settled:
                    self._take_in()
                while self._settled:
                    yield self._settled.popleft()
            self._dismiss()
        finally:
            self.end()

    def end(self) -> None:
        """Kill every worker."""
        for worker in self._workers:
            worker.process.kill()
        while self._workers:
            self._workers.pop().end(SHUTDOWN_SECONDS)

    # giving out -----------------------------------------------------------------------------------------------

    def _give_out(self) -> bool:
        """Hand tasks to those who have room for them; whether there is anything left to wait for."""
        starting = sum(worker.state == STARTING for worker in self._workers)
        while len(self._workers) < len(self._places) and self._ahead(starting + 1):
            self._hire()
            starting += 1
        for depth in range(1, TASKS_PER_WORKER + 1):
            for worker in self._workers:
                if worker.state == AT_WORK and len(worker.parcels) < depth and self._ahead(1):
                    self._give(worker, self._waiting.popleft())
        self._even_out()
        return bool(self._waiting or self._settled or any(worker.parcels for worker in self._workers))

    def _ahead(self, number: int) -> bool:
        """Whether so many tasks wait; only as many as that are taken from the iterator."""
        while len(self._waiting) < number:
            try:
                task = next(self._tasks)
            except StopIteration:
                return False
            self._taken += 1
            try:
                self._waiting.append(TaskMessage(self._taken, task, pickle.dumps(task)))
            except Exception as error:  # noqa: BLE001 - a foreign object may raise anything when it is pickled
                self._settled.append(Outcome(task, error=format_error(error)))
        return True

    def _hire(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked torch may hang in threads it does not have
        place = min(set(range(len(self._places))) - {worker.place for worker in self._workers})
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, os.getpid(), self._threads))
        with environment(self._places[place]), _interrupts_held_back():
            process.start()
            self._workers.append(Worker(place, process, ours))
        theirs.close()  # so that the connection ends when the worker does

    def _give(self, worker: Worker, parcel: TaskMessage) -> None:
        worker.send(TASK, parcel.number, parcel.data)
        if worker.state == AT_WORK:
            worker.parcels[parcel.number] = parcel
        else:
            self._waiting.appendleft(parcel)

    def _even_out(self) -> None:
        """When tasks run out, those that wait behind a long one go to workers that have nothing to do."""
        idle = sum(worker.state == AT_WORK and not worker.parcels for worker in self._workers)
        for worker in self._workers:
            if idle and len(worker.parcels) == TASKS_PER_WORKER and not worker.asked_back:
                worker.asked_back = True
                worker.send(BACK, list(worker.parcels)[-1])
                idle -= 1

    # taking in ------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Wait a little for letters, and read one of each worker that wrote."""
        heard = wait([worker.connection for worker in self._workers], timeout=POLL_SECONDS)
        for worker in list(self._workers):
            if worker.connection in heard:
                self._read(worker)
            elif not heard and worker.process.exitcode is not None and not worker.connection.poll():
                self._bury(worker)  # it is dead, but a process that it started holds its connection open

    def _read(self, worker: Worker) -> None:
        try:
            kind, *rest = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._bury(worker)
            return
        if kind == HELLO:
            worker.send(WORK, self._payload)
        elif kind == READY:
            worker.state, self._killed_early = AT_WORK, 0
        elif kind == BROKEN:
            raise InputError(f"The workers cannot read the work that was sent to them:\n{rest[0]}")
        else:
            worker.asked_back = False
            parcel = worker.parcels.pop(rest[0])
            if kind == DONE:
                result, error = rest[1:]
                self._settled.append(unpickle_outcome(parcel.task, result, error, parcel.attempts))
            else:
                self._waiting.append(parcel)

    def _bury(self, worker: Worker) -> None:
        """Take a dead worker's tasks back; the first of them is the one it died over."""
        self._workers.remove(worker)
        how = worker.end(POLL_SECONDS)
        if worker.state == STARTING:
            self._check_start(worker.process.exitcode or 0, how)
        parcels = list(worker.parcels.values())
        if parcels and parcels[0].attempts == ATTEMPTS:
            lost = parcels.pop(0)
            self._settled.append(Outcome(lost.task, error=retries_exhausted(ATTEMPTS, how), attempts=ATTEMPTS))
        elif parcels:
            parcels[0].attempts += 1
        self._waiting.extendleft(reversed(parcels))

    def _check_start(self, code: int, how: str) -> None:
        """A worker that was killed is replaced a few times; one that gave up would give up again."""
        self._killed_early += 1
        if code >= 0 or self._killed_early == MAX_FAILED_STARTS:
            raise InputError(
                f"A worker process ended before it was ready ({how}); what it printed says more. In a script, call "
                'this under `if __name__ == "__main__":`, as every worker reads the script again; code that was typed '
                "or piped in cannot be read again, so put it in a file. If memory ran out, take fewer workers."
            )

    def _dismiss(self) -> None:
        """Let the workers end by themselves, so that what their tasks opened is closed."""
        for worker in self._workers:
            worker.send(STOP)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for worker in self._workers:
            if worker.state == AT_WORK:
                worker.process.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C waits until a process has started; the process itself starts without hearing it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started with the first worker, it would let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ----------------------------------------------------------------------------------------------------
# Tasks in processes of this machine: each with its share of the cores, and its GPU where some are asked for.


@dataclass(frozen=True)
class Processes:
    """Runs tasks in fresh processes, which end with this one.

    A script that uses it needs `if __name__ == "__main__":`, as Python reads the script again in every worker.

    >>> from intertwine.lab.study.executors.pool import Processes
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
        workers = pool_size(self.workers, self.gpus)
        threads = threads_each(workers, self.threads)
        names = gpu_names(self.gpus)
        places = [thread_environment(threads) for _ in range(workers)]
        for number, place in enumerate(places):
            if names:
                place[GPU_VARIABLE] = names[number % len(names)]
        return _outcomes(ProcessPool(places, threads, payload, iter(tasks)))


def _packed(work: Work[Any, Any], shared: Shared) -> bytes:
    try:
        return pickle.dumps((work, shared))
    except Exception as error:
        raise InputError(
            f"The work {getattr(work, '__qualname__', work)!r} and what its tasks share must be picklable to reach "
            f"other processes, and they are not: {error}. Take a function of a module, and share data, not open files "
            "or functions made on the spot; or use the serial executor."
        ) from error


def _outcomes(crew: ProcessPool) -> Iterator[Outcome[Any, Any]]:
    # Python waits for its processes before it collects generators, so one left open would keep it from ever ending.
    atexit.register(crew.end)
    try:
        yield from crew.outcomes()
    finally:
        atexit.unregister(crew.end)
