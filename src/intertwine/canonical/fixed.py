"""Fixed: the book of what is known of a strand's scales or signs, index by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from intertwine.canonical.blocks import Pieces, Site
from intertwine.canonical.directions import Direction, directions_of
from intertwine.shapes import Float, Int
from intertwine.symmetry.element import copies


class Fixed:
    """Which directions of a strand's scales (or, modulo 2, of its signs) are known at every index of it."""

    def __init__(self, pieces: Pieces, s: int, directions: Sequence[Direction], modulus: int = 0) -> None:
        found = tuple(dict.fromkeys(d for d in directions if any(d)))
        strand = pieces.strands[s]
        self.generators = strand.signs if modulus else strand.scales
        self.algebra = directions_of(found, self.generators, modulus)
        self.directions = self.algebra.index
        self.sets: list[tuple[int, ...]] = [()]  # the sets of independent directions met so far
        self.known = torch.zeros(1, len(found), dtype=torch.bool)  # which directions follow from each set
        self.everywhere = self.known[0]  # and which are known at every index
        self.pattern: Int[Tensor, "*copies n"] = torch.zeros(*copies(pieces.strands, s), strand.size, dtype=torch.int64)

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
                self.known = torch.cat([self.known, torch.from_numpy(self.algebra.spanned(larger))[None]])
            pattern[where & (self.pattern == old)] = self.sets.index(larger)
        self.pattern = pattern
        self.everywhere = self.known[pattern.unique()].all(0)

    def free(self, direction: Direction) -> Float[Tensor, "generators *copies n"]:
        """Per index: the part of a direction along which scales may still change without touching what is known."""
        parts = np.stack([self.algebra.perpendicular(np.array(direction), chosen) for chosen in self.sets])
        return torch.from_numpy(parts)[self.pattern].movedim(-1, 0)

    def solve(self, goals: Mapping[Direction, Tensor]) -> Float[Tensor, "generators *copies n"]:
        """A step that reaches the new goals and keeps what was known before."""
        step = torch.zeros(self.generators, *self.pattern.shape, dtype=torch.float64)
        found = {self.directions[d]: goal for d, goal in goals.items()}
        for p in self.pattern.unique().tolist():
            chosen, at = self.sets[p], self.pattern == p
            if any(d in found for d in chosen):
                goal = torch.stack([found[d][at] if d in found else torch.zeros(int(at.sum())) for d in chosen])
                step[:, at] = torch.from_numpy(self.algebra.right_inverse(chosen)) @ goal.to(torch.float64)
        return step


def untouched_first(pieces: Pieces, fixed: Mapping[int, Fixed]) -> list[tuple[int, Site]]:
    """Where signs are not known: strands first of which no unit is known, for one of each tells the others."""
    every = [(s, site) for s in fixed for site in pieces.sites[s] if not fixed[s].complete(site.leaf.flip)]
    return sorted(every, key=lambda x: bool(fixed[x[0]].knows(x[1].leaf.flip).any()))
