"""Heads matched by what they do: a strand of units that each hold a basis of their own.

How well head i of A and head j of B fit must not depend on the bases inside. A matrix inside a head multiplies some
slices X₊ (queries) and divides others, X₋ (keys), so X₊ᵀX₋ does not know of it. The inner product of two such products
is Σ (X₊Y₊ᵀ) ∘ (X₋Y₋ᵀ), a sum over matrices as small as the head. Where a head holds scales instead of a matrix (queries
and keys under rotary positions), the same holds index by index, on the diagonals of the small matrices.

Units inside a head that have an order (queries that share a key) are ordered along with it, each pair of heads by its
own best order. Then every head of B gets its best matrices towards its partner, and the whole is one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.align.matrices import LEAST_GAIN, best_matrix, grams, matrix_move
from intertwine.align.pair import Pair
from intertwine.align.place import Place
from intertwine.shapes import Float
from intertwine.symmetry.element import Element, Move, identity_move

Fit = Float[Tensor, "heads heads"]


@dataclass(frozen=True)
class Family:
    """A strand of heads and the movable strands fibred over it alone, by what they carry."""

    heads: int
    matrices: tuple[int, ...]
    scales: tuple[int, ...]
    orders: tuple[int, ...]


def match_heads(pair: Pair, s: int) -> bool:
    """Bring heads that hold matrices into the best order, with the best insides; whether anything moved."""
    family = _family(pair, s)
    if not family.matrices or not pair.strands[s].permutes:
        return False
    moves = _orders(pair, family)
    if all(torch.equal(m.permutation, _still(pair, t)) for t, m in moves.items() if m.permutation is not None):
        return False  # what is inside has visits of its own
    step = Element(pair.strands, moves, pair.symmetry.signature)
    partner = moves[s].permutation
    moved = [pair.act(step, i) if i in pair.touched[s] else x for i, x in enumerate(pair.b)]
    for t in family.matrices:
        found = best_matrix(pair, t, grams(pair, t, moved))
        moves[t] = matrix_move(pair, t, _at_source(found, partner))
    return pair.step(moves, LEAST_GAIN)


def _still(pair: Pair, t: int) -> Tensor:
    order = identity_move(pair.strands, t).permutation
    assert order is not None
    return order


def _family(pair: Pair, s: int) -> Family:
    over = [t for t in sorted(pair.movable) if pair.strands[t].bases == (s,)]
    strands = pair.strands
    return Family(
        s,
        tuple(t for t in over if strands[t].matrix),
        tuple(t for t in over if strands[t].scales == 1 and not strands[t].permutes and _two_sided(pair, t)),
        tuple(t for t in over if strands[t].permutes),
    )


def _two_sided(pair: Pair, t: int) -> bool:
    return all(abs(place.leaf.powers[0]) == 1 for place in pair.places[t])


def _at_source(found: Tensor, partner: Tensor | None) -> Tensor:
    """What each head of A asks of its partner, told by the partner's own number."""
    assert partner is not None
    told = torch.empty_like(found)
    told[partner] = found
    return told


def _orders(pair: Pair, family: Family) -> dict[int, Move]:
    """The best order of heads, and of what has an order inside them."""
    n = pair.strands[family.heads].size
    total = torch.zeros(n, n, dtype=torch.float64)
    inside = {u: torch.zeros(n, n, k, k, dtype=torch.float64) for u in family.orders for k in (pair.strands[u].size,)}
    for t in (*family.matrices, *family.scales):
        plain, split = _invariant_fit(pair, family, t)
        total += plain
        for u, fit in split.items():
            inside[u] += fit
    for u, fit in _plain_fits(pair, family):
        if u is None:
            total += fit
        else:
            inside[u] += fit
    orders = {u: _best_orders(fit) for u, fit in inside.items()}
    total += sum((value for _, value in orders.values()), torch.zeros(()))
    partner = torch.from_numpy(linear_sum_assignment(total.numpy(), maximize=True)[1])
    moves = {family.heads: replace(identity_move(pair.strands, family.heads), permutation=partner)}
    for u, (order, _) in orders.items():
        own = order[torch.arange(n), partner]
        moves[u] = replace(identity_move(pair.strands, u), permutation=_at_source(own, partner))
    return moves


