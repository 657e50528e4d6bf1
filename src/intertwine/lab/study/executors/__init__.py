"""Executors: the same tasks run in this process, in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

from intertwine.errors import InputError, unknown_name
from intertwine.lab.study.executors.base import Executor, Outcome, Serial
from intertwine.lab.study.executors.pool import Processes
from intertwine.lab.study.executors.ray_cluster import RayCluster

__all__ = ["EXECUTORS", "Executor", "Outcome", "Processes", "RayCluster", "Serial", "executor"]

#: The names of the executors.
EXECUTORS = ("serial", "processes", "ray")


def executor(
    name: str, workers: int | None = None, gpus: int = 0, address: str | None = None, threads: int | None = None
) -> Executor:
    """The executor with that name, after checking that Ray, its cluster and the GPUs are available.

    Args:
        name: "serial", "processes" or "ray".
        workers: how many tasks run at once; by default one per GPU, else one per core.
        gpus: how many GPUs the workers share; if there are more workers than GPUs, several workers share one.
        address: "host:port" of a running Ray cluster; by default Ray is started on this machine.
        threads: of each worker; by default the cores divided by the workers, and one on a cluster.

    >>> from intertwine.lab.study.executors import executor
    >>> def work(task, shared):
    ...     return task + shared["more"]
    >>> [outcome.result for outcome in executor("serial").run([1, 2], work, {"more": 10})]
    [11, 12]
    """
    if name not in EXECUTORS:
        raise InputError(unknown_name("executor", name, EXECUTORS))
    for what, number, least in (("workers", workers, 1), ("gpus", gpus, 0), ("threads", threads, 1)):
        if number is not None and number < least:
            raise InputError(f"{what} must be at least {least}, but is {number}.")
    if address is not None and name != "ray":
        raise InputError(f"address={address!r} has no effect with {name}: only ray joins a cluster. Leave it out.")
    if name == "serial":
        if workers not in (None, 1):
            raise InputError(f"serial runs one task at a time, but workers is {workers}. Use processes.")
        if gpus:
            raise InputError(f"serial runs in this process and uses its GPUs, but gpus is {gpus}. Use processes.")
        return Serial(threads)
    chosen = Processes(workers, gpus, threads) if name == "processes" else RayCluster(workers, gpus, threads, address)
    chosen.check()  # now, before networks are trained
    return chosen
