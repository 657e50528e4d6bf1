"""A pool of worker processes on this machine that replaces dead workers and retries their tasks."""

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
from itertools import count
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from intertwine.errors import InputError
from intertwine.lab.study.executors import base, resources
from intertwine.lab.study.executors import worker as protocol
from intertwine.lab.study.executors.base import ATTEMPTS, TASKS_PER_WORKER, Outcome, R, Shared, T, TaskMessage, Work

#: How many workers in a row may be killed before they are ready.
MAX_FAILED_STARTS = 5
#: Seconds for a worker to end by itself.
SHUTDOWN_SECONDS = 5.0
NOT_READY = (
    "A worker process ended before it was ready ({}); its output has the reason. In a script, put the call under "
    '`if __name__ == "__main__":`, because every worker imports the script; code from a prompt or a pipe cannot be '
    "imported, so put it in a file. If memory ran out, use fewer workers."
)
#: States of a worker.
STARTING, WORKING, DEAD = "starting", "working", "dead"


@dataclass(frozen=True)
class Processes:
    """Runs tasks in new processes, which end with this one.

    A script needs `if __name__ == "__main__":` around it, because Python imports the script in every worker.

    >>> Processes(workers=2)
    Processes(workers=2, gpus=0, threads=None)
    """

    workers: int | None = None
    gpus: int = 0
    threads: int | None = None

    def check(self) -> None:
        """Refuse more GPUs than this machine has."""
        resources.gpu_names(self.gpus)

    def run(self, tasks: Iterable[T], work: Work[T, R], shared: Shared) -> Iterator[Outcome[T, R]]:
        """See `Executor.run`."""
        try:
            payload = pickle.dumps((work, shared))
        except Exception as error:
            raise base.not_picklable(work, error) from error
        gpus = resources.gpu_names(self.gpus)
        workers, threads = resources.divide_cores(self.workers, self.gpus, self.threads)
        environments = [
            resources.thread_environment(threads) | ({resources.GPU_VARIABLE: gpus[i % len(gpus)]} if gpus else {})
            for i in range(workers)
        ]
        return _closed_at_exit(ProcessPool(environments, threads, payload, iter(tasks)))


def _closed_at_exit(pool: ProcessPool) -> Iterator[Outcome[Any, Any]]:
    # Python waits for its processes before it collects generators, so an open one would keep it from ending.
    atexit.register(pool.kill)
    try:
        yield from pool.outcomes()
    finally:
        atexit.unregister(pool.kill)


