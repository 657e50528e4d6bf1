"""Readers that never run code from a file: .npz archives, and pickles of plain data; imports of optional packages."""

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


def import_extra(module: str, package: str, purpose: str) -> Any:
    """Import a module of an optional package.

    >>> import_extra("zlib", "zlib", "compressed files").crc32(b"")
    0
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"Reading {purpose} needs {package}, which is not installed ({error}). "
            "Install it with: pip install 'intertwine[data]'"
        ) from error


def read_arrays(
    file: Path, choices: tuple[tuple[str, ...], ...], name: str
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The arrays of integers from 0 to 255 in an `.npz` archive, as bytes, and the names they were found under.

    Args:
        file: the archive; nothing in it is ever unpickled.
        choices: alternative sets of names; the first one in the archive is read.
        name: the data set, for messages.
    """
    try:
        with file.open("rb") as stream, np.load(stream) as archive:
            found = list(archive.files)
            names = next((names for names in choices if set(names) <= set(found)), ())
            arrays = [archive[each] for each in names]
    except (zipfile.BadZipFile, EOFError, ValueError, OSError, TypeError, zlib.error) as error:
        raise InputError(f"{file} could not be read as an .npz archive ({error}). {remedy(name)}.") from error
    if not names:
        expected = " or ".join(", ".join(names) for names in choices)
        raise InputError(f"{file} holds the arrays {', '.join(found)}; expected {expected}. {remedy(name)}.")
    for array, each in zip(arrays, names, strict=True):
        if array.dtype.kind not in "ui" or (array.size and not 0 <= array.min() <= array.max() <= 255):
            raise InputError(
                f"{file}: {each} should hold whole numbers from 0 to 255, but holds {array.dtype} {array.shape}."
            )
    return [array.astype(np.uint8, copy=False) for array in arrays], names


def read_pickle(contents: bytes, where: str | Path) -> dict[str, Any]:
    """The dict in a pickle, read as data: arrays of bytes as numpy arrays, lists, text and numbers.

    The official Python version of CIFAR-10 comes as pickles. A pickle is a program that may call anything it can name.
    Here it can name five things only, and gets a stand-in without effects for each; numpy's unpickling is not used.

    >>> read_pickle(pickle.dumps({b"labels": [1, 2]}, protocol=2), "example")
    {'labels': [1, 2]}

    Raises:
        InputError: the pickle names anything else, is damaged, or does not hold a dict.
    """
    try:
        found = _Reader(io.BytesIO(contents), encoding="bytes").load()
    except _Refused as error:
        raise InputError(
            f"{where} is a pickle that names {error}, so reading it could run code. A file of this data set holds "
            "lists, text, numbers and arrays of bytes; use the official one or the binary version."
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"{where} could not be read as a pickle ({type(error).__name__}: {error}).") from error
    if not isinstance(found, dict):
        raise InputError(f"{where} should hold a dict, but holds a {type(found).__name__}.")
    return {_text(key): value.array(where) if isinstance(value, _Array) else value for key, value in found.items()}


def _text(key: Any) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


class _Refused(Exception):
    """The pickle names something that is not allowed; the message is that name."""


class _StandIn:
    """What a pickle gets instead of the thing it names: it stores its arguments and does nothing.

    `__setstate__` on every stand-in keeps a pickle from setting attributes of the classes themselves.
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
        """The array that the pickle describes."""
        try:
            _, shape, dtype, columns_first, raw = self.state
            kind = dtype.arguments[0]
            if _text(kind) not in ("u1", "|u1", "uint8"):
                raise ValueError(f"its elements are {_text(kind)!r}, not bytes")
            return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if columns_first else "C").copy()
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise InputError(f"{where} holds an array that could not be read ({error}).") from error


class _Reconstruct(_StandIn):
    """Stands in for numpy's function that makes an empty array to be filled later."""

    def __new__(cls, *arguments: Any) -> Any:
        return _Array(*arguments)


class _Encode(_StandIn):
    """Stands in for `_codecs.encode`, with which Python 3 writes bytes into a pickle for Python 2."""

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
    """An unpickler that resolves the allowed names only."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _ALLOWED:
            raise _Refused(f"{module}.{name}")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("an object from outside the file")