def _best_orders(fit: Float[Tensor, "heads heads k k"]) -> tuple[Tensor, Fit]:
    """For every two heads: the best order of the units inside, and how well it fits."""
    values = fit.numpy()
    n, k = values.shape[0], values.shape[-1]
    orders, best = np.empty((n, n, k), dtype=np.int64), np.empty((n, n))
    for i, j in np.ndindex(n, n):
        orders[i, j] = linear_sum_assignment(values[i, j], maximize=True)[1]
        best[i, j] = values[i, j, np.arange(k), orders[i, j]].sum()
    return torch.from_numpy(orders), torch.from_numpy(best)


# -- fits --------------------------------------------------------------------------------------------------------------


def _invariant_fit(pair: Pair, family: Family, t: int) -> tuple[Fit, Mapping[int, Tensor]]:
    """How well heads fit through one inner strand: alone, and per unit of an ordered strand that shares its blocks.

    Products of weights are brought back to the size of weights, so that they can be added to other fits.
    """
    n, diagonal = pair.strands[family.heads].size, t in family.scales
    whole: list[Tensor | float] = [0.0, 0.0]
    split: list[dict[int, Tensor]] = [{}, {}]
    for place in pair.places[t]:
        side = 0 if place.leaf.powers[0] > 0 else 1
        u = _order_beside(pair, family, place)
        x, y = (_slices(pair, blocks[place.block], place, u) for blocks in (pair.a, pair.b))
        products = torch.einsum("igae,jhae->ijgha" if diagonal else "igae,jhbe->ijghab", x, y).cpu()
        if u is None:
            whole[side] = whole[side] + products
        else:
            split[side][u] = split[side].get(u, torch.zeros(())) + products
    size = _weight(pair, t, diagonal)
    plain = _inner(whole[0], whole[1], n)[..., 0, 0]
    fits: dict[int, Tensor] = {}
    for u in {*split[0], *split[1]}:
        parts = [(split[0].get(u, 0.0), whole[1]), (whole[0], split[1].get(u, 0.0)), (split[0].get(u), split[1].get(u))]
        found = [_inner(p, q, n) for p, q in parts if isinstance(p, Tensor) and isinstance(q, Tensor)]
        fits[u] = size * sum(found, torch.zeros(()))
    return size * plain, {u: fit for u, fit in fits.items() if fit.ndim}


def _inner(p: Tensor | float, q: Tensor | float, n: int) -> Float[Tensor, "heads heads g h"]:
    """Σ P ∘ Q over the small matrices; zero where a side is missing."""
    if not (isinstance(p, Tensor) and isinstance(q, Tensor)):
        return torch.zeros(n, n, 1, 1, dtype=torch.float64)
    return (p * q).flatten(4).sum(-1)


def _weight(pair: Pair, t: int, diagonal: bool) -> float:
    """Squared length of a strand's slices over that of their products."""
    found = grams(pair, t)
    own = torch.stack([found.a, found.b])  # A or B, side, copies, n, n
    lengths = own.diagonal(dim1=-2, dim2=-1)
    here, there = ((lengths if diagonal else own).prod(1).flatten(1).sum(-1)).tolist()
    return float(lengths.sum()) / 2 / (here * there) ** 0.5 if here * there > 0 else 0.0


def _plain_fits(pair: Pair, family: Family) -> Iterator[tuple[int | None, Tensor]]:
    """Inner products of whole heads, or of their units, in blocks that no matrix or scale inside them enters."""
    entered = {place.block for t in (*family.matrices, *family.scales) for place in pair.places[t]}
    for place in pair.places[family.heads]:
        if place.block not in entered and not _order_beside(pair, family, place):
            x, y = pair.rows_of_a(place).double(), pair.rows_of_b(place).double()
            yield None, torch.einsum("xie,xje->ij", x, y).cpu()
    for u in family.orders:
        for place in pair.places[u]:
            if place.block not in entered:
                x, y = pair.rows_of_a(place).double(), pair.rows_of_b(place).double()
                yield u, torch.einsum("ige,jhe->ijgh", x, y).cpu()


def _order_beside(pair: Pair, family: Family, place: Place) -> int | None:
    """The ordered strand of the family that stands in the same block."""
    return next((u for u in family.orders if pair.blocks[place.block].places(u)), None)


def _slices(pair: Pair, block: Tensor, place: Place, u: int | None) -> Float[Tensor, "heads units n entries"]:
    """The slices of an inner strand, per head and per unit of an ordered strand beside it; one unit if none is."""
    if u is None:
        return place.rows(block).double().unsqueeze(1)
    beside = pair.blocks[place.block].places(u)[0]
    order = (place.front[0], beside, place.front[1], *(d for d in place.rest if d != beside))
    return block.permute(*order).flatten(3).double() if block.ndim > 3 else block.permute(*order)[..., None].double()
