"""The best permutation of one strand, with its signs where asked, all others held still.

How well unit i of A and unit j of B fit is the inner product of their slices, summed over all places of the strand. A
strand whose units hold units of other strands (heads, groups of channels) is matched together with those: each pair of
its units is judged by the best order inside. Where a strand enters one block twice, this is the slope of the objective
at the present element, and a search over mixtures of orders follows (`frank_wolfe`); `Pair.step` keeps a result only if
the objective itself falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.align.frank_wolfe import frank_wolfe
from intertwine.align.inner_products import SHORT
from intertwine.align.pair import Pair
from intertwine.align.place import Place
from intertwine.shapes import Float
from intertwine.symmetry.element import Move, identity_move

#: Pairs of units whose insides are matched; with more of them the order inside is held still.
MOST_PAIRS = 4096
#: Signs of one index that are tried in every combination.
MOST_SIGNS = 6

Fit = Float[Tensor, "copies n n"]


def assign(pair: Pair, s: int, signs: bool = False) -> bool:
    """Bring a strand into the order (with `signs`: order and signs) that fits best; whether anything moved."""
    inner = _inner_strands(pair, s)
    moved = bool(inner) and _try(pair, _nested_moves(pair, s, inner))
    moves, before = _plain_moves(pair, s, signs), tuple(pair.b)
    if _try(pair, moves):
        moved = True
        order, sign = moves[s].permutation, moves[s].sign
        if order is not None and (sign is None or bool((sign > 0).all())):
            pair.products.reordered(pair.places[s], order.reshape(-1, order.shape[-1]), before)
    return frank_wolfe(pair, s) or moved


def _try(pair: Pair, moves: dict[int, Move]) -> bool:
    return bool(moves) and pair.step(moves)


def _plain_moves(pair: Pair, s: int, signs: bool) -> dict[int, Move]:
    strand = pair.strands[s]
    fit, pattern = _best_signs(pair, s, signs, _fits(pair, s, signs))
    order = (
        torch.stack([_assign(f) for f in fit]) if strand.permutes else torch.arange(strand.size).expand(fit.shape[:2])
    )
    move = identity_move(pair.strands, s)
    if strand.permutes:
        move = replace(move, permutation=order.reshape(_shape(move)))
    if pattern is not None and move.sign is not None:
        chosen = pattern.gather(-1, order.unsqueeze(-1)).squeeze(-1)  # the combination of every unit of A
        at_source = torch.empty_like(chosen).scatter_(-1, order, chosen)
        table = torch.tensor(list(product((1.0, -1.0), repeat=strand.signs)), dtype=torch.float64)
        move = replace(move, sign=table[at_source].movedim(-1, 0).reshape(move.sign.shape))
    still = torch.equal(order, torch.arange(strand.size).expand(order.shape))
    return {} if still and (move.sign is None or bool((move.sign > 0).all())) else {s: move}


def _shape(move: Move) -> tuple[int, ...]:
    assert move.permutation is not None
    return tuple(move.permutation.shape)


def _fits(pair: Pair, s: int, signs: bool) -> dict[tuple[int, ...], Fit]:
    """How well units fit, summed over places; with `signs`, over those with the same exponents of signs."""
    groups: dict[tuple[int, ...], list[Place]] = {}
    for place in pair.places[s]:
        groups.setdefault(tuple(int(f) for f in place.leaf.flips) if signs else (), []).append(place)
    return {flips: pair.products.total(places) for flips, places in groups.items()}


def _products(x: Tensor, y: Tensor) -> Float[Tensor, "copies n m"]:
    """Inner products of all rows; short rows in double precision, which costs nothing there."""
    if x.shape[-1] <= SHORT:
        x, y = x.double(), y.double()
    return torch.matmul(x, y.mT).cpu()


def _best_signs(pair: Pair, s: int, signs: bool, fits: dict[tuple[int, ...], Tensor]) -> tuple[Fit, Tensor | None]:
    """The fit with the best signs for each pair of units, and which combination of signs that is."""
    count = pair.strands[s].signs
    if not (signs and count) or count > MOST_SIGNS:
        return sum(fits.values(), torch.zeros(())), None
    ways = []
    for combination in product((0, 1), repeat=count):
        parity = {flips: sum(f * c for f, c in zip(flips, combination, strict=False)) % 2 for flips in fits}
        ways.append(sum((-fit if parity[flips] else fit for flips, fit in fits.items()), torch.zeros(())))
    best = torch.stack(ways).max(0)
    return best.values, best.indices


def _assign(fit: Float[Tensor, "n n"]) -> Tensor:
    return torch.from_numpy(linear_sum_assignment(fit.numpy(), maximize=True)[1])


# -- units that hold units ---------------------------------------------------------------------------------------------


def _inner_strands(pair: Pair, s: int) -> list[int]:
    """The strands fibred over s alone that permute, where there are few enough pairs to look into all of them."""
    if pair.strands[s].bases or not pair.strands[s].permutes or pair.strands[s].size ** 2 > MOST_PAIRS:
        return []
    return [t for t in sorted(pair.movable) if pair.strands[t].bases == (s,) and pair.strands[t].permutes]


def _nested_moves(pair: Pair, s: int, inner: list[int]) -> dict[int, Move]:
    n = pair.strands[s].size
    total = np.zeros((n, n))
    for place in _without(pair, s, inner):
        total += _products(pair.rows_of_a(place), pair.rows_of_b(place))[0].double().numpy()
    orders = {}
    for t in inner:
        orders[t], value = _orders_inside(pair, t)
        total += value
    partner = linear_sum_assignment(total, maximize=True)[1]
    moves = {s: replace(identity_move(pair.strands, s), permutation=torch.from_numpy(partner))}
    stays = np.array_equal(partner, np.arange(n))
    for t in inner:
        at_source = np.empty((n, pair.strands[t].size), dtype=np.int64)
        at_source[partner] = orders[t][np.arange(n), partner]
        stays = stays and bool((at_source == np.arange(pair.strands[t].size)).all())
        moves[t] = replace(identity_move(pair.strands, t), permutation=torch.from_numpy(at_source))
    return {} if stays else moves


def _without(pair: Pair, s: int, inner: list[int]) -> Iterator[Place]:
    """The places of a strand in blocks that none of its inner strands enters."""
    entered = {place.block for t in inner for place in pair.places[t]}
    return (place for place in pair.places[s] if place.block not in entered)


def _orders_inside(pair: Pair, t: int) -> tuple[np.ndarray, np.ndarray]:
    """For every unit of A and of B that hold units of strand t: the best order inside, and how well it fits."""
    fit: Tensor | float = 0.0
    for place in pair.places[t]:
        x, y = pair.rows_of_a(place), pair.rows_of_b(place)
        outer, n, entries = x.shape
        flat = _products(x.reshape(1, outer * n, entries), y.reshape(1, outer * n, entries))[0]
        fit = fit + flat.reshape(outer, n, outer, n).transpose(1, 2).double()
    assert isinstance(fit, Tensor)
    values = fit.numpy()
    outer, n = values.shape[0], values.shape[-1]
    orders, best = np.empty((outer, outer, n), dtype=np.int64), np.empty((outer, outer))
    for i, j in product(range(outer), repeat=2):
        orders[i, j] = linear_sum_assignment(values[i, j], maximize=True)[1]
        best[i, j] = values[i, j, np.arange(n), orders[i, j]].sum()
    return orders, best
