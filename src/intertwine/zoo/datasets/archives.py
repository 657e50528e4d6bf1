"""Arrays by name from an `.npz` archive."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from intertwine.errors import InputError
from intertwine.zoo.datasets.sources import remedy


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
