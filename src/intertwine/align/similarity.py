"""Similarity matrices of units on data: streaming second moments of the activations of two networks at the activation
sites of each wire.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from intertwine.align.activation_sites import CapturedForward, activation_sites
from intertwine.align.state import MovableWires
from intertwine.argument_types import Float
from intertwine.errors import InputError
from intertwine.symmetry.blocks import BlockSlot, block_slots, cut_block
from intertwine.symmetry.element import WireSpec
from intertwine.symmetry.geometry import Layout, WireAxis

#: The most numbers that are converted to double precision at once.
CHUNK = 1 << 24
#: A unit whose deviations are below this many roundings of its size is constant.
CONSTANT = 8.0

Flips = tuple[int, ...]
Matrix = Float[Tensor, "units units"]


@dataclass
class _Means:
    count: int
    a: Float[Tensor, " first"]
    b: Float[Tensor, " second"]


@dataclass
class CrossMoments:
    """Over tensors t and positions p: Σ (a − mean_t a)(b − mean_t b)ᵀ, and the same of each network with itself.

    Memory does not grow with the data. Positions of a tensor (pixels, tokens) are samples too. All sums are in double
    precision, every tensor has its own means, and batches are merged around them, so there is no cancellation.

    Example:
        >>> import torch
        >>> a, b = torch.randn(3, 50), torch.randn(4, 50)
        >>> products = CrossMoments()
        >>> for part in range(5):
        ...     products.add("layer", a[:, part::5], b[:, part::5])
        >>> torch.allclose(products.correlation(), torch.corrcoef(torch.cat([a, b]))[:3, 3:].double(), atol=1e-6)
        True
    """

    cross: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    squares_a: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    squares_b: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    eps: float = 0.0
    _means: dict[Hashable, _Means] = field(default_factory=dict)

    def add(self, tensor: Hashable, a: Float[Tensor, "first entries"], b: Float[Tensor, "second entries"]) -> None:
        """Add some positions of one tensor, identified by any name.

        Positions with an infinite entry are masked and skipped. NaN raises an error.
        """
        self.eps = max(self.eps, *(torch.finfo(x.dtype).eps for x in (a, b)))
        width = max(CHUNK // max(len(a), len(b)), 1)
        for x, y in zip(a.split(width, 1), b.split(width, 1), strict=True):
            x, y = x.double(), y.double()
            if not bool((x.sum() + y.sum()).isfinite()):  # one sum is cheaper than checking every number
                if bool(x.isnan().any() | y.isnan().any()):
                    raise InputError(
                        f"The features at {tensor} hold NaN, so units cannot be compared by them. Look at the data and "
                        "the weights of both networks; the method 'weights' needs no features."
                    )
                finite = x.isfinite().all(0) & y.isfinite().all(0)
                x, y = x[:, finite], y[:, finite]
            if x.shape[1]:
                self._add(tensor, x, y)

    def _add(self, tensor: Hashable, x: Tensor, y: Tensor) -> None:
        if not self.cross.numel():
            self.cross = x.new_zeros(len(x), len(y))
            self.squares_a, self.squares_b = x.new_zeros(len(x)), y.new_zeros(len(y))
        mean_x, mean_y, count = x.mean(1), y.mean(1), x.shape[1]
        means = self._means.setdefault(tensor, _Means(0, torch.zeros_like(mean_x), torch.zeros_like(mean_y)))
        x, y = x - mean_x[:, None], y - mean_y[:, None]
        shift_x, shift_y = mean_x - means.a, mean_y - means.b
        total = means.count + count
        weight = means.count * count / total
        self.cross.addmm_(x, y.T).addr_(shift_x, shift_y, alpha=weight)
        self.squares_a += x.square().sum(1) + weight * shift_x.square()
        self.squares_b += y.square().sum(1) + weight * shift_y.square()
        means.a, means.b = means.a + shift_x * (count / total), means.b + shift_y * (count / total)
        means.count = total

    def inner(self) -> Float[Tensor, "first second"]:
        """Σ a bᵀ: inner products of the uncentred features."""
        found = self.cross.clone()
        for means in self._means.values():
            found.addr_(means.a, means.b, alpha=means.count)
        return found.cpu()

    def lengths(self) -> tuple[Float[Tensor, " first"], Float[Tensor, " second"]]:
        """Σ a² and Σ b² of every unit."""
        mean_a, mean_b = self._mean_squares()
        return (self.squares_a + mean_a).cpu(), (self.squares_b + mean_b).cpu()

    def correlation(self) -> Float[Tensor, "first second"]:
        """Correlation of deviations from each tensor's own means; 0 for a constant unit."""
        inverse = [
            torch.where(dead, 0.0, 1 / torch.where(dead, 1.0, squares).sqrt())
            for dead, squares in zip(self._dead(), (self.squares_a, self.squares_b), strict=True)
        ]
        return (self.cross * inverse[0][:, None] * inverse[1]).clamp(-1.0, 1.0).cpu()

    def dead(self) -> tuple[Tensor, Tensor]:
        """Which units of the first and of the second network are constant, up to rounding."""
        return self._dead()[0].cpu(), self._dead()[1].cpu()

    def _dead(self) -> list[Tensor]:
        sides = zip((self.squares_a, self.squares_b), self._mean_squares(), strict=True)
        return [squares <= (CONSTANT * self.eps) ** 2 * (squares + means) for squares, means in sides]

    def _mean_squares(self) -> list[Tensor]:
        """Σ of squared means of each network, over all positions."""
        all_means = self._means.values()
        return [torch.stack([m.count * getattr(m, side).square() for m in all_means]).sum(0) for side in "ab"]


