"""Scale normalisation: solve for the scales (and signs) of each wire that give every unit's weights length one.

Exponent directions, the partial solution of the scale equations, and the least-squares fit for scales that are only
known through each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.linalg import lsqr
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.symmetry.blocks import ROUNDING, SHORTEST, BlockedWeights, BlockSlot, WeightBlock
from intertwine.symmetry.element import copies
from intertwine.symmetry.geometry import WireAxis, base_dims, spread

# ----------------------------------------------------------------------------------------------------
# Directions: the vectors of exponents with which the scales or signs of a strand enter its blocks, and their algebra.
#
# The same few vectors come back for every checkpoint of an architecture, so what was worked out is kept.


Direction = tuple[float, ...]


class Directions:
    """The directions of one strand, over the reals for scales and modulo 2 for signs."""

    def __init__(self, vectors: tuple[Direction, ...], generators: int, modulus: int) -> None:
        self.index = {d: i for i, d in enumerate(vectors)}
        self.matrix = np.array(vectors, dtype=np.float64).reshape(len(vectors), generators)
        self.modulus = modulus
        self.spanned = cache(self._spanned)
        self.right_inverse = cache(self._right_inverse)

    def _spanned(self, chosen: tuple[int, ...]) -> np.ndarray:
        """Which directions are combinations of some of them."""
        if self.modulus:
            return np.logical_not(_reduced(self.matrix.astype(np.int64) % 2, chosen).any(1))
        return np.logical_not(self.perpendicular(self.matrix, chosen).any(-1))

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

    def perpendicular(self, vectors: np.ndarray, chosen: tuple[int, ...]) -> np.ndarray:
        """What is left of vectors without their parts along independent chosen directions; zero where nothing is."""
        basis = np.linalg.qr(self.matrix[list(chosen)].T)[0]
        left = vectors - vectors @ basis @ basis.T
        return np.where(np.abs(left).max(-1, keepdims=True) < 1e-9, 0.0, left)


@lru_cache(maxsize=4096)
def directions_of(vectors: tuple[Direction, ...], generators: int, modulus: int) -> Directions:
    """The algebra of some directions, made once."""
    return Directions(vectors, generators, modulus)


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


# ----------------------------------------------------------------------------------------------------
# Fixed: the book of what is known of a strand's scales or signs, index by index.


class PartialSolution:
    """Which directions of a strand's scales (or, modulo 2, of its signs) are known at every index of it."""

    def __init__(self, pieces: BlockedWeights, s: int, directions: Sequence[Direction], modulus: int = 0) -> None:
        found = tuple(dict.fromkeys(d for d in directions if any(d)))
        strand = pieces.wire_specs[s]
        self.generators = strand.signs if modulus else strand.scales
        self.algebra = directions_of(found, self.generators, modulus)
        self.directions = self.algebra.index
        self.sets: list[tuple[int, ...]] = [()]  # the sets of independent directions met so far
        self.known = torch.zeros(1, len(found), dtype=torch.bool)  # which directions follow from each set
        self.everywhere = self.known[0]  # and which are known at every index
        self.pattern: Int[Tensor, "*copies n"] = torch.zeros(
            *copies(pieces.wire_specs, s), strand.size, dtype=torch.int64
        )

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


def untouched_first(pieces: BlockedWeights, fixed: Mapping[int, PartialSolution]) -> list[tuple[int, BlockSlot]]:
    """Where signs are not known: strands first of which no unit is known, for one of each tells the others."""
    every = [(s, site) for s in fixed for site in pieces.sites[s] if not fixed[s].complete(site.axis.flip)]
    return sorted(every, key=lambda x: bool(fixed[x[0]].knows(x[1].axis.flip).any()))


# ----------------------------------------------------------------------------------------------------
# Scales that can be read only through each other, fixed together.
#
# When the entries of a block are scaled by products s_h · t_i, neither factor has a length of its own. The logarithms of
# the lengths are then fitted by sums of logarithms, over all blocks at once; what is left has one form, whatever the
# scales were before, because directions that the fit cannot see change no weight.


