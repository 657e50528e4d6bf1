"""Tasks on Ray: an instance on this machine, started for the run, or a cluster that runs already."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from intertwine.errors import InputError
from intertwine.study.executors.base import (
    ATTEMPTS,
    Outcome,
    R,
    Shared,
    T,
    Work,
    carried_out,
    given_up,
    told,
    unpacked,
)
from intertwine.study.executors.pinning import gpu_names, hold_torch
from intertwine.study.executors.ray_session import Room, check_address, load_ray, session

#: The work and the shared objects of the latest run, in a worker, by the name of the object they came in.
_unpacked: dict[str, tuple[Work[Any, Any], Shared]] = {}


@dataclass(frozen=True)
class RayCluster:
    """Runs tasks on Ray (`pip install 'intertwine[cluster]'`).

    Without an address Ray is started on this machine for the run and ended after it, unless this process is connected
    to a Ray already: then that one is used and left as it is. `shared` lies in Ray's object store, and every worker
    reads it once; NumPy arrays in it are read-only there.

    >>> from intertwine.study.executors.ray_cluster import RayCluster
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
        with session(ray, self.workers, self.gpus, self.threads, self.address) as room:
            yield from _flow(ray, room, tasks, _stored(ray, work, shared))


@dataclass
class _Flight:
    """A task that Ray has."""

    task: Any
    data: bytes
    attempts: int = 1


def _flow(ray: Any, room: Room, tasks: Iterator[Any], stored: list[Any]) -> Iterator[Outcome[Any, Any]]:
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
            return Outcome(task, error=told(error))
    return None


def _landed(ray: Any, flight: _Flight, ref: Any) -> Outcome[Any, Any] | None:
    """The outcome of a task; None where its worker died and it is to be begun again."""
    raised = ray.exceptions
    try:
        result, error = ray.get(ref)
    except (raised.WorkerCrashedError, raised.NodeDiedError, raised.OutOfMemoryError, raised.ObjectLostError) as death:
        if flight.attempts < ATTEMPTS:
            return None
        result, error = b"", given_up(ATTEMPTS, str(death).partition(".")[0])
    except raised.RayError as problem:  # errors of the task itself are returned, not raised
        raise InputError(
            f"Ray's workers cannot read the work that was sent to them: {str(problem).splitlines()[-1]}. "
            "Every machine of the cluster needs intertwine and the modules of the work."
        ) from None
    return unpacked(flight.task, result, error, flight.attempts)


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
        hold_torch(threads)
    work, shared = _unpacked[name]
    return carried_out(work, task, shared)
