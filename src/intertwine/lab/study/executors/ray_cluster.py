"""Tasks on Ray: a local instance started for the run, or a running cluster."""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from intertwine.errors import InputError
from intertwine.lab.study.executors import base, resources
from intertwine.lab.study.executors.base import ATTEMPTS, TASKS_PER_WORKER, Outcome, R, Shared, T, TaskMessage, Work

#: Read by Ray when it is imported or started: no usage statistics, and no log lines on the terminal.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": ".", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
#: Seconds for a cluster to answer.
CONNECT_SECONDS = 3.0
#: The start of every HTTP/2 connection, which Ray uses: the preface, then an empty frame of settings.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS_FRAME = 4
#: In a worker: the work and the shared data of the latest run, by the name of their Ray object.
_unpacked: dict[str, tuple[Work[Any, Any], Shared]] = {}


@dataclass(frozen=True)
class RayCluster:
    """Runs tasks on Ray (`pip install 'intertwine[cluster]'`).

    Without an address, Ray is started on this machine for the run, unless this process is connected to a Ray already:
    then that one is used and left running. `shared` is in Ray's object store, and every worker reads it once; NumPy
    arrays in it are read-only there.

    >>> RayCluster(workers=8, address="head.example:6379").address
    'head.example:6379'
    """

    workers: int | None = None
    gpus: int = 0
    threads: int | None = None
    address: str | None = None

    def check(self) -> Any:
        """Ray, if it is installed and reachable, and the GPUs are available."""
        ray = load_ray()
        if self.address is not None:
            check_address(ray, self.address)
        elif not ray.is_initialized():
            resources.gpu_names(self.gpus)
        return ray

    def run(self, tasks: Iterable[T], work: Work[T, R], shared: Shared) -> Iterator[Outcome[T, R]]:
        """See `Executor.run`."""
        return self._outcomes(self.check(), iter(tasks), work, shared)

    def _outcomes(self, ray: Any, tasks: Iterator[Any], work: Work[Any, Any], shared: Shared) -> Iterator[Any]:
        with ray_session(ray, self.workers, self.gpus, self.threads, self.address) as capacity:
            try:
                stored = [ray.put((work, shared))]  # in a list: Ray would read a bare reference for every task
            except TypeError as error:
                raise base.not_picklable(work, str(error).splitlines()[0]) from error
            yield from _run_tasks(ray, capacity, map(base.pickle_task, tasks), stored)


def _run_tasks(
    ray: Any, capacity: RayCapacity, tasks: Iterator[TaskMessage | Outcome[Any, Any]], stored: list[Any]
) -> Iterator[Outcome[Any, Any]]:
    """Keep Ray supplied with tasks; a task whose worker died is started again."""
    # No retries by Ray itself: it does not count the attempts.
    remote = ray.remote(_work_on).options(num_cpus=capacity.threads, num_gpus=capacity.gpu_share, max_retries=0)
    running: dict[Any, TaskMessage] = {}

    def start(message: TaskMessage) -> None:
        running[remote.remote(message.data, stored, capacity.threads)] = message

    try:
        while True:
            while len(running) < capacity.in_flight and (message := next(tasks, None)):
                if isinstance(message, Outcome):
                    yield message
                else:
                    start(message)
            if not running:
                return
            done, _ = ray.wait(list(running), num_returns=1)
            message = running.pop(done[0])
            outcome = _fetch(ray, message, done[0])
            if outcome is not None:
                yield outcome
            else:
                message.attempts += 1
                start(message)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _fetch(ray: Any, message: TaskMessage, reference: Any) -> Outcome[Any, Any] | None:
    """The outcome of a task; None if its worker died and the task must start again."""
    raised = ray.exceptions
    try:
        result, error = ray.get(reference)
    except (raised.WorkerCrashedError, raised.NodeDiedError, raised.OutOfMemoryError, raised.ObjectLostError) as death:
        if message.attempts < ATTEMPTS:
            return None
        result, error = b"", base.retries_exhausted(str(death).partition(".")[0])
    except raised.RayError as problem:  # errors of the task itself are returned, not raised
        raise InputError(
            f"Ray's workers cannot unpickle the work: {str(problem).splitlines()[-1]}. Every machine of the cluster "
            "needs intertwine and the modules of the work."
        ) from None
    return base.unpickle_outcome(message, result, error)


def _work_on(task: bytes, stored: list[Any], threads: int) -> tuple[bytes, str | None]:
    """In a worker: run one task."""
    import ray

    name = stored[0].hex()
    if name not in _unpacked:
        _unpacked.clear()
        _unpacked[name] = ray.get(stored[0])
        resources.limit_torch_threads(threads)
    work, shared = _unpacked[name]
    return base.run_pickled(work, task, shared)


