"""What runs inside a worker process: it reads tasks, does them in turn, and ends when its driver does.

The driver and a worker send each other pickled tuples. The driver: the work first, then (TASK, number, task),
(BACK, number) to have a task again that has not been begun, and STOP. The worker: HELLO, READY or (BROKEN, why), then
(DONE, number, result, error) and (BACK, number).
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

HELLO, READY, BROKEN, WORK, TASK, BACK, DONE, STOP = (
    "hello", "ready", "broken", "work", "task", "back", "done", "stop",
)  # fmt: skip
#: Seconds between two looks at whether the other side is still there.
POLL_SECONDS = 1.0


def serve(connection: Connection, driver: int, threads: int) -> None:
    """Do what the driver sends until it says stop.

    Args:
        driver: the number of its process.
    """
    _leave_interrupts_to_the_driver()
    mailbox = Mailbox(connection, driver)
    mailbox.send(HELLO)
    try:
        work, shared = pickle.loads(mailbox.next()[1])
    except Exception as error:  # noqa: BLE001 - reading a pickle imports foreign modules
        mailbox.send(BROKEN, format_error(error))
        return
    limit_torch_threads(threads)
    mailbox.send(READY)
    while (letter := mailbox.next())[0] == TASK:
        _, number, data = letter
        mailbox.send(DONE, number, *run_pickled(work, data, shared))


def _leave_interrupts_to_the_driver() -> None:
    """Ctrl-C reaches every process of a terminal; the driver is the one that ends the workers then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # the driver held it back while this process started
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


class Mailbox:
    """Reads letters while a task runs, so that neither side waits for the other to read, and sees the driver's end."""

    def __init__(self, connection: Connection, driver: int) -> None:
        self._connection, self._driver = connection, driver
        self._letters: deque[tuple[Any, ...]] = deque()
        self._arrived, self._sending = threading.Condition(), threading.Lock()
        threading.Thread(target=self._read, name="mailbox", daemon=True).start()

    def next(self) -> tuple[Any, ...]:
        """The next letter, when there is one."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._letters))
            return self._letters.popleft()

    def send(self, *letter: Any) -> None:
        """To the driver."""
        with self._sending:
            self._connection.send_bytes(pickle.dumps(letter))

    def _read(self) -> None:
        try:
            while True:
                letter = self._letter()
                with self._arrived:
                    if letter[0] == BACK:
                        self._give_back(letter[1])
                    else:
                        self._letters.append(letter)
                        self._arrived.notify()
        except (EOFError, OSError):
            os._exit(1)  # without its driver nobody asks for the result; the task may take hours yet

    def _letter(self) -> tuple[Any, ...]:
        while not self._connection.poll(POLL_SECONDS):
            # A process that the driver forked may hold the connection open after the driver's end.
            if hasattr(os, "getppid") and os.getppid() != self._driver:
                raise EOFError
        return pickle.loads(self._connection.recv_bytes())

    def _give_back(self, number: int) -> None:
        for letter in self._letters:
            if letter[:2] == (TASK, number):
                self._letters.remove(letter)
                self.send(BACK, number)
                return
