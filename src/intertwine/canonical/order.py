"""Canonical order of units: refine the order of each wire by comparing rows of weights whose own order is known, until
no ties are left. Lexicographic order and the NodeSort order.

Ranks are integers per index; equal ranks are indices not yet distinguished. Rows are compared lexicographically, first
by the signs of their entries and then by the values: a positive scale never changes a sign, so rounding cannot change
the order of two units unless all of their signs agree. Values that scales have changed are compared up to rounding, so
that units with equal weights are distinguished by other weights and not by their last digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.canonical.scales import (
    Direction,
    PartialSolution,
    flip,
    hidden,
    known_rows,
    signs_known,
    untouched_first,
)
from intertwine.errors import InputError
from intertwine.symmetry.blocks import BlockedWeights, BlockSlot
from intertwine.symmetry.element import copies
from intertwine.symmetry.geometry import WireAxis, base_dims, spread

#: How many entries of a row are compared by sign before values are compared.
SIGNS_COMPARED = 512


# -- Ordered partitions --


def unresolved(rank: Int[Tensor, "*copies n"]) -> bool:
    """Whether some indices are not distinguished."""
    return bool(tied(rank).any())


def tied(rank: Int[Tensor, "*copies n"]) -> Tensor:
    """Which indices share their rank with another index of the same copy."""
    ordered, order = rank.sort(-1)
    same = ordered[..., 1:] == ordered[..., :-1]
    edge = torch.zeros(*rank.shape[:-1], 1, dtype=torch.bool)
    both = torch.cat([same, edge], -1) | torch.cat([edge, same], -1)
    return torch.zeros_like(both).scatter(-1, order, both)


def refine(rank: Int[Tensor, "*copies n"], rows: Tensor) -> Int[Tensor, "*copies n"]:
    """Ranks refined by rows: tied indices are ordered by their rows, byte by byte; others keep their ranks.

    `rows`: (*copies, n, bytes), unsigned bytes, as `sign_bytes` and `value_bytes` make them.
    """
    where = tied(rank)
    if rows.shape[-1] == 0 or not bool(where.any()):
        return rank
    n = rank.shape[-1]
    copy_of = torch.arange(rank.numel() // n).reshape(*rank.shape[:-1], 1).expand(rank.shape)[where].numpy()
    old = rank[where].numpy()
    # one comparison of bytes decides: the copy, the old rank, then the row
    head = np.stack([copy_of, old], -1).astype(">i8").view(np.uint8)
    words = np.ascontiguousarray(np.concatenate([head, rows[where].numpy()], -1))
    order = np.argsort(words.view(f"V{words.shape[-1]}")[:, 0], kind="stable")
    ordered = words[order]
    fresh = np.empty(len(order), bool)
    fresh[0] = True
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(-1)
    began = (ordered[1:, :16] != ordered[:-1, :16]).any(-1)  # where a new tied group begins
    group_start = np.concatenate([[0], np.where(began, np.arange(1, len(order)), 0)])
    start = np.maximum.accumulate(group_start)
    place = np.maximum.accumulate(np.where(fresh, np.arange(len(order)), 0)) - start
    result = rank.clone()
    updated = np.empty(len(order), np.int64)
    updated[order] = old[order] + place
    result[where] = torch.from_numpy(updated)
    return result


def sign_bytes(x: Tensor) -> Tensor:
    """−, 0, + as the bytes 0, 1, 2."""
    return (x.sign() + 1).to(torch.uint8)


def value_bytes(x: Tensor) -> Tensor:
    """Numbers as bytes that compare as the numbers do; both zeros give the same bytes."""
    values = (x + 0.0).contiguous().cpu().numpy()
    width = values.dtype.itemsize
    bits = values.view(f"i{width}")
    top = np.array(1, f"u{width}") << np.array(8 * width - 1, f"u{width}")
    keys = np.where(bits < 0, ~bits.view(f"u{width}"), bits.view(f"u{width}") | top).astype(f">u{width}")
    return torch.from_numpy(keys.view(np.uint8).reshape(*values.shape[:-1], -1))


def value_codes(
    x: Float[Tensor, "*copies n entries"], noise: float, size: Float[Tensor, "*copies n entries"] | None = None
) -> Tensor:
    """Numbers of units as bytes that compare as the numbers do; numbers that differ by rounding give the same bytes.

    Args:
        x: the numbers of all units are compared with each other, entry by entry.
        noise: the relative size of rounding; 0 compares every bit. size: what it is relative to; `x` by default.
    """
    if noise == 0.0:
        return value_bytes(x)
    values, order = x.double().cpu().sort(dim=-2)
    large = values.abs() if size is None else size.double().cpu().gather(-2, order)
    apart = values.diff(dim=-2) > noise * torch.maximum(large[..., 1:, :], large[..., :-1, :])
    first = torch.zeros_like(values[..., :1, :])
    number = torch.cat([first, apart.cumsum(-2).to(values.dtype)], -2)  # how many gaps lie below
    return value_bytes(torch.zeros_like(number).scatter(-2, order, number).float())


def order_of(rank: Int[Tensor, "*copies n"]) -> Int[Tensor, "*copies n"]:
    """The permutation that puts indices in the order of their ranks: new[i] = old[order[i]]."""
    return rank.argsort(dim=-1, stable=True)


# -- The order of units --


class Ordering:
    """Sorts all wires of some weights. Signs are fixed during the search and written into the blocks.

    It begins where the order is given (at the inputs and outputs, and at biases) and goes on from wire to wire. Units
    that are still tied are compared by their connections, whatever the order of those; equal units take any order; and
    if nothing distinguishes unequal units, one is put first and the search continues. Every decision depends only on
    numbers that all members of the orbit share, so all of them arrive at one form.
    """

    def __init__(self, blocked: BlockedWeights) -> None:
        self.blocked = blocked
        specs = blocked.wire_specs
        shapes = [(*copies(specs, w), spec.size) for w, spec in enumerate(specs)]
        self.ranks: list[Int[Tensor, "*copies n"]] = [
            torch.zeros(shape, dtype=torch.int64) if spec.permutes else torch.arange(spec.size).expand(shape).clone()
            for spec, shape in zip(specs, shapes, strict=True)
        ]
        self.signs: dict[int, Float[Tensor, "signs *copies n"]] = {
            w: torch.ones(spec.signs, *shape, dtype=torch.float64)
            for w, (spec, shape) in enumerate(zip(specs, shapes, strict=True))
            if spec.signs
        }
        self.resolved = [not unresolved(rank) for rank in self.ranks]
        self.fixed = {
            w: PartialSolution(blocked, w, [x.axis.flip for x in blocked.sites[w]], modulus=2) for w in self.signs
        }
        self.excused: set[tuple[int, Direction]] = set()  # signs that need not be known everywhere: dead units
        self.used: set[tuple[str, int, int]] = set()  # (stage, wire, site): every site is compared once per stage
        self.choices = 0  # how often unequal units got an arbitrary order

    def run(self) -> Ordering:
        """Sort all wires."""
        stages = (self._by_signs, self._by_values, self._by_surroundings, self._by_choice)
        while any(stage() for stage in stages):  # back to the first stage after every success
            pass
        return self

    def permutation(self, w: int) -> Int[Tensor, "*copies n"]:
        """The permutation that sorts a wire."""
        return order_of(self.ranks[w])

    def _by_signs(self) -> bool:
        """Fix signs and compare rows by sign, wherever everything else in a block is known."""
        done = False
        for w in range(len(self.blocked.wire_specs)):
            done |= self._read_signs(w)
            done |= self._compare("signs", w)
        return done

    def _by_values(self) -> bool:
        """Compare the rows of one wire by value, so that the next wires can again be compared by signs."""
        return any(self._compare("values", w) for w in range(len(self.blocked.wire_specs)))

    def _by_surroundings(self) -> bool:
        """Compare rows whose order of entries is not known, as sorted lists and without signs."""
        done = False
        for w in self._open():
            for site in self.blocked.sites[w]:
                if not self.resolved[w] and not (self.known(w, site) and self._signed(site.axis)):
                    codes = value_codes(self._sorted_rows(site), site.block.noise)
                    done |= self._update(w, refine(self.ranks[w], codes))
        return done

    def _by_choice(self) -> bool:
        """Equal units take any order; of units that cannot be distinguished otherwise, one is put first."""
        for w, direction in self._waiting():
            if bool(self.fixed[w].knows(direction).any()):  # dead units block the others: continue without them
                self.excused.add((w, direction))
                return True
        if sum(self._split_twins(w) for w in self._open()):
            return True
        for w in self._open():
            rank, where = self.ranks[w].clone(), tied(self.ranks[w])
            low = torch.where(where, rank, rank.shape[-1]).amin(-1, keepdim=True)
            cell = where & (rank == low)
            chosen = cell & (cell.cumsum(-1) == 1)
            self.choices += 1
            return self._update(w, torch.where(cell & ~chosen, rank + 1, rank))
        return self._keep_a_sign()

    def _keep_a_sign(self) -> bool:
        """Of the units whose signs are known only relative to each other, the first one keeps its own."""
        for w, site in untouched_first(self.blocked, self.fixed):
            there = ~self.fixed[w].knows(site.axis.flip) & hidden(site, known_rows(self.blocked, self.fixed, site))
            if bool(there.any()):
                place = self._places(w)
                self.choices += 1
                self.fixed[w].learn(site.axis.flip, place == place[there].min())
                return True
        return False

    def _places(self, w: int) -> Int[Tensor, "*copies n"]:
        """The canonical position of every index of a wire, over all of its copies."""
        specs, place = self.blocked.wire_specs, torch.zeros((), dtype=torch.int64)
        along_axes = (*specs[w].bases, w)
        for q in along_axes:
            axes = [along_axes.index(b) for b in (*specs[q].bases, q)]
            place = place * specs[q].size + spread(self.ranks[q], axes, len(along_axes))
        return place

    def _waiting(self) -> list[tuple[int, Direction]]:
        """Signs that are neither known at every index nor excused."""
        every = [(w, d) for w, fixed in self.fixed.items() for d in fixed.directions if (w, d) not in self.excused]
        return [(w, d) for w, d in every if not self.fixed[w].complete(d)]

    def _open(self) -> list[int]:
        return [w for w, resolved in enumerate(self.resolved) if not resolved]

    def known(self, w: int, site: BlockSlot) -> bool:
        """Whether the order and the signs of all other axes of a block are known."""
        ordered = all(self.resolved[axis.wire] for _, axis in site.others())
        return ordered and all(self._signed(axis) for _, axis in site.company())

    def _signed(self, axis: WireAxis) -> bool:
        """Whether the signs of a wire in a block are known, except for dead units."""
        return (axis.wire, axis.flip) in self.excused or signs_known(self.fixed, axis)

    def _update(self, w: int, rank: Int[Tensor, "*copies n"]) -> bool:
        changed = not torch.equal(rank, self.ranks[w])
        self.ranks[w] = rank
        self.resolved[w] = not unresolved(rank)
        return changed

    def _compare(self, stage: str, w: int) -> bool:
        if self.resolved[w]:
            return False
        done = False
        for i, site in enumerate(self.blocked.sites[w]):
            if (stage, w, i) in self.used or not self._signed(site.axis) or not self.known(w, site):
                continue
            self.used.add((stage, w, i))
            for rows in self._chunks(
                site, known_rows(self.blocked, self.fixed, site, own=True), SIGNS_COMPARED if stage == "signs" else None
            ):
                code = sign_bytes(rows.cpu()) if stage == "signs" else value_codes(rows, site.block.noise)
                done |= self._update(w, refine(self.ranks[w], code))
                if self.resolved[w]:
                    return True
        return done

    def _chunks(self, site: BlockSlot, x: Tensor, most: int | None) -> Iterator[Tensor]:
        """The rows x of a site with their entries in canonical order, a few columns first and then more."""
        fronts = len(site.front)
        total = prod(x.shape[fronts:])
        stop = total if most is None else min(most, total)
        if total == 1:
            yield x.reshape(*x.shape[:fronts], 1)
            return
        index = self.columns(site)
        start, width = 0, 64
        while start < stop:
            flat = None if index is None else index[start : min(start + width, stop)]
            if flat is None:
                yield self._carry(x, site, (*site.front, *site.rest)).flatten(fronts)[
                    ..., start : min(start + width, stop)
                ]
            else:
                yield x[(..., *torch.unravel_index(flat.to(x.device), x.shape[fronts:]))]
            start, width = start + width, 8 * width

    def columns(self, site: BlockSlot) -> Int[Tensor, " entries"] | None:
        """The entries of a row in canonical order, as positions; None if that order differs from row to row."""
        for _, axis in site.others():
            if any(
                b in {site.block.wire_axis(f).wire for f in site.front}
                for b in self.blocked.wire_specs[axis.wire].bases
            ):
                return None
        sizes = [site.block.data.shape[d] for d in site.rest]
        index = torch.arange(prod(sizes)).reshape(sizes)
        return self._carry(index, site, site.rest).flatten()

    def _carry(self, x: Tensor, site: BlockSlot, dims: Sequence[int]) -> Tensor:
        """Reorder the dimensions of x (which are `dims` of the block) that belong to other wires."""
        specs = self.blocked.wire_specs
        for d, axis in sorted(site.others(), key=lambda o: -len(specs[o[1].wire].bases)):
            bases = base_dims(site.block.dims, d, specs[axis.wire].bases)
            index = order_of(self.ranks[axis.wire]).to(x.device)
            places = [dims.index(p) for p in (*bases, d)]
            x = torch.take_along_dim(x, spread(index, places, x.ndim), dims.index(d))
        return x

    def _sorted_rows(self, site: BlockSlot) -> Float[Tensor, "*copies n entries"]:
        """Each row sorted as far as the order of its entries is not known; absolute values if signs are not known."""
        x = site.rows
        if not all(signs_known(self.fixed, axis) for axis in (site.axis, *(axis for _, axis in site.company()))):
            x = x.abs()
        dims = (*site.front, *site.rest)
        cell = torch.zeros([1] * x.ndim, dtype=torch.int64)
        for d in site.rest:
            tree = site.block.dims[d].tree
            size = site.block.data.shape[d]
            rank, places = torch.arange(size), [dims.index(d)]
            if (d, tree) in site.others():
                axis = site.block.wire_axis(d)
                rank = self.ranks[axis.wire]
                bases = base_dims(site.block.dims, d, self.blocked.wire_specs[axis.wire].bases)
                places = [dims.index(p) for p in (*bases, d)]
            cell = cell * size + spread(rank, places, x.ndim)
        fronts = len(site.front)
        values = x.flatten(fronts).cpu() if site.rest else x.unsqueeze(-1).cpu()
        cells = cell.expand(x.shape).reshape(values.shape)
        order = values.argsort(dim=-1, stable=True)
        order = order.gather(-1, cells.gather(-1, order).argsort(dim=-1, stable=True))
        return values.gather(-1, order)

    def _split_twins(self, w: int) -> bool:
        """Give tied units with equal weights everywhere any order."""
        sites = self.blocked.sites[w]
        if any(len(site.block.places(w)) > 1 for site in sites):
            return False
        n = self.ranks[w].shape[-1]
        same = self.ranks[w]
        for site in sites:
            rows = site.rows.reshape(*site.rows.shape[: len(site.front)], -1)
            same = refine(same, value_codes(rows, site.block.noise))
        fine = refine(same, value_bytes(torch.arange(n, dtype=torch.float64).expand(same.shape).unsqueeze(-1)))
        # a cell of equal units takes any order; a cell of unequal units is left for a choice
        mixed = same != self.ranks[w]
        cells = self.ranks[w]
        unlike = torch.zeros_like(cells).scatter_reduce(-1, cells, mixed.long(), "amax").gather(-1, cells).bool()
        return self._update(w, torch.where(unlike, cells, fine))

    def _read_signs(self, w: int) -> bool:
        """Fix the signs of a wire as far as they are determined; whether any was."""
        if w not in self.fixed or bool(self.fixed[w].everywhere.all()):
            return False
        fixed = self.fixed[w]
        goals: dict[Direction, Tensor] = {}
        before = fixed.pattern
        for site in self.blocked.sites[w]:
            # new signs are not applied yet, so a block that the wire enters twice has to wait
            twice = any(axis.wire == w for _, axis in site.company())
            if signs_known(self.fixed, site.axis) or (goals and twice) or not self.known(w, site):
                continue
            sign = self._first_sign(site)
            accepted = ~fixed.knows(site.axis.flip) & (sign != 0)
            if bool(accepted.any()):
                fixed.learn(site.axis.flip, accepted)
                negative = (accepted & (sign < 0)).to(torch.float64)
                goals[site.axis.flip] = goals.get(site.axis.flip, torch.zeros(())) + negative
        if torch.equal(before, fixed.pattern):
            return False
        signs = 1 - 2 * fixed.solve(goals).remainder(2).round()
        self.signs[w] = self.signs[w] * signs
        flip(self.blocked.sites[w], signs)
        return True

    def _first_sign(self, site: BlockSlot) -> Float[Tensor, "*copies n"]:
        """The sign of the first entry of every row that is not zero, in canonical order."""
        sign = torch.zeros(site.rows.shape[: len(site.front)], dtype=torch.float32)
        for rows in self._chunks(site, known_rows(self.blocked, self.fixed, site), None):
            signs = rows.sign().cpu().float()
            first = (signs != 0).float().argmax(-1, keepdim=True)
            sign = torch.where(sign == 0, signs.gather(-1, first).squeeze(-1), sign)
            if bool((sign != 0).all()):
                break
        return sign


# -- NodeSort --


class NodeSort(Ordering):
    """The order of Sorensen's thesis, made sequential: units are sorted by the keys Σ_j w_j p^j of outgoing weights.

    As printed, every layer's keys are computed from the given weights, so from two hidden layers on they depend on the
    order that was to be removed. This version goes backwards from the output and computes each key after the next layer
    has been sorted. Units with equal keys are compared as in the lexicographic order.
    """

    def __init__(self, blocked: BlockedWeights, base: float) -> None:
        super().__init__(blocked)
        self.base = base

    def _by_signs(self) -> bool:
        for w in reversed(self._open()):
            if self._read_signs(w):
                return True
            sites = self.blocked.sites[w]
            known = [x for x in reversed(sites) if self._signed(x.axis) and self.known(w, x)]
            if not known or ("keys", w, -1) in self.used:
                continue
            self.used.add(("keys", w, -1))  # one key per spec, as in the thesis
            chunks = self._chunks(known[0], known_rows(self.blocked, self.fixed, known[0], own=True), None)
            rows = torch.cat([chunk.cpu() for chunk in chunks], -1)
            key, size = (inner_product(x, self.base).unsqueeze(-1) for x in (rows, rows.abs()))
            if self._update(w, refine(self.ranks[w], value_codes(key, known[0].block.noise, size))):
                return True
        return super()._by_signs()


def inner_product(rows: Tensor, base: float) -> Float[Tensor, "*copies n"]:
    """Σ_j w_j p^(j−m+1): the key divided by its largest power, so that no width and no base overflows."""
    m = rows.shape[-1]
    powers = np.exp2(np.log2(base) * (np.arange(m) - (m - 1)))
    # a plain sum along rows rounds each row in the same way, wherever it stands
    return torch.from_numpy((rows.to(torch.float64).contiguous().numpy() * powers).sum(-1))


def printed_permutations(blocked: BlockedWeights, base: float) -> dict[int, Int[Tensor, "*copies n"]]:
    """The order as printed: keys of all layers from the given weights, with powers that may overflow."""
    found = {}
    for w, spec in enumerate(blocked.wire_specs):
        if not (spec.permutes and blocked.sites[w]):
            continue
        site = blocked.sites[w][-1]
        rows = site.rows.reshape(*site.rows.shape[: len(site.front)], -1).cpu()
        found[w] = _printed_key(rows, base, spec.name).argsort(dim=-1, stable=True)
    return found


def _printed_key(rows: Tensor, base: float, wire: str) -> Float[Tensor, "*copies n"]:
    m = rows.shape[-1]
    with np.errstate(over="ignore"):
        powers = np.power(float(base), np.arange(m, dtype=np.float64))
    if not np.isfinite(powers).all():
        raise InputError(
            f"NodeSort as printed multiplies the {m} weights of a unit (wire {wire!r}) by powers of {base}, which "
            f"overflow float64. Use order='nodesort', which is safe for any width and base, or a base nearer to 1."
        )
    return torch.from_numpy((rows.to(torch.float64).contiguous().numpy() * powers).sum(-1))
