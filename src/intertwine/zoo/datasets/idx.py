"""The idx format of MNIST: a magic number, the sizes of the axes, and the bytes; plain or gzipped."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from intertwine.errors import InputError
from intertwine.zoo.datasets.checksums import cut_short, verify
from intertwine.zoo.datasets.sources import remedy

#: The first four bytes of a file of bytes, less its number of axes.
MAGIC = 0x0800


def read_idx(file: Path, axes: int, name: str, md5: str | None = None) -> np.ndarray:
    """The array of bytes in an idx file.

    Args:
        file: gzipped if its name ends in `.gz`.
        axes: how many axes are expected: 3 for images, 1 for labels.
        name: the data set, for messages.
        md5: the sum of the unpacked file; None does not check it.

    Raises:
        InputError: another format, another number of axes, another length than the header says, or another sum.
    """
    contents = _unzipped(file, name) if file.suffix == ".gz" else file.read_bytes()
    magic = int.from_bytes(contents[:4], "big")
    if len(contents) < 4 or magic != MAGIC + axes:
        raise InputError(
            f"{file} is no idx file of bytes with {axes} axes: its magic number should be {MAGIC + axes:#010x} but is "
            f"{magic:#010x}. {remedy(name)}."
        )
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", contents[4:start].ljust(4 * axes, b"\0"))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(contents) < max(expected, start):
        raise cut_short(file, name, expected, len(contents))
    if md5 is not None:
        verify(contents, file, name, md5, expected)
    if len(contents) > expected:
        raise InputError(
            f"{file} should hold {expected} bytes by its own header, but holds {len(contents)}. {remedy(name)}."
        )
    return np.frombuffer(contents, np.uint8, offset=start).reshape(shape).copy()


def idx_bytes(array: np.ndarray) -> bytes:
    """The idx file of an array of bytes.

    >>> idx_bytes(np.array([7, 8], np.uint8)).hex(" ")
    '00 00 08 01 00 00 00 02 07 08'
    """
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return (MAGIC + array.ndim).to_bytes(4, "big") + sizes + np.ascontiguousarray(array, np.uint8).tobytes()


def _unzipped(file: Path, name: str) -> bytes:
    """What a gzipped file holds; as much of it as there is, when it ends too early, for the header says how much."""
    try:
        return zlib.decompressobj(wbits=31).decompress(file.read_bytes())
    except zlib.error as error:
        raise InputError(f"{file} is no gzip file, or a damaged one ({error}). {remedy(name)}.") from error
