"""Scales and signs brought to a normal form: every unit's weights get length one, and a first entry above zero.

Each index of a wire may carry several scales. A *direction* is a vector of exponents with which they enter a block;
the length of a unit's slice of a block fixes the scales along that direction. Wires are visited in turn, because a
length can be measured only where the scales of all other wires in the block are known; a unit whose slice is zero
there (a dead unit) waits for another block. Signs are fixed in the same way, modulo 2, by the first non-zero entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from intertwine.canonical.blocks import Pieces, Site
from intertwine.shapes import Float, Int
from intertwine.symmetry.layout import base_dims, spread

#: Lengths this near to one (in units of the precision) are left alone, so that a normal form is its own normal form.
LEAVE_ALONE = 4.0

Directions = tuple[tuple[float, ...], ...]


class ScaleGauge:
    """Normalises the scales of all strands of some weights, writing into their blocks."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.fixed = [_Fixed(pieces, s, [tuple(map(float, x.leaf.powers)) for x in pieces.sites[s]]) for s in _all(pieces)]
        self.logs = {
            s: torch.zeros(strand.scales, *_copies(pieces, s), strand.size, dtype=torch.float64)
            for s, strand in enumerate(pieces.strands)
            if strand.scales
        }

    def run(self) -> dict[int, Float[Tensor, "scales *copies n"]]:
        """Strand → the scales that take the weights to their normal form."""
        while any([self._visit(s) for s in self.logs]):
            pass
        return {s: log.exp() for s, log in self.logs.items()}

    def loose(self) -> list[int]:
        """Strands some of whose scales could not be fixed although they act on weights that are not zero."""
        return [s for s in self.logs if any(bool(self._unknown_length(s, site).any()) for site in self._scaled(s))]

    def _scaled(self, s: int) -> list[Site]:
        return [site for site in self.pieces.sites[s] if any(site.leaf.powers)]

    def _visit(self, s: int) -> bool:
        """Fix what can be fixed of one strand; whether anything was."""
        fixed, found = self.fixed[s], {}
        before = fixed.pattern.clone()
        for site in self._scaled(s):
            direction = tuple(map(float, site.leaf.powers))
            wanted = ~fixed.knows(direction)
            if not bool(wanted.any()):
                continue
            length = self._length(s, site)
            accepted = wanted & (length > 0)
            if bool(accepted.any()):
                fixed.learn(direction, accepted)
                snap = LEAVE_ALONE * torch.finfo(site.block.data.dtype).eps
                goal = -torch.where(accepted, length, 1.0).log()
                found[direction] = torch.where(goal.abs() > snap, goal, 0.0)
        if found:
            self._apply(s, fixed.solve(found))
        return not torch.equal(before, fixed.pattern)

    def _length(self, s: int, site: Site) -> Float[Tensor, "*copies n"]:
        """The length of every unit's slice, over those entries on which every other scale is known."""
        x = site.rows
        for d, leaf in site.others():
            if any(leaf.powers):
                known = self.fixed[leaf.strand].knows(tuple(map(float, leaf.powers)))
                if not bool(known.all()):
                    x = x * along(known.to(x.dtype), self.pieces, site, d)
        dims = tuple(range(len(site.front), x.ndim))
        if not dims:
            return x.abs().to(torch.float64).cpu()
        return torch.linalg.vector_norm(x, dim=dims, dtype=torch.float64).cpu()

    def _unknown_length(self, s: int, site: Site) -> Tensor:
        dims = tuple(range(len(site.front), site.rows.ndim))
        length = site.rows.abs().amax(dims) if dims else site.rows.abs()
        return ~self.fixed[s].knows(tuple(map(float, site.leaf.powers))) & (length > 0).cpu()

    def _apply(self, s: int, step: Float[Tensor, "scales *copies n"]) -> None:
        self.logs[s] += step.cpu()
        for site in self._scaled(s):
            exponent = sum(float(p) * step[k] for k, p in enumerate(site.leaf.powers) if p)
            if isinstance(exponent, Tensor) and bool(exponent.any()):
                factor = exponent.exp().to(site.block.data.device, site.block.data.dtype)
                site.rows.mul_(factor.reshape(*factor.shape, *[1] * len(site.rest)))


def settle_signs(
    pieces: Pieces, s: int, sites: Sequence[Site], first: Sequence[Tensor]
) -> tuple[Float[Tensor, "signs *copies n"], Tensor]:
    """The signs of one strand that make the first non-zero entries of its slices positive.

    Args:
        sites: occurrences of the strand in which it flips and all else is known.
        first: for each, the sign (−1, 0, 1) of the first non-zero entry of every slice, in the canonical order.

    Returns:
        The signs, and which indices have signs that act on other occurrences too and could not be read here.
    """
    every = [tuple(map(float, site.leaf.flips)) for site in pieces.sites[s]]
    fixed = _Fixed(pieces, s, every, modulus=2)
    goals: dict[tuple[float, ...], Tensor] = {}
    for site, sign in zip(sites, first, strict=True):
        direction = tuple(map(float, site.leaf.flips))
        accepted = ~fixed.knows(direction) & (sign != 0)
        if bool(accepted.any()):
            fixed.learn(direction, accepted)
            goal = (sign < 0).to(torch.float64)
            goals[direction] = torch.where(accepted, goal, goals.get(direction, torch.zeros_like(goal)))
    known = torch.stack([fixed.knows(d) for d in fixed.directions]).all(0)
    return 1 - 2 * fixed.solve(goals).remainder(2).round(), ~known


