"""What features do not speak of is settled by the weights, where that lowers their distance.

A unit that is zero on all data fits every other unit equally well, and so does a unit that never varies where
correlations are taken. The order of such units among themselves costs nothing. A strand may also be carried by no
hidden tensor at all (the inner layers of an LSTM, which is one op), and a sign by none of the compared ones (before a
batch norm, or before an even function).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from intertwine.align.assignment import assign
from intertwine.align.choice import Choice, best_order, best_signs, sources
from intertwine.align.fits import Flips
from intertwine.align.pair import Pair
from intertwine.symmetry.element import Move, identity_move

#: How often all wires are looked at: still units of neighbouring wires wait for each other.
ROUNDS = 3


def settle(pair: Pair, choice: Choice, note: Callable[[int], None]) -> None:
    """Settle by weights what a choice by features left open, from where the pair is; `note` is told what moved."""
    still = _still_units(choice)
    for _ in range(ROUNDS):
        moved = [s for s in choice.moving.in_order if _settled(pair, choice, s, still) and [note(s)]]
        if not moved:
            break


def _settled(pair: Pair, choice: Choice, s: int, still: dict[int, tuple[Tensor, Tensor]]) -> bool:
    """Settle one strand; whether anything moved."""
    if not pair.places[s]:
        return False
    if s not in choice.fits and not any(t in choice.fits for t in choice.moving.inside(s)):
        return assign(pair, s, choice.signs)
    moved = False
    if s in still:
        rows, columns = still[s]
        moved |= _reorder(pair, s, rows)
        moved |= _reorder(pair, s, columns[sources(pair.element, s)])
    return (choice.signs and _flip(pair, choice, s)) or moved


def _still_units(choice: Choice) -> dict[int, tuple[Tensor, Tensor]]:
    """Permuting strand → which of its units fit nothing, in A and in B; strands without any are left out."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for s, fits in choice.fits.items():
        silent = torch.stack([fit == 0 for fit in fits.values()]).all(0)
        if s in choice.moving.permuted and bool(silent.all(1).any() | silent.all(0).any()):
            found[s] = silent.all(1), silent.all(0)
    return found


def _reorder(pair: Pair, s: int, units: Tensor) -> bool:
    """Let some units of a strand change places, copy by copy, where that lowers the objective; whether it did."""
    move = identity_move(pair.strands, s)
    assert move.permutation is not None
    order = move.permutation.reshape(-1, pair.strands[s].size).clone()
    fits = [(pair.rows_of_a(p).double() @ pair.rows_of_b(p).double().mT).cpu() for p in pair.places[s]]
    for copy, (fit, chosen) in enumerate(zip(sum(fits[1:], fits[0]), units.reshape(order.shape), strict=True)):
        places = chosen.nonzero().flatten()
        order[copy, places] = places[best_order(fit[places][:, places])]
    step: dict[int, Move] = {s: replace(move, permutation=order.reshape(move.permutation.shape))}
    return pair.step(step)


def _flip(pair: Pair, choice: Choice, s: int) -> bool:
    """Change the signs of a strand that features do not show where that lowers the objective; whether it did."""
    move = identity_move(pair.strands, s)
    shown = {k for flips in choice.fits.get(s, {}) for k, flip in enumerate(flips) if flip % 2}
    if move.sign is None or len(shown) == len(move.sign):
        return False
    fits: dict[Flips, Tensor] = {}
    for place in pair.places[s]:
        flips = tuple(0 if k in shown else int(flip) % 2 for k, flip in enumerate(place.leaf.flips))
        fit = (pair.rows_of_a(place).double() * pair.rows_of_b(place).double()).sum(-1).flatten().cpu()
        fits[flips] = fits[flips] + fit if flips in fits else fit
    sign = best_signs(fits, len(move.sign), (move.sign[0].numel(),))[1].reshape(move.sign.shape)
    return bool((sign < 0).any()) and pair.step({s: replace(move, sign=sign)})
