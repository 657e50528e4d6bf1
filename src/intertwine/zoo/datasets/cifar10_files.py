"""One batch of CIFAR-10 from one file: binary records, a pickle, or a grid of images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from intertwine.errors import InputError
from intertwine.zoo.datasets.archives import read_arrays
from intertwine.zoo.datasets.checksums import cut_short, verify
from intertwine.zoo.datasets.extra import extra
from intertwine.zoo.datasets.pickles import read_pickle
from intertwine.zoo.datasets.sources import UNPACKED, remedy

NAME, SIDE, IMAGES = "cifar10", 32, 10_000
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
Batch = tuple[np.ndarray, np.ndarray]


def from_records(contents: bytes, where: str | Path, batch: str, check: bool) -> Batch:
    """A file of the binary version: per image one byte of label, then the red, green and blue planes."""
    if check:
        verify(contents, where, NAME, UNPACKED[NAME][f"{batch}.bin"], IMAGES * RECORD)
    whole = -(-len(contents) // RECORD) * RECORD
    if not contents or len(contents) < whole:
        raise cut_short(where, NAME, max(whole, RECORD), len(contents))
    records = np.frombuffer(contents, np.uint8).reshape(-1, RECORD)
    return _upright(records[:, 1:]), records[:, 0].copy()


def to_records(images: np.ndarray, labels: np.ndarray) -> bytes:
    """The binary version's file of a batch.

    >>> len(to_records(np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2, np.uint8)))
    6146
    """
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([labels.astype(np.uint8)[:, None], planes], axis=1).tobytes()


def from_pickle(contents: bytes, where: str | Path, batch: str, check: bool) -> Batch:
    """A file of the Python version: a pickle, read as data. Its sum is checked before it is opened."""
    if check:
        verify(contents, where, NAME, UNPACKED[NAME][batch], PICKLED[batch])
    entries = read_pickle(contents, where)
    planes, labels = entries.get("data"), entries.get("labels")
    if not isinstance(planes, np.ndarray) or planes.ndim != 2 or planes.shape[1] != PIXELS or not _bytes_only(labels):
        raise InputError(
            f"{where} should hold `data`, an array of bytes (images, {PIXELS}), and `labels`, a list of numbers from 0 "
            f"to 255; found the keys {sorted(entries)}. {remedy(NAME)}."
        )
    return _paired(_upright(planes), np.array(labels, np.uint8), where)


def from_grid(file: Path, labels: np.ndarray, batch: str, check: bool) -> Batch:
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
        verify(contents, f"{file} with its labels", NAME, UNPACKED[NAME][f"{batch}.bin"], len(contents))
    return images, labels


def grid_labels(file: Path, batches: int) -> list[np.ndarray]:
    """The labels beside the grids: those of the training batches, cut into equal parts, and those of the test batch."""
    (train, test), _ = read_arrays(file, (("train_labels", "test_labels"),), NAME)
    return [*np.array_split(train, batches), test]


def _upright(planes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))


def _bytes_only(labels: object) -> bool:
    return isinstance(labels, list) and all(isinstance(label, int) and 0 <= label <= 255 for label in labels)


def _paired(images: np.ndarray, labels: np.ndarray, where: str | Path) -> Batch:
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
        raise cut_short(file, NAME, expected, len(contents))
    image = extra("PIL.Image", "Pillow", "images of CIFAR-10 in WebP files")
    try:
        with image.open(io.BytesIO(contents)) as opened:
            return np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise InputError(f"{file} could not be read as an image ({error}). {remedy(NAME)}.") from error
