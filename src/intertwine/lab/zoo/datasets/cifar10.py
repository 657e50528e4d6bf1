"""CIFAR-10 from any of its layouts: binary or Python batches, unpacked or in their archive, or grids of images."""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets import downloads
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.downloads import UNPACKED, remedy, truncated_error, verify
from intertwine.lab.zoo.datasets.formats import import_extra, read_arrays, read_pickle

CIFAR10, SIDE, IMAGES = "cifar10", 32, 10_000
PIXELS = 3 * SIDE * SIDE
RECORD = 1 + PIXELS
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
#: Sizes of the pickled batches, which also hold the names of the images.
PICKLED = dict(zip(BATCHES, (31_035_704, 31_035_320, 31_035_999, 31_035_696, 31_035_623, 31_035_526), strict=True))
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255)

#: Images (n, 32, 32, 3) and labels (n,), both bytes.
BatchArrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class CifarVersion:
    """One of the two versions that the authors offer: its folder, archive and file ending."""

    folder: str
    archive: str
    size: int  # of the archive
    ending: str

    def read(self, contents: bytes, where: str | Path, batch: str, check: bool) -> BatchArrays:
        """One batch from the contents of its file."""
        return (from_records if self.ending else from_pickle)(contents, where, batch, check)


BINARY = CifarVersion("cifar-10-batches-bin", "cifar-10-binary.tar.gz", 170_052_171, ".bin")
PYTHON = CifarVersion("cifar-10-batches-py", "cifar-10-python.tar.gz", 170_498_071, "")


def read_cifar10(folders: Sequence[Path], check: bool = True) -> Dataset:
    """CIFAR-10 from the first folder that holds a file of it; every layout gives the same tensors."""
    for folder in folders:
        batches = _batches(folder, check) or _batches(folder / CIFAR10, check)
        if batches:
            *train, test = batches
            images, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
            return Dataset.of(CIFAR10, (images, labels), test, MEAN, STD, CLASSES)
    files = f"{BINARY.folder}, {PYTHON.folder}, {BINARY.archive}, {PYTHON.archive} or *.webp, there or in {CIFAR10}/"
    raise downloads.not_found_error(CIFAR10, folders, files)


