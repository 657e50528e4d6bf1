"""Executors: the same tasks run in this process, in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

from intertwine.errors import InputError, did_you_mean
from intertwine.lab.study.executors.base import Executor, Outcome, Serial
from intertwine.lab.study.executors.pool import Processes
from intertwine.lab.study.executors.ray_cluster import RayCluster

__all__ = ["EXECUTORS", "Executor", "Outcome", "Processes", "RayCluster", "Serial", "executor"]

#: The names `executor` knows.
EXECUTORS = ("serial", "processes", "ray")


def executor(
    name: str,
    workers: int | None = None,
    gpus: int = 0,
    address: str | None = None,
    threads: int | None = None,
) -> Executor:
    """The executor of that name; what it needs is looked for at once: Ray, its cluster, the GPUs.

    Args:
        name: "serial", "processes" or "ray".
        workers: how many tasks run at once; by default one per GPU asked for, else one per core.
        gpus: how many GPUs the workers share, one after another; with more workers than GPUs, several share one.
        address: of a Ray cluster that runs already, "host:port"; without it, Ray is started on this machine.
        threads: of each worker; by default the cores divided by the workers, and one on a cluster.

    >>> from intertwine.lab.study.executors import executor
    >>> def work(task, shared):
    ...     return task + shared["more"]
    >>> [outcome.result for outcome in executor("serial").run([1, 2], work, {"more": 10})]
    [11, 12]
    """
    if name not in EXECUTORS:
        raise InputError(
            f"An executor called {name!r} was asked for, and there is none. {did_you_mean(name, EXECUTORS)}"
            f"Take one of: {', '.join(EXECUTORS)}."
        )
    for what, number, least in (("workers", workers, 1), ("gpus", gpus, 0), ("threads", threads, 1)):
        if number is not None and number < least:
            raise InputError(f"{what}={number} was asked for; give {least} or more, or leave it out.")
    if address is not None and name != "ray":
        raise InputError(f"address={address!r} was given, but only ray joins a cluster, not {name}. Leave it out.")
    if name == "serial":
        return _serial(workers, gpus, threads)
    chosen = Processes(workers, gpus, threads) if name == "processes" else RayCluster(workers, gpus, threads, address)
    chosen.check()  # now, not after hours of training what the tasks need
    return chosen


def _serial(workers: int | None, gpus: int, threads: int | None) -> Executor:
    """One worker, this process; anything else was meant for another executor."""
    if workers not in (None, 1):
        raise InputError(
            f"workers={workers} was asked for, but serial runs one task at a time. Take processes, or leave it out."
        )
    if gpus:
        raise InputError(
            f"gpus={gpus} was asked for, but serial runs in this process, which has its GPUs already. "
            "Leave gpus out, or take processes."
        )
    return Serial(threads)
