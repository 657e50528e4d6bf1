"""Scale normalisation: solve for the scales (and signs) of each wire that give every unit's weights length one.

Each index of a wire may have several scales. A *direction* is a vector of exponents with which they enter a block; the
length of a unit's slice of a block fixes the scales along that direction. Wires are visited in turn, because a length
can be measured only where the scales of all other wires in the block are known; a unit whose slice is zero there (a
dead unit) waits for another block. Signs are solved in the same way, modulo 2.
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

Direction = tuple[float, ...]


class Directions:
    """The directions of one wire and their linear algebra, over the reals for scales and modulo 2 for signs."""

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
    """The algebra of some directions, cached: the same few vectors recur for every checkpoint of an architecture."""
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


class PartialSolution:
    """A partial solution: which directions of a wire's scales (or, modulo 2, of its signs) are known at every index."""

    def __init__(self, blocked: BlockedWeights, w: int, directions: Sequence[Direction], modulus: int = 0) -> None:
        found = tuple(dict.fromkeys(d for d in directions if any(d)))
        spec = blocked.wire_specs[w]
        self.generators = spec.signs if modulus else spec.scales
        self.algebra = directions_of(found, self.generators, modulus)
        self.directions = self.algebra.index
        self.sets: list[tuple[int, ...]] = [()]  # the sets of independent directions met so far
        self.known = torch.zeros(1, len(found), dtype=torch.bool)  # which directions follow from each set
        self.everywhere = self.known[0]  # and which are known at every index
        self.pattern: Int[Tensor, "*copies n"] = torch.zeros(
            *copies(blocked.wire_specs, w), spec.size, dtype=torch.int64
        )

    def knows(self, direction: Direction) -> Tensor:
        """Per index: whether a direction follows from the known ones."""
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
        """Per index: the part of a direction along which scales may still change without changing known ones."""
        parts = np.stack([self.algebra.perpendicular(np.array(direction), chosen) for chosen in self.sets])
        return torch.from_numpy(parts)[self.pattern].movedim(-1, 0)

    def solve(self, goals: Mapping[Direction, Tensor]) -> Float[Tensor, "generators *copies n"]:
        """A step that reaches the new goals and keeps the known directions."""
        step = torch.zeros(self.generators, *self.pattern.shape, dtype=torch.float64)
        found = {self.directions[d]: goal for d, goal in goals.items()}
        for p in self.pattern.unique().tolist():
            chosen, at = self.sets[p], self.pattern == p
            if any(d in found for d in chosen):
                goal = torch.stack([found[d][at] if d in found else torch.zeros(int(at.sum())) for d in chosen])
                step[:, at] = torch.from_numpy(self.algebra.right_inverse(chosen)) @ goal.to(torch.float64)
        return step


def untouched_first(blocked: BlockedWeights, fixed: Mapping[int, PartialSolution]) -> list[tuple[int, BlockSlot]]:
    """Sites where signs are not known; wires without any known unit come first, as one sign determines the others."""
    every = [(w, site) for w in fixed for site in blocked.sites[w] if not fixed[w].complete(site.axis.flip)]
    return sorted(every, key=lambda x: bool(fixed[x[0]].knows(x[1].axis.flip).any()))


Free = Callable[[WireAxis], Tensor]  # generators × indices of the axis's wire: exponents of scales that are not known


def coupled_wires(blocked: BlockedWeights, stuck: list[int]) -> list[int]:
    """The wires among the stuck ones that are connected to the first of them through blocks."""
    found, grown = {stuck[0]}, True
    while grown:
        grown = False
        for block in blocked.blocks:
            here = {d.tree.wire for d in block.dims if isinstance(d.tree, WireAxis) and any(d.tree.powers)} & set(stuck)
            if here & found and not here <= found:
                found |= here
                grown = True
    return sorted(found)


