"""The verb `dissect`: which concepts the units of a layer stand for, in the network's own basis or a rotated one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from intertwine.errors import InputError, did_you_mean
from intertwine.inspect.concepts import ConceptData
from intertwine.inspect.dissect import Cut, dissect_maps
from intertwine.inspect.maps import Maps
from intertwine.inspect.rotation import rotation
from intertwine.study.rows import Row
from intertwine.study.verbs.strokes import stroke_concepts
from intertwine.study.verbs.verb import Ask
from intertwine.zoo.concepts import SMALLEST, concept_images
from intertwine.zoo.datasets.dataset import Dataset

#: Pictures drawn where no number of images is given, with another seed than those that networks are trained on.
DRAWN, SEED = 500, 1


def dissect(ask: Ask) -> Iterator[Row]:
    """Units per concept, the share of units that stand for one, and that share by chance."""
    name, data = ask.options["concepts"], ask.bench.data(ask.zoo)
    if name not in CONCEPTS:
        known = ", ".join(CONCEPTS)
        raise InputError(f"The concepts {name!r} were asked for. {did_you_mean(str(name), CONCEPTS)}There are {known}.")
    inputs, concepts = CONCEPTS[name](data, ask.options["images"])
    maps = Maps(ask.a, ask.at, inputs.to(ask.bench.device))
    power = float(ask.options["rotation"])
    turn = rotation(maps.units, power, ask.seed, torch.float32) if power else None
    cut = Cut(float(ask.options["level"]), float(ask.options["share"]))
    found = dissect_maps(maps, concepts, turn, cut)
    for concept, units in found.by_concept.items():
        yield Row("units", float(len(units)), layer=ask.layer, note=concept)
    yield Row("fraction", found.fraction, layer=ask.layer)
    if found.null is not None:
        yield Row("fraction_by_chance", found.null.above(found.level), layer=ask.layer)


def _strokes(data: Dataset, images: int | None) -> tuple[Tensor, ConceptData]:
    """The training images themselves, with the parts of their strokes."""
    if data.shape[0] != 1:
        raise InputError(
            f'Strokes were to be found in {data.name}, whose images have {data.shape[0]} channels. Ask for concepts = '
            '"synthetic" there, or dissect a network of grey images.'
        )  # fmt: skip
    pixels = data.images[:images].cpu()
    return data.inputs(pixels), stroke_concepts(pixels[..., 0] > int(data.images.max()) / 2)


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
