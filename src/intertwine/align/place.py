"""Place: one occurrence of a strand in a block of weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from intertwine.shapes import Float
from intertwine.symmetry.layout import Leaf


@dataclass(frozen=True)
class Place:
    """One occurrence of a strand: in which block, along which dimensions (bases, then its own), and what is left."""

    block: int
    leaf: Leaf
    front: tuple[int, ...]
    rest: tuple[int, ...]

    def rows(self, x: Tensor) -> Float[Tensor, "copies n entries"]:
        """The slices of a block: one row per copy and index of the strand."""
        shape = [x.shape[d] for d in self.front]
        return x.permute(*self.front, *self.rest).reshape(prod(shape[:-1]), shape[-1], -1)