def fit_log_scales(
    blocked: BlockedWeights, wires: list[int], free: Free
) -> Mapping[int, Float[Tensor, "scales *copies n"]]:
    """Wire → the log-scales that bring the lengths in all blocks as near to one as possible.

    When the entries of a block are scaled by products s_h · t_i, neither factor has a length of its own. The logarithms
    of the lengths are then fitted by sums of logarithms, over all blocks at once. The result does not depend on the
    scales before, because directions that the fit cannot see change no weight.
    """
    start, total = {}, 0
    for w in wires:
        start[w] = total
        total += blocked.wire_specs[w].scales * int(
            np.prod([*copies(blocked.wire_specs, w), blocked.wire_specs[w].size])
        )
    rows, columns, values, goals, count = [], [], [], [], 0
    for block in blocked.blocks:
        terms, goal = _equations(blocked, block, start, free)
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
        w: (blocked.wire_specs[w].scales, *copies(blocked.wire_specs, w), blocked.wire_specs[w].size) for w in wires
    }
    ends = {w: start[w] + int(np.prod(shape)) for w, shape in shapes.items()}
    return {w: torch.from_numpy(solution[start[w] : ends[w]]).reshape(shapes[w]) for w in wires}


def _equations(
    blocked: BlockedWeights, block: WeightBlock, start: Mapping[int, int], free: Free
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """One equation per cell of a block: the exponents of the unknown scales there, and minus its log-length."""
    axes = [(i, d.tree) for i, d in enumerate(block.dims) if isinstance(d.tree, WireAxis)]
    active = [(i, axis) for i, axis in axes if axis.wire in start and any(axis.powers) and bool(free(axis).any())]
    if not active:
        return [], np.zeros(0)
    kept = sorted(
        {p for i, axis in active for p in (*base_dims(block.dims, i, blocked.wire_specs[axis.wire].bases), i)}
    )
    rest = tuple(i for i in range(len(block.dims)) if i not in kept)
    length = torch.linalg.vector_norm(block.data, dim=rest, dtype=torch.float64) if rest else block.data.abs().double()
    there = (length > SHORTEST).flatten().cpu().numpy()
    terms = []
    for i, axis in active:
        places = [kept.index(p) for p in (*base_dims(block.dims, i, blocked.wire_specs[axis.wire].bases), i)]
        powers = free(axis)
        first = start[axis.wire]
        numbers: Int[Tensor, "scales *copies n"] = torch.arange(first, first + powers.numel()).reshape(powers.shape)
        for number, power in zip(numbers, powers, strict=True):
            column = spread(number, places, len(kept)).expand(length.shape)
            value = spread(power, places, len(kept)).expand(length.shape)
            terms.append((column.flatten().numpy()[there], value.flatten().numpy()[there]))
    goal = -np.log(length.flatten().cpu().numpy()[there])
    return terms, goal


class ScaleNormaliser:
    """Normalises the scales of all wires of some weights, writing into their blocks."""

    def __init__(self, blocked: BlockedWeights) -> None:
        self.blocked = blocked
        self.fixed = [
            PartialSolution(blocked, w, [x.axis.power for x in blocked.sites[w]])
            for w in range(len(blocked.wire_specs))
        ]
        self.logs = {
            w: torch.zeros(spec.scales, *copies(blocked.wire_specs, w), spec.size, dtype=torch.float64)
            for w, spec in enumerate(blocked.wire_specs)
            if spec.scales
        }

    def run(self) -> dict[int, Float[Tensor, "scales *copies n"]]:
        """Wire → the scales that take the weights to their normal form."""
        while sum(self._solve(w) for w in self.logs) or self._solve_coupled():
            pass
        return {w: log.exp() for w, log in self.logs.items()}

    def _solve_coupled(self) -> bool:
        """Fix scales that are known only relative to each other, all at once; whether there were any."""
        stuck = [w for w in self.logs if any(self._undetermined(w, site) for site in self._scaled(w))]
        if not stuck:
            return False
        together = coupled_wires(self.blocked, stuck)
        found = fit_log_scales(self.blocked, together, lambda axis: self.fixed[axis.wire].free(axis.power))
        for w, step in found.items():
            for direction in self.fixed[w].directions:
                self.fixed[w].learn(direction, ~self.fixed[w].knows(direction))
            rounding = ROUNDING * max(block.precision for block in self.blocked.blocks)
            self._apply(w, torch.where(step.abs() > rounding, step, 0.0))
        return True

    def _scaled(self, w: int) -> list[BlockSlot]:
        return [site for site in self.blocked.sites[w] if any(site.axis.powers)]

    def _solve(self, w: int) -> bool:
        """Fix the scales of one wire as far as they are determined; whether any was."""
        fixed = self.fixed[w]
        if bool(fixed.everywhere.all()):
            return False
        found: dict[Direction, Tensor] = {}
        before = fixed.pattern.clone()
        for site in self._scaled(w):
            direction = site.axis.power
            # new scales are not applied yet, so a block that the wire enters twice has to wait
            twice = any(axis.wire == w for _, axis in site.company())
            if fixed.complete(direction) or (found and twice):
                continue
            wanted = ~fixed.knows(direction)
            length = self._length(w, site)
            accepted = wanted & (length > SHORTEST)
            if bool(accepted.any()):
                fixed.learn(direction, accepted)
                snap = ROUNDING * site.block.precision  # so that a normal form is its own normal form
                goal = -torch.where(accepted, length, 1.0).log()
                found[direction] = found.get(direction, torch.zeros(())) + torch.where(goal.abs() > snap, goal, 0.0)
        if found:
            self._apply(w, fixed.solve(found))
        return not torch.equal(before, fixed.pattern)

    def _length(self, w: int, site: BlockSlot) -> Float[Tensor, "*copies n"]:
        """The length of every unit's slice, over those entries on which every other scale is known."""
        x = site.rows
        for d, axis in site.company():
            if any(axis.powers):
                fixed = self.fixed[axis.wire]
                if not fixed.complete(axis.power):
                    x = x * along(fixed.knows(axis.power).to(x.dtype), self.blocked, site, d)
        return site.lengths(x)

    def _undetermined(self, w: int, site: BlockSlot) -> bool:
        """Whether some unit's slice is not zero, and yet its scale is not known."""
        fixed = self.fixed[w]
        if fixed.complete(site.axis.power):
            return False
        return bool((~fixed.knows(site.axis.power) & (site.lengths() > SHORTEST)).any())

    def _apply(self, w: int, step: Float[Tensor, "scales *copies n"]) -> None:
        self.logs[w] += step.cpu()
        for site in self._scaled(w):
            exponent = sum(float(p) * step[k] for k, p in enumerate(site.axis.powers) if p)
            if isinstance(exponent, Tensor) and bool(exponent.any()):
                multiply(site, exponent.exp())


def multiply(site: BlockSlot, factor: Float[Tensor, "*copies n"]) -> None:
    """Multiply the slices of a site, in place."""
    factor = factor.to(site.block.data.device, site.block.data.dtype)
    site.rows.mul_(factor.reshape(*factor.shape, *[1] * len(site.rest)))


def flip(sites: Sequence[BlockSlot], signs: Float[Tensor, "signs *copies n"]) -> None:
    """Multiply all slices of a wire by signs, in place."""
    for site in sites:
        if any(site.axis.flips):
            multiply(site, torch.stack([signs[k] for k, f in enumerate(site.axis.flips) if f]).prod(0))


def signs_known(fixed: Mapping[int, PartialSolution], axis: WireAxis) -> bool:
    """Whether the signs with which a wire enters a block are known at every index."""
    return not any(axis.flips) or fixed[axis.wire].complete(axis.flip)


def known_rows(
    blocked: BlockedWeights, fixed: Mapping[int, PartialSolution], site: BlockSlot, own: bool = False
) -> Tensor:
    """The rows of a site, with zeros at units of unknown sign (also of the wire itself with `own`)."""
    x = site.rows
    for d, axis in [*site.company(), *([(site.front[-1], site.axis)] if own else [])]:
        if not signs_known(fixed, axis):
            x = x * along(fixed[axis.wire].knows(axis.flip).to(x.dtype), blocked, site, d)
    return x


def hidden(site: BlockSlot, alive: Tensor) -> Tensor:
    """Per index: whether the rows of a site differ from those in which unknown units are zero."""
    return (site.rows != alive).reshape(*alive.shape[: len(site.front)], -1).any(-1).cpu()


def along(values: Tensor, blocked: BlockedWeights, site: BlockSlot, d: int) -> Tensor:
    """Values of another wire (one axis per base, then its own), broadcast along their dimensions of a site's rows."""
    block, order = site.block, (*site.front, *site.rest)
    places = [*base_dims(block.dims, d, blocked.wire_specs[block.wire_axis(d).wire].bases), d]
    return spread(values, [order.index(p) for p in places], len(order)).to(block.data.device)
