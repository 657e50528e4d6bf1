"""The numeric precision of training, and the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from intertwine.errors import InputError, unknown_name

NAMES = ("float64", "float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Precision:
    """A precision on a device: weights are in `dtype`, images and hidden features in `features`."""

    name: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, gradients and the optimizer."""
        return torch.float64 if self.name == "float64" else torch.float32

    @property
    def features(self) -> torch.dtype:
        """Of the images that a network reads."""
        return torch.bfloat16 if self.name == "bfloat16" else self.dtype

    @property
    def fast(self) -> bool:
        """Whether the fused Triton kernels run the layers they support."""
        return self.name == "bfloat16" and self.device.type == "cuda" and find_spec("triton") is not None

    def cast(self) -> AbstractContextManager[object]:
        """The autocast context of torch for bfloat16; no effect otherwise."""
        if self.name != "bfloat16":
            return nullcontext()
        # without a cache, because a recorded step must cast the weights at every replay
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    @contextmanager
    def flags(self) -> Iterator[None]:
        """Within it, torch's GPU libraries use TF32 only if this precision is tf32, and are deterministic."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = bool(matmul.allow_tf32), bool(cudnn.allow_tf32), bool(cudnn.deterministic)
        matmul.allow_tf32 = cudnn.allow_tf32 = self.name == "tf32"
        cudnn.deterministic = True
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before


def precision(name: str | None, device: torch.device) -> Precision:
    """The precision of that name; by default bfloat16 on a GPU and float32 elsewhere.

    >>> precision(None, torch.device("cpu")).name
    'float32'
    """
    name = name or ("bfloat16" if device.type == "cuda" else "float32")
    if name not in NAMES:
        raise InputError(unknown_name("precision", name, NAMES))
    if name == "tf32" and device.type != "cuda":
        raise InputError(f"The precision tf32 needs a GPU, but the device is {device}. Use float32 there.")
    return Precision(name, device)


def find_device(name: str | None, here: bool = True) -> torch.device:
    """The device of that name; by default a GPU if there is one.

    Args:
        name: such as "cpu", "cuda" or "cuda:1".
        here: whether this machine must have the device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"Unknown device {name!r}. Use a device of torch such as cpu, cuda or cuda:1.") from error
    if here and device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"The device {name!r} needs a GPU, but torch finds none. Use the device cpu.")
    return device
