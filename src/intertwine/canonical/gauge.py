"""Scales brought to a normal form: the weights of every unit get length one.

Each index of a wire may carry several scales. A *direction* is a vector of exponents with which they enter a block;
the length of a unit's slice of a block fixes the scales along that direction. Wires are visited in turn, because a
length can be measured only where the scales of all other wires in the block are known; a unit whose slice is zero
there (a dead unit) waits for another block. `Fixed`, the book of what is known, serves signs too, modulo 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intertwine.canonical.balance import balanced, tangled
from intertwine.canonical.blocks import ROUNDING, SHORTEST, Pieces, Site
from intertwine.canonical.directions import Direction
from intertwine.canonical.fixed import Fixed
from intertwine.shapes import Float
from intertwine.symmetry.element import copies
from intertwine.symmetry.layout import base_dims, spread


class ScaleGauge:
    """Normalises the scales of all strands of some weights, writing into their blocks."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.fixed = [Fixed(pieces, s, [x.leaf.power for x in pieces.sites[s]]) for s in range(len(pieces.strands))]
        self.logs = {
            s: torch.zeros(strand.scales, *copies(pieces.strands, s), strand.size, dtype=torch.float64)
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
            accepted = wanted & (length > SHORTEST)
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
        return bool((~fixed.knows(site.leaf.power) & (site.lengths() > SHORTEST)).any())

    def _apply(self, s: int, step: Float[Tensor, "scales *copies n"]) -> None:
        self.logs[s] += step.cpu()
        for site in self._scaled(s):
            exponent = sum(float(p) * step[k] for k, p in enumerate(site.leaf.powers) if p)
            if isinstance(exponent, Tensor) and bool(exponent.any()):
                multiply(site, exponent.exp())


def _precision(pieces: Pieces) -> float:
    return max(block.precision for block in pieces.blocks)


def multiply(site: Site, factor: Float[Tensor, "*copies n"]) -> None:
    """Multiply the slices of a site, in place."""
    factor = factor.to(site.block.data.device, site.block.data.dtype)
    site.rows.mul_(factor.reshape(*factor.shape, *[1] * len(site.rest)))


def hidden(site: Site, alive: Tensor) -> Tensor:
    """Per index: whether the rows of a site hold anything else than those in which unknown units are zero."""
    return (site.rows != alive).reshape(*alive.shape[: len(site.front)], -1).any(-1).cpu()


def along(values: Tensor, pieces: Pieces, site: Site, d: int) -> Tensor:
    """Values of another strand (one axis per base, then its own) laid along their dimensions of a site's rows."""
    block, order = site.block, (*site.front, *site.rest)
    places = [*base_dims(block.dims, d, pieces.strands[block.leaf(d).strand].bases), d]
    return spread(values, [order.index(p) for p in places], len(order)).to(block.data.device)
