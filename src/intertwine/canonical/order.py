"""Canonical order of units: refine the order of each wire by comparing rows of weights whose own order is known, until
no ties are left. Lexicographic order and the NodeSort order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.canonical.scales import Direction, PartialSolution, along, hidden, multiply, untouched_first
from intertwine.errors import InputError
from intertwine.symmetry.blocks import BlockedWeights, BlockSlot
from intertwine.symmetry.element import copies
from intertwine.symmetry.geometry import WireAxis, base_dims, spread

# ----------------------------------------------------------------------------------------------------
# Ordered partitions: which indices of a strand come before which, refined by comparing rows of numbers.
#
# Ranks are whole numbers per index; equal ranks are indices not yet told apart. Rows are compared as a dictionary orders
# words, first by the signs of their entries and then by the values: a positive scale never changes a sign, so rounding
# cannot change the order of two units unless all of their signs agree. Values that scales have passed through are
# compared up to rounding, so that units with equal weights are told apart by other weights and not by their last digits.


def unresolved(rank: Int[Tensor, "*copies n"]) -> bool:
    """Whether some indices are not told apart."""
    return bool(tied(rank).any())


def tied(rank: Int[Tensor, "*copies n"]) -> Tensor:
    """Which indices share their rank with another index of the same copy."""
    ordered, order = rank.sort(-1)
    same = ordered[..., 1:] == ordered[..., :-1]
    edge = torch.zeros(*rank.shape[:-1], 1, dtype=torch.bool)
    both = torch.cat([same, edge], -1) | torch.cat([edge, same], -1)
    return torch.zeros_like(both).scatter(-1, order, both)


def refine(rank: Int[Tensor, "*copies n"], rows: Tensor) -> Int[Tensor, "*copies n"]:
    """Ranks refined by rows: tied indices are ordered by their rows, byte by byte; others keep their places.

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
    """Numbers as bytes that compare as the numbers do; the two zeros are one."""
    values = (x + 0.0).contiguous().cpu().numpy()
    width = values.dtype.itemsize
    bits = values.view(f"i{width}")
    top = np.array(1, f"u{width}") << np.array(8 * width - 1, f"u{width}")
    keys = np.where(bits < 0, ~bits.view(f"u{width}"), bits.view(f"u{width}") | top).astype(f">u{width}")
    return torch.from_numpy(keys.view(np.uint8).reshape(*values.shape[:-1], -1))


