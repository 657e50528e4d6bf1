"""The verb `dissect`, and concept masks of handwritten digits computed from the images themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

import numpy as np
import torch
from scipy.ndimage import binary_fill_holes
from torch import Tensor
from torch.nn import functional

from intertwine.errors import InputError
from intertwine.inspect.concepts import ConceptData
from intertwine.inspect.dissect import DissectionSettings, Maps, dissect_maps
from intertwine.inspect.rotation import rotation
from intertwine.lab.study.records import ResultRow
from intertwine.lab.study.verb import VerbContext
from intertwine.lab.zoo.datasets.concepts import SMALLEST, concept_images
from intertwine.lab.zoo.datasets.dataset import Dataset

#: Stroke direction → step (down, right) along the stroke; rising and falling are seen from the left.
DIRECTIONS = {"level": (0, 1), "upright": (1, 0), "falling": (1, 1), "rising": (-1, 1)}
#: Edge concept → step to the neighbour outside the ink.
EDGES = {"top edge": (-1, 0), "bottom edge": (1, 0), "left edge": (0, -1), "right edge": (0, 1)}
MAX_RUN = 4  # steps; longer strokes are as clear
NEIGHBOURS = [(down, right) for down, right in product((-1, 0, 1), repeat=2) if (down, right) != (0, 0)]
#: Size and seed of the synthetic images if the plan gives no number; networks are trained on another seed.
SYNTHETIC_IMAGES, SYNTHETIC_SEED = 500, 1


def dissect(context: VerbContext) -> Iterator[ResultRow]:
    """Units per concept, the fraction of units that match a concept, and that fraction by chance."""
    options = context.options
    inputs, concepts = CONCEPTS[options["concepts"]](context.cache.data(context.zoo), options["images"])
    maps = Maps(context.a, context.at, inputs.to(context.cache.device))
    power = float(options["rotation"])
    turn = rotation(maps.units, power, context.seed, torch.float32) if power else None
    settings = DissectionSettings(float(options["level"]), float(options["share"]))
    found = dissect_maps(maps, concepts, turn, settings)
    for concept, units in found.by_concept.items():
        yield ResultRow("units", float(len(units)), layer=context.layer, note=concept)
    yield ResultRow("fraction", found.fraction, layer=context.layer)
    if found.null is not None:
        yield ResultRow("fraction_by_chance", found.null.above(found.level), layer=context.layer)


def handwriting_concepts(ink: Tensor) -> ConceptData:
    """Masks of ten concepts that a pixel's neighbours define: stroke directions, edges, tips and holes.

    Args:
        ink: (images, height, width) of bool.

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
    lengths = {name: _run_length(ink, step) for name, step in DIRECTIONS.items()}
    masks = {}
    for name, length in lengths.items():
        others = torch.stack([one for other, one in lengths.items() if other != name]).amax(0)
        masks[f"{name} stroke"] = (length > others) & ink
    masks |= {name: ink & ~_shifted(ink, step) for name, step in EDGES.items()}
    masks["tip"] = ink & (torch.stack([_shifted(ink, step) for step in NEIGHBOURS]).sum(0) <= 1)
    holes = [np.asarray(binary_fill_holes(image)) & ~image for image in ink.numpy()]
    masks["hole"] = torch.from_numpy(np.stack(holes))
    categories = ("stroke",) * len(DIRECTIONS) + ("edge",) * len(EDGES) + ("form",) * 2
    return ConceptData(tuple(masks), categories, [torch.stack(list(masks.values()), 1)])


def _shifted(ink: Tensor, step: tuple[int, int]) -> Tensor:
    """At every pixel, whether the pixel one step away is ink; outside the image there is none."""
    (down, right), (height, width) = step, ink.shape[1:]
    margin = max(abs(down), abs(right))
    padded = functional.pad(ink, (margin,) * 4)
    return padded[:, margin + down : margin + down + height, margin + right : margin + right + width]


def _run_length(ink: Tensor, step: tuple[int, int]) -> Tensor:
    """The number of consecutive ink pixels through every pixel, in both directions of a step."""
    total = ink.long()
    for sign in (1, -1):
        run = ink
        for distance in range(1, MAX_RUN + 1):
            run = run & _shifted(ink, (sign * distance * step[0], sign * distance * step[1]))
            total = total + run
    return total


def _handwriting(data: Dataset, images: int | None) -> tuple[Tensor, ConceptData]:
    """Training images with their handwriting concepts."""
    if data.shape[0] != 1:
        raise InputError(
            f'Images of {data.name} have {data.shape[0]} channels, but concepts = "strokes" needs grey images. '
            'Use concepts = "synthetic", or a network of grey images.'
        )
    pixels = data.images[:images].cpu()
    return data.inputs(pixels), handwriting_concepts(pixels[..., 0] > int(data.images.max()) / 2)


def _synthetic(data: Dataset, images: int | None) -> tuple[Tensor, ConceptData]:
    """Synthetic images of the size of the data's images, normalised like them."""
    channels, height, width = data.shape
    if channels != 3 or height != width or height < SMALLEST:
        raise InputError(
            f"Synthetic images are coloured squares of at least {SMALLEST}×{SMALLEST}, but the images of {data.name} "
            f'are {channels}×{height}×{width}. Use concepts = "strokes" for grey images.'
        )
    drawn = concept_images(SYNTHETIC_IMAGES if images is None else images, SYNTHETIC_SEED, height)
    return data.inputs(drawn.images), drawn.concepts


#: Source of the concepts: data set and number of images → inputs, and the masks of their concepts.
CONCEPTS: Mapping[str, Callable[[Dataset, int | None], tuple[Tensor, ConceptData]]] = {
    "strokes": _handwriting,
    "synthetic": _synthetic,
}