def rows_of(slot: BlockSlot, permuted: Collection[int] = ()) -> Float[Tensor, "units entries"]:
    """One row per copy and unit of the slot's wire; entries that `permuted` wires reorder are sorted."""
    dims = slot.block.dims
    foreign = [d for d in slot.rest if isinstance(dims[d].tree, WireAxis) and slot.block.wire_axis(d).wire in permuted]
    plain = [d for d in slot.rest if d not in foreign]
    x = slot.block.data.permute(*slot.front, *plain, *foreign)
    if foreign:
        x = x.flatten(len(slot.front) + len(plain)).sort(-1).values
    return x.flatten(0, len(slot.front) - 1).flatten(1) if x.ndim > len(slot.front) else x.flatten()[:, None]


def slots_of(layout: Layout, x: Tensor, w: int, wire_specs: tuple[WireSpec, ...]) -> list[BlockSlot]:
    """Where a wire stands in a tensor."""
    return [slot for block in cut_block("", x, layout, 0.0) for slot in block_slots(block, w, wire_specs)]


def sign_exponents(slot: BlockSlot) -> Flips:
    """The exponents modulo 2 with which the signs of the slot's wire act there."""
    return tuple(int(flip) % 2 for flip in slot.axis.flips)


@dataclass(frozen=True)
class ActivationKind:
    """Tensors in which a wire has the same exponents of signs and scales."""

    flips: Flips
    powers: tuple[float, ...]


@dataclass
class PairedActivations:
    """Collects products of the activations of two networks (see `run_side_by_side`) for each wanted wire.

    A wire with bases (units inside heads) has one row for every unit of every copy, so that any order of the bases can
    be scored later. Entries along an axis that another moving wire permutes are compared in sorted order, which no
    permutation changes. A tensor in which the units of a wire hold units of a nested wire is left to the nested match.

    `signs`, `scales`: keep tensors apart in which the signs or scales of a wire act differently.
    """

    wires: MovableWires
    wanted: frozenset[int]
    at: str = "post"
    signs: bool = False
    scales: bool = False
    products: dict[int, dict[ActivationKind, CrossMoments]] = field(default_factory=dict)
    names: dict[int, dict[str, None]] = field(default_factory=dict)
    _sites: dict[int, tuple[CapturedForward, dict[int, list[int]]]] = field(default_factory=dict)

    def on_call(
        self,
        captured: CapturedForward,
        position: int,
        read: tuple[Mapping[str, Any], Mapping[str, Any]],
        a: Any,
        b: Any,
    ) -> None:
        """Add the results of one call, if it is an activation site of a wanted wire."""
        if id(captured) not in self._sites:
            wires_at: dict[int, list[int]] = {}
            for w, positions in activation_sites(captured, self.at).items():
                for p in positions if w in self.wanted else ():
                    wires_at.setdefault(p, []).append(w)
            self._sites[id(captured)] = captured, wires_at
        for w in self._sites[id(captured)][1].get(position, ()):
            self._add(w, captured.program.calls[position].name, captured.layouts[position], a, b)

    def _add(self, w: int, name: str, layout: Layout, a: Tensor, b: Tensor) -> None:
        nested = set(self.wires.nested(w))
        pairs = zip(*(slots_of(layout, x, w, self.wires.wire_specs) for x in (a, b)), strict=True)
        for number, (x, y) in enumerate(pairs):
            if nested & {dim.tree.wire for dim in x.block.dims if isinstance(dim.tree, WireAxis)}:
                continue
            kind = ActivationKind(sign_exponents(x) if self.signs else (), x.axis.power if self.scales else ())
            self.names.setdefault(w, {})[name] = None
            rows = (rows_of(slot, self.wires.permuted) for slot in (x, y))
            self.products.setdefault(w, {}).setdefault(kind, CrossMoments()).add((name, number), *rows)

    def similarities(self, value: Callable[[CrossMoments], Tensor]) -> dict[int, dict[Flips, Tensor]]:
        """Wire → exponents of signs → similarity of units, a function of products summed over kinds of tensors."""
        found: dict[int, dict[Flips, Tensor]] = {}
        for w, kinds in self.products.items():
            own = found.setdefault(w, {})
            for kind, products in kinds.items():
                own[kind.flips] = own[kind.flips] + value(products) if kind.flips in own else value(products)
        return found
