"""Fits: what two networks compute at the places of a strand, as matrices of how well units fit each other.

A strand with bases (units inside heads) has one row for every unit of every copy, so that any order of the bases can be
judged later. Entries along an axis that another moving strand permutes are compared in sorted order, which no
permutation changes. A strand whose units hold units of others is judged by the best order inside (see `choice`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from intertwine.align.carriers import carriers
from intertwine.align.hidden import Captured
from intertwine.align.products import Products
from intertwine.canonical.blocks import Site, block_sites, cut_block
from intertwine.shapes import Float
from intertwine.symmetry.element import Strand
from intertwine.symmetry.layout import Layout, Leaf

#: Pairs of units whose insides are matched; with more of them the order inside is held still.
MOST_PAIRS = 4096

Flips = tuple[int, ...]
Matrix = Float[Tensor, "units units"]


def rows_of(site: Site, permuted: Collection[int] = ()) -> Float[Tensor, "units entries"]:
    """One row per copy and unit of the site's strand; what `permuted` strands reorder is sorted."""
    dims = site.block.dims
    foreign = [d for d in site.rest if isinstance(dims[d].tree, Leaf) and site.block.leaf(d).strand in permuted]
    plain = [d for d in site.rest if d not in foreign]
    x = site.block.data.permute(*site.front, *plain, *foreign)
    if foreign:
        x = x.flatten(len(site.front) + len(plain)).sort(-1).values
    return x.flatten(0, len(site.front) - 1).flatten(1) if x.ndim > len(site.front) else x.flatten()[:, None]


def sites_of(layout: Layout, x: Tensor, strand: int, strands: tuple[Strand, ...]) -> list[Site]:
    """Where a strand stands in a tensor."""
    return [site for block in cut_block("", x, layout, 0.0) for site in block_sites(block, strand, strands)]


@dataclass(frozen=True)
class Moving:
    """The strands that may move, among all."""

    strands: tuple[Strand, ...]
    movable: frozenset[int]

    @cached_property
    def permuted(self) -> frozenset[int]:
        return frozenset(s for s in self.movable if self.strands[s].permutes)

    @cached_property
    def in_order(self) -> list[int]:
        """Bases before what stands over them."""
        return sorted(self.movable, key=lambda s: (len(self.strands[s].bases), s))

    def inside(self, s: int) -> list[int]:
        """The strands fibred over s alone that permute, where there are few enough pairs to look into all of them."""
        if s not in self.permuted or self.strands[s].bases or self.strands[s].size ** 2 > MOST_PAIRS:
            return []
        return [t for t in sorted(self.permuted) if self.strands[t].bases == (s,)]


@dataclass(frozen=True)
class Kind:
    """Tensors in which a strand is flipped and scaled alike."""

    flips: Flips
    powers: tuple[float, ...]


@dataclass
class Features:
    """Listens to two networks (see `hidden.watch`) and keeps the products of what speaks for each wanted strand.

    `signs`, `scales`: keep tensors apart in which signs or scales of a strand act otherwise.
    """

    moving: Moving
    wanted: frozenset[int]
    at: str = "post"
    signs: bool = False
    scales: bool = False
    products: dict[int, dict[Kind, Products]] = field(default_factory=dict)
    names: dict[int, dict[str, None]] = field(default_factory=dict)
    _plans: dict[int, tuple[Captured, dict[int, list[int]]]] = field(default_factory=dict)

    def hear(
        self, captured: Captured, position: int, read: tuple[Mapping[str, Any], Mapping[str, Any]], a: Any, b: Any
    ) -> None:
        if id(captured) not in self._plans:
            self._plans[id(captured)] = captured, self._plan(captured)
        for s in self._plans[id(captured)][1].get(position, ()):
            self._take(s, captured.program.calls[position].name, captured.layouts[position], a, b)

    def _plan(self, captured: Captured) -> dict[int, list[int]]:
        """Position of a call → the strands its result speaks for."""
        plan: dict[int, list[int]] = {}
        for s, positions in carriers(captured, self.at).items():
            for position in positions if s in self.wanted else ():
                plan.setdefault(position, []).append(s)
        return plan

    def _take(self, s: int, name: str, layout: Layout, a: Tensor, b: Tensor) -> None:
        inside, strands = set(self.moving.inside(s)), self.moving.strands
        pairs = zip(*(sites_of(layout, x, s, strands) for x in (a, b)), strict=True)
        for number, (x, y) in enumerate(pairs):
            if inside & {leaf.strand for leaf in _leaves(x)}:
                continue  # judged by the best order inside
            flips = tuple(int(f) % 2 for f in x.leaf.flips)
            kind = Kind(flips if self.signs else (), x.leaf.power if self.scales else ())
            self.names.setdefault(s, {})[name] = None
            rows = (rows_of(site, self.moving.permuted) for site in (x, y))
            self.products.setdefault(s, {}).setdefault(kind, Products()).add((name, number), *rows)

    def fits(self, value: Callable[[Products], Tensor]) -> dict[int, dict[Flips, Tensor]]:
        """Strand → exponents of signs → how well units fit, by a function of products; several kinds are added up."""
        found: dict[int, dict[Flips, Tensor]] = {}
        for s, kinds in self.products.items():
            own = found.setdefault(s, {})
            for kind, products in kinds.items():
                own[kind.flips] = own[kind.flips] + value(products) if kind.flips in own else value(products)
        return found


def _leaves(site: Site) -> Iterator[Leaf]:
    return (dim.tree for dim in site.block.dims if isinstance(dim.tree, Leaf))
