"""Inner products of A's and B's slices, kept until the block they were taken from changes.

They are what weight matching spends its time on. Between two visits of a wire most of its blocks have not changed, and
where the wire itself was reordered its products are the same ones in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from intertwine.align.place import Place
from intertwine.shapes import Float, Int

#: Rows of so few entries are multiplied in double precision, those of all places together: it costs nothing there.
SHORT = 16
#: Products that are kept, in bytes, over all wires of a pair.
MOST = 2**29

Rows = Callable[[Place], Tensor]


@dataclass
class InnerProducts:
    """The products of one pair of weights: `a` and `b` give the slices at a place, `block` the present block of b.

    A block of b is a new tensor after every step, so that its identity tells its age. Products are kept with a row for
    each unit of b: what was reordered is then whole rows, several times as quick to move as columns.
    """

    a: Rows
    b: Rows
    block: Callable[[int], Tensor]
    _kept: dict[Place, tuple[ReferenceType[Tensor], Tensor]] = field(default_factory=dict)
    _bytes: int = 0

    def total(self, places: Sequence[Place]) -> Float[Tensor, "copies n m"]:
        """⟨a_i, b_j⟩ of all pairs of units, summed over places of one strand; on the CPU."""
        short = [place for place in places if self.a(place).shape[-1] <= SHORT]
        parts = [self._of(place) for place in places if place not in short]
        if short:
            rows = [torch.cat([of(place).double() for place in short], -1) for of in (self.a, self.b)]
            parts.append(torch.matmul(rows[1], rows[0].mT).cpu())
        found = parts[-1].clone()
        for part in parts[:-1]:
            found += part
        return found.mT

    def _of(self, place: Place) -> Float[Tensor, "copies m n"]:
        block, kept = self.block(place.block), self._kept.get(place)
        if kept is not None and kept[0]() is block:
            return kept[1]
        found = torch.matmul(self.b(place), self.a(place).mT).cpu()
        size = 0 if kept is not None else found.numel() * found.element_size()
        if self._bytes + size <= MOST:
            self._bytes += size
            self._kept[place] = (ref(block), found)
        return found

    def reordered(self, places: Sequence[Place], order: Int[Tensor, "copies n"], before: Sequence[Tensor]) -> None:
        """The strand of these places alone was reordered, which made new blocks of b out of the blocks `before`."""
        for place in places:
            kept = self._kept.get(place)
            once = sum(1 for other in places if other.block == place.block) == 1
            if kept is not None and once and kept[0]() is before[place.block]:
                alone = order.shape[0] == 1  # several times as quick
                moved = (
                    kept[1].index_select(-2, order[0]) if alone else torch.take_along_dim(kept[1], order[..., None], -2)
                )
                self._kept[place] = (ref(self.block(place.block)), moved)
