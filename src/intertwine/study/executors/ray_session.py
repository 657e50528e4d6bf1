"""The connection to Ray: started on this machine and ended again, joined by its address, or used as it is."""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from intertwine.errors import InputError
from intertwine.study.executors.base import DEPTH
from intertwine.study.executors.pinning import crew_size, environment, thread_environment, threads_each

#: Read by Ray when it is imported or started: no statistics are sent, and no log lines of Ray's reach the terminal.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
#: Seconds that a cluster gets to answer.
PATIENCE = 3.0
#: How every client of HTTP/2 begins, which Ray speaks: the fixed words, then a frame of settings with none in it.
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS_FRAME = 4


@dataclass(frozen=True)
class Room:
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
    with socket.create_connection((host, port), timeout=PATIENCE) as line:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True  # it would not answer to an open greeting
        line.sendall(HTTP2_GREETING)
        try:
            answer = line.recv(9, socket.MSG_WAITALL)
        except OSError:
            return False
        return len(answer) == 9 and answer[3] == SETTINGS_FRAME


@contextmanager
def session(ray: Any, workers: int | None, gpus: int, threads: int | None, address: str | None) -> Iterator[Room]:
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


def _start(ray: Any, workers: int | None, gpus: int, threads: int | None) -> Room:
    count = crew_size(workers, gpus)
    each = threads_each(count, threads)
    # The workers find what this process finds. Those of a cluster have their own folders.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with environment({**thread_environment(each), "PYTHONPATH": paths}):
        # "local": without it Ray would join any cluster that it finds on this machine.
        _connect(ray, address="local", num_cpus=count * each, num_gpus=gpus, include_dashboard=False)
    return Room(each, _gpu_share(count, gpus), DEPTH * count)


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


def _room_in_a_cluster(ray: Any, workers: int | None, gpus: int, threads: int | None) -> Room:
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
    return Room(each, _gpu_share(count, gpus), DEPTH * count if fitting <= count else count)


def _gpu_share(workers: int, gpus: int) -> float:
    """The part of a GPU for each worker, so that they all fit; Ray counts in ten-thousandths."""
    if not gpus:
        return 0.0
    return math.floor(10_000 / math.ceil(workers / gpus)) / 10_000
