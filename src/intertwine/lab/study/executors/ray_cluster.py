"""Tasks on Ray: a local instance started for the run, or a running cluster."""

from __future__ import annotations

import importlib
import logging
import math
import os
import pickle
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    run_pickled,
    unpickle_outcome,
)
from intertwine.lab.study.executors.resources import (
    environment,
    gpu_names,
    limit_torch_threads,
    pool_size,
    thread_environment,
    threads_each,
)

# ----------------------------------------------------------------------------------------------------
# The connection to Ray: started on this machine and ended again, joined by its address, or used as it is.


#: Read by Ray when it is imported or started: no statistics are sent, and no log lines of Ray's reach the terminal.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
#: Seconds that a cluster gets to answer.
CONNECT_SECONDS = 3.0
#: How every client of HTTP/2 begins, which Ray speaks: the fixed words, then a frame of settings with none in it.
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS_FRAME = 4


@dataclass(frozen=True)
class RayCapacity:
    """What a run may take of Ray: threads and the share of a GPU for each task, and how many tasks it is given."""

    threads: int
    gpu_share: float
    in_flight: int


def load_ray() -> Any:
    """Ray, if it is installed."""
    try:
        with environment(QUIET):
            return importlib.import_module("ray")
    except ImportError as error:
        raise InputError(
            f"The ray executor was asked for, but Ray is not installed ({error}). "
            "Install it with: pip install 'intertwine[cluster]'. Or take processes, which needs nothing more."
        ) from error


def check_address(ray: Any, address: str) -> None:
    """Refuse an address where no Ray answers, in seconds; Ray itself would try for minutes."""
    if ray.is_initialized():
        raise InputError(
            f"address={address!r} was given, but this process is connected to a Ray already, at "
            f"{ray.get_runtime_context().gcs_address}. Leave the address out to use that one, or call "
            "ray.shutdown() first."
        )
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit()) or "/" in host:
        raise InputError(
            f"address={address!r} is not of the form host:port, such as 10.0.0.1:6379, which `ray start` prints."
        )
    advice = (
        "`ray start --head` prints the right address (port 6379 unless told otherwise); run this on a machine of the "
        "cluster. Without an address, Ray is started on this machine."
    )
    try:
        answer = _greeted(host, int(port))
    except (OSError, OverflowError) as error:
        raise InputError(f"No Ray cluster can be reached at {address} ({error}). {advice}") from error
    if not answer:
        raise InputError(f"Something answers at {address}, but it is not a Ray cluster. {advice}")


def _greeted(host: str, port: int) -> bool:
    """Whether what listens there answers as Ray does."""
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as line:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True  # it would not answer to an open greeting
        line.sendall(HTTP2_GREETING)
        try:
            answer = line.recv(9, socket.MSG_WAITALL)
        except OSError:
            return False
        return len(answer) == 9 and answer[3] == SETTINGS_FRAME


@contextmanager
def ray_session(
    ray: Any, workers: int | None, gpus: int, threads: int | None, address: str | None
) -> Iterator[RayCapacity]:
    """A connection to Ray for the time of a run; ended is only what was begun here."""
    if ray.is_initialized():
        yield _room_in_a_cluster(ray, workers, gpus, threads)
        return
    try:
        if address is None:
            yield _start(ray, workers, gpus, threads)
        else:
            _connect(ray, address=address)
            yield _room_in_a_cluster(ray, workers, gpus, threads)
    finally:
        ray.shutdown()


def _start(ray: Any, workers: int | None, gpus: int, threads: int | None) -> RayCapacity:
    count = pool_size(workers, gpus)
    each = threads_each(count, threads)
    # The workers find what this process finds. Those of a cluster have their own folders.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with environment({**thread_environment(each), "PYTHONPATH": paths}):
        # "local": without it Ray would join any cluster that it finds on this machine.
        _connect(ray, address="local", num_cpus=count * each, num_gpus=gpus, include_dashboard=False)
    return RayCapacity(each, _gpu_share(count, gpus), TASKS_PER_WORKER * count)


def _connect(ray: Any, **options: Any) -> None:
    try:
        with environment(QUIET):
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = "on this machine" if options["address"] == "local" else f"at {options['address']}"
        raise InputError(
            f"Ray {where} could not be used: {error}. Its logs are in /tmp/ray/session_latest/logs. To join a cluster, "
            "this machine must be part of it, with the same versions of Python and Ray; and where the cluster asks for "
            "a token, which Ray finds by itself, RAY_AUTH_MODE=token must be set."
        ) from error


