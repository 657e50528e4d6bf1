"""Overlaps: intersections and unions of every unit's mask with every concept's, added up over a data set.

The sums for a concept run over the images in which at least one concept of its category is labelled, as in Bau et al.
(2017): where a category is not labelled at all, nothing can be said about it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from intertwine.inspect.concepts import Labels
from intertwine.shapes import Float

#: Pixels of unit masks that are held at once.
PIXELS = 2**23


class Overlaps:
    """Counts of pixels: intersections (units × concepts), areas of units per category and areas of concepts.

    >>> import torch
    >>> sums = Overlaps(units=1, categories=["colour"])
    >>> seen, there = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]])
    >>> sums.add(torch.tensor([0]), seen.float(), Labels(torch.tensor([0]), there.bool().reshape(1, 1, 3)))
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

    def meet(self, labels: Labels) -> tuple[Tensor, Tensor, Tensor]:
        """Count the areas of the concepts of an image; gives them, their categories and their masks as a matrix."""
        concepts = labels.concepts.to(self.category.device)
        there = labels.masks.to(self.category.device).flatten(1).float()
        areas = there.sum(1)
        concepts, there, areas = concepts[areas > 0], there[areas > 0], areas[areas > 0]
        self.of_concepts.index_add_(0, concepts, areas.double())
        return concepts, self.category[concepts].unique(), there

    def count(
        self, active: Tensor, seen: Float[Tensor, "active pixels"], met: tuple[Tensor, Tensor, Tensor]
    ) -> None:  # fmt: skip
        """Count the pixels that the masks of some units share with those of an image's concepts."""
        concepts, kinds, there = met
        if len(concepts):
            self.together[active[:, None], concepts] += (seen @ there.T).double()
            self.of_units[active[:, None], kinds] += seen.sum(1, keepdim=True).double()

    def add(self, active: Tensor, seen: Float[Tensor, "active pixels"], labels: Labels) -> None:
        """Count one image: the masks of the units that are active in it, and its labels."""
        self.count(active, seen, self.meet(labels))

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
    """For parts of the units that are active in an image: their numbers, and 1 where the enlarged map is above.

    Maps are enlarged with bilinear interpolation, which never goes above the largest value: units whose map stays below
    the threshold have empty masks and are left out.
    """
    active = (maps.flatten(1).amax(1) > thresholds).nonzero()[:, 0]
    if not len(active):
        return []
    found = []
    for some in active.split(max(1, PIXELS // (size[0] * size[1]))):
        large = functional.interpolate(maps[some][None], size, mode="bilinear", align_corners=False)[0]
        found.append((some, (large.flatten(1) > thresholds[some, None]).float()))
    return found
