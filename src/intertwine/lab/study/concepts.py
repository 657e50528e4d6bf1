"""The verb `dissect`, with concept masks of handwriting computed from the ink itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

import numpy as np
import torch
from scipy.ndimage import binary_fill_holes
from torch import Tensor
from torch.nn import functional

from intertwine.errors import InputError, did_you_mean
from intertwine.inspect.concepts import ConceptData
from intertwine.inspect.dissect import DissectionSettings, Maps, dissect_maps
from intertwine.inspect.rotation import rotation
from intertwine.lab.study.records import ResultRow
from intertwine.lab.study.verb import VerbContext
from intertwine.lab.zoo.datasets.concepts import SMALLEST, concept_images
from intertwine.lab.zoo.datasets.dataset import Dataset

# ----------------------------------------------------------------------------------------------------
# Concepts of handwriting, read off the ink itself: strokes by direction, their edges and tips, and holes.
#
# Images of digits come without labels of pixels. What a pixel of a stroke is can be said by its neighbours alone, so
# these masks need nobody to draw them.


#: Concept → the step (down, right) along which the ink goes on. Rising and falling as one writes, from the left.
DIRECTIONS = {"level": (0, 1), "upright": (1, 0), "falling": (1, 1), "rising": (-1, 1)}
#: Concept → the step to the neighbour that is no ink.
EDGES = {"top edge": (-1, 0), "bottom edge": (1, 0), "left edge": (0, -1), "right edge": (0, 1)}
MAX_RUN = 4  # steps that are looked at; longer strokes are equally clear
NEIGHBOURS = [(down, right) for down, right in product((-1, 0, 1), repeat=2) if (down, right) != (0, 0)]


def handwriting_concepts(ink: Tensor) -> ConceptData:
    """The masks of ten concepts. `ink`: (images, height, width) of bool.

    >>> ink = torch.zeros(1, 5, 5, dtype=torch.bool)
    >>> ink[0, 1:4, 1:4] = True
    >>> ink[0, 2, 2] = False                                       # a ring
    >>> found = handwriting_concepts(ink)
    >>> found
    ConceptData(10 concepts of 3 categories: stroke, edge, form)
    >>> masks = dict(zip(found.names, next(iter(found.batches))[0]))
    >>> masks["hole"].nonzero().tolist(), masks["level stroke"][1].tolist()
    ([[2, 2]], [False, False, True, False, False])
    """
    lengths = {name: _run(ink, step) for name, step in DIRECTIONS.items()}
    masks = {f"{name} stroke": _longest(name, lengths) & ink for name in lengths}
    masks |= {name: ink & ~_shifted(ink, step) for name, step in EDGES.items()}
    masks["tip"] = ink & (torch.stack([_shifted(ink, step) for step in NEIGHBOURS]).sum(0) <= 1)
    holes = [np.asarray(binary_fill_holes(one)) & ~one for one in ink.numpy()]
    masks["hole"] = torch.from_numpy(np.stack(holes))
    kinds = ("stroke",) * len(DIRECTIONS) + ("edge",) * len(EDGES) + ("form",) * 2
    return ConceptData(tuple(masks), kinds, [torch.stack(list(masks.values()), 1)])


def _shifted(ink: Tensor, step: tuple[int, int]) -> Tensor:
    """At every pixel, whether the pixel one step away is ink; beyond the border nothing is."""
    (down, right), (height, width) = step, ink.shape[1:]
    room = max(abs(down), abs(right))
    padded = functional.pad(ink, (room,) * 4)
    return padded[:, room + down : room + down + height, room + right : room + right + width]


def _run(ink: Tensor, step: tuple[int, int]) -> Tensor:
    """How many pixels of ink follow each other through every pixel, both ways along a step."""
    total = ink.long()
    for sign in (1, -1):
        on = ink
        for far in range(1, MAX_RUN + 1):
            on = on & _shifted(ink, (sign * far * step[0], sign * far * step[1]))
            total = total + on
    return total


def _longest(name: str, lengths: dict[str, Tensor]) -> Tensor:
    """Where the ink goes further in this direction than in every other."""
    others = torch.stack([length for other, length in lengths.items() if other != name]).amax(0)
    return lengths[name] > others


# ----------------------------------------------------------------------------------------------------
# The verb `dissect`: which concepts the units of a layer stand for, in the network's own basis or a rotated one.


#: Pictures drawn where no number of images is given, with another seed than those that networks are trained on.
DRAWN, SEED = 500, 1


def dissect(ask: VerbContext) -> Iterator[ResultRow]:
    """Units per concept, the share of units that stand for one, and that share by chance."""
    name, data = ask.options["concepts"], ask.bench.data(ask.zoo)
    if name not in CONCEPTS:
        known = ", ".join(CONCEPTS)
        raise InputError(f"The concepts {name!r} were asked for. {did_you_mean(str(name), CONCEPTS)}There are {known}.")
    inputs, concepts = CONCEPTS[name](data, ask.options["images"])
    maps = Maps(ask.a, ask.at, inputs.to(ask.bench.device))
    power = float(ask.options["rotation"])
    turn = rotation(maps.units, power, ask.seed, torch.float32) if power else None
    cut = DissectionSettings(float(ask.options["level"]), float(ask.options["share"]))
    found = dissect_maps(maps, concepts, turn, cut)
    for concept, units in found.by_concept.items():
        yield ResultRow("units", float(len(units)), layer=ask.layer, note=concept)
    yield ResultRow("fraction", found.fraction, layer=ask.layer)
    if found.null is not None:
        yield ResultRow("fraction_by_chance", found.null.above(found.level), layer=ask.layer)


def _strokes(data: Dataset, images: int | None) -> tuple[Tensor, ConceptData]:
    """The training images themselves, with the parts of their strokes."""
    if data.shape[0] != 1:
        raise InputError(
            f'Strokes were to be found in {data.name}, whose images have {data.shape[0]} channels. Ask for concepts = '
            '"synthetic" there, or dissect a network of grey images.'
        )  # fmt: skip
    pixels = data.images[:images].cpu()
    return data.inputs(pixels), handwriting_concepts(pixels[..., 0] > int(data.images.max()) / 2)


def _synthetic(data: Dataset, images: int | None) -> tuple[Tensor, ConceptData]:
    """Pictures drawn at the size of the data's images, seen as these are."""
    channels, height, width = data.shape
    if channels != 3 or height != width or height < SMALLEST:
        raise InputError(
            f"Synthetic pictures are coloured squares of at least {SMALLEST}×{SMALLEST}, but the images of {data.name} "
            f'are {channels}×{height}×{width}. Ask for concepts = "strokes" where they are grey.'
        )
    drawn = concept_images(DRAWN if images is None else images, SEED, height)
    return data.inputs(drawn.images), drawn.concepts


#: Where concepts come from: the data set and how many images → inputs, and the masks of their concepts.
CONCEPTS: Mapping[str, Callable[[Dataset, int | None], tuple[Tensor, ConceptData]]] = {
    "strokes": _strokes,
    "synthetic": _synthetic,
}