class _Fixed:
    """Which directions of a strand's scales (or signs) are known, for every index: a set of directions per index."""

    def __init__(
        self, pieces: Pieces, s: int, directions: Sequence[tuple[float, ...]], modulus: int = 0
    ) -> None:
        self.directions: Directions = tuple(dict.fromkeys(d for d in directions if any(d)))
        self.modulus = modulus
        strand = pieces.strands[s]
        self.rank = strand.signs if modulus else strand.scales
        self.pattern: Int[Tensor, "*copies n"] = torch.zeros(*_copies(pieces, s), strand.size, dtype=torch.int64)

    def knows(self, direction: tuple[float, ...]) -> Tensor:
        """Per index: whether a direction is fixed by those learnt."""
        if not any(direction):
            return torch.ones_like(self.pattern, dtype=torch.bool)
        known = [int(p) for p in self.pattern.unique() if _spans(self._chosen(int(p)), direction, self.modulus)]
        return torch.isin(self.pattern, torch.tensor(known, dtype=torch.int64))

    def learn(self, direction: tuple[float, ...], where: Tensor) -> None:
        self.pattern = self.pattern | (where.to(torch.int64).cpu() << self.directions.index(direction))

    def _chosen(self, pattern: int) -> Directions:
        return tuple(d for i, d in enumerate(self.directions) if pattern >> i & 1)

    def solve(self, goals: dict[tuple[float, ...], Tensor]) -> Float[Tensor, "generators *copies n"]:
        """The smallest step that reaches the new goals and keeps what was known before."""
        step = torch.zeros(self.rank, *self.pattern.shape, dtype=torch.float64)
        for p in self.pattern.unique():
            chosen = self._chosen(int(p))
            if not chosen:
                continue
            inverse = torch.tensor(_right_inverse(chosen, self.modulus), dtype=torch.float64)
            goal = torch.stack([goals.get(d, torch.zeros(())).cpu().expand(self.pattern.shape) for d in chosen])
            solved = torch.einsum("gd,d...->g...", inverse, goal.to(torch.float64))
            step = torch.where(self.pattern == p, solved, step)
        return step


@cache
def _spans(chosen: Directions, direction: tuple[float, ...], modulus: int) -> bool:
    if not chosen:
        return False
    return _rank((*chosen, direction), modulus) == _rank(chosen, modulus)


def _rank(rows: Directions, modulus: int) -> int:
    if not modulus:
        return int(np.linalg.matrix_rank(np.array(rows)))
    return len(_echelon(rows))


def _echelon(rows: Directions) -> list[int]:
    """Independent rows modulo 2, each as an integer whose bits are its entries."""
    basis: list[int] = []
    for row in rows:
        bits = sum(1 << k for k, v in enumerate(row) if int(v) % 2)
        for b in basis:
            bits = min(bits, bits ^ b)
        if bits:
            basis.append(bits)
    return basis


@cache
def _right_inverse(rows: Directions, modulus: int) -> tuple[tuple[float, ...], ...]:
    """R with rows @ R = 1 (modulo 2 where asked); the rows are independent."""
    if not modulus:
        return tuple(map(tuple, np.linalg.pinv(np.array(rows)).tolist()))
    count, width = len(rows), len(rows[0])
    columns = []
    for target in range(count):
        for x in range(1 << width):  # a wire has one or two signs, so all of their products can be tried
            image = [sum(int(v) * (x >> k & 1) for k, v in enumerate(row)) % 2 for row in rows]
            if image == [int(i == target) for i in range(count)]:
                columns.append([float(x >> k & 1) for k in range(width)])
                break
    return tuple(map(tuple, np.array(columns).T.tolist()))


def _all(pieces: Pieces) -> range:
    return range(len(pieces.strands))


def _copies(pieces: Pieces, s: int) -> tuple[int, ...]:
    return tuple(pieces.strands[b].size for b in pieces.strands[s].bases)


def along(values: Tensor, pieces: Pieces, site: Site, d: int) -> Tensor:
    """Values of another strand (one axis per base, then its own) laid along their dimensions of a site's rows."""
    block, order = site.block, (*site.front, *site.rest)
    places = [*base_dims(block.dims, d, pieces.strands[block.leaf(d).strand].bases), d]
    return spread(values, [order.index(p) for p in places], len(order)).to(block.data.device)