Free = Callable[[WireAxis], Tensor]  # generators × indices of the leaf's strand: exponents of scales that are not known


def coupled_strands(pieces: BlockedWeights, stuck: list[int]) -> list[int]:
    """The strands among the stuck ones that are joined to the first of them through blocks."""
    found, grown = {stuck[0]}, True
    while grown:
        grown = False
        for block in pieces.blocks:
            here = {d.tree.wire for d in block.dims if isinstance(d.tree, WireAxis) and any(d.tree.powers)} & set(stuck)
            if here & found and not here <= found:
                found |= here
                grown = True
    return sorted(found)


def fit_log_scales(
    pieces: BlockedWeights, strands: list[int], free: Free
) -> Mapping[int, Float[Tensor, "scales *copies n"]]:
    """Strand → the log-scales that bring the lengths in all blocks as near to one as they come."""
    start, total = {}, 0
    for s in strands:
        start[s] = total
        total += pieces.wire_specs[s].scales * int(np.prod([*copies(pieces.wire_specs, s), pieces.wire_specs[s].size]))
    rows, columns, values, goals, count = [], [], [], [], 0
    for block in pieces.blocks:
        terms, goal = _equations(pieces, block, start, free)
        for column, value in terms:
            there = value != 0
            rows.append(count + np.flatnonzero(there))
            columns.append(column[there])
            values.append(value[there])
        goals.append(goal)
        count += len(goal)
    matrix = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), (count, total))
    solution = lsqr(matrix.tocsr(), np.concatenate(goals), atol=1e-15, btol=1e-15, iter_lim=10_000)[0]
    shapes = {
        s: (pieces.wire_specs[s].scales, *copies(pieces.wire_specs, s), pieces.wire_specs[s].size) for s in strands
    }
    ends = {s: start[s] + int(np.prod(shape)) for s, shape in shapes.items()}
    return {s: torch.from_numpy(solution[start[s] : ends[s]]).reshape(shapes[s]) for s in strands}


