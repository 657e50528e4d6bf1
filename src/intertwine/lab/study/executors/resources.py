"""The share of a machine that one worker gets: its threads and its GPU."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from intertwine.errors import InputError

#: Every library that starts threads of its own reads one of these when it is loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ONE_AT_A_TIME = threading.RLock()


def cores() -> int:
    """How many cores this process may use; fewer than the machine has where it is held to some of them.

    >>> from intertwine.lab.study.executors.resources import cores
    >>> cores() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pool_size(workers: int | None, gpus: int) -> int:
    """How many workers there are: as asked, else one per GPU, else one per core.

    >>> from intertwine.lab.study.executors.resources import pool_size
    >>> pool_size(None, 4), pool_size(3, 4)
    (4, 3)
    """
    return workers or gpus or cores()


def threads_each(workers: int, threads: int | None) -> int:
    """The threads of each worker: as asked, else an equal share of the cores.

    >>> from intertwine.lab.study.executors.resources import threads_each
    >>> threads_each(10_000, None), threads_each(2, 3)
    (1, 3)
    """
    return threads or max(1, cores() // workers)


def thread_environment(threads: int) -> dict[str, str]:
    """The variables that hold libraries to a number of threads.

    >>> from intertwine.lab.study.executors.resources import thread_environment
    >>> thread_environment(2)["OMP_NUM_THREADS"]
    '2'
    """
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def gpu_names(gpus: int) -> list[str]:
    """The names of the first GPUs that this process may use.

    >>> from intertwine.lab.study.executors.resources import gpu_names
    >>> gpu_names(0)
    []
    """
    if not gpus:
        return []
    import torch

    there = torch.cuda.device_count()
    if there < gpus:
        raise InputError(
            f"gpus={gpus} was asked for, but torch finds {there} on this machine. "
            f"Ask for fewer, or look at {GPU_VARIABLE} and at what nvidia-smi lists."
        )
    allowed = os.environ.get(GPU_VARIABLE)
    names = [name.strip() for name in allowed.split(",")] if allowed else [str(index) for index in range(there)]
    return names[:gpus]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables hold for what is started inside; afterwards all is as before.

    >>> import os
    >>> from intertwine.lab.study.executors.resources import environment
    >>> with environment({"AN_EXAMPLE": "1"}):
    ...     os.environ["AN_EXAMPLE"]
    '1'
    >>> "AN_EXAMPLE" in os.environ
    False
    """
    with _ONE_AT_A_TIME:  # two threads that start workers would put back each other's values
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """torch has so many threads inside; None leaves it alone.

    >>> import torch
    >>> from intertwine.lab.study.executors.resources import torch_threads
    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    """
    if threads is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def limit_torch_threads(threads: int) -> None:
    """Hold torch to so many threads for the rest of this process, if it is loaded.

    Loaded later, it reads the variables. Loading it here would cost seconds that a task may not need.
    """
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)
