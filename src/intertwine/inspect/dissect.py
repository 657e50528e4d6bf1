"""`dissect`: the concepts of the units of a layer, from thresholds of activations and overlaps of masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from intertwine.argument_types import Float
from intertwine.data.batches import calls, samples_of
from intertwine.data.features import CapturedLayer, features
from intertwine.errors import InputError, MismatchError
from intertwine.inspect.concepts import ConceptData, Labels, concept_data
from intertwine.inspect.dissection import LEVEL, ChanceOverlaps, Dissection, Unit
from intertwine.inspect.rotation import check_rotation

#: Images per batch of a tensor of images.
BATCH = 32
#: Bytes of cached activations.
MEMORY = 2**30


class Maps:
    """The activations of one layer on some images: batches (images, channels, height, width), always in the same order.

    They are cached up to a memory limit; beyond it the network runs again in every pass.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    >>> maps = Maps(model, "1", torch.randn(40, 3, 8, 8))
    >>> maps.units, maps.size, maps.images, [len(batch) for batch in maps]
    (4, (8, 8), 40, [32, 8])
    """

    def __init__(self, model: nn.Module, at: str, images: Any, memory: int = MEMORY) -> None:
        self.at = at
        self.data = image_batches(images)
        known = getattr(self.data, "samples", None)  # otherwise data must be decoded to be counted
        self.images = known if isinstance(known, int) else sum(samples_of(call) for call in calls(self.data))
        self.source = features(model, self.data, [at])
        (self.layer,) = self.source.layers
        self.order = _order(self.layer)
        shape = [self.layer.shape[axis - (axis > self.layer.axis)] for axis in self.order[1:]]
        self.units, self.size = shape[0], (shape[1], shape[2])
        self.seen = image_size(self.data)
        self.cached = 4 * self.images * self.units * self.size[0] * self.size[1] <= memory
        self._cache: list[Tensor] | None = None

    def __iter__(self) -> Iterator[Float[Tensor, "images units height width"]]:
        if self._cache is not None:
            yield from self._cache
            return
        cache: list[Tensor] = []
        for batch in self.source:
            maps = batch[self.layer.name].permute(self.order).float()
            if tuple(maps.shape[1:]) != (self.units, *self.size):
                raise MismatchError(
                    f"The maps at {self.at!r} are {(self.units, *self.size)} for the first images and "
                    f"{tuple(maps.shape[1:])} for later ones. Give all images one size."
                )
            if self.cached:
                cache.append(maps)
            yield maps
        if self.cached:
            self._cache = cache


def image_batches(images: Any) -> Any:
    """Images as batches (inputs, targets) that can be read several times.

    Images come as one tensor, as batches of (inputs, targets), or as batches of inputs alone.

    >>> import torch
    >>> [len(inputs) for inputs, _ in image_batches(torch.zeros(40, 3, 8, 8))]
    [32, 8]
    """
    if isinstance(images, Tensor):
        return [(part, None) for part in images.split(BATCH)]
    if isinstance(images, (list, tuple)) and all(isinstance(one, Tensor) and one.dim() == 4 for one in images):
        return [(part, None) for part in images]
    if isinstance(images, Iterator):
        raise InputError(
            "The images are a generator, which can be read only once, but dissection reads them at least twice. Pass "
            "a tensor, a list of batches or a DataLoader without shuffling."
        )
    return images


def image_size(data: Iterable[Any]) -> tuple[int, int] | None:
    """Height and width of the images, if the network takes one tensor of images."""
    (args, _) = next(iter(calls(data)))
    first = args[0] if args else None
    return (first.shape[-2], first.shape[-1]) if isinstance(first, Tensor) and first.dim() == 4 else None


def _order(layer: CapturedLayer) -> tuple[int, ...]:
    """The axes as samples, channels, height, width."""
    if layer.layout.count("p") != 2 or layer.layout.count("c") != 1 or len(layer.layout) != 4:
        raise InputError(
            f"Dissection needs maps of channels over two axes of positions, but {layer.name!r} ({layer.module}) gives "
            f"{'×'.join(map(str, layer.shape)) or 'one number'} per image, layout {layer.layout!r}. Choose a layer "
            "before the positions are pooled or flattened, such as the last convolution."
        )
    rows = [axis for axis, letter in enumerate(layer.layout) if letter == "p"]
    return layer.layout.index("n"), layer.layout.index("c"), *rows


class TopValues:
    """The exact quantile of every unit over a data set, from its largest values, batch by batch.

    Only values that may still exceed the quantile are kept: twice 0.5 % of all for the usual top 0.5 %.

    Args:
        values: how many each unit has. share: of them above the quantile.

    >>> import torch
    >>> top = TopValues(values=100, share=0.1)
    >>> for part in torch.arange(200.0).reshape(2, 100).split(30, dim=1):
    ...     top.add(part)
    >>> top.threshold()
    tensor([ 89.1000, 189.1000])
    """

    def __init__(self, values: int, share: float) -> None:
        if not 0 < share < 1:
            raise InputError(f"share must be between 0 and 1, such as 0.005, but is {share}.")
        if values < 1:
            raise InputError("There are no activations. Give at least one image.")
        self.values, self.share = values, share
        self.position = (values - 1) * share  # of the quantile, counted from the largest value
        self.keep = min(values, int(self.position) + 2)
        self.seen = 0
        self._best: Tensor | None = None
        self._waiting: list[Tensor] = []

    def add(self, values: Float[Tensor, "units values"]) -> None:
        """Add values of every unit."""
        if not bool(values.isfinite().all()):
            raise InputError(
                "The activations hold NaN or infinity, so they have no quantile. Check the network and its inputs."
            )
        self.seen += values.shape[1]
        self._waiting.append(values)
        if sum(part.shape[1] for part in self._waiting) >= self.keep:
            self._sort_in()

    def threshold(self) -> Float[Tensor, " units"]:
        """The quantile of every unit, with linear interpolation as in numpy.quantile."""
        if self.seen != self.values:
            raise InputError(
                f"There must be {self.values:,} values per unit, but there are {self.seen:,}. The images must be the "
                "same in every pass and give maps of one size; turn dropping and random sampling off."
            )
        self._sort_in()
        assert self._best is not None
        top = self._best.sort(dim=1, descending=True).values
        at = int(self.position)
        above, below = top[:, at].double(), top[:, min(at + 1, top.shape[1] - 1)].double()
        return (above + (below - above) * (self.position - at)).to(top.dtype)

    def _sort_in(self) -> None:
        parts = [*([] if self._best is None else [self._best]), *self._waiting]
        joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if joined.shape[1] > self.keep:
            joined = joined.topk(self.keep, dim=1, sorted=False).values
        self._best, self._waiting = joined, []


#: Pixels of unit masks in memory at once.
PIXELS = 2**23


class Overlaps:
    """Counts of pixels: intersections (units × concepts), areas of units per category and areas of concepts.

    The sums of a concept run over the images in which some concept of its category is labelled, as in Bau et al.
    (2017).

    >>> import torch
    >>> sums = Overlaps(units=1, categories=["colour"])
    >>> seen, there = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]])
    >>> labels = Labels(torch.tensor([0]), there.bool().reshape(1, 1, 3))
    >>> sums.add_units(torch.tensor([0]), seen.float(), sums.add_concepts(labels))
    >>> sums.iou()
    tensor([[0.3333]], dtype=torch.float64)
    """

    def __init__(self, units: int, categories: Sequence[str], device: torch.device | None = None) -> None:
        kinds = list(dict.fromkeys(categories))
        options = {"dtype": torch.float64, "device": device}
        self.category = torch.tensor([kinds.index(name) for name in categories], device=device)
        self.together = torch.zeros(units, len(categories), **options)
        self.of_units = torch.zeros(units, len(kinds), **options)
        self.of_concepts = torch.zeros(len(categories), **options)

    def add_concepts(self, labels: Labels) -> tuple[Tensor, Tensor, Tensor]:
        """Count the areas of the concepts of an image; returns them, their categories and their masks as a matrix."""
        concepts = labels.concepts.to(self.category.device)
        masks = labels.masks.to(self.category.device).flatten(1).float()
        areas = masks.sum(1)
        concepts, masks, areas = concepts[areas > 0], masks[areas > 0], areas[areas > 0]
        self.of_concepts.index_add_(0, concepts, areas.double())
        return concepts, self.category[concepts].unique(), masks

    def add_units(
        self, active: Tensor, seen: Float[Tensor, "active pixels"], found: tuple[Tensor, Tensor, Tensor]
    ) -> None:  # fmt: skip
        """Count the pixels that masks of units share with those of an image's concepts, given by `add_concepts`."""
        concepts, kinds, masks = found
        if len(concepts):
            self.together[active[:, None], concepts] += (seen @ masks.T).double()
            self.of_units[active[:, None], kinds] += seen.sum(1, keepdim=True).double()

    @property
    def union(self) -> Float[Tensor, "units concepts"]:
        """Pixels in either mask."""
        return self.of_units[:, self.category] + self.of_concepts - self.together

    def iou(self) -> Float[Tensor, "units concepts"]:
        """Intersection over union; 0 where a concept never occurs."""
        union = self.union
        return torch.where(union > 0, self.together / union.clamp(min=1), 0.0)