def _equations(
    pieces: BlockedWeights, block: WeightBlock, start: Mapping[int, int], free: Free
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """One equation per cell of a block: the exponents of the unknown scales there, and minus its log-length."""
    leaves = [(i, d.tree) for i, d in enumerate(block.dims) if isinstance(d.tree, WireAxis)]
    active = [(i, leaf) for i, leaf in leaves if leaf.wire in start and any(leaf.powers) and bool(free(leaf).any())]
    if not active:
        return [], np.zeros(0)
    kept = sorted({p for i, leaf in active for p in (*base_dims(block.dims, i, pieces.wire_specs[leaf.wire].bases), i)})
    rest = tuple(i for i in range(len(block.dims)) if i not in kept)
    length = torch.linalg.vector_norm(block.data, dim=rest, dtype=torch.float64) if rest else block.data.abs().double()
    there = (length > SHORTEST).flatten().cpu().numpy()
    terms = []
    for i, leaf in active:
        places = [kept.index(p) for p in (*base_dims(block.dims, i, pieces.wire_specs[leaf.wire].bases), i)]
        powers = free(leaf)
        first = start[leaf.wire]
        numbers: Int[Tensor, "scales *copies n"] = torch.arange(first, first + powers.numel()).reshape(powers.shape)
        for number, power in zip(numbers, powers, strict=True):
            column = spread(number, places, len(kept)).expand(length.shape)
            value = spread(power, places, len(kept)).expand(length.shape)
            terms.append((column.flatten().numpy()[there], value.flatten().numpy()[there]))
    goal = -np.log(length.flatten().cpu().numpy()[there])
    return terms, goal


# ----------------------------------------------------------------------------------------------------
# Scales brought to a normal form: the weights of every unit get length one.
#
# Each index of a wire may carry several scales. A *direction* is a vector of exponents with which they enter a block;
# the length of a unit's slice of a block fixes the scales along that direction. Wires are visited in turn, because a
# length can be measured only where the scales of all other wires in the block are known; a unit whose slice is zero
# there (a dead unit) waits for another block. `Fixed`, the book of what is known, serves signs too, modulo 2.


class ScaleNormaliser:
    """Normalises the scales of all strands of some weights, writing into their blocks."""

    def __init__(self, pieces: BlockedWeights) -> None:
        self.pieces = pieces
        self.fixed = [
            PartialSolution(pieces, s, [x.axis.power for x in pieces.sites[s]]) for s in range(len(pieces.wire_specs))
        ]
        self.logs = {
            s: torch.zeros(strand.scales, *copies(pieces.wire_specs, s), strand.size, dtype=torch.float64)
            for s, strand in enumerate(pieces.wire_specs)
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
        together = coupled_strands(self.pieces, stuck)
        found = fit_log_scales(self.pieces, together, lambda leaf: self.fixed[leaf.wire].free(leaf.power))
        for s, step in found.items():
            for direction in self.fixed[s].directions:
                self.fixed[s].learn(direction, ~self.fixed[s].knows(direction))
            self._apply(s, torch.where(step.abs() > ROUNDING * _precision(self.pieces), step, 0.0))
        return True

    def _scaled(self, s: int) -> list[BlockSlot]:
        return [site for site in self.pieces.sites[s] if any(site.axis.powers)]

    def _visit(self, s: int) -> bool:
        """Fix what can be fixed of one strand; whether anything was."""
        fixed = self.fixed[s]
        if bool(fixed.everywhere.all()):
            return False
        found: dict[Direction, Tensor] = {}
        before = fixed.pattern.clone()
        for site in self._scaled(s):
            direction = site.axis.power
            # what was just learnt is not applied yet, so a block that the strand enters twice has to wait
            twice = any(leaf.wire == s for _, leaf in site.company())
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

    def _length(self, s: int, site: BlockSlot) -> Float[Tensor, "*copies n"]:
        """The length of every unit's slice, over those entries on which every other scale is known."""
        x = site.rows
        for d, leaf in site.company():
            if any(leaf.powers):
                fixed = self.fixed[leaf.wire]
                if not fixed.complete(leaf.power):
                    x = x * along(fixed.knows(leaf.power).to(x.dtype), self.pieces, site, d)
        return site.lengths(x)

    def _unread(self, s: int, site: BlockSlot) -> bool:
        """Whether some unit's slice is not zero, and yet its scale is not known."""
        fixed = self.fixed[s]
        if fixed.complete(site.axis.power):
            return False
        return bool((~fixed.knows(site.axis.power) & (site.lengths() > SHORTEST)).any())

    def _apply(self, s: int, step: Float[Tensor, "scales *copies n"]) -> None:
        self.logs[s] += step.cpu()
        for site in self._scaled(s):
            exponent = sum(float(p) * step[k] for k, p in enumerate(site.axis.powers) if p)
            if isinstance(exponent, Tensor) and bool(exponent.any()):
                multiply(site, exponent.exp())


def _precision(pieces: BlockedWeights) -> float:
    return max(block.precision for block in pieces.blocks)


def multiply(site: BlockSlot, factor: Float[Tensor, "*copies n"]) -> None:
    """Multiply the slices of a site, in place."""
    factor = factor.to(site.block.data.device, site.block.data.dtype)
    site.rows.mul_(factor.reshape(*factor.shape, *[1] * len(site.rest)))


def hidden(site: BlockSlot, alive: Tensor) -> Tensor:
    """Per index: whether the rows of a site hold anything else than those in which unknown units are zero."""
    return (site.rows != alive).reshape(*alive.shape[: len(site.front)], -1).any(-1).cpu()


def along(values: Tensor, pieces: BlockedWeights, site: BlockSlot, d: int) -> Tensor:
    """Values of another strand (one axis per base, then its own) laid along their dimensions of a site's rows."""
    block, order = site.block, (*site.front, *site.rest)
    places = [*base_dims(block.dims, d, pieces.wire_specs[block.wire_axis(d).wire].bases), d]
    return spread(values, [order.index(p) for p in places], len(order)).to(block.data.device)
