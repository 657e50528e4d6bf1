"""`dissect`: which concepts the units of a layer stand for, in the network's own basis or a rotated one.

After Bau et al. (2017): a unit's threshold is exceeded by 0.5 % of its activations over the data set; its map is
enlarged to the size of the concepts' masks and cut at the threshold; the unit stands for the concept with the largest
intersection over union, added up over the data set, if that is above 0.04.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.errors import InputError, MismatchError
from intertwine.inspect.concepts import ConceptData, Labels, concept_data
from intertwine.inspect.dissection import LEVEL, Dissection, Null, Unit
from intertwine.inspect.maps import MEMORY, Maps
from intertwine.inspect.overlaps import Overlaps, unit_masks
from intertwine.inspect.rotation import check_rotation
from intertwine.inspect.thresholds import TopValues
from intertwine.shapes import Float

#: The share of a unit's activations above its threshold.
SHARE = 0.005


@dataclass(frozen=True)
class Cut:
    """How units are judged: the level of overlap, the share above the threshold, and how often chance is drawn."""

    level: float = LEVEL
    share: float = SHARE
    null: int = 1


def dissect(
    model: nn.Module,
    at: str,
    images: Any,
    concepts: Any,
    rotation: Tensor | None = None,
    *,
    level: float = LEVEL,
    share: float = SHARE,
    null: int = 1,
    memory: int = MEMORY,
) -> Dissection:
    """Which concept every unit at a place stands for.

    Args:
        model: any network of images; left as it was. at: a place that gives maps, see `intertwine.features.places`.
        images: a tensor, or batches of (inputs, targets) that come in the same order every time.
        concepts: masks in the order of the images: a `ConceptData`, a tensor (images, concepts, height, width) of bool,
            or batches of such.
        rotation: a matrix Q (units × units), such as `intertwine.rotation(n, alpha, seed)`. The units are then the
            rows of Q·x instead of x, at every position.
        level: above which an overlap makes a unit interpretable. share: of the activations above a unit's threshold.
        null: how often the units are judged again with the masks of other images, to see what chance gives; 0 for not.
        memory: bytes of activations to keep. Above it the network runs once for thresholds and once for overlaps.

    Raises:
        InputError: a place without maps, masks of different sizes, only concepts that never occur.
        MismatchError: a rotation of another size, more or fewer masks than images.

    >>> import torch
    >>> from intertwine.inspect.dissect import dissect
    >>> images = torch.rand(50, 2, 8, 8)
    >>> masks = images > 0.995                                     # one concept per channel
    >>> dissect(torch.nn.Sequential(torch.nn.Identity()), "0", images, masks, null=0)
    Dissection(0: 2 of 2 units (100.0%) above 0.04, 50 images, 2 concepts)
      concept: 2 units, 2 concepts
    """
    return dissect_maps(Maps(model, at, images, memory), concept_data(concepts), rotation, Cut(level, share, null))


@torch.no_grad()
def dissect_maps(maps: Maps, concepts: ConceptData, rotation: Tensor | None, cut: Cut) -> Dissection:
    """`dissect` for maps that may serve several rotations."""
    if rotation is not None:
        _check_size(rotation, maps)
    if cut.null < 0 or (cut.null and maps.images <= cut.null):
        raise InputError(
            f"Chance was to be drawn {cut.null} times with the masks of other images, but there are {maps.images} "
            "images. Give null=0 to leave it out, or more images than draws."
        )
    thresholds = _thresholds(maps, rotation, cut.share)
    real, shifted = _overlaps(maps, concepts, rotation, thresholds, cut.null)
    return _result(maps, concepts, rotation, cut, thresholds, real, shifted)


def _rotated(maps: Tensor, rotation: Tensor | None) -> Float[Tensor, "images units height width"]:
    if rotation is None:
        return maps
    return torch.einsum("uc,nchw->nuhw", rotation.to(maps), maps)


def _thresholds(maps: Maps, rotation: Tensor | None, share: float) -> Float[Tensor, " units"]:
    top = TopValues(maps.images * maps.size[0] * maps.size[1], share)
    for batch in maps:
        top.add(_rotated(batch, rotation).movedim(1, 0).flatten(1))
    return top.threshold()


def _overlaps(
    maps: Maps, concepts: ConceptData, rotation: Tensor | None, thresholds: Tensor, null: int
) -> tuple[Overlaps, list[Overlaps]]:
    """The sums with the right masks, and those with the masks of other images."""
    sums = [Overlaps(maps.units, concepts.categories, thresholds.device) for _ in range(1 + null)]
    offsets = [maps.images * i // (1 + null) for i in range(1 + null)]
    streams = zip(*(_from(concepts, offset) for offset in offsets), strict=False)  # ends with the first
    pairs = zip_longest((one for batch in maps for one in _rotated(batch, rotation)), streams)
    size: tuple[int, int] | None = None
    for number, (one, labels) in enumerate(pairs):
        if one is None or labels is None:
            raise MismatchError(_uneven(maps, concepts))
        size = size or _mask_size(labels[0], maps)
        for offset, some in zip(offsets, labels, strict=True):
            _check_masks(some, size, (number + offset) % maps.images)
        met = [each.meet(some) for each, some in zip(sums, labels, strict=True)]
        for active, seen in unit_masks(one, thresholds, size):
            for each, there in zip(sums, met, strict=True):
                each.count(active, seen, there)
    return sums[0], sums[1:]


def _from(concepts: ConceptData, offset: int) -> Iterator[Labels]:
    """The labels from an image on, then from the first image again; without an offset, once."""
    if offset == 0:
        return concepts.images()
    return islice(chain(concepts.images(), concepts.images()), offset, None)


def _uneven(maps: Maps, concepts: ConceptData) -> str:
    found = sum(1 for _ in concepts.images())
    return (
        f"There are {maps.images} images and masks of {found}. Give the masks of exactly these images, in their order."
    )


def _mask_size(labels: Labels, maps: Maps) -> tuple[int, int]:
    size = (labels.masks.shape[-2], labels.masks.shape[-1])
    if maps.seen is not None:
        (height, width), off = maps.seen, size[0] * maps.seen[1] / max(1, size[1] * maps.seen[0])
        if not 0.97 < off < 1.03:
            raise InputError(
                f"The masks are {size[0]}×{size[1]} and the images {height}×{width}, which are not of one shape. Crop "
                "or stretch both alike; any size will do, as long as the sides keep their ratio."
            )
    return size


def _check_masks(labels: Labels, size: tuple[int, int], number: int) -> None:
    found = (labels.masks.shape[-2], labels.masks.shape[-1])
    if found != size:
        raise InputError(
            f"The masks of image {number} are {found[0]}×{found[1]}, those of the first {size[0]}×{size[1]}. Bring all "
            "masks to one size."
        )


def _check_size(rotation: Tensor, maps: Maps) -> None:
    if tuple(rotation.shape) != (maps.units, maps.units):
        raise MismatchError(
            f"A rotation {tuple(rotation.shape)} was given for {maps.at!r}, which has {maps.units} units. Give a "
            f"matrix {maps.units} × {maps.units}, such as intertwine.rotation({maps.units}, alpha, seed)."
        )
    check_rotation(rotation)


def _result(
    maps: Maps, concepts: ConceptData, rotation: Tensor | None, cut: Cut, thresholds: Tensor, real: Overlaps,
    shifted: list[Overlaps],
) -> Dissection:  # fmt: skip
    occurs = (real.of_concepts > 0).nonzero()[:, 0].tolist()
    if not occurs:
        raise InputError(
            f"None of the {len(concepts.names)} concepts occurs in any of the {maps.images} images: every mask is "
            "empty. Check that the masks belong to these images."
        )
    names, kinds = (tuple(words[i] for i in occurs) for words in (concepts.names, concepts.categories))
    iou = real.iou()[:, occurs].cpu()
    best = iou.max(1)
    units = tuple(
        Unit(i, names[c] if value > 0 else None, kinds[c] if value > 0 else None, value, threshold)
        for i, (value, c, threshold) in enumerate(
            zip(best.values.tolist(), best.indices.tolist(), thresholds.tolist(), strict=True)
        )
    )
    null = Null(torch.stack([sums.iou().amax(1).cpu() for sums in shifted])) if shifted else None
    left_out = tuple(name for i, name in enumerate(concepts.names) if i not in set(occurs))
    return Dissection(
        at=maps.at, units=units, level=cut.level, share=cut.share, images=maps.images, names=names, categories=kinds,
        iou=iou, left_out=left_out, null=null, rotated=rotation is not None,
    )  # fmt: skip
