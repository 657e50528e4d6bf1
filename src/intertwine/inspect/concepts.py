"""Concepts as masks per image with names and categories, and Broden folders read as such."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.data.batches import kind_of
from intertwine.errors import InputError, MismatchError

#: The category of concepts without one.
ONE_CATEGORY = "concept"
ADVICE = (
    "Give one batch of masks per batch of images, each a tensor (images, concepts, height, width) of True and False; "
    "or a ConceptData."
)


@dataclass(frozen=True, eq=False)
class Labels:
    """The concepts present in one image, and their masks. Other concepts are absent."""

    concepts: Int[Tensor, " present"]
    masks: Tensor  # (present, height, width) of bool


@dataclass(frozen=True, eq=False)
class ConceptData:
    """Concepts over a data set: what the pixels of images show.

    Attributes:
        names: of the concepts. categories: one word per concept, such as "colour" or "texture".
        batches: in the order of the images, tensors (images, concepts, height, width) of bool, or lists with one
            `Labels` per image; batch sizes may differ from those of the images. They are read several times.

    >>> import torch
    >>> masks = torch.zeros(4, 2, 8, 8, dtype=torch.bool)
    >>> ConceptData(("red", "round"), ("colour", "shape"), [masks])
    ConceptData(2 concepts of 2 categories: colour, shape)
    """

    names: tuple[str, ...]
    categories: tuple[str, ...]
    batches: Iterable[Any] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.categories):
            raise InputError(
                f"Every concept needs one category; found {len(self.names)} names and {len(self.categories)} "
                "categories."
            )
        check_again(self.batches)
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise InputError(f"Two concepts have the name {twice!r}. Give every concept a unique name.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The categories, each once, in the order of their first concept."""
        return tuple(dict.fromkeys(self.categories))

    def images(self) -> Iterator[Labels]:
        """The labels of every image, one after the other."""
        for batch in self.batches:
            yield from _labels(batch, len(self.names))

    def __repr__(self) -> str:
        kinds = f"{len(self.kinds)} categor{'y' if len(self.kinds) == 1 else 'ies'}"
        return f"ConceptData({len(self.names)} concepts of {kinds}: {', '.join(self.kinds)})"


def concept_data(
    concepts: Any, names: Sequence[str] | None = None, categories: Sequence[str] | None = None
) -> ConceptData:
    """Concepts from a ConceptData (returned unchanged), one tensor of masks, or batches of masks.

    Args:
        concepts: the masks. names, categories: of the concepts; "concept 0", … of one category by default.

    >>> import torch
    >>> concept_data(torch.zeros(4, 2, 8, 8, dtype=torch.bool)).names
    ('concept 0', 'concept 1')
    """
    if isinstance(concepts, ConceptData):
        return concepts
    batches = [concepts] if isinstance(concepts, Tensor) else concepts
    if isinstance(batches, (str, bytes)) or not isinstance(batches, Iterable):
        raise InputError(f"concepts is {kind_of(concepts)}, which holds no masks. {ADVICE}")
    check_again(batches)
    first = next(iter(batches), None)
    if not isinstance(first, Tensor) or first.dim() != 4:
        raise InputError(f"The first batch of masks is {kind_of(first)}. {ADVICE}")
    found = tuple(names or (f"concept {i}" for i in range(first.shape[1])))
    return ConceptData(found, tuple(categories or [ONE_CATEGORY] * len(found)), batches)


def check_again(batches: Iterable[Any]) -> None:
    """Refuse masks that can be read only once."""
    if isinstance(batches, Iterator):
        raise InputError(
            "The masks are a generator, which can be read only once, but they are read again for the overlaps by "
            "chance and for every rotation. Pass a tensor, a list, or an object whose __iter__ restarts."
        )


def _labels(batch: Any, count: int) -> Iterator[Labels]:
    if isinstance(batch, Tensor):
        if batch.dim() != 4 or batch.shape[1] != count:
            raise InputError(f"A batch of masks of {count} concepts is {kind_of(batch)}. {ADVICE}")
        for masks in as_masks(batch):
            present = masks.flatten(1).any(1).nonzero()[:, 0]
            yield Labels(present, masks[present])
        return
    if not isinstance(batch, (list, tuple)) or not all(isinstance(one, Labels) for one in batch):
        raise InputError(f"A batch of masks is {kind_of(batch)}. {ADVICE}")
    for one in batch:
        if len(one.concepts) != len(one.masks) or one.masks.dim() != 3:
            raise InputError(
                f"An image has {len(one.concepts)} concepts, but its masks are {kind_of(one.masks)}. Give one mask "
                "(height, width) per concept."
            )
        if len(one.concepts) and not 0 <= int(one.concepts.min()) <= int(one.concepts.max()) < count:
            raise MismatchError(
                f"An image has the concept {int(one.concepts.max())}, but there are {count} concepts, counted from 0."
            )
        yield Labels(one.concepts, as_masks(one.masks))


