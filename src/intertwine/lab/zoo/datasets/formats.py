"""Readers of file formats that run no code: .npz archives, and pickles restricted to plain data; and imports of
optional packages.
"""

from __future__ import annotations

import importlib
import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets.downloads import remedy

# ----------------------------------------------------------------------------------------------------
# Packages that only some data sets need, imported when they are needed.


def extra(module: str, package: str, purpose: str) -> Any:
    """A module of an optional package.

    >>> extra("zlib", "zlib", "squeezing").crc32(b"")
    0
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"Reading {purpose} needs {package}, which is not installed ({error}). "
            "Install it with: pip install 'intertwine[data]'"
        ) from error


# ----------------------------------------------------------------------------------------------------
# Arrays by name from an `.npz` archive.


def read_arrays(
    file: Path, choices: tuple[tuple[str, ...], ...], name: str
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The arrays of whole numbers from 0 to 255 in an archive, as bytes, and the names they were found under.

    Args:
        file: the archive; nothing in it is ever unpickled.
        choices: sets of names, of which the first that is there is taken.
        name: the data set, for messages.
    """
    try:
        with file.open("rb") as stream, np.load(stream) as archive:
            held = list(archive.files)
            names = next((names for names in choices if set(names) <= set(held)), ())
            arrays = [archive[each] for each in names]
    except (zipfile.BadZipFile, EOFError, ValueError, OSError, TypeError, zlib.error) as error:
        raise InputError(f"{file} could not be read as an .npz archive ({error}). {remedy(name)}.") from error
    if not names:
        expected = " or ".join(", ".join(names) for names in choices)
        raise InputError(f"{file} holds the arrays {', '.join(held)}; expected {expected}. {remedy(name)}.")
    return [_as_bytes(array, f"{file}: {each}") for array, each in zip(arrays, names, strict=True)], names


def _as_bytes(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype.kind not in "ui" or (array.size and not 0 <= array.min() <= array.max() <= 255):
        raise InputError(f"{where} should hold whole numbers from 0 to 255, but holds {array.dtype} {array.shape}.")
    return array.astype(np.uint8, copy=False)


# ----------------------------------------------------------------------------------------------------
# Pickles read as data: a dict of arrays of bytes, lists, text and numbers, and nothing that runs code.
#
# The official Python version of CIFAR-10 comes as pickles. A pickle is a program that may call anything it can name. Here
# it can name five things only, and gets an inert stand-in for each of them; numpy's own unpickling is not involved.


def read_pickle(contents: bytes, where: str | Path) -> dict[str, Any]:
    """The dict in a pickle, with its arrays as numpy arrays and its keys as text.

    >>> read_pickle(pickle.dumps({b"labels": [1, 2]}, protocol=2), "example")
    {'labels': [1, 2]}

    Raises:
        InputError: the pickle names anything but bytes and arrays of bytes, is damaged, or holds no dict.
    """
    try:
        found = _Reader(io.BytesIO(contents), encoding="bytes").load()
    except _Refused as error:
        raise InputError(
            f"{where} was refused: it is a pickle that asks for {error}, and reading it could run code. A file of "
            "this data set holds lists, text, numbers and arrays of bytes; take the official one or the binary one."
        ) from error
    except Exception as error:  # a damaged pickle can make its reader stumble anywhere
        raise InputError(f"{where} could not be read as a pickle ({type(error).__name__}: {error}).") from error
    if not isinstance(found, dict):
        raise InputError(f"{where} should hold a dict, but holds a {type(found).__name__}.")
    return {_text(key): value.array(where) if isinstance(value, _Array) else value for key, value in found.items()}


def _text(key: Any) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


class _Refused(Exception):
    """The pickle names something it does not need; the message is that name."""


class _StandIn:
    """What a pickle gets instead of the thing it names: remembers what it is told and does nothing.

    Having `__setstate__` on every one of them keeps a pickle from writing attributes onto the classes themselves.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_StandIn):
    """Stands in for numpy.dtype."""


class _Array(_StandIn):
    """Stands in for numpy.ndarray."""

    def array(self, where: str | Path) -> np.ndarray:
        """The array that was meant."""
        try:
            _, shape, dtype, columns_first, raw = self.state
            kind = dtype.arguments[0]
            if _text(kind) not in ("u1", "|u1", "uint8"):
                raise ValueError(f"its elements are {_text(kind)!r}, not bytes")
            return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if columns_first else "C").copy()
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise InputError(f"{where} holds an array that could not be read ({error}).") from error


class _Reconstruct(_StandIn):
    """Stands in for numpy's function that makes an empty array, to be filled afterwards."""

    def __new__(cls, *arguments: Any) -> Any:
        return _Array(*arguments)


class _Encode(_StandIn):
    """Stands in for `_codecs.encode`: how Python 3 writes bytes into a pickle that Python 2 can read."""

    def __new__(cls, text: str, encoding: str | bytes = "latin1") -> Any:
        if encoding not in ("latin1", b"latin1"):
            raise _Refused(f"the encoding {encoding!r}")
        return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encode,
}


class _Reader(pickle.Unpickler):
    """An unpickler that knows the allowed names only."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _ALLOWED:
            raise _Refused(f"{module}.{name}")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("an object from outside the file")
