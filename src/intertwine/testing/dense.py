"""An independent reference for the action: the dense matrix of an element on a whole tensor, entry by entry.

It shares no code with the gathers of `symmetry.geometry`; it interprets the same layouts. For an entry of the moved
tensor every wire axis above it is found, bases first: the source index of the base determines which copy of a dependent
axis acts. The result is a row of the matrix, so that the fast path can be compared with plain linear algebra.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError
from intertwine.symmetry.element import Element
from intertwine.symmetry.geometry import Layout, LayoutAxis, ProductAxis, SumAxis, WireAxis

LARGEST_MATRIX = 4096  # entries of a tensor; the matrix has the square of that

Terms = list[tuple[int, float]]  # (index the number comes from, what it is multiplied by)


@dataclass(frozen=True)
class AxisEntry:
    """A wire axis over one entry of a tensor: in which axis of the tensor, at which index, and the stride of its
    indices."""

    axis: int
    wire_axis: WireAxis
    place: int
    step: int


class DenseAction:
    """The action of one element on the tensors of one layout, row by row.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> sym = intertwine.symmetry(model, torch.zeros(1, 3))
        >>> g = sym.random(seed=0)
        >>> matrix, offset = DenseAction(sym.layouts["0.weight"], g).matrix()
        >>> weight = model[0].weight.detach().double()
        >>> moved = sym.act(g, model.double())[0].weight.detach()
        >>> torch.allclose(matrix @ weight.flatten() + offset, moved.flatten())
        True
    """

    def __init__(self, layout: Layout, element: Element, degree: int = 1) -> None:
        self.layout, self.element, self.degree = layout, element, degree
        self._parts: dict[int, dict[str, Any]] = {
            i: {name: t.numpy() for name, t in move.items()} for i, move in element.moves.items()
        }
        for parts in self._parts.values():
            if "matrix" in parts:
                parts["contragredient"] = np.linalg.inv(parts["matrix"]).swapaxes(-1, -2)
        steps = [prod(layout.shape[axis + 1 :]) for axis in range(len(layout.axes))]
        self._steps = steps
        self._hits = [
            [tuple(_walk(tree, axis, position, steps[axis])) for position in range(tree.size)]
            for axis, tree in enumerate(layout.axes)
        ]

    def row(self, entry: int) -> dict[int, float]:
        """Entry of the moved tensor → the entries of the tensor it is a sum of, with their factors."""
        places = [entry // step % n for step, n in zip(self._steps, self.layout.shape, strict=True)]
        hits = [hit for axis, position in enumerate(places) for hit in self._hits[axis][position]]
        found: dict[int, float] = {}
        for terms in product(*(self._terms(hit, hits) for hit in hits)):
            source = entry + sum((index - h.place) * h.step for (index, _), h in zip(terms, hits, strict=True))
            found[source] = found.get(source, 0.0) + prod((factor for _, factor in terms), start=1.0)
        return found

    def offset(self, row: dict[int, float]) -> float:
        """The constant term: a running variance moves as (v + eps), an affine map of v."""
        return self.layout.shift * (sum(row.values()) - 1)

    def value(self, entry: int, numbers: Sequence[float]) -> float:
        """One entry of the moved tensor, from all entries of the tensor in order."""
        row = self.row(entry)
        return sum(factor * numbers[i] for i, factor in row.items()) + self.offset(row)

    def matrix(self) -> tuple[Float[Tensor, "n n"], Float[Tensor, " n"]]:
        """The whole matrix and offset: the moved tensor is `matrix @ tensor.flatten() + offset`."""
        size = prod(self.layout.shape)
        if size > LARGEST_MATRIX:
            raise InputError(
                f"The tensor has {size} entries, but a dense matrix is limited to {LARGEST_MATRIX}. "
                "Take single rows with DenseAction.row."
            )
        matrix, offset = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        for entry in range(size):
            row = self.row(entry)
            for source, factor in row.items():
                matrix[entry, source] = factor
            offset[entry] = self.offset(row)
        return matrix, offset

    def _terms(self, hit: AxisEntry, hits: list[AxisEntry]) -> Terms:
        """The sources of the entry at a hit, with their factors; a matrix has one term for each of its columns."""
        parts = self._parts.get(hit.wire_axis.wire, {})
        copy = self._copy(hit, hits)
        if "matrix" in parts:
            straight = hit.wire_axis.powers[0] * self.degree == 1
            row = parts["matrix" if straight else "contragredient"][(*copy, hit.place)]
            return list(enumerate(row.tolist()))
        source = int(parts["permutation"][(*copy, hit.place)]) if "permutation" in parts else hit.place
        factor = 1.0
        for k, power in enumerate(hit.wire_axis.powers):
            if power:
                factor *= float(parts["scale"][(k, *copy, source)]) ** float(power * self.degree)
        for k, flip in enumerate(hit.wire_axis.flips):
            if flip and self.degree % 2:
                factor *= float(parts["sign"][(k, *copy, source)])
        return [(source, factor)]

    def _copy(self, hit: AxisEntry, hits: list[AxisEntry]) -> tuple[int, ...]:
        """Which copy of a dependent axis acts: the indices of its bases before the move."""
        bases = self.element.wire_specs[hit.wire_axis.wire].bases
        return tuple(self._terms(_nearest(hit, base, hits), hits)[0][0] for base in bases)


def _walk(tree: LayoutAxis, axis: int, position: int, step: int) -> Iterator[AxisEntry]:
    if isinstance(tree, WireAxis):
        yield AxisEntry(axis, tree, position, step)
    elif isinstance(tree, ProductAxis):
        for part in reversed(tree.parts):  # the last factor runs fastest
            position, digit = divmod(position, part.size)
            yield from _walk(part, axis, digit, step)
            step *= part.size
    elif isinstance(tree, SumAxis):
        for part in tree.parts:
            if position < part.size:
                yield from _walk(part, axis, position, step)
                return
            position -= part.size


def _nearest(hit: AxisEntry, base: int, hits: list[AxisEntry]) -> AxisEntry:
    """The occurrence of a base that belongs to a wire axis: the one in the same tensor axis, else the only other."""
    places = [h for h in hits if h.wire_axis.wire == base]
    return next((h for h in places if h.axis == hit.axis), places[0])