def unit_masks(
    maps: Float[Tensor, "units rows columns"], thresholds: Float[Tensor, " units"], size: tuple[int, int]
) -> list[tuple[Tensor, Float[Tensor, "active pixels"]]]:
    """For parts of the active units of an image: their numbers, and 1 where the enlarged map exceeds the threshold.

    Bilinear interpolation never exceeds the largest value, so units whose map stays below the threshold have empty
    masks and are left out.
    """
    active = (maps.flatten(1).amax(1) > thresholds).nonzero()[:, 0]
    if not len(active):
        return []
    found = []
    for some in active.split(max(1, PIXELS // (size[0] * size[1]))):
        large = functional.interpolate(maps[some][None], size, mode="bilinear", align_corners=False)[0]
        found.append((some, (large.flatten(1) > thresholds[some, None]).float()))
    return found


#: The share of a unit's activations above its threshold.
SHARE = 0.005


@dataclass(frozen=True)
class DissectionSettings:
    """The level of overlap, the share of activations above the threshold, and the number of draws of chance."""

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
    """The concept that every unit of a layer responds to, in the network's own basis or a rotated one.

    After Bau et al. (2017): 0.5 % of a unit's activations over the data set exceed its threshold; its map is enlarged
    to the size of the concepts' masks and thresholded; the unit stands for the concept with the largest intersection
    over union, summed over the data set, if that is above 0.04.

    Args:
        model: any network of images; it is not changed. at: a layer that gives maps, see `intertwine.data.layers`.
        images: a tensor, or batches of (inputs, targets) that come in the same order every time.
        concepts: masks in the order of the images: a `ConceptData`, a tensor (images, concepts, height, width) of bool,
            or batches of such.
        rotation: a matrix Q (units × units), such as `intertwine.rotation(n, alpha, seed)`. The units are then the
            rows of Q·x instead of x, at every position.
        level: above which an overlap makes a unit interpretable. share: of the activations above a unit's threshold.
        null: the number of repetitions with the masks of other images, which show the overlaps by chance; 0 for none.
        memory: bytes of activations to cache. Beyond it the network runs once for thresholds and once for overlaps.

    Raises:
        InputError: a layer without maps, masks of different sizes, only concepts that never occur.
        MismatchError: a rotation of another size, more or fewer masks than images.

    >>> import torch
    >>> from intertwine.inspect.dissect import dissect
    >>> images = torch.rand(50, 2, 8, 8)
    >>> masks = images > 0.995                                     # one concept per channel
    >>> dissect(torch.nn.Sequential(torch.nn.Identity()), "0", images, masks, null=0)
    Dissection(0: 2 of 2 units (100.0%) above 0.04, 50 images, 2 concepts)
      concept: 2 units, 2 concepts
    """
    return dissect_maps(
        Maps(model, at, images, memory), concept_data(concepts), rotation, DissectionSettings(level, share, null)
    )


@torch.no_grad()
def dissect_maps(
    maps: Maps, concepts: ConceptData, rotation: Tensor | None, settings: DissectionSettings
) -> Dissection:
    """`dissect` for maps that may serve several rotations."""
    if rotation is not None:
        if tuple(rotation.shape) != (maps.units, maps.units):
            raise MismatchError(
                f"The rotation is {tuple(rotation.shape)}, but {maps.at!r} has {maps.units} units. Give a matrix "
                f"{maps.units} × {maps.units}, such as intertwine.rotation({maps.units}, alpha, seed)."
            )
        check_rotation(rotation)
    if settings.null < 0 or (settings.null and maps.images <= settings.null):
        raise InputError(
            f"null must be at least 0 and less than the number of images, {maps.images}, but is {settings.null}. Give "
            "null=0 to leave it out, or more images."
        )
    top = TopValues(maps.images * maps.size[0] * maps.size[1], settings.share)
    for batch in maps:
        top.add(_rotated(batch, rotation).movedim(1, 0).flatten(1))
    thresholds = top.threshold()
    real, shifted = _overlaps(maps, concepts, rotation, thresholds, settings.null)
    return _result(maps, concepts, rotation is not None, settings, thresholds, real, shifted)


def _rotated(maps: Tensor, rotation: Tensor | None) -> Float[Tensor, "images units height width"]:
    if rotation is None:
        return maps
    return torch.einsum("uc,nchw->nuhw", rotation.to(maps), maps)


def _overlaps(
    maps: Maps, concepts: ConceptData, rotation: Tensor | None, thresholds: Tensor, null: int
) -> tuple[Overlaps, list[Overlaps]]:
    """The sums with the right masks, and those with the masks of other images."""
    sums = [Overlaps(maps.units, concepts.categories, thresholds.device) for _ in range(1 + null)]
    offsets = [maps.images * i // (1 + null) for i in range(1 + null)]
    streams = zip(*(_labels_from(concepts, offset) for offset in offsets), strict=False)  # ends with the first
    pairs = zip_longest((one for batch in maps for one in _rotated(batch, rotation)), streams)
    size: tuple[int, int] | None = None
    for number, (one, labels) in enumerate(pairs):
        if one is None or labels is None:
            found = sum(1 for _ in concepts.images())
            raise MismatchError(
                f"There are {maps.images} images, but masks of {found}. Give the masks of exactly these images, in "
                "their order."
            )
        size = size or _mask_size(labels[0], maps)
        for offset, some in zip(offsets, labels, strict=True):
            if tuple(some.masks.shape[-2:]) != size:
                raise InputError(
                    f"The masks of image {(number + offset) % maps.images} are "
                    f"{some.masks.shape[-2]}×{some.masks.shape[-1]}, but those of the first are {size[0]}×{size[1]}. "
                    "Resize all masks to one size."
                )
        present = [each.add_concepts(some) for each, some in zip(sums, labels, strict=True)]
        for active, seen in unit_masks(one, thresholds, size):
            for each, some in zip(sums, present, strict=True):
                each.add_units(active, seen, some)
    return sums[0], sums[1:]


def _labels_from(concepts: ConceptData, offset: int) -> Iterator[Labels]:
    """The labels from an image on, then from the first image again; without an offset, once."""
    if offset == 0:
        return concepts.images()
    return islice(chain(concepts.images(), concepts.images()), offset, None)


def _mask_size(labels: Labels, maps: Maps) -> tuple[int, int]:
    size = (labels.masks.shape[-2], labels.masks.shape[-1])
    if maps.seen is not None:
        (height, width), ratio = maps.seen, size[0] * maps.seen[1] / max(1, size[1] * maps.seen[0])
        if not 0.97 < ratio < 1.03:
            raise InputError(
                f"The masks are {size[0]}×{size[1]}, but the images {height}×{width}: their aspect ratios differ. "
                "Crop or stretch both alike; sizes may differ."
            )
    return size


def _result(
    maps: Maps, concepts: ConceptData, rotated: bool, settings: DissectionSettings, thresholds: Tensor, real: Overlaps,
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
    null = ChanceOverlaps(torch.stack([sums.iou().amax(1).cpu() for sums in shifted])) if shifted else None
    left_out = tuple(name for i, name in enumerate(concepts.names) if i not in set(occurs))
    return Dissection(
        at=maps.at, units=units, level=settings.level, share=settings.share, images=maps.images, names=names,
        categories=kinds, iou=iou, left_out=left_out, null=null, rotated=rotated,
    )  # fmt: skip
