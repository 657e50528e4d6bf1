"""CIFAR-10 from any of its layouts: binary or Python batches, unpacked or in their archive, or images in a grid."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from intertwine.errors import InputError
from intertwine.zoo.datasets.checksums import cut_short
from intertwine.zoo.datasets.cifar10_files import Batch, from_grid, from_pickle, from_records, grid_labels
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.datasets.places import incomplete, nothing_found
from intertwine.zoo.datasets.sources import remedy

NAME = "cifar10"
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255)


@dataclass(frozen=True)
class Official:
    """One of the two versions the authors offer: its folder, its archive, the ending of its files."""

    folder: str
    archive: str
    size: int  # of the archive
    ending: str

    def read(self, contents: bytes, where: str | Path, batch: str, check: bool) -> Batch:
        """One batch from the contents of its file."""
        return (from_records if self.ending else from_pickle)(contents, where, batch, check)


# The fastest first.
BINARY = Official("cifar-10-batches-bin", "cifar-10-binary.tar.gz", 170_052_171, ".bin")
PYTHON = Official("cifar-10-batches-py", "cifar-10-python.tar.gz", 170_498_071, "")


def read_cifar10(searched: Sequence[Path], check: bool = True) -> Dataset:
    """CIFAR-10 from the first place that holds a file of it; every layout gives the same tensors."""
    for place in searched:
        batches = _batches(place, check) or _batches(place / NAME, check)
        if batches:
            return _dataset(batches)
    raise nothing_found(
        NAME,
        searched,
        f"{BINARY.folder}, {PYTHON.folder}, {BINARY.archive}, {PYTHON.archive} or *.webp, there or in {NAME}/",
    )


def _batches(folder: Path, check: bool) -> list[Batch] | None:
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
        raise incomplete(NAME, folder, missing)
    return not missing


def _unpacked(version: Official, folder: Path, check: bool) -> Iterator[Batch]:
    for batch in BATCHES:
        file = folder / (batch + version.ending)
        yield version.read(file.read_bytes(), file, batch, check)


def _archived(version: Official, archive: Path, check: bool) -> list[Batch]:
    """The batches in an archive; only its six members are read, and nothing is unpacked to disk."""
    wanted = {f"{version.folder}/{batch}{version.ending}": batch for batch in BATCHES}
    found: dict[str, Batch] = {}
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
            raise cut_short(archive, NAME, version.size, size) from error
        raise InputError(f"{archive} is damaged: reading it failed ({error}). {remedy(NAME)}.") from error
    missing = [file for file, batch in wanted.items() if batch not in found]
    if missing:
        raise incomplete(NAME, archive, missing)
    return [found[batch] for batch in BATCHES]


def _gridded(folder: Path, check: bool) -> list[Batch]:
    labels = grid_labels(folder / "labels.npz", len(BATCHES) - 1)
    files = [folder / f"{batch}.webp" for batch in BATCHES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding takes seconds, and leaves Python to other threads
        return list(pool.map(from_grid, files, labels, BATCHES, [check] * len(BATCHES)))


def _dataset(batches: list[Batch]) -> Dataset:
    *train, test = batches
    images, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    return Dataset.of(NAME, (images, labels), test, MEAN, STD, CLASSES)
