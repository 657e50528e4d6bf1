"""Scales brought to a normal form: the weights of every unit get length one.

Each index of a wire may carry several scales. A *direction* is a vector of exponents with which they enter a block;
the length of a unit's slice of a block fixes the scales along that direction. Wires are visited in turn, because a
length can be measured only where the scales of all other wires in the block are known; a unit whose slice is zero
there (a dead unit) waits for another block. `Fixed`, the book of what is known, serves signs too, modulo 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from intertwine.canonical.balance import balanced, tangled
from intertwine.canonical.blocks import ROUNDING, Pieces, Site
from intertwine.shapes import Float, Int
from intertwine.symmetry.layout import base_dims, spread

Direction = tuple[float, ...]


class ScaleGauge:
    """Normalises the scales of all strands of some weights, writing into their blocks."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.fixed = [Fixed(pieces, s, [x.leaf.power for x in pieces.sites[s]]) for s in _all(pieces)]
        self.logs = {
            s: torch.zeros(strand.scales, *_copies(pieces, s), strand.size, dtype=torch.float64)
            for s, strand in enumerate(pieces.strands)
            if strand.scales
        }

    def run(self) -> dict[int, Float[Tensor, "scales *copies n"]]:
        """Strand → the scales that take the weights to their normal form."""
        while sum(self._visit(s) for s in self.logs) or self._untangle():
            pass
        return {s: log.exp() for s, log in self.logs.items()}

    def _untangle(self) -> bool:
        """Fix scales that can be read only through each other, all at once; whether there were any."""
        stuck = [s for s in self.logs if any(self._unread(s, site) for site in self._scaled(s))]
        if not stuck:
            return False
        together = tangled(self.pieces, stuck)
        found = balanced(self.pieces, together, lambda leaf: self.fixed[leaf.strand].free(leaf.power))
        for s, step in found.items():
            for direction in self.fixed[s].directions:
                self.fixed[s].learn(direction, ~self.fixed[s].knows(direction))
            self._apply(s, torch.where(step.abs() > ROUNDING * _precision(self.pieces), step, 0.0))
        return True

    def _scaled(self, s: int) -> list[Site]:
        return [site for site in self.pieces.sites[s] if any(site.leaf.powers)]

    def _visit(self, s: int) -> bool:
        """Fix what can be fixed of one strand; whether anything was."""
        fixed = self.fixed[s]
        if bool(fixed.everywhere.all()):
            return False
        found: dict[Direction, Tensor] = {}
        before = fixed.pattern.clone()
        for site in self._scaled(s):
            direction = site.leaf.power
            # what was just learnt is not applied yet, so a block that the strand enters twice has to wait
            twice = any(leaf.strand == s for _, leaf in site.company())
            if fixed.complete(direction) or (found and twice):
                continue
            wanted = ~fixed.knows(direction)
            length = self._length(s, site)
            accepted = wanted & (length > 0)
            if bool(accepted.any()):
                fixed.learn(direction, accepted)
                snap = ROUNDING * site.block.precision  # so that a normal form is its own normal form
                goal = -torch.where(accepted, length, 1.0).log()
                found[direction] = found.get(direction, torch.zeros(())) + torch.where(goal.abs() > snap, goal, 0.0)
        if found:
            self._apply(s, fixed.solve(found))
        return not torch.equal(before, fixed.pattern)

    def _length(self, s: int, site: Site) -> Float[Tensor, "*copies n"]:
        """The length of every unit's slice, over those entries on which every other scale is known."""
        x = site.rows
        for d, leaf in site.company():
            if any(leaf.powers):
                fixed = self.fixed[leaf.strand]
                if not fixed.complete(leaf.power):
                    x = x * along(fixed.knows(leaf.power).to(x.dtype), self.pieces, site, d)
        return site.lengths(x)

    def _unread(self, s: int, site: Site) -> bool:
        """Whether some unit's slice is not zero, and yet its scale is not known."""
        fixed = self.fixed[s]
        if fixed.complete(site.leaf.power):
            return False
        return bool((~fixed.knows(site.leaf.power) & (site.lengths() > 0)).any())

    def _apply(self, s: int, step: Float[Tensor, "scales *copies n"]) -> None:
        self.logs[s] += step.cpu()
        for site in self._scaled(s):
            exponent = sum(float(p) * step[k] for k, p in enumerate(site.leaf.powers) if p)
            if isinstance(exponent, Tensor) and bool(exponent.any()):
                multiply(site, exponent.exp())