def value_codes(
    x: Float[Tensor, "*copies n entries"], noise: float, size: Float[Tensor, "*copies n entries"] | None = None
) -> Tensor:
    """Numbers of units as bytes that compare as the numbers do; what differs by rounding only is one.

    Args:
        x: entry by entry, the numbers of all units are compared with each other.
        noise: the relative size of rounding; with 0 every bit counts. size: what it is relative to; `x` by default.
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


# ----------------------------------------------------------------------------------------------------
# The order of units: every strand is sorted by rows of numbers whose own order is already known.
#
# It begins where the order is given (at the inputs and outputs, and at biases) and goes on from wire to wire. Where
# units still look alike, they are told apart by what they are joined to, whatever its order; units that are truly the
# same may stand in any order; and if unequal units are left that nothing tells apart, one is put first and the rest
# follows. Every decision depends only on numbers that all members of the orbit share, so all of them arrive at one form.


#: How many entries of a row are compared by sign before values are looked at.
SIGNS_COMPARED = 512


class Ordering:
    """Sorts all strands of some weights. Signs are fixed on the way and written into the blocks."""

    def __init__(self, pieces: BlockedWeights) -> None:
        self.pieces = pieces
        strands = pieces.wire_specs
        shapes = [(*copies(strands, i), s.size) for i, s in enumerate(strands)]
        self.ranks: list[Int[Tensor, "*copies n"]] = [
            torch.zeros(shape, dtype=torch.int64) if s.permutes else torch.arange(s.size).expand(shape).clone()
            for s, shape in zip(strands, shapes, strict=True)
        ]
        self.signs: dict[int, Float[Tensor, "signs *copies n"]] = {
            i: torch.ones(s.signs, *shape, dtype=torch.float64)
            for i, (s, shape) in enumerate(zip(strands, shapes, strict=True))
            if s.signs
        }
        self.resolved = [not unresolved(rank) for rank in self.ranks]
        self.fixed = {
            s: PartialSolution(pieces, s, [x.axis.flip for x in pieces.sites[s]], modulus=2) for s in self.signs
        }
        self.excused: set[tuple[int, Direction]] = set()  # signs that need not be known everywhere: dead units
        self.used: set[tuple[str, int, int]] = set()  # (stage, strand, site): what a site says is heard once
        self.choices = 0  # how often unequal units had to be put in an order that nothing gives

    def run(self) -> Ordering:
        """Sort everything."""
        stages = (self._by_signs, self._by_values, self._by_surroundings, self._by_choice)
        while any(stage() for stage in stages):  # back to the first stage after every success
            pass
        return self

    def permutation(self, s: int) -> Int[Tensor, "*copies n"]:
        """The permutation that puts a strand in order."""
        return order_of(self.ranks[s])

    # -- stages ----------------------------------------------------------------------------------------------------

    def _by_signs(self) -> bool:
        """Fix signs and compare rows by sign, wherever everything else in a block is known."""
        done = False
        for s in range(len(self.pieces.wire_specs)):
            done |= self._read_signs(s)
            done |= self._compare("signs", s)
        return done

    def _by_values(self) -> bool:
        """Compare the rows of one strand by value, so that the next strands can again be told apart by signs."""
        return any(self._compare("values", s) for s in range(len(self.pieces.wire_specs)))

    def _by_surroundings(self) -> bool:
        """Compare what units are joined to where its order is not known: as sorted lists, without signs."""
        done = False
        for s in self._open():
            for site in self.pieces.sites[s]:
                if not self.resolved[s] and not (self.known(s, site) and self._signed(site.axis)):
                    codes = value_codes(self._sorted_rows(site), site.block.noise)
                    done |= self._update(s, refine(self.ranks[s], codes))
        return done

    def _by_choice(self) -> bool:
        """Units that are the same take any order; of units that only look the same, one is put first."""
        for s, direction in self._waiting():
            if bool(self.fixed[s].knows(direction).any()):  # dead units hold up the rest: go on without them
                self.excused.add((s, direction))
                return True
        if sum(self._split_twins(s) for s in self._open()):
            return True
        for s in self._open():
            rank, where = self.ranks[s].clone(), tied(self.ranks[s])
            low = torch.where(where, rank, rank.shape[-1]).amin(-1, keepdim=True)
            cell = where & (rank == low)
            chosen = cell & (cell.cumsum(-1) == 1)
            self.choices += 1
            return self._update(s, torch.where(cell & ~chosen, rank + 1, rank))
        return self._keep_a_sign()

    def _keep_a_sign(self) -> bool:
        """Of the units whose signs can be read only through each other, the first one keeps its own."""
        for s, site in untouched_first(self.pieces, self.fixed):
            there = ~self.fixed[s].knows(site.axis.flip) & hidden(site, self._alive(site, own=False))
            if bool(there.any()):
                place = self._places(s)
                self.choices += 1
                self.fixed[s].learn(site.axis.flip, place == place[there].min())
                return True
        return False

    def _places(self, s: int) -> Int[Tensor, "*copies n"]:
        """The canonical position of every index of a strand, over all of its copies."""
        strands, place = self.pieces.wire_specs, torch.zeros((), dtype=torch.int64)
        along_axes = (*strands[s].bases, s)
        for q in along_axes:
            axes = [along_axes.index(b) for b in (*strands[q].bases, q)]
            place = place * strands[q].size + spread(self.ranks[q], axes, len(along_axes))
        return place

    def _waiting(self) -> list[tuple[int, Direction]]:
        """Signs that are not known at every index and not excused."""
        every = [(s, d) for s, fixed in self.fixed.items() for d in fixed.directions if (s, d) not in self.excused]
        return [(s, d) for s, d in every if not self.fixed[s].complete(d)]

    # -- comparing -------------------------------------------------------------------------------------------------

    def _open(self) -> list[int]:
        return [s for s, resolved in enumerate(self.resolved) if not resolved]

    def known(self, s: int, site: BlockSlot) -> bool:
        """Whether the order and the signs of everything else in a block are known."""
        ordered = all(self.resolved[leaf.wire] for _, leaf in site.others())
        return ordered and all(self._signed(leaf) for _, leaf in site.company())

    def _signed(self, leaf: WireAxis) -> bool:
        """Whether the signs with which a strand stands in a block are known, dead units aside."""
        return not any(leaf.flips) or (leaf.wire, leaf.flip) in self.excused or self._complete(leaf)

    def _complete(self, leaf: WireAxis) -> bool:
        return not any(leaf.flips) or self.fixed[leaf.wire].complete(leaf.flip)

    def _update(self, s: int, rank: Int[Tensor, "*copies n"]) -> bool:
        changed = not torch.equal(rank, self.ranks[s])
        self.ranks[s] = rank
        self.resolved[s] = not unresolved(rank)
        return changed

    def _compare(self, stage: str, s: int) -> bool:
        if self.resolved[s]:
            return False
        done = False
        for i, site in enumerate(self.pieces.sites[s]):
            if (stage, s, i) in self.used or not self._signed(site.axis) or not self.known(s, site):
                continue
            self.used.add((stage, s, i))
            for rows in self._chunks(site, self._alive(site, own=True), SIGNS_COMPARED if stage == "signs" else None):
                code = sign_bytes(rows.cpu()) if stage == "signs" else value_codes(rows, site.block.noise)
                done |= self._update(s, refine(self.ranks[s], code))
                if self.resolved[s]:
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
        for _, leaf in site.others():
            if any(
                b in {site.block.wire_axis(f).wire for f in site.front} for b in self.pieces.wire_specs[leaf.wire].bases
            ):
                return None
        sizes = [site.block.data.shape[d] for d in site.rest]
        index = torch.arange(prod(sizes)).reshape(sizes)
        return self._carry(index, site, site.rest).flatten()

    def _alive(self, site: BlockSlot, own: bool) -> Tensor:
        """The rows of a site, with zeros where they belong to dead units (also of the strand itself with `own`)."""
        x = site.rows
        for d, leaf in [*site.company(), *([(site.front[-1], site.axis)] if own else [])]:
            if not self._complete(leaf):
                known = self.fixed[leaf.wire].knows(leaf.flip)
                x = x * along(known.to(x.dtype), self.pieces, site, d)
        return x

    def _carry(self, x: Tensor, site: BlockSlot, dims: Sequence[int]) -> Tensor:
        """Reorder those dimensions of x (which stand for `dims` of the block) that belong to other strands."""
        strands = self.pieces.wire_specs
        for d, leaf in sorted(site.others(), key=lambda o: -len(strands[o[1].wire].bases)):
            bases = base_dims(site.block.dims, d, strands[leaf.wire].bases)
            index = order_of(self.ranks[leaf.wire]).to(x.device)
            places = [dims.index(p) for p in (*bases, d)]
            x = torch.take_along_dim(x, spread(index, places, x.ndim), dims.index(d))
        return x

    def _sorted_rows(self, site: BlockSlot) -> Float[Tensor, "*copies n entries"]:
        """Each row sorted within what is known of the order of its entries; without signs where some are open."""
        x = site.rows
        if not all(self._complete(leaf) for leaf in (site.axis, *(leaf for _, leaf in site.company()))):
            x = x.abs()
        dims = (*site.front, *site.rest)
        cell = torch.zeros([1] * x.ndim, dtype=torch.int64)
        for d in site.rest:
            tree = site.block.dims[d].tree
            size = site.block.data.shape[d]
            rank, places = torch.arange(size), [dims.index(d)]
            if (d, tree) in site.others():
                leaf = site.block.wire_axis(d)
                rank = self.ranks[leaf.wire]
                bases = base_dims(site.block.dims, d, self.pieces.wire_specs[leaf.wire].bases)
                places = [dims.index(p) for p in (*bases, d)]
            cell = cell * size + spread(rank, places, x.ndim)
        fronts = len(site.front)
        values = x.flatten(fronts).cpu() if site.rest else x.unsqueeze(-1).cpu()
        cells = cell.expand(x.shape).reshape(values.shape)
        order = values.argsort(dim=-1, stable=True)
        order = order.gather(-1, cells.gather(-1, order).argsort(dim=-1, stable=True))
        return values.gather(-1, order)

    def _split_twins(self, s: int) -> bool:
        """Give tied units with the very same weights everywhere any order."""
        sites = self.pieces.sites[s]
        if any(len(site.block.places(s)) > 1 for site in sites):
            return False
        n = self.ranks[s].shape[-1]
        same = self.ranks[s]
        for site in sites:
            rows = site.rows.reshape(*site.rows.shape[: len(site.front)], -1)
            same = refine(same, value_codes(rows, site.block.noise))
        fine = refine(same, value_bytes(torch.arange(n, dtype=torch.float64).expand(same.shape).unsqueeze(-1)))
        # a cell whose units are all the same is put in any order; a mixed one is left for a choice
        mixed = same != self.ranks[s]
        cells = self.ranks[s]
        unlike = torch.zeros_like(cells).scatter_reduce(-1, cells, mixed.long(), "amax").gather(-1, cells).bool()
        return self._update(s, torch.where(unlike, cells, fine))

    # -- signs -----------------------------------------------------------------------------------------------------

    def _read_signs(self, s: int) -> bool:
        """Fix the signs of a strand as far as they can be read; whether any was."""
        if s not in self.fixed or bool(self.fixed[s].everywhere.all()):
            return False
        fixed = self.fixed[s]
        goals: dict[Direction, Tensor] = {}
        before = fixed.pattern
        for site in self.pieces.sites[s]:
            # what was just read is not applied yet, so a block that the strand enters twice has to wait
            twice = any(leaf.wire == s for _, leaf in site.company())
            if self._complete(site.axis) or (goals and twice) or not self.known(s, site):
                continue
            sign = self._first_sign(site)
            accepted = ~fixed.knows(site.axis.flip) & (sign != 0)
            if bool(accepted.any()):
                fixed.learn(site.axis.flip, accepted)
                negative = (accepted & (sign < 0)).to(torch.float64)
                goals[site.axis.flip] = goals.get(site.axis.flip, torch.zeros(())) + negative
        if torch.equal(before, fixed.pattern):
            return False
        self._apply_signs(s, 1 - 2 * fixed.solve(goals).remainder(2).round())
        return True

    def _apply_signs(self, s: int, signs: Float[Tensor, "signs *copies n"]) -> None:
        self.signs[s] = self.signs[s] * signs
        for site in self.pieces.sites[s]:
            if any(site.axis.flips):
                multiply(site, torch.stack([signs[k] for k, f in enumerate(site.axis.flips) if f]).prod(0))

    def _first_sign(self, site: BlockSlot) -> Float[Tensor, "*copies n"]:
        """The sign of the first entry of every row that is not zero, in canonical order."""
        sign = torch.zeros(site.rows.shape[: len(site.front)], dtype=torch.float32)
        for rows in self._chunks(site, self._alive(site, own=False), None):
            signs = rows.sign().cpu().float()
            first = (signs != 0).float().argmax(-1, keepdim=True)
            sign = torch.where(sign == 0, signs.gather(-1, first).squeeze(-1), sign)
            if bool((sign != 0).all()):
                break
        return sign


# ----------------------------------------------------------------------------------------------------
# NodeSort, the order of Sorensen's thesis: units sorted by the inner product of their outgoing weights with powers.
#
# The key of a unit is Σ_j w_j p^j over what it feeds into. As printed, every layer's keys are taken from the weights as
# they stand, so from two hidden layers on they depend on the order that was to be removed. The sequential version goes
# backwards from the output and takes each key after the layer behind it has been sorted.


class NodeSort(Ordering):
    """The sequential version. Units with equal keys are told apart as in the lexicographic order."""

    def __init__(self, pieces: BlockedWeights, base: float) -> None:
        super().__init__(pieces)
        self.base = base

    def _by_signs(self) -> bool:
        for s in reversed(self._open()):
            if self._read_signs(s):
                return True
            sites = self.pieces.sites[s]
            known = [x for x in reversed(sites) if self._signed(x.axis) and self.known(s, x)]
            if not known or ("keys", s, -1) in self.used:
                continue
            self.used.add(("keys", s, -1))  # one key per strand, as in the thesis
            rows = self._ordered_rows(known[0])
            key, size = (inner_product(x, self.base).unsqueeze(-1) for x in (rows, rows.abs()))
            if self._update(s, refine(self.ranks[s], value_codes(key, known[0].block.noise, size))):
                return True
        return super()._by_signs()

    def _ordered_rows(self, site: BlockSlot) -> Tensor:
        chunks = [rows.cpu() for rows in self._chunks(site, self._alive(site, own=True), None)]
        return torch.cat(chunks, -1)


def inner_product(rows: Tensor, base: float) -> Float[Tensor, "*copies n"]:
    """Σ_j w_j p^(j−m+1): the thesis's key divided by its largest power, so that no width and no base overflows."""
    m = rows.shape[-1]
    powers = np.exp2(np.log2(base) * (np.arange(m) - (m - 1)))
    # a plain sum along rows rounds each row in the same way, wherever it stands
    return torch.from_numpy((rows.to(torch.float64).contiguous().numpy() * powers).sum(-1))


def printed_permutations(pieces: BlockedWeights, base: float) -> dict[int, Int[Tensor, "*copies n"]]:
    """The order as printed: keys of all layers from the weights as they stand, with powers that may overflow."""
    found = {}
    for s, strand in enumerate(pieces.wire_specs):
        if not (strand.permutes and pieces.sites[s]):
            continue
        site = pieces.sites[s][-1]
        rows = site.rows.reshape(*site.rows.shape[: len(site.front)], -1).cpu()
        found[s] = _printed_key(rows, base, strand.name).argsort(dim=-1, stable=True)
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
