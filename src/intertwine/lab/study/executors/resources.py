"""The share of a machine that each worker gets: threads and GPUs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from intertwine.errors import InputError

#: Libraries read these variables when they are loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ENVIRONMENT_LOCK = threading.RLock()


def divide_cores(workers: int | None, gpus: int, threads: int | None) -> tuple[int, int]:
    """The number of workers (one per GPU, else one per core, by default) and the threads of each.

    >>> divide_cores(None, 4, 2), divide_cores(3, 4, 1), divide_cores(10_000, 0, None)
    ((4, 2), (3, 1), (10000, 1))
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = workers or gpus or cores
    return count, threads or max(1, cores // count)


def thread_environment(threads: int) -> dict[str, str]:
    """The environment variables that limit the threads of libraries.

    >>> thread_environment(2)["OMP_NUM_THREADS"]
    '2'
    """
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def gpu_names(gpus: int) -> list[str]:
    """The names of the first GPUs that this process may use.

    >>> gpu_names(0)
    []
    """
    if not gpus:
        return []
    import torch

    count = torch.cuda.device_count()
    if count < gpus:
        raise InputError(
            f"gpus is {gpus}, but torch finds {count} on this machine. Use fewer, or check {GPU_VARIABLE} and "
            "nvidia-smi."
        )
    visible = os.environ.get(GPU_VARIABLE)
    names = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(count)]
    return names[:gpus]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside; restored afterwards.

    >>> with environment({"AN_EXAMPLE": "1"}):
    ...     os.environ["AN_EXAMPLE"]
    '1'
    >>> "AN_EXAMPLE" in os.environ
    False
    """
    with _ENVIRONMENT_LOCK:  # otherwise two threads would restore each other's values
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
    """Set the number of torch threads inside; None leaves it unchanged.

    >>> import torch
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
    """Set the number of torch threads for the rest of this process, if torch is loaded.

    If it is loaded later, it reads the environment variables.
    """
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)