def _batches(folder: Path, check: bool) -> list[BatchArrays] | None:
    """The six batches in a folder, from its fastest layout; None if it has none."""
    for version in (BINARY, PYTHON):
        for inner in (folder / version.folder, folder):
            if _has_batches(inner, version.ending):
                files = [inner / (batch + version.ending) for batch in BATCHES]
                pairs = zip(files, BATCHES, strict=True)
                return [version.read(file.read_bytes(), file, batch, check) for file, batch in pairs]
    for version in (BINARY, PYTHON):
        if (folder / version.archive).is_file():
            return _from_archive(version, folder / version.archive, check)
    if not _has_batches(folder, ".webp"):
        return None
    (train, test), _ = read_arrays(folder / "labels.npz", (("train_labels", "test_labels"),), CIFAR10)
    labels = [*np.array_split(train, len(BATCHES) - 1), test]
    files = [folder / f"{batch}.webp" for batch in BATCHES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding takes seconds and releases the GIL
        return list(pool.map(from_grid, files, labels, BATCHES, [check] * len(BATCHES)))


def _has_batches(folder: Path, ending: str) -> bool:
    """Whether the folder holds the files of a layout; raises if it holds only some of them."""
    missing = [batch + ending for batch in BATCHES if not (folder / (batch + ending)).is_file()]
    if 0 < len(missing) < len(BATCHES):
        raise downloads.incomplete_error(CIFAR10, folder, missing)
    return not missing


def _from_archive(version: CifarVersion, archive: Path, check: bool) -> list[BatchArrays]:
    """The batches in an archive; only its six members are read, and nothing is unpacked to disk."""
    members = {f"{version.folder}/{batch}{version.ending}": batch for batch in BATCHES}
    found: dict[str, BatchArrays] = {}
    try:
        with tarfile.open(archive, "r|gz") as entries:
            for entry in entries:
                stream = entries.extractfile(entry) if entry.name in members else None
                if stream is not None:
                    batch, where = members[entry.name], f"{archive} ({entry.name})"
                    found[batch] = version.read(stream.read(), where, batch, check)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        size = archive.stat().st_size
        if size < version.size:
            raise truncated_error(archive, CIFAR10, version.size, size) from error
        raise InputError(f"{archive} is damaged: reading it failed ({error}). {remedy(CIFAR10)}.") from error
    missing = [file for file, batch in members.items() if batch not in found]
    if missing:
        raise downloads.incomplete_error(CIFAR10, archive, missing)
    return [found[batch] for batch in BATCHES]


# -- One batch from one file -------------------------------------------------------------------------------------------


def from_records(contents: bytes, where: str | Path, batch: str, check: bool) -> BatchArrays:
    """A file of the binary version: per image one byte of label, then the red, green and blue planes."""
    if check:
        verify(contents, where, CIFAR10, UNPACKED[CIFAR10][f"{batch}.bin"], IMAGES * RECORD)
    whole = -(-len(contents) // RECORD) * RECORD
    if not contents or len(contents) < whole:
        raise truncated_error(where, CIFAR10, max(whole, RECORD), len(contents))
    records = np.frombuffer(contents, np.uint8).reshape(-1, RECORD)
    return _channels_last(records[:, 1:]), records[:, 0].copy()


def to_records(images: np.ndarray, labels: np.ndarray) -> bytes:
    """The contents of a batch file of the binary version.

    >>> len(to_records(np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2, np.uint8)))
    6146
    """
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([labels.astype(np.uint8)[:, None], planes], axis=1).tobytes()


def from_pickle(contents: bytes, where: str | Path, batch: str, check: bool) -> BatchArrays:
    """A file of the Python version: a pickle, read as data after its sum is checked."""
    if check:
        verify(contents, where, CIFAR10, UNPACKED[CIFAR10][batch], PICKLED[batch])
    entries = read_pickle(contents, where)
    planes, labels = entries.get("data"), entries.get("labels")
    bytes_only = isinstance(labels, list) and all(isinstance(label, int) and 0 <= label <= 255 for label in labels)
    if not isinstance(planes, np.ndarray) or planes.ndim != 2 or planes.shape[1] != PIXELS or not bytes_only:
        raise InputError(
            f"{where} should hold `data`, an array of bytes (images, {PIXELS}), and `labels`, a list of numbers from 0 "
            f"to 255; found the keys {sorted(entries)}. {remedy(CIFAR10)}."
        )
    return _paired(_channels_last(planes), np.array(labels, np.uint8), where)


def from_grid(file: Path, labels: np.ndarray, batch: str, check: bool) -> BatchArrays:
    """A lossless WebP of 100 × 100 tiles, row by row.

    It has no published sum, but the binary file of the same images and labels has one.
    """
    pixels = _webp_pixels(file)
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


def _channels_last(planes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))


def _paired(images: np.ndarray, labels: np.ndarray, where: str | Path) -> BatchArrays:
    if len(images) != len(labels):
        raise InputError(f"{where} has {len(images)} images but {len(labels)} labels. Take both from one source.")
    return images, labels


def _webp_pixels(file: Path) -> np.ndarray:
    """The (height, width, 3) pixels of a WebP file, whose header holds its length."""
    contents = file.read_bytes()
    expected = int.from_bytes(contents[4:8], "little") + 8
    if contents[:4] == b"RIFF" and len(contents) < expected:
        raise truncated_error(file, CIFAR10, expected, len(contents))
    image = import_extra("PIL.Image", "Pillow", "images of CIFAR-10 in WebP files")
    try:
        with image.open(io.BytesIO(contents)) as opened:
            return np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise InputError(f"{file} could not be read as an image ({error}). {remedy(CIFAR10)}.") from error
