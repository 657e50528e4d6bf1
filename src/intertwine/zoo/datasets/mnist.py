"""MNIST and Fashion-MNIST: four idx files, or for MNIST one `mnist.npz`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from intertwine.errors import InputError
from intertwine.zoo.datasets.archives import read_arrays
from intertwine.zoo.datasets.checksums import verify
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.datasets.idx import idx_bytes, read_idx
from intertwine.zoo.datasets.places import incomplete, nothing_found
from intertwine.zoo.datasets.sources import UNPACKED

#: The four files: what it is, and its number of axes.
FILES = (("train-images", 3), ("train-labels", 1), ("t10k-images", 3), ("t10k-labels", 1))
ARCHIVE = "mnist.npz"
#: Names of the four arrays in the archive: ours, and those of the file Keras offers.
ARRAYS = (("train_images", "train_labels", "test_images", "test_labels"), ("x_train", "y_train", "x_test", "y_test"))
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@dataclass(frozen=True)
class Family:
    """What tells one data set of this kind from another: where it lies, its classes, its normalisation."""

    name: str
    folders: tuple[str, ...]  # the named ones come first: the file names alone do not tell whose they are
    classes: tuple[str, ...]
    mean: float
    std: float
    system: tuple[str, ...] = ()  # searched last, unless a folder is given


FAMILIES = {
    "mnist": Family("mnist", ("mnist", "MNIST/raw", ""), tuple("0123456789"), 0.1307 * 255, 0.3081 * 255),
    "fashion-mnist": Family(
        "fashion-mnist",
        ("fashion-mnist", "FashionMNIST/raw", ""),
        CLOTHES,
        0.2860 * 255,
        0.3530 * 255,
        ("/usr/share/datasets",),  # of the package dataset-fashion-mnist on Debian and Ubuntu
    ),
}


def read_mnist(name: str, searched: Sequence[Path], check: bool = True) -> Dataset:
    """MNIST or Fashion-MNIST from the first place that holds a file of it."""
    family = FAMILIES[name]
    for folder in (place / inner for place in searched for inner in family.folders):
        if name == "mnist" and (folder / ARCHIVE).is_file():
            return _dataset(family, _from_archive(folder / ARCHIVE, check))
        found = {part: _file(folder, part, axes) for part, axes in FILES}
        missing = [f"{part}-idx{axes}-ubyte" for part, axes in FILES if found[part] is None]
        if not missing:
            return _dataset(family, _from_files(family, found, check))
        if len(missing) < len(FILES):
            raise incomplete(name, folder, missing)
    wanted = ", ".join(f"{part}-idx{axes}-ubyte" for part, axes in FILES)
    archive = f"{ARCHIVE} or " if name == "mnist" else ""
    inner = " or ".join(folder for folder in family.folders if folder)
    raise nothing_found(name, searched, f"{archive}{wanted} (each also with .gz), there or in {inner}")


def _file(folder: Path, part: str, axes: int) -> Path | None:
    names = (f"{part}{mark}idx{axes}-ubyte{end}" for end in ("", ".gz") for mark in ("-", "."))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _from_files(family: Family, found: dict[str, Path | None], check: bool) -> list[np.ndarray]:
    sums = UNPACKED[family.name] if check else {}
    return [read_idx(file, axes, family.name, sums.get(part)) for part, axes in FILES if (file := found[part])]


def _from_archive(file: Path, check: bool) -> list[np.ndarray]:
    arrays, names = read_arrays(file, ARRAYS, "mnist")
    for (part, axes), name, array in zip(FILES, names, arrays, strict=True):
        if array.ndim != axes:
            raise InputError(f"{file}: {name} should have {axes} axes, but its shape is {array.shape}.")
        if check:  # no sum is published for the archive, but the same bytes in the idx format have one
            contents = idx_bytes(array)
            verify(contents, f"{file} ({name})", "mnist", UNPACKED["mnist"][part], len(contents))
    return arrays


def _dataset(family: Family, arrays: list[np.ndarray]) -> Dataset:
    images, labels, test_images, test_labels = arrays
    train, test = (images[..., None], labels), (test_images[..., None], test_labels)
    return Dataset.of(family.name, train, test, [family.mean], [family.std], family.classes)