class Fixed:
    """Which directions of a strand's scales (or, modulo 2, of its signs) are known at every index of it."""

    def __init__(self, pieces: Pieces, s: int, directions: Sequence[Direction], modulus: int = 0) -> None:
        found = list(dict.fromkeys(d for d in directions if any(d)))
        strand = pieces.strands[s]
        self.directions = {d: i for i, d in enumerate(found)}
        self.modulus = modulus
        self.generators = strand.signs if modulus else strand.scales
        self.matrix = np.array(found, dtype=np.float64).reshape(len(found), self.generators)
        self.sets: list[tuple[int, ...]] = [()]  # the sets of independent directions met so far
        self.known = torch.zeros(1, len(found), dtype=torch.bool)  # which directions follow from each set
        self.everywhere = self.known[0]  # and which are known at every index
        self.pattern: Int[Tensor, "*copies n"] = torch.zeros(*_copies(pieces, s), strand.size, dtype=torch.int64)

    def knows(self, direction: Direction) -> Tensor:
        """Per index: whether a direction follows from those learnt."""
        if not any(direction):
            return torch.ones_like(self.pattern, dtype=torch.bool)
        return self.known[:, self.directions[direction]][self.pattern]

    def complete(self, direction: Direction) -> bool:
        """Whether a direction is known at every index."""
        return not any(direction) or bool(self.everywhere[self.directions[direction]])

    def learn(self, direction: Direction, where: Tensor) -> None:
        """Add a direction, independent of those known there, at some indices."""
        pattern = self.pattern.clone()
        for old in self.pattern[where].unique().tolist():
            larger = (*self.sets[old], self.directions[direction])
            if larger not in self.sets:
                self.sets.append(larger)
                self.known = torch.cat([self.known, self._spanned(larger)[None]])
            pattern[where & (self.pattern == old)] = self.sets.index(larger)
        self.pattern = pattern
        self.everywhere = self.known[pattern.unique()].all(0)

    def _spanned(self, chosen: tuple[int, ...]) -> Tensor:
        """Which directions are combinations of some of them."""
        if self.modulus:
            return torch.from_numpy(_reduced(self.matrix.astype(np.int64) % 2, chosen)).logical_not().all(1)
        return torch.from_numpy(~_perpendicular(self.matrix, self.matrix[list(chosen)]).any(-1))

    def free(self, direction: Direction) -> Float[Tensor, "generators *copies n"]:
        """Per index: the part of a direction along which scales may still change without touching what is known."""
        parts = np.stack([_perpendicular(np.array(direction), self.matrix[list(chosen)]) for chosen in self.sets])
        return torch.from_numpy(parts)[self.pattern].movedim(-1, 0)

    def solve(self, goals: Mapping[Direction, Tensor]) -> Float[Tensor, "generators *copies n"]:
        """A step that reaches the new goals and keeps what was known before."""
        step = torch.zeros(self.generators, *self.pattern.shape, dtype=torch.float64)
        found = {self.directions[d]: goal for d, goal in goals.items()}
        for p in self.pattern.unique().tolist():
            chosen, at = self.sets[p], self.pattern == p
            if any(d in found for d in chosen):
                goal = torch.stack([found[d][at] if d in found else torch.zeros(int(at.sum())) for d in chosen])
                step[:, at] = torch.from_numpy(self._right_inverse(chosen)) @ goal.to(torch.float64)
        return step

    def _right_inverse(self, chosen: tuple[int, ...]) -> np.ndarray:
        """R with rows @ R = 1 (modulo 2 for signs), for independent rows."""
        rows = self.matrix[list(chosen)]
        if not self.modulus:
            return np.linalg.pinv(rows)
        count, width = rows.shape
        work = np.concatenate([rows.astype(np.int64) % 2, np.eye(count, dtype=np.int64)], 1)
        work = _reduced(work, tuple(range(count)), keep=True, width=width)
        result = np.zeros((width, count))
        for row in work:  # the pivot of each row stands alone in its column
            result[int(row[:width].argmax())] = row[width:]
        return result


def _reduced(rows: np.ndarray, chosen: tuple[int, ...], keep: bool = False, width: int | None = None) -> np.ndarray:
    """Rows modulo 2 with the pivots of the chosen rows cleared from all others (and from each other with `keep`)."""
    work = rows.copy()
    basis = rows[list(chosen)].copy()
    for i in range(len(basis)):
        pivot = int(basis[i, :width].argmax())
        clear = basis[:, pivot].astype(bool)
        clear[i] = False
        basis[clear] ^= basis[i]
        work[work[:, pivot].astype(bool)] ^= basis[i]
    return basis if keep else work


def _perpendicular(vectors: np.ndarray, known: np.ndarray) -> np.ndarray:
    """What is left of vectors without their parts along independent known ones; zero where nothing is."""
    basis = np.linalg.qr(known.T)[0]
    left = vectors - vectors @ basis @ basis.T
    return np.where(np.abs(left).max(-1, keepdims=True) < 1e-9, 0.0, left)


def _precision(pieces: Pieces) -> float:
    return max(block.precision for block in pieces.blocks)


def _all(pieces: Pieces) -> range:
    return range(len(pieces.strands))


def _copies(pieces: Pieces, s: int) -> tuple[int, ...]:
    return tuple(pieces.strands[b].size for b in pieces.strands[s].bases)


def multiply(site: Site, factor: Float[Tensor, "*copies n"]) -> None:
    """Multiply the slices of a site, in place."""
    factor = factor.to(site.block.data.device, site.block.data.dtype)
    site.rows.mul_(factor.reshape(*factor.shape, *[1] * len(site.rest)))


def untouched_first(pieces: Pieces, fixed: Mapping[int, Fixed]) -> list[tuple[int, Site]]:
    """Where signs are not known: strands first of which no unit is known, for one of each tells the others."""
    every = [(s, site) for s in fixed for site in pieces.sites[s] if not fixed[s].complete(site.leaf.flip)]
    return sorted(every, key=lambda x: bool(fixed[x[0]].knows(x[1].leaf.flip).any()))


def hidden(site: Site, alive: Tensor) -> Tensor:
    """Per index: whether the rows of a site hold anything else than those in which unknown units are zero."""
    return (site.rows != alive).reshape(*alive.shape[: len(site.front)], -1).any(-1).cpu()


def along(values: Tensor, pieces: Pieces, site: Site, d: int) -> Tensor:
    """Values of another strand (one axis per base, then its own) laid along their dimensions of a site's rows."""
    block, order = site.block, (*site.front, *site.rest)
    places = [*base_dims(block.dims, d, pieces.strands[block.leaf(d).strand].bases), d]
    return spread(values, [order.index(p) for p in places], len(order)).to(block.data.device)
