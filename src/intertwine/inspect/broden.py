"""Broden: a folder of images with labels per pixel in the published layout, as images and concepts for `dissect`.

index.csv      image,split,ih,iw,sh,sw, and one column per category: files of label maps or numbers of labels for
               the whole image, separated by ";". A label map is an image whose pixels are red + 256 · green.
label.csv      number,name,category,…: the category as "color(289);object(3)", with how often it has the label.
category.csv   name,…: the categories.
images/        the images and the label maps.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.inspect.concepts import ConceptData, Labels
from intertwine.shapes import Float

Row = Mapping[str, str]
#: Of the numbers 0 to 1 that pixels are, as networks trained on ImageNet want them.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Broden:
    """A folder that was read: `images` and `concepts` are what `dissect` takes; files are decoded when needed."""

    folder: Path
    images: BrodenImages = field(repr=False)
    concepts: ConceptData

    def __repr__(self) -> str:
        return f"Broden({self.images.samples:,} images of {self.folder.name}, {self.concepts!r})"


@dataclass(frozen=True, eq=False)
class BrodenImages:
    """Batches (inputs, None) of the images, normalised for a network, at one size."""

    files: tuple[Path, ...]
    size: tuple[int, int]
    batch: int
    mean: Sequence[float]
    std: Sequence[float]

    @property
    def samples(self) -> int:
        """How many images there are."""
        return len(self.files)

    def __len__(self) -> int:
        return -(-len(self.files) // self.batch)

    def __iter__(self) -> Iterator[tuple[Float[Tensor, "images 3 height width"], None]]:
        for start in range(0, len(self.files), self.batch):
            yield torch.stack([self._image(file) for file in self.files[start : start + self.batch]]), None

    def _image(self, file: Path) -> Tensor:
        picture = _open(file).convert("RGB").resize(self.size[::-1], 2)  # 2: bilinear
        pixels = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255)
        return ((pixels - torch.tensor(self.mean)) / torch.tensor(self.std)).movedim(-1, 0)


@dataclass(frozen=True, eq=False)
class BrodenLabels:
    """Lists with the `Labels` of one image each."""

    folder: Path
    rows: tuple[Row, ...]
    kinds: tuple[str, ...]
    concept: Mapping[int, int]  # number of the label → number of the concept

    def __iter__(self) -> Iterator[list[Labels]]:
        for row in self.rows:
            yield [self._labels(row)]

    def _labels(self, row: Row) -> Labels:
        size = int(row["sh"]), int(row["sw"])
        found: dict[int, Tensor] = {}
        for kind in self.kinds:
            for entry in filter(None, row[kind].split(";")):
                for number, mask in self._masks(entry, size):
                    at = self.concept.get(number)
                    if at is None:
                        raise InputError(f"{row['image']} has the label {number}, which label.csv does not name.")
                    found[at] = found[at] | mask if at in found else mask
        masks = torch.stack(list(found.values())) if found else torch.zeros(0, *size, dtype=torch.bool)
        return Labels(torch.tensor(list(found), dtype=torch.long), masks)

    def _masks(self, entry: str, size: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        if entry.isdigit():
            yield int(entry), torch.ones(size, dtype=torch.bool)
            return
        pixels = np.asarray(_open(self.folder / "images" / entry).convert("RGB"), dtype=np.int64)
        labels = torch.from_numpy(pixels[..., 0] + 256 * pixels[..., 1])
        if tuple(labels.shape) != size:
            raise InputError(
                f"The label map {entry} is {labels.shape[0]}×{labels.shape[1]}, but index.csv says {size[0]}×{size[1]}."
            )
        for number in labels.unique().tolist():
            if number:  # 0: nothing is known of the pixel
                yield number, labels == number


def read_broden(
    folder: str | Path,
    split: str | None = None,
    size: tuple[int, int] | None = None,
    batch: int = 32,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> Broden:
    """A Broden folder as images and concepts.

    Args:
        split: "train" or "val", for a part of the images. size: height and width a network wants; that of the first
            image without. batch: images at once. mean, std: of the network's inputs, for pixels from 0 to 1.

    >>> import tempfile
    >>> from intertwine.inspect.broden import read_broden
    >>> with tempfile.TemporaryDirectory() as empty:
    ...     read_broden(empty)
    Traceback (most recent call last):
    intertwine.errors.InputError: A Broden folder was asked for, but ... has no category.csv. ...
    """
    place = Path(folder)
    kinds = tuple(row["name"] for row in _table(place, "category.csv", ("name",)))
    rows = _table(place, "index.csv", ("image", "split", "ih", "iw", "sh", "sw", *kinds))
    splits = sorted({row["split"] for row in rows})
    chosen = tuple(row for row in rows if split in (None, row["split"]))
    if not chosen:
        raise InputError(f"The part {split!r} of {place} has no images; index.csv has {', '.join(splits) or 'none'}.")
    names: dict[int, tuple[str, str]] = {}
    for row in _table(place, "label.csv", ("number", "name", "category")):
        names[int(row["number"])] = (row["name"], _category(row["category"], kinds))
    names.pop(0, None)
    data = BrodenLabels(place, chosen, kinds, {number: i for i, number in enumerate(names)})
    concepts = ConceptData(_told_apart(names), tuple(kind for _, kind in names.values()), data)
    files = tuple(place / "images" / row["image"] for row in chosen)
    images = BrodenImages(files, size or (int(chosen[0]["ih"]), int(chosen[0]["iw"])), batch, mean, std)
    return Broden(place, images, concepts)


def _category(text: str, kinds: Sequence[str]) -> str:
    """The category that has a label most often: "object" of "color(3);object(12)"."""
    found = [(int(count or 0), name) for name, count in re.findall(r"([^;()]+)(?:\((\d+)\))?", text)]
    known = [(count, -i, name) for i, (count, name) in enumerate(found) if name in kinds]
    if not known:
        raise InputError(f"A label of label.csv has the category {text!r}; category.csv has {', '.join(kinds)}.")
    return max(known)[2]


def _told_apart(names: Mapping[int, tuple[str, str]]) -> tuple[str, ...]:
    """Names of labels; those that several labels share get their category and number added."""
    plain = [name for name, _ in names.values()]
    return tuple(
        name if plain.count(name) == 1 else f"{name} ({kind} {number})" for number, (name, kind) in names.items()
    )


def _table(folder: Path, name: str, needed: Sequence[str]) -> list[dict[str, str]]:
    file = folder / name
    if not file.is_file():
        raise InputError(
            f"A Broden folder was asked for, but {folder} has no {name}. It holds index.csv, label.csv, category.csv "
            "and images/; give the folder in which these lie."
        )
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if missing := [column for column in needed if column not in (reader.fieldnames or ())]:
            raise InputError(f"{file} has no column {', '.join(missing)}; found {', '.join(reader.fieldnames or ())}.")
        return list(reader)


def _open(file: Path) -> Any:
    try:
        image = import_module("PIL.Image")
    except ImportError as error:
        raise InputError(
            "Reading Broden needs pillow, which is not installed: pip install 'intertwine[data]'."
        ) from error
    try:
        return image.open(file)
    except OSError as error:
        raise InputError(f"{file}, which index.csv names, cannot be read as an image ({error}).") from error
