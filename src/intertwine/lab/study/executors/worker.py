"""The code of a worker process: it reads tasks, runs them in turn, and ends when its driver does.

Driver and worker exchange pickled tuples. The driver sends (WORK, payload), then (TASK, number, data), (RECALL, number)
to get back a task that has not started, and (STOP,). The worker sends (HELLO,), (READY,) or (BROKEN, error), then
(DONE, number, result, error) and (RECALL, number).
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from intertwine.lab.study.executors.base import format_error, run_pickled
from intertwine.lab.study.executors.resources import limit_torch_threads

HELLO, READY, BROKEN, WORK = "hello", "ready", "broken", "work"
TASK, RECALL, DONE, STOP = "task", "recall", "done", "stop"
#: Seconds between two checks that the other side is alive.
POLL_SECONDS = 1.0


def serve(connection: Connection, driver: int, threads: int) -> None:
    """Run the tasks that the driver sends until it sends STOP.

    Args:
        connection: to the driver.
        driver: its process id.
        threads: of torch.
    """
    # Ctrl-C reaches every process of a terminal; the driver ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # the driver blocked it while this process started
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    mailbox = Mailbox(connection, driver)
    mailbox.send(HELLO)
    try:
        work, shared = pickle.loads(mailbox.next()[1])
    except Exception as error:  # noqa: BLE001 - unpickling imports foreign modules
        mailbox.send(BROKEN, format_error(error))
        return
    limit_torch_threads(threads)
    mailbox.send(READY)
    while (message := mailbox.next())[0] == TASK:
        _, number, data = message
        mailbox.send(DONE, number, *run_pickled(work, data, shared))


class Mailbox:
    """Receives messages in a thread, also while a task runs, and ends the process when the driver ends."""

    def __init__(self, connection: Connection, driver: int) -> None:
        self._connection, self._driver = connection, driver
        self._messages: deque[tuple[Any, ...]] = deque()
        self._arrived, self._sending = threading.Condition(), threading.Lock()
        threading.Thread(target=self._read, name="mailbox", daemon=True).start()

    def next(self) -> tuple[Any, ...]:
        """Wait for the next message."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._messages))
            return self._messages.popleft()

    def send(self, *message: Any) -> None:
        """Send a message to the driver."""
        with self._sending:
            self._connection.send_bytes(pickle.dumps(message))

    def _read(self) -> None:
        try:
            while True:
                while not self._connection.poll(POLL_SECONDS):
                    # A process forked by the driver may keep the connection open after the driver's end.
                    if hasattr(os, "getppid") and os.getppid() != self._driver:
                        raise EOFError
                message = pickle.loads(self._connection.recv_bytes())
                with self._arrived:
                    if message[0] != RECALL:
                        self._messages.append(message)
                        self._arrived.notify()
                    elif waiting := [task for task in self._messages if task[:2] == (TASK, message[1])]:
                        self._messages.remove(waiting[0])
                        self.send(*message)
        except (EOFError, OSError):
            os._exit(1)  # without its driver, the result has no reader