@dataclass
class Worker:
    """One worker process; `tasks` are those it has, in the order it runs them."""

    slot: int
    process: BaseProcess
    connection: Connection
    state: str = STARTING
    tasks: dict[int, TaskMessage] = field(default_factory=dict)
    recalled: bool = False

    def send(self, *message: Any) -> None:
        """Send a message; if the worker has died, it is reaped when its connection is read."""
        try:
            self.connection.send_bytes(pickle.dumps(message))
        except OSError:
            self.state = DEAD if self.state == WORKING else self.state

    def end(self, timeout: float) -> str:
        """Wait for the process to end, then kill it; how it ended."""
        self.process.join(timeout)
        self.process.kill()
        self.process.join()
        self.connection.close()
        code = self.process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class ProcessPool:
    """Worker processes that run the tasks of an iterator.

    Args:
        environments: the environment variables of each worker.
        threads: of each worker.
        payload: the work and the shared data, pickled.
        tasks: read as workers become free.
    """

    def __init__(
        self, environments: Sequence[Mapping[str, str]], threads: int, payload: bytes, tasks: Iterator[Any]
    ) -> None:
        self._environments, self._threads, self._payload = environments, threads, payload
        self._tasks = map(base.pickle_task, tasks, count(1))
        self._workers: list[Worker] = []
        self._queue: deque[TaskMessage] = deque()
        self._finished: deque[Outcome[Any, Any]] = deque()
        self._failed_starts = 0

    def outcomes(self) -> Iterator[Outcome[Any, Any]]:
        """The outcome of every task; closing the iterator ends the workers."""
        try:
            while self._assign():
                if not self._finished:
                    self._receive()
                while self._finished:
                    yield self._finished.popleft()
            self._stop()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill every worker."""
        for worker in self._workers:
            worker.process.kill()
        while self._workers:
            self._workers.pop().end(SHUTDOWN_SECONDS)

    def _stop(self) -> None:
        """Let the workers end by themselves, so that the files of their tasks are closed."""
        for worker in self._workers:
            worker.send(protocol.STOP)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for worker in self._workers:
            if worker.state == WORKING:
                worker.process.join(max(0.0, deadline - time.monotonic()))

    # -- Sending -------------------------------------------------------------------------------------------------------

    def _assign(self) -> bool:
        """Start workers and send them tasks; False when all tasks are finished."""
        starting = sum(worker.state == STARTING for worker in self._workers)
        while len(self._workers) < len(self._environments) and self._fill_queue(starting + 1):
            self._spawn()
            starting += 1
        for depth in range(1, TASKS_PER_WORKER + 1):
            for worker in self._workers:
                if worker.state == WORKING and len(worker.tasks) < depth and self._fill_queue(1):
                    message = self._queue.popleft()
                    worker.send(protocol.TASK, message.number, message.data)
                    if worker.state == WORKING:
                        worker.tasks[message.number] = message
                    else:
                        self._queue.appendleft(message)
        self._rebalance()
        return bool(self._queue or self._finished or any(worker.tasks for worker in self._workers))

    def _fill_queue(self, size: int) -> bool:
        """Read tasks until the queue has this size; False when there are no more."""
        while len(self._queue) < size:
            message = next(self._tasks, None)
            if message is None:
                return False
            if isinstance(message, Outcome):
                self._finished.append(message)
            else:
                self._queue.append(message)
        return True

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked torch may deadlock in threads that it lost
        slot = min(set(range(len(self._environments))) - {worker.slot for worker in self._workers})
        ours, theirs = context.Pipe()
        process = context.Process(target=protocol.serve, args=(theirs, os.getpid(), self._threads))
        with resources.environment(self._environments[slot]), _interrupts_blocked():
            process.start()
            self._workers.append(Worker(slot, process, ours))
        theirs.close()  # so that the connection ends with the worker

    def _rebalance(self) -> None:
        """Recall tasks that wait behind another one, if other workers are idle."""
        idle = sum(worker.state == WORKING and not worker.tasks for worker in self._workers)
        for worker in self._workers:
            if idle and len(worker.tasks) == TASKS_PER_WORKER and not worker.recalled:
                worker.recalled = True
                worker.send(protocol.RECALL, list(worker.tasks)[-1])
                idle -= 1

    # -- Receiving -----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Wait for messages, and read one from each worker that sent any."""
        ready = wait([worker.connection for worker in self._workers], timeout=protocol.POLL_SECONDS)
        for worker in list(self._workers):
            if worker.connection in ready:
                self._read(worker)
            elif not ready and worker.process.exitcode is not None and not worker.connection.poll():
                self._reap(worker)  # it is dead, but one of its child processes keeps the connection open

    def _read(self, worker: Worker) -> None:
        try:
            kind, *values = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._reap(worker)
            return
        if kind == protocol.HELLO:
            worker.send(protocol.WORK, self._payload)
        elif kind == protocol.READY:
            worker.state, self._failed_starts = WORKING, 0
        elif kind == protocol.BROKEN:
            raise InputError(f"The workers cannot unpickle the work:\n{values[0]}")
        else:
            worker.recalled = False
            message = worker.tasks.pop(values[0])
            if kind == protocol.DONE:
                self._finished.append(base.unpickle_outcome(message, *values[1:]))
            else:
                self._queue.append(message)

    def _reap(self, worker: Worker) -> None:
        """Requeue the tasks of a dead worker; it died during the first of them."""
        self._workers.remove(worker)
        how = worker.end(protocol.POLL_SECONDS)
        if worker.state == STARTING:
            self._failed_starts += 1
            # a killed worker is replaced a few times; one that ended by itself would end again
            if (worker.process.exitcode or 0) >= 0 or self._failed_starts == MAX_FAILED_STARTS:
                raise InputError(NOT_READY.format(how))
        tasks = list(worker.tasks.values())
        if tasks and tasks[0].attempts == ATTEMPTS:
            self._finished.append(base.unpickle_outcome(tasks.pop(0), b"", base.retries_exhausted(how)))
        elif tasks:
            tasks[0].attempts += 1
        self._queue.extendleft(reversed(tasks))


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C until a process has started; the new process starts with it blocked."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # if it started with the first worker, it would unblock interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
