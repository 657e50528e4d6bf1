"""Sums: of files as they were published, and of a data set's contents whatever files they came in."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor

from intertwine.errors import InputError
from intertwine.zoo.datasets.sources import owner, remedy

CHUNK = 1 << 20


def sum_of_contents(*tensors: Tensor) -> str:
    """The sha256 of some tensors' shapes and values.

    >>> import torch
    >>> sum_of_contents(torch.zeros(2, 3)) == sum_of_contents(torch.zeros(3, 2))
    False
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def md5_of_file(file: Path) -> str:
    """The md5 sum of a file, read piece by piece."""
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def verify(contents: bytes, where: str | Path, name: str, md5: str, size: int) -> None:
    """Raise unless some bytes have the md5 sum that was published for them.

    Args:
        contents: what was read.
        where: the file it was read from, for the message.
        name: the data set the file belongs to.
        md5: the published sum.
        size: the published size; only tells a file that is cut short from one that holds something else.

    >>> verify(b"hello", "greeting", "mnist", "5d41402abc4b2a76b9719d911017c592", 5)
    """
    found = hashlib.md5(contents, usedforsecurity=False).hexdigest()
    if found == md5:
        return
    if len(contents) < size:
        raise cut_short(where, name, size, len(contents))
    whose = owner(found)
    belongs = f" (it belongs to {whose})" if whose else ""
    raise InputError(
        f"{where} is not the file that was published for {name}: its md5 sum should be {md5} but is {found}{belongs}. "
        f"{remedy(name)}, or pass check=False to take the file as it is."
    )


def cut_short(where: str | Path, name: str, expected: int, found: int) -> InputError:
    """The error for a file that ends too early."""
    return InputError(f"{where} is cut short: it should hold {expected} bytes but holds {found}. {remedy(name)}.")