# -- The connection ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayCapacity:
    """What a run may use of Ray: threads and the share of a GPU per task, and the number of tasks in flight."""

    threads: int
    gpu_share: float
    in_flight: int


def load_ray() -> Any:
    """The package Ray."""
    try:
        with resources.environment(QUIET):
            return importlib.import_module("ray")
    except ImportError as error:
        raise InputError(
            f"The ray executor needs Ray, which is not installed ({error}). Install it with: pip install "
            "'intertwine[cluster]'. Or use processes, which needs nothing more."
        ) from error


def check_address(ray: Any, address: str) -> None:
    """Refuse an address without a Ray cluster, in seconds; Ray itself would retry for minutes."""
    if ray.is_initialized():
        raise InputError(
            f"address={address!r} cannot be used: this process is already connected to a Ray cluster, at "
            f"{ray.get_runtime_context().gcs_address}. Leave the address out to use that one, or call "
            "ray.shutdown() first."
        )
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit()) or "/" in host:
        raise InputError(
            f"address must be host:port, such as 10.0.0.1:6379 (`ray start` prints it), but is {address!r}."
        )
    advice = (
        "`ray start --head` prints the address (its port is 6379 by default); run this on a machine of the cluster. "
        "Without an address, Ray is started on this machine."
    )
    try:
        is_ray = _answers_like_ray(host, int(port))
    except (OSError, OverflowError) as error:
        raise InputError(f"No Ray cluster can be reached at {address} ({error}). {advice}") from error
    if not is_ray:
        raise InputError(f"The server at {address} is not a Ray cluster. {advice}")


def _answers_like_ray(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True  # it would not answer an unencrypted preface
        connection.sendall(HTTP2_PREFACE)
        try:
            answer = connection.recv(9, socket.MSG_WAITALL)
        except OSError:
            return False
        return len(answer) == 9 and answer[3] == SETTINGS_FRAME


@contextmanager
def ray_session(
    ray: Any, workers: int | None, gpus: int, threads: int | None, address: str | None
) -> Iterator[RayCapacity]:
    """A connection to Ray during a run; an existing one is used and left open."""
    if ray.is_initialized():
        yield _cluster_capacity(ray, workers, gpus, threads)
        return
    try:
        if address is None:
            yield _start_local(ray, workers, gpus, threads)
        else:
            _connect(ray, address=address)
            yield _cluster_capacity(ray, workers, gpus, threads)
    finally:
        ray.shutdown()


def _start_local(ray: Any, workers: int | None, gpus: int, threads: int | None) -> RayCapacity:
    count, each = resources.divide_cores(workers, gpus, threads)
    # The workers get the import path of this process. Those of a cluster have their own folders.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with resources.environment({**resources.thread_environment(each), "PYTHONPATH": paths}):
        # "local": otherwise Ray would join any cluster that it finds on this machine.
        _connect(ray, address="local", num_cpus=count * each, num_gpus=gpus, include_dashboard=False)
    return RayCapacity(each, _gpu_share(count, gpus), TASKS_PER_WORKER * count)


def _connect(ray: Any, **options: Any) -> None:
    try:
        with resources.environment(QUIET):
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = "on this machine" if options["address"] == "local" else f"at {options['address']}"
        raise InputError(
            f"Cannot use Ray {where}: {error}. Its logs are in /tmp/ray/session_latest/logs. To join a cluster, this "
            "machine must be part of it, with the same versions of Python and Ray; if the cluster needs a token, which "
            "Ray finds by itself, set RAY_AUTH_MODE=token."
        ) from error


def _cluster_capacity(ray: Any, workers: int | None, gpus: int, threads: int | None) -> RayCapacity:
    """Refuse what the cluster does not have, for which Ray would wait forever."""
    each = threads or 1
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most_cpus = max((machine.get("CPU", 0) for machine in machines), default=0)
    if most_cpus < each:
        raise InputError(f"threads is {each}, but no machine of the Ray cluster offers more than {most_cpus:g} CPUs.")
    available = sum(machine.get("GPU", 0) for machine in machines)
    if available < gpus:
        raise InputError(f"gpus is {gpus}, but the Ray cluster offers {available:g}. Use fewer, or add machines.")
    slots = int(sum(machine.get("CPU", 0) // each for machine in machines))
    count = workers or gpus or slots
    # Ray runs as many tasks as fit; tasks may only wait in Ray if that is no more than `workers`.
    return RayCapacity(each, _gpu_share(count, gpus), TASKS_PER_WORKER * count if slots <= count else count)


def _gpu_share(workers: int, gpus: int) -> float:
    """The share of a GPU per worker, so that all fit; Ray counts in ten-thousandths."""
    return math.floor(10_000 / math.ceil(workers / gpus)) / 10_000 if gpus else 0.0
