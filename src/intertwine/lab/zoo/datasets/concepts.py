"""A synthetic data set of concepts for network dissection: pictures with pixel-wise labels.

Every picture shows a few objects on a grey background. Each object has a shape, a colour, a texture of dark stripes,
checks or dots, and sometimes a part: a white hole in the middle or a black foot below. The class of a picture is that
of its largest object, so a network must learn these concepts to classify it. As in Broden, pixel labels are one map per
category.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError, unknown_name
from intertwine.inspect.concepts import ConceptData
from intertwine.lab.zoo.datasets.dataset import Dataset

COLOURS = {"red": (220, 50, 47), "green": (60, 170, 60), "blue": (50, 90, 220), "yellow": (225, 200, 50)}
#: Category → concepts. Every object has one of each category but "part", which is optional.
VOCABULARY: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "texture": ("plain", "striped", "checked", "dotted"),
    "shape": ("disc", "square", "triangle", "cross"),
    "part": ("hole", "foot"),
}
NAMES = tuple(name for names in VOCABULARY.values() for name in names)
CATEGORIES = tuple(kind for kind, names in VOCABULARY.items() for _ in names)
#: Smallest width of a picture in which all concepts are visible.
SMALLEST = 16


@dataclass(frozen=True, eq=False)
class ConceptImages:
    """Pictures with class labels and concept maps.

    Attributes:
        images: (n, height, width, 3) of uint8. maps: (n, category, height, width) of uint8: 0 without a label of the
            category, else 1 + the index of the concept in its category.
        labels: the class of each picture. task: the categories that make up the class.
    """

    images: Tensor
    maps: Tensor
    labels: Int[Tensor, " n"]
    task: tuple[str, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, such as "red disc"."""
        names = [""]
        for kind in self.task:
            names = [f"{before} {name}".strip() for before in names for name in VOCABULARY[kind]]
        return tuple(names)

    def inputs(self) -> Float[Tensor, "n 3 height width"]:
        """The normalised pictures."""
        return (self.images.movedim(-1, 1).float() - 110) / 60

    @property
    def concepts(self) -> ConceptData:
        """The masks of every concept, for `intertwine.dissect`."""
        return ConceptData(NAMES, CATEGORIES, _MaskBatches(self.maps))

    def dataset(self, test: int) -> Dataset:
        """The pictures as a training data set whose test split is the last `test` pictures."""
        if not 0 < test < len(self.images):
            raise InputError(f"test must be from 1 to {len(self.images) - 1} of the pictures, but is {test}.")
        parts = [(self.images[:-test], self.labels[:-test]), (self.images[-test:], self.labels[-test:])]
        return Dataset.of("concepts", parts[0], parts[1], [110] * 3, [60] * 3, self.classes)

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        size = "×".join(map(str, self.images.shape[1:3]))
        return f"ConceptImages({len(self)} pictures {size}, {len(NAMES)} concepts, {len(self.classes)} classes)"


@dataclass(frozen=True, eq=False)
class _MaskBatches:
    """Batches of concept masks, computed from the maps on iteration."""

    maps: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        for maps in self.maps.split(64):
            masks = [maps[:, i] == 1 + j for i, names in enumerate(VOCABULARY.values()) for j in range(len(names))]
            yield torch.stack(masks, 1)


def concept_images(
    count: int, seed: int = 0, size: int = 32, task: Sequence[str] = ("colour", "shape")
) -> ConceptImages:
    """Draw pictures. A seed always gives the same sequence; a larger `count` extends it.

    Args:
        count: number of pictures. seed: of the drawing. size: height and width.
        task: the categories that make up the class, without "part".

    >>> found = concept_images(20, seed=0)
    >>> found
    ConceptImages(20 pictures 32×32, 14 concepts, 16 classes)
    >>> found.concepts
    ConceptData(14 concepts of 4 categories: colour, texture, shape, part)
    """
    if count < 1 or size < SMALLEST:
        raise InputError(
            f"count must be at least 1 and size at least {SMALLEST}, but they are count={count}, size={size}."
        )
    categories = [kind for kind in VOCABULARY if kind != "part"]
    for kind in task:
        if kind not in categories:
            raise InputError(unknown_name("category of a class", kind, categories))
    if not task or len(set(task)) != len(task):
        raise InputError(f"task must be one or more different categories of {', '.join(categories)}, not {list(task)}.")
    pictures = [_picture(np.random.default_rng((seed, i)), size, task) for i in range(count)]
    images, maps, labels = zip(*pictures, strict=True)
    return ConceptImages(
        torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(maps)), torch.tensor(labels), tuple(task)
    )


def _picture(random: np.random.Generator, size: int, task: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
    """One picture, its maps and its class: small objects first, the large one last and on top."""
    pixels = np.full((size, size, 3), random.uniform(90, 130)) + random.normal(0, 12, (size, size, 1))
    maps = np.zeros((len(VOCABULARY), size, size), np.uint8)
    choice = [0] * len(VOCABULARY)
    for radius in [*(size * random.uniform(0.09, 0.14) for _ in range(random.integers(1, 4))), size * 0.22]:
        choice = [int(random.integers(len(names))) for names in VOCABULARY.values()]
        _draw_object(random, pixels, maps, choice, radius)
    pixels += random.normal(0, 8, pixels.shape)
    columns = [list(VOCABULARY).index(kind) for kind in task]
    sizes = [len(VOCABULARY[kind]) for kind in task]
    label = sum(choice[kind] * prod(sizes[i + 1 :]) for i, kind in enumerate(columns))
    return pixels.clip(0, 255).astype(np.uint8), maps, label


def _draw_object(
    random: np.random.Generator, pixels: np.ndarray, maps: np.ndarray, choice: Sequence[int], radius: float
) -> None:  # fmt: skip
    """Draw one object into a picture and its maps, over what is there."""
    size = len(pixels)
    x, y = random.uniform(radius, size - radius, 2)
    rows, columns = np.mgrid[:size, :size]
    down, right = (rows - y) / radius, (columns - x) / radius
    inside = _inside(VOCABULARY["shape"][choice[2]], down, right)
    dark = _dark(VOCABULARY["texture"][choice[1]], rows, columns)
    colour = np.array(list(COLOURS.values())[choice[0]]) * random.uniform(0.85, 1.15)
    pixels[inside] = np.where(dark[inside][:, None], colour * 0.35, colour)
    maps[:, inside] = 0
    maps[:3, inside] = 1 + np.array(choice[:3], np.uint8)[:, None]
    if random.random() < 0.5:
        part = VOCABULARY["part"][choice[3]]
        mask = down**2 + right**2 < 0.16 if part == "hole" else (abs(right) < 0.5) & (down > 1.0) & (down < 1.5)
        pixels[mask] = 245.0 if part == "hole" else 15.0
        maps[:, mask] = 0
        maps[3, mask] = 1 + choice[3]


def _inside(shape: str, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    match shape:
        case "disc":
            return down**2 + right**2 < 1
        case "square":
            return np.maximum(abs(down), abs(right)) < 0.9
        case "triangle":
            return (down < 0.9) & (abs(right) < (down + 1.1) * 0.55)
    return (np.minimum(abs(down), abs(right)) < 0.38) & (np.maximum(abs(down), abs(right)) < 1)


def _dark(texture: str, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The pixels that a texture darkens."""
    match texture:
        case "striped":
            return rows % 4 < 2
        case "checked":
            return (rows // 2 + columns // 2) % 2 == 0
        case "dotted":
            return (rows % 4 == 0) & (columns % 4 == 0)
    return np.zeros(rows.shape, bool)
