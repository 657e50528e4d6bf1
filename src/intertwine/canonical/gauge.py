"""Scales brought to a normal form: the weights of every unit get length one.

Each index of a wire may carry several scales. A *direction* is a vector of exponents with which they enter a block;
the length of a unit's slice of a block fixes the scales along that direction. Wires are visited in turn, because a
length can be measured only where the scales of all other wires in the block are known; a unit whose slice is zero
there (a dead unit) waits for another block. `Fixed`, the book of what is known, serves signs too, modulo 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self.fixed = [Fixed(pieces, s, [tuple(map(float, x.leaf.powers)) for x in pieces.sites[s]]) for s in _all(pieces)]
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


class Fixed:
    """Which directions of a strand's scales (or signs) are known at every index of it."""

    def __init__(self, pieces: Pieces, s: int, directions: Sequence[tuple[float, ...]], modulus: int = 0) -> None:
        self.directions: Directions = tuple(dict.fromkeys(d for d in directions if any(d)))
        self.modulus = modulus
        strand = pieces.strands[s]
        self.generators = strand.signs if modulus else strand.scales
        self.sets: list[Directions] = [()]  # the sets of independent directions met so far
        self.pattern: Int[Tensor, "*copies n"] = torch.zeros(*_copies(pieces, s), strand.size, dtype=torch.int64)

    def knows(self, direction: tuple[float, ...]) -> Tensor:
        """Per index: whether a direction follows from those learnt."""
        known = torch.tensor([_spans(chosen, direction, self.modulus) for chosen in self.sets])
        return known[self.pattern]

    @property
    def complete(self) -> bool:
        """Whether every direction is known at every index."""
        return all(bool(self.knows(d).all()) for d in self.directions)

    def learn(self, direction: tuple[float, ...], where: Tensor) -> None:
        """Add a direction, independent of those known there, at some indices."""
        pattern = self.pattern.clone()
        for old in self.pattern[where].unique().tolist():
            larger = (*self.sets[old], direction)
            if larger not in self.sets:
                self.sets.append(larger)
            pattern[where & (self.pattern == old)] = self.sets.index(larger)
        self.pattern = pattern

    def solve(self, goals: Mapping[tuple[float, ...], Tensor]) -> Float[Tensor, "generators *copies n"]:
        """The smallest step that reaches the new goals and keeps what was known before."""
        step = torch.zeros(self.generators, *self.pattern.shape, dtype=torch.float64)
        for p in self.pattern.unique().tolist():
            chosen = self.sets[p]
            if not chosen:
                continue
            inverse = torch.tensor(_right_inverse(chosen, self.modulus), dtype=torch.float64)
            at = self.pattern == p
            goal = torch.stack([goals[d][at] if d in goals else torch.zeros(int(at.sum())) for d in chosen])
            step[:, at] = inverse @ goal.to(torch.float64)
        return step


@cache
def _spans(chosen: Directions, direction: tuple[float, ...], modulus: int) -> bool:
    if not any(direction) or direction in chosen:
        return True
    if modulus:
        return len(_echelon((*chosen, direction))) == len(_echelon(chosen))
    return bool(chosen) and _rank((*chosen, direction)) == _rank(chosen)


@cache
def _rank(rows: Directions) -> int:
    return int(np.linalg.matrix_rank(np.array(rows)))


@cache
def _echelon(rows: Directions) -> tuple[int, ...]:
    """Independent rows modulo 2, each as an integer whose bits are its entries."""
    basis: list[int] = []
    for row in rows:
        bits = sum(1 << k for k, v in enumerate(row) if v)
        for b in basis:
            bits = min(bits, bits ^ b)
        if bits:
            basis.append(bits)
    return tuple(basis)


@cache
def _right_inverse(rows: Directions, modulus: int) -> tuple[tuple[float, ...], ...]:
    """R with rows @ R = 1 (modulo 2 where asked); the rows are independent."""
    a = np.array(rows)
    if not modulus:
        return tuple(map(tuple, np.linalg.pinv(a).tolist()))
    count, width = a.shape
    work = np.concatenate([a.astype(np.int64) % 2, np.eye(count, dtype=np.int64)], 1)
    result = np.zeros((width, count))
    for i in range(count):
        pivot = int(work[i, :width].argmax())
        for j in range(count):
            if j != i and work[j, pivot]:
                work[j] ^= work[i]
    for i in range(count):  # reduced: the pivot of each row stands alone in its column
        result[int(work[i, :width].argmax())] = work[i, width:]
    return tuple(map(tuple, result.tolist()))


def _all(pieces: Pieces) -> range:
    return range(len(pieces.strands))


def _copies(pieces: Pieces, s: int) -> tuple[int, ...]:
    return tuple(pieces.strands[b].size for b in pieces.strands[s].bases)


def along(values: Tensor, pieces: Pieces, site: Site, d: int) -> Tensor:
    """Values of another strand (one axis per base, then its own) laid along their dimensions of a site's rows."""
    block, order = site.block, (*site.front, *site.rest)
    places = [*base_dims(block.dims, d, pieces.strands[block.leaf(d).strand].bases), d]
    return spread(values, [order.index(p) for p in places], len(order)).to(block.data.device)
