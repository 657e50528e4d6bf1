"""Precision: in which numbers networks are trained, and what that asks of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from intertwine.errors import InputError

NAMES = ("float64", "float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Precision:
    """Weights are kept in `dtype`; images and hidden features are in `features`."""

    name: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, gradients and the optimizer."""
        return torch.float64 if self.name == "float64" else torch.float32

    @property
    def features(self) -> torch.dtype:
        """Of the images a network is given."""
        return torch.bfloat16 if self.name == "bfloat16" else self.dtype

    @property
    def fast(self) -> bool:
        """Whether our kernels take the layers they know."""
        return self.name == "bfloat16" and self.device.type == "cuda" and find_spec("triton") is not None

    def cast(self) -> AbstractContextManager[object]:
        """Within it, torch's own layers choose their numbers."""
        if self.name != "bfloat16":
            return nullcontext()
        # a recorded step must cast the weights each time it is replayed
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    @contextmanager
    def flags(self) -> Iterator[None]:
        """Within it, torch's GPU libraries use TF32 only where it was asked for, and give the same bits every time."""
        backends = torch.backends
        found = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.deterministic
        before = tuple(map(bool, found))
        _set_flags(self.name == "tf32", self.name == "tf32", True)
        try:
            yield
        finally:
            _set_flags(*before)


def _set_flags(products: bool, convolutions: bool, deterministic: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = products
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cudnn.deterministic = deterministic


def precision(name: str | None, device: torch.device) -> Precision:
    """The precision of that name; without one, bfloat16 on a GPU and float32 elsewhere.

    >>> precision(None, torch.device("cpu")).name
    'float32'
    """
    name = name or ("bfloat16" if device.type == "cuda" else "float32")
    if name not in NAMES:
        raise InputError(f"The precision {name!r} was asked for; it is one of {', '.join(NAMES)}.")
    if name == "tf32" and device.type != "cuda":
        raise InputError(f"tf32 was asked for on {device}, but only GPUs have it. Use float32 there.")
    return Precision(name, device)


def find_device(name: str | None, here: bool = True) -> torch.device:
    """The device of that name; without one, a GPU if there is one. `here`: whether this machine must have it."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"The device {name!r} was asked for; torch knows cpu, cuda, cuda:1 and the like.") from error
    if here and device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"The device {name!r} was asked for, but torch finds no GPU here. Use the device cpu.")
    return device
