"""Similarity matrices of units on data: streaming second moments of the activations of two networks at the activation
sites of each wire.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from intertwine.align.activation_sites import CapturedForward, activation_sites
from intertwine.argument_types import Float
from intertwine.errors import InputError
from intertwine.symmetry.blocks import BlockSlot, block_slots, cut_block
from intertwine.symmetry.element import WireSpec
from intertwine.symmetry.geometry import Layout, WireAxis

# ----------------------------------------------------------------------------------------------------
# Products of features: how every unit of one network varies with every unit of another, summed over all data.
#
# What is kept are matrices of units by units, never features, so memory does not grow with the data. Positions of a
# tensor are samples too: those of images, and tokens. All sums are in double precision. Every tensor has its own means,
# and batches are joined around them, so that nothing is lost to cancellation.


#: Numbers that are turned into double precision at once.
CHUNK = 1 << 24
#: A unit whose deviations are below this many roundings of its size does not vary.
STILL = 8.0


@dataclass
class _Means:
    count: int
    a: Float[Tensor, " first"]
    b: Float[Tensor, " second"]


@dataclass
class CrossMoments:
    """Over tensors t and positions p: Σ (a − mean_t a)(b − mean_t b)ᵀ, and the same of each network with itself.

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
        """Take in some positions of one tensor, which is known by any name.

        Positions with an infinite entry are left out: they are masked. NaN is refused.
        """
        self.eps = max(self.eps, *(torch.finfo(x.dtype).eps for x in (a, b)))
        width = max(CHUNK // max(len(a), len(b)), 1)
        for x, y in zip(a.split(width, 1), b.split(width, 1), strict=True):
            x, y = x.double(), y.double()
            if not bool((x.sum() + y.sum()).isfinite()):  # one sum is cheaper than a look at every number
                x, y = _without_masked(tensor, x, y)
            if x.shape[1]:
                self._join(tensor, x, y)

    def _join(self, tensor: Hashable, x: Tensor, y: Tensor) -> None:
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

    # -- what is known when all data has passed --------------------------------------------------------------------

    def inner(self) -> Float[Tensor, "first second"]:
        """Σ a bᵀ: inner products of the features as they are."""
        found = self.cross.clone()
        for means in self._means.values():
            found.addr_(means.a, means.b, alpha=means.count)
        return found.cpu()

    def lengths(self) -> tuple[Float[Tensor, " first"], Float[Tensor, " second"]]:
        """Σ a² and Σ b² of every unit."""
        return (self.squares_a + self._sizes("a")).cpu(), (self.squares_b + self._sizes("b")).cpu()

    def correlation(self) -> Float[Tensor, "first second"]:
        """Of deviations from each tensor's own means; 0 for a unit that does not vary."""
        inverse = [
            torch.where(dead, 0.0, 1 / torch.where(dead, 1.0, squares).sqrt())
            for dead, squares in zip(self._dead(), (self.squares_a, self.squares_b), strict=True)
        ]
        return (self.cross * inverse[0][:, None] * inverse[1]).clamp(-1.0, 1.0).cpu()

    def dead(self) -> tuple[Tensor, Tensor]:
        """Which units of the first and of the second network do not vary, but for rounding."""
        return self._dead()[0].cpu(), self._dead()[1].cpu()

    def _dead(self) -> list[Tensor]:
        sides = ((self.squares_a, "a"), (self.squares_b, "b"))
        return [squares <= (STILL * self.eps) ** 2 * (squares + self._sizes(side)) for squares, side in sides]

    def _sizes(self, side: str) -> Tensor:
        means = [m.count * getattr(m, side).square() for m in self._means.values()]
        return torch.stack(means).sum(0)


def _without_masked(tensor: Hashable, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Only the positions at which every unit is finite; NaN is refused."""
    if bool(x.isnan().any() | y.isnan().any()):
        raise InputError(
            f"The features at {tensor} hold NaN, so units cannot be compared by them. Look at the data and the weights "
            "of both networks; the method 'weights' needs no features."
        )
    finite = x.isfinite().all(0) & y.isfinite().all(0)
    return x[:, finite], y[:, finite]


# ----------------------------------------------------------------------------------------------------
# Fits: what two networks compute at the places of a strand, as matrices of how well units fit each other.
#
# A strand with bases (units inside heads) has one row for every unit of every copy, so that any order of the bases can be
# judged later. Entries along an axis that another moving strand permutes are compared in sorted order, which no
# permutation changes. A strand whose units hold units of others is judged by the best order inside (see `choice`).


#: Pairs of units whose insides are matched; with more of them the order inside is held still.
MOST_PAIRS = 4096

Flips = tuple[int, ...]
Matrix = Float[Tensor, "units units"]


def rows_of(site: BlockSlot, permuted: Collection[int] = ()) -> Float[Tensor, "units entries"]:
    """One row per copy and unit of the site's strand; what `permuted` strands reorder is sorted."""
    dims = site.block.dims
    foreign = [d for d in site.rest if isinstance(dims[d].tree, WireAxis) and site.block.wire_axis(d).wire in permuted]
    plain = [d for d in site.rest if d not in foreign]
    x = site.block.data.permute(*site.front, *plain, *foreign)
    if foreign:
        x = x.flatten(len(site.front) + len(plain)).sort(-1).values
    return x.flatten(0, len(site.front) - 1).flatten(1) if x.ndim > len(site.front) else x.flatten()[:, None]


def slots_of(layout: Layout, x: Tensor, strand: int, strands: tuple[WireSpec, ...]) -> list[BlockSlot]:
    """Where a strand stands in a tensor."""
    return [site for block in cut_block("", x, layout, 0.0) for site in block_slots(block, strand, strands)]


@dataclass(frozen=True)
class MovableStrands:
    """The strands that may move, among all."""

    wire_specs: tuple[WireSpec, ...]
    movable: frozenset[int]

    @cached_property
    def permuted(self) -> frozenset[int]:
        return frozenset(s for s in self.movable if self.wire_specs[s].permutes)

    @cached_property
    def in_order(self) -> list[int]:
        """Bases before what stands over them."""
        return sorted(self.movable, key=lambda s: (len(self.wire_specs[s].bases), s))

    def inside(self, s: int) -> list[int]:
        """The strands fibred over s alone that permute, where there are few enough pairs to look into all of them."""
        if s not in self.permuted or self.wire_specs[s].bases or self.wire_specs[s].size ** 2 > MOST_PAIRS:
            return []
        return [t for t in sorted(self.permuted) if self.wire_specs[t].bases == (s,)]


@dataclass(frozen=True)
class ActivationKind:
    """Tensors in which a strand is flipped and scaled alike."""

    flips: Flips
    powers: tuple[float, ...]


@dataclass
class PairedActivations:
    """Listens to two networks (see `hidden.watch`) and keeps the products of what speaks for each wanted strand.

    `signs`, `scales`: keep tensors apart in which signs or scales of a strand act otherwise.
    """

    moving: MovableStrands
    wanted: frozenset[int]
    at: str = "post"
    signs: bool = False
    scales: bool = False
    products: dict[int, dict[ActivationKind, CrossMoments]] = field(default_factory=dict)
    names: dict[int, dict[str, None]] = field(default_factory=dict)
    _plans: dict[int, tuple[CapturedForward, dict[int, list[int]]]] = field(default_factory=dict)

    def hear(
        self,
        captured: CapturedForward,
        position: int,
        read: tuple[Mapping[str, Any], Mapping[str, Any]],
        a: Any,
        b: Any,
    ) -> None:
        if id(captured) not in self._plans:
            self._plans[id(captured)] = captured, self._plan(captured)
        for s in self._plans[id(captured)][1].get(position, ()):
            self._take(s, captured.program.calls[position].name, captured.layouts[position], a, b)

    def _plan(self, captured: CapturedForward) -> dict[int, list[int]]:
        """Position of a call → the strands its result speaks for."""
        plan: dict[int, list[int]] = {}
        for s, positions in activation_sites(captured, self.at).items():
            for position in positions if s in self.wanted else ():
                plan.setdefault(position, []).append(s)
        return plan

    def _take(self, s: int, name: str, layout: Layout, a: Tensor, b: Tensor) -> None:
        inside, strands = set(self.moving.inside(s)), self.moving.wire_specs
        pairs = zip(*(slots_of(layout, x, s, strands) for x in (a, b)), strict=True)
        for number, (x, y) in enumerate(pairs):
            if inside & {leaf.wire for leaf in _leaves(x)}:
                continue  # judged by the best order inside
            flips = tuple(int(f) % 2 for f in x.axis.flips)
            kind = ActivationKind(flips if self.signs else (), x.axis.power if self.scales else ())
            self.names.setdefault(s, {})[name] = None
            rows = (rows_of(site, self.moving.permuted) for site in (x, y))
            self.products.setdefault(s, {}).setdefault(kind, CrossMoments()).add((name, number), *rows)

    def fits(self, value: Callable[[CrossMoments], Tensor]) -> dict[int, dict[Flips, Tensor]]:
        """Strand → exponents of signs → how well units fit, by a function of products; several kinds are added up."""
        found: dict[int, dict[Flips, Tensor]] = {}
        for s, kinds in self.products.items():
            own = found.setdefault(s, {})
            for kind, products in kinds.items():
                own[kind.flips] = own[kind.flips] + value(products) if kind.flips in own else value(products)
        return found


def _leaves(site: BlockSlot) -> Iterator[WireAxis]:
    return (dim.tree for dim in site.block.dims if isinstance(dim.tree, WireAxis))