def as_masks(masks: Tensor) -> Tensor:
    """Masks as bool; integers must be 0 and 1."""
    if masks.dtype == torch.bool:
        return masks
    if masks.is_floating_point() or bool(((masks != 0) & (masks != 1)).any()):
        kind = str(masks.dtype).removeprefix("torch.")
        raise InputError(
            f"Masks must be True and False, or 0 and 1, but are {kind} numbers. A map of labels becomes masks by "
            "(labels[:, None] == torch.arange(count)[:, None, None])."
        )
    return masks.bool()


Row = Mapping[str, str]
#: Of pixels from 0 to 1, for networks trained on ImageNet.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Broden:
    """A Broden folder: `images` and `concepts` are arguments of `dissect`; files are decoded when needed."""

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
                        raise InputError(f"{row['image']} has the label {number}, which label.csv does not list.")
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
            if number:  # 0: no label
                yield number, labels == number


def read_broden(
    folder: str | Path,
    split: str | None = None,
    size: tuple[int, int] | None = None,
    batch: int = 32,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> Broden:
    """A Broden folder, in the published layout, as images and concepts.

    - index.csv: image, split, ih, iw, sh, sw, and one column per category: files of label maps or numbers of labels of
      the whole image, separated by ";". A label map is an image whose pixels are red + 256 · green.
    - label.csv: number, name, category, …: the category as "color(289);object(3)", with counts of the label.
    - category.csv: name, …
    - images/: the images and the label maps.

    Args:
        folder: the folder. split: "train" or "val", for a part of the images. size: height and width of the network's
            inputs, by default of the first image. batch: images at once. mean, std: of the network's inputs, for pixels
            from 0 to 1.

    >>> import tempfile
    >>> from intertwine.inspect.concepts import read_broden
    >>> with tempfile.TemporaryDirectory() as empty:
    ...     read_broden(empty)
    Traceback (most recent call last):
    intertwine.errors.InputError: ... is no Broden folder: it has no category.csv. ...
    """
    place = Path(folder)
    kinds = tuple(row["name"] for row in _table(place, "category.csv", ("name",)))
    rows = _table(place, "index.csv", ("image", "split", "ih", "iw", "sh", "sw", *kinds))
    splits = sorted({row["split"] for row in rows})
    chosen = tuple(row for row in rows if split in (None, row["split"]))
    if not chosen:
        raise InputError(f"The split {split!r} of {place} has no images; index.csv has {', '.join(splits) or 'none'}.")
    names: dict[int, tuple[str, str]] = {}
    for row in _table(place, "label.csv", ("number", "name", "category")):
        names[int(row["number"])] = (row["name"], _category(row["category"], kinds))
    names.pop(0, None)
    data = BrodenLabels(place, chosen, kinds, {number: i for i, number in enumerate(names)})
    plain = [name for name, _ in names.values()]
    unique = (  # names of several labels get their category and number
        name if plain.count(name) == 1 else f"{name} ({kind} {number})" for number, (name, kind) in names.items()
    )
    concepts = ConceptData(tuple(unique), tuple(kind for _, kind in names.values()), data)
    files = tuple(place / "images" / row["image"] for row in chosen)
    images = BrodenImages(files, size or (int(chosen[0]["ih"]), int(chosen[0]["iw"])), batch, mean, std)
    return Broden(place, images, concepts)


def _category(text: str, kinds: Sequence[str]) -> str:
    """The most frequent category of a label: "object" of "color(3);object(12)"."""
    found = [(int(count or 0), name) for name, count in re.findall(r"([^;()]+)(?:\((\d+)\))?", text)]
    known = [(count, -i, name) for i, (count, name) in enumerate(found) if name in kinds]
    if not known:
        raise InputError(f"A label of label.csv has the category {text!r}; category.csv has {', '.join(kinds)}.")
    return max(known)[2]


def _table(folder: Path, name: str, needed: Sequence[str]) -> list[dict[str, str]]:
    file = folder / name
    if not file.is_file():
        raise InputError(
            f"{folder} is no Broden folder: it has no {name}. Give the folder that holds index.csv, label.csv, "
            "category.csv and images/."
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
        raise InputError(f"{file}, which index.csv lists, cannot be read as an image ({error}).") from error
