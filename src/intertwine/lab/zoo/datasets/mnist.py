"""MNIST and Fashion-MNIST from idx files (plain or gzipped), or MNIST from `mnist.npz`."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets import downloads
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.downloads import UNPACKED, remedy, truncated_error, verify
from intertwine.lab.zoo.datasets.formats import read_arrays

#: The first four bytes of an idx file of bytes, minus its number of axes.
MAGIC = 0x0800
#: The four files: contents and number of axes.
FILES = (("train-images", 3), ("train-labels", 1), ("t10k-images", 3), ("t10k-labels", 1))
ARCHIVE = "mnist.npz"
#: Names of the four arrays in the archive: our own, and those in the file of Keras.
ARRAYS = (("train_images", "train_labels", "test_images", "test_labels"), ("x_train", "y_train", "x_test", "y_test"))
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@dataclass(frozen=True)
class MnistVariant:
    """One of the two data sets: its folders, classes and normalisation."""

    name: str
    folders: tuple[str, ...]  # named ones first, because the two data sets have files of the same names
    classes: tuple[str, ...]
    mean: float
    std: float
    system: tuple[str, ...] = ()  # searched last, unless a folder is given


MNIST_VARIANTS = {
    "mnist": MnistVariant("mnist", ("mnist", "MNIST/raw", ""), tuple("0123456789"), 0.1307 * 255, 0.3081 * 255),
    "fashion-mnist": MnistVariant(
        "fashion-mnist", ("fashion-mnist", "FashionMNIST/raw", ""), CLOTHES, 0.2860 * 255, 0.3530 * 255,
        ("/usr/share/datasets",),  # of the package dataset-fashion-mnist of Debian and Ubuntu
    ),
}  # fmt: skip


def read_mnist(name: str, folders: Sequence[Path], check: bool = True) -> Dataset:
    """MNIST or Fashion-MNIST from the first folder that holds a file of it."""
    variant = MNIST_VARIANTS[name]
    for folder in (folder / inner for folder in folders for inner in variant.folders):
        if name == "mnist" and (folder / ARCHIVE).is_file():
            return _dataset(variant, _from_archive(folder / ARCHIVE, check))
        found = {part: _file(folder, part, axes) for part, axes in FILES}
        missing = [f"{part}-idx{axes}-ubyte" for part, axes in FILES if found[part] is None]
        if not missing:
            sums = UNPACKED[name] if check else {}
            arrays = [read_idx(file, axes, name, sums.get(part)) for part, axes in FILES if (file := found[part])]
            return _dataset(variant, arrays)
        if len(missing) < len(FILES):
            raise downloads.incomplete_error(name, folder, missing)
    files = ", ".join(f"{part}-idx{axes}-ubyte" for part, axes in FILES)
    archive = f"{ARCHIVE} or " if name == "mnist" else ""
    inner = " or ".join(folder for folder in variant.folders if folder)
    raise downloads.not_found_error(name, folders, f"{archive}{files} (each also with .gz), there or in {inner}")


def read_idx(file: Path, axes: int, name: str, md5: str | None = None) -> np.ndarray:
    """The array of bytes in an idx file: a magic number, the sizes of the axes, and the bytes.

    Args:
        file: gzipped if its name ends in `.gz`.
        axes: the expected number of axes: 3 for images, 1 for labels.
        name: the data set, for messages.
        md5: the sum of the unpacked file; None skips this check.

    Raises:
        InputError: wrong format, wrong number of axes, a length other than the header says, or a wrong sum.
    """
    contents = file.read_bytes()
    if file.suffix == ".gz":
        try:
            contents = zlib.decompressobj(wbits=31).decompress(contents)  # of a truncated file, what there is
        except zlib.error as error:
            raise InputError(f"{file} is not a gzip file, or a damaged one ({error}). {remedy(name)}.") from error
    magic = int.from_bytes(contents[:4], "big")
    if len(contents) < 4 or magic != MAGIC + axes:
        raise InputError(
            f"{file} is not an idx file of bytes with {axes} axes: its magic number should be {MAGIC + axes:#010x} but "
            f"is {magic:#010x}. {remedy(name)}."
        )
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", contents[4:start].ljust(4 * axes, b"\0"))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(contents) < max(expected, start):
        raise truncated_error(file, name, expected, len(contents))
    if md5 is not None:
        verify(contents, file, name, md5, expected)
    if len(contents) > expected:
        raise InputError(
            f"{file} should hold {expected} bytes according to its header, but holds {len(contents)}. {remedy(name)}."
        )
    return np.frombuffer(contents, np.uint8, offset=start).reshape(shape).copy()


def idx_bytes(array: np.ndarray) -> bytes:
    """The contents of the idx file for an array of bytes.

    >>> idx_bytes(np.array([7, 8], np.uint8)).hex(" ")
    '00 00 08 01 00 00 00 02 07 08'
    """
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return (MAGIC + array.ndim).to_bytes(4, "big") + sizes + np.ascontiguousarray(array, np.uint8).tobytes()


def _file(folder: Path, part: str, axes: int) -> Path | None:
    names = (f"{part}{mark}idx{axes}-ubyte{end}" for end in ("", ".gz") for mark in ("-", "."))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _from_archive(file: Path, check: bool) -> list[np.ndarray]:
    arrays, names = read_arrays(file, ARRAYS, "mnist")
    for (part, axes), name, array in zip(FILES, names, arrays, strict=True):
        if array.ndim != axes:
            raise InputError(f"{file}: {name} should have {axes} axes, but its shape is {array.shape}.")
        if check:  # the archive has no published sum, but the same bytes in the idx format have one
            contents = idx_bytes(array)
            verify(contents, f"{file} ({name})", "mnist", UNPACKED["mnist"][part], len(contents))
    return arrays


def _dataset(variant: MnistVariant, arrays: list[np.ndarray]) -> Dataset:
    images, labels, test_images, test_labels = arrays
    train, test = (images[..., None], labels), (test_images[..., None], test_labels)
    return Dataset.of(variant.name, train, test, [variant.mean], [variant.std], variant.classes)