def _room_in_a_cluster(ray: Any, workers: int | None, gpus: int, threads: int | None) -> RayCapacity:
    """Refuse what no machine of the cluster has, for which Ray would wait without end."""
    each = threads or 1
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    widest = max((machine.get("CPU", 0) for machine in machines), default=0)
    if widest < each:
        raise InputError(
            f"threads={each} were asked for, but no machine of the Ray cluster offers more than {widest:g} CPUs."
        )
    there = sum(machine.get("GPU", 0) for machine in machines)
    if there < gpus:
        raise InputError(
            f"gpus={gpus} was asked for, but the Ray cluster offers {there:g}. Ask for fewer, or add machines."
        )
    fitting = int(sum(machine.get("CPU", 0) // each for machine in machines))
    count = workers or gpus or fitting
    # Ray runs as many tasks as there is room for; only where that is no more than `workers` may some wait with it.
    return RayCapacity(each, _gpu_share(count, gpus), TASKS_PER_WORKER * count if fitting <= count else count)


def _gpu_share(workers: int, gpus: int) -> float:
    """The part of a GPU for each worker, so that they all fit; Ray counts in ten-thousandths."""
    if not gpus:
        return 0.0
    return math.floor(10_000 / math.ceil(workers / gpus)) / 10_000


# ----------------------------------------------------------------------------------------------------
# Tasks on Ray: an instance on this machine, started for the run, or a cluster that runs already.


#: The work and the shared objects of the latest run, in a worker, by the name of the object they came in.
_unpacked: dict[str, tuple[Work[Any, Any], Shared]] = {}


@dataclass(frozen=True)
class RayCluster:
    """Runs tasks on Ray (`pip install 'intertwine[cluster]'`).

    Without an address Ray is started on this machine for the run and ended after it, unless this process is connected
    to a Ray already: then that one is used and left as it is. `shared` lies in Ray's object store, and every worker
    reads it once; NumPy arrays in it are read-only there.

    >>> from intertwine.lab.study.executors.ray_cluster import RayCluster
    >>> RayCluster(workers=8, address="head.example:6379").address
    'head.example:6379'
    """

    workers: int | None = None
    gpus: int = 0
    threads: int | None = None
    address: str | None = None

    def check(self) -> Any:
        """Ray, if it is installed and can be reached, and the GPUs are there."""
        ray = load_ray()
        if self.address is not None:
            check_address(ray, self.address)
        elif not ray.is_initialized():
            gpu_names(self.gpus)
        return ray

    def run(self, tasks: Iterable[T], work: Work[T, R], shared: Shared) -> Iterator[Outcome[T, R]]:
        """See `Executor.run`."""
        return self._outcomes(self.check(), iter(tasks), work, shared)

    def _outcomes(self, ray: Any, tasks: Iterator[Any], work: Work[Any, Any], shared: Shared) -> Iterator[Any]:
        with ray_session(ray, self.workers, self.gpus, self.threads, self.address) as room:
            yield from _flow(ray, room, tasks, _stored(ray, work, shared))


@dataclass
class _Flight:
    """A task that Ray has."""

    task: Any
    data: bytes
    attempts: int = 1


def _flow(ray: Any, room: RayCapacity, tasks: Iterator[Any], stored: list[Any]) -> Iterator[Outcome[Any, Any]]:
    """Keep Ray supplied, and hand on what it finishes; a task whose worker died is begun again."""
    # Ray's own retries would not tell how often a task was begun.
    remote = ray.remote(_attempted).options(num_cpus=room.threads, num_gpus=room.gpu_share, max_retries=0)
    flying: dict[Any, _Flight] = {}

    def begin(flight: _Flight) -> None:
        flying[remote.remote(flight.data, stored, room.threads)] = flight

    try:
        while True:
            while len(flying) < room.in_flight and (flight := _next(tasks)):
                if isinstance(flight, Outcome):
                    yield flight
                else:
                    begin(flight)
            if not flying:
                return
            done, _ = ray.wait(list(flying), num_returns=1)
            flight = flying.pop(done[0])
            outcome = _landed(ray, flight, done[0])
            if outcome is not None:
                yield outcome
            else:
                begin(_Flight(flight.task, flight.data, flight.attempts + 1))
    finally:
        for ref in flying:
            ray.cancel(ref, force=True)


def _next(tasks: Iterator[Any]) -> _Flight | Outcome[Any, Any] | None:
    for task in tasks:
        try:
            return _Flight(task, pickle.dumps(task))
        except Exception as error:  # noqa: BLE001 - a foreign object may raise anything when it is pickled
            return Outcome(task, error=format_error(error))
    return None


def _landed(ray: Any, flight: _Flight, ref: Any) -> Outcome[Any, Any] | None:
    """The outcome of a task; None where its worker died and it is to be begun again."""
    raised = ray.exceptions
    try:
        result, error = ray.get(ref)
    except (raised.WorkerCrashedError, raised.NodeDiedError, raised.OutOfMemoryError, raised.ObjectLostError) as death:
        if flight.attempts < ATTEMPTS:
            return None
        result, error = b"", retries_exhausted(ATTEMPTS, str(death).partition(".")[0])
    except raised.RayError as problem:  # errors of the task itself are returned, not raised
        raise InputError(
            f"Ray's workers cannot read the work that was sent to them: {str(problem).splitlines()[-1]}. "
            "Every machine of the cluster needs intertwine and the modules of the work."
        ) from None
    return unpickle_outcome(flight.task, result, error, flight.attempts)


def _stored(ray: Any, work: Work[Any, Any], shared: Shared) -> list[Any]:
    """A list of one reference: Ray would read a bare one anew for every task."""
    try:
        return [ray.put((work, shared))]
    except TypeError as error:
        raise InputError(
            f"The work {getattr(work, '__qualname__', work)!r} and what its tasks share must be picklable to reach "
            f"Ray's workers, and they are not: {str(error).splitlines()[0]}. Share data, not open files or locks."
        ) from error


def _attempted(task: bytes, stored: list[Any], threads: int) -> tuple[bytes, str | None]:
    """In a worker: do one task."""
    import ray

    name = stored[0].hex()
    if name not in _unpacked:
        _unpacked.clear()
        _unpacked[name] = ray.get(stored[0])
        limit_torch_threads(threads)
    work, shared = _unpacked[name]
    return run_pickled(work, task, shared)
