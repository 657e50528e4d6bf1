"""CIFAR-10 from binary or Python batches, unpacked or in their archive, or from image grids."""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.downloads import (
    UNPACKED,
    incomplete_error,
    not_found_error,
    remedy,
    truncated_error,
    verify,
)
from intertwine.lab.zoo.datasets.formats import extra, read_arrays, read_pickle

# ----------------------------------------------------------------------------------------------------
# One batch of CIFAR-10 from one file: binary records, a pickle, or a grid of images.


CIFAR10, SIDE, IMAGES = "cifar10", 32, 10_000
PIXELS = 3 * SIDE * SIDE
RECORD = 1 + PIXELS
#: Sizes of the pickled batches, which hold the names of the images too.
PICKLED = dict(
    zip(
        ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"),
        (31_035_704, 31_035_320, 31_035_999, 31_035_696, 31_035_623, 31_035_526),
        strict=True,
    )
)

#: Images (n, 32, 32, 3) and labels (n,), both bytes.
BatchArrays = tuple[np.ndarray, np.ndarray]


def from_records(contents: bytes, where: str | Path, batch: str, check: bool) -> BatchArrays:
    """A file of the binary version: per image one byte of label, then the red, green and blue planes."""
    if check:
        verify(contents, where, CIFAR10, UNPACKED[CIFAR10][f"{batch}.bin"], IMAGES * RECORD)
    whole = -(-len(contents) // RECORD) * RECORD
    if not contents or len(contents) < whole:
        raise truncated_error(where, CIFAR10, max(whole, RECORD), len(contents))
    records = np.frombuffer(contents, np.uint8).reshape(-1, RECORD)
    return _upright(records[:, 1:]), records[:, 0].copy()


def to_records(images: np.ndarray, labels: np.ndarray) -> bytes:
    """The binary version's file of a batch.

    >>> len(to_records(np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2, np.uint8)))
    6146
    """
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([labels.astype(np.uint8)[:, None], planes], axis=1).tobytes()


def from_pickle(contents: bytes, where: str | Path, batch: str, check: bool) -> BatchArrays:
    """A file of the Python version: a pickle, read as data. Its sum is checked before it is opened."""
    if check:
        verify(contents, where, CIFAR10, UNPACKED[CIFAR10][batch], PICKLED[batch])
    entries = read_pickle(contents, where)
    planes, labels = entries.get("data"), entries.get("labels")
    if not isinstance(planes, np.ndarray) or planes.ndim != 2 or planes.shape[1] != PIXELS or not _bytes_only(labels):
        raise InputError(
            f"{where} should hold `data`, an array of bytes (images, {PIXELS}), and `labels`, a list of numbers from 0 "
            f"to 255; found the keys {sorted(entries)}. {remedy(CIFAR10)}."
        )
    return _paired(_upright(planes), np.array(labels, np.uint8), where)


def from_grid(file: Path, labels: np.ndarray, batch: str, check: bool) -> BatchArrays:
    """A lossless WebP of 100 × 100 tiles, row by row.

    No sum is published for it, but there is one for the binary file of the same images and labels.
    """
    pixels = _pixels(file)
    rows, columns = pixels.shape[0] // SIDE, pixels.shape[1] // SIDE
    if rows * columns == 0 or pixels.shape[:2] != (rows * SIDE, columns * SIDE) or (check and rows * columns != IMAGES):
        raise InputError(
            f"{file} should be a grid of tiles of {SIDE} × {SIDE} pixels, {IMAGES} in all (3200 × 3200 pixels); found "
            f"{pixels.shape[1]} × {pixels.shape[0]} pixels."
        )
    tiles = pixels.reshape(rows, SIDE, columns, SIDE, 3).transpose(0, 2, 1, 3, 4).reshape(-1, SIDE, SIDE, 3)
    images, labels = _paired(tiles, labels, file)
    if check:
        contents = to_records(images, labels)
        verify(contents, f"{file} with its labels", CIFAR10, UNPACKED[CIFAR10][f"{batch}.bin"], len(contents))
    return images, labels


def grid_labels(file: Path, batches: int) -> list[np.ndarray]:
    """The labels beside the grids: those of the training batches, cut into equal parts, and those of the test batch."""
    (train, test), _ = read_arrays(file, (("train_labels", "test_labels"),), CIFAR10)
    return [*np.array_split(train, batches), test]


def _upright(planes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))


def _bytes_only(labels: object) -> bool:
    return isinstance(labels, list) and all(isinstance(label, int) and 0 <= label <= 255 for label in labels)


def _paired(images: np.ndarray, labels: np.ndarray, where: str | Path) -> BatchArrays:
    if len(images) != len(labels):
        raise InputError(
            f"{where} has {len(images)} images, but there are {len(labels)} labels for it. Take both from one source."
        )
    return images, labels


def _pixels(file: Path) -> np.ndarray:
    """The (height, width, 3) pixels of a WebP file, whose header says how long it should be."""
    contents = file.read_bytes()
    expected = int.from_bytes(contents[4:8], "little") + 8
    if contents[:4] == b"RIFF" and len(contents) < expected:
        raise truncated_error(file, CIFAR10, expected, len(contents))
    image = extra("PIL.Image", "Pillow", "images of CIFAR-10 in WebP files")
    try:
        with image.open(io.BytesIO(contents)) as opened:
            return np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise InputError(f"{file} could not be read as an image ({error}). {remedy(CIFAR10)}.") from error


# ----------------------------------------------------------------------------------------------------
# CIFAR-10 from any of its layouts: binary or Python batches, unpacked or in their archive, or images in a grid.


CIFAR10_FOLDER = "cifar10"
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255)


@dataclass(frozen=True)
class CifarVersion:
    """One of the two versions the authors offer: its folder, its archive, the ending of its files."""

    folder: str
    archive: str
    size: int  # of the archive
    ending: str

    def read(self, contents: bytes, where: str | Path, batch: str, check: bool) -> BatchArrays:
        """One batch from the contents of its file."""
        return (from_records if self.ending else from_pickle)(contents, where, batch, check)


# The fastest first.
BINARY = CifarVersion("cifar-10-batches-bin", "cifar-10-binary.tar.gz", 170_052_171, ".bin")
PYTHON = CifarVersion("cifar-10-batches-py", "cifar-10-python.tar.gz", 170_498_071, "")


def read_cifar10(searched: Sequence[Path], check: bool = True) -> Dataset:
    """CIFAR-10 from the first place that holds a file of it; every layout gives the same tensors."""
    for place in searched:
        batches = _batches(place, check) or _batches(place / CIFAR10_FOLDER, check)
        if batches:
            return _dataset(batches)
    raise not_found_error(
        CIFAR10_FOLDER,
        searched,
        f"{BINARY.folder}, {PYTHON.folder}, {BINARY.archive}, {PYTHON.archive} or *.webp, there or in {CIFAR10_FOLDER}/",
    )


def _batches(folder: Path, check: bool) -> list[BatchArrays] | None:
    for version in (BINARY, PYTHON):
        for inner in (folder / version.folder, folder):
            if _present(inner, version.ending):
                return list(_unpacked(version, inner, check))
    for version in (BINARY, PYTHON):
        if (folder / version.archive).is_file():
            return list(_archived(version, folder / version.archive, check))
    return _gridded(folder, check) if _present(folder, ".webp") else None


def _present(folder: Path, ending: str) -> bool:
    """Whether the folder holds a file of a layout; if it holds only some of them, that is an error."""
    missing = [batch + ending for batch in BATCHES if not (folder / (batch + ending)).is_file()]
    if 0 < len(missing) < len(BATCHES):
        raise incomplete_error(CIFAR10_FOLDER, folder, missing)
    return not missing


def _unpacked(version: CifarVersion, folder: Path, check: bool) -> Iterator[BatchArrays]:
    for batch in BATCHES:
        file = folder / (batch + version.ending)
        yield version.read(file.read_bytes(), file, batch, check)


def _archived(version: CifarVersion, archive: Path, check: bool) -> list[BatchArrays]:
    """The batches in an archive; only its six members are read, and nothing is unpacked to disk."""
    wanted = {f"{version.folder}/{batch}{version.ending}": batch for batch in BATCHES}
    found: dict[str, BatchArrays] = {}
    try:
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                stream = members.extractfile(member) if member.name in wanted else None
                if stream is not None:
                    batch, where = wanted[member.name], f"{archive} ({member.name})"
                    found[batch] = version.read(stream.read(), where, batch, check)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        size = archive.stat().st_size
        if size < version.size:
            raise truncated_error(archive, CIFAR10_FOLDER, version.size, size) from error
        raise InputError(f"{archive} is damaged: reading it failed ({error}). {remedy(CIFAR10_FOLDER)}.") from error
    missing = [file for file, batch in wanted.items() if batch not in found]
    if missing:
        raise incomplete_error(CIFAR10_FOLDER, archive, missing)
    return [found[batch] for batch in BATCHES]


def _gridded(folder: Path, check: bool) -> list[BatchArrays]:
    labels = grid_labels(folder / "labels.npz", len(BATCHES) - 1)
    files = [folder / f"{batch}.webp" for batch in BATCHES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding takes seconds, and leaves Python to other threads
        return list(pool.map(from_grid, files, labels, BATCHES, [check] * len(BATCHES)))


def _dataset(batches: list[BatchArrays]) -> Dataset:
    *train, test = batches
    images, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    return Dataset.of(CIFAR10_FOLDER, (images, labels), test, MEAN, STD, CLASSES)
