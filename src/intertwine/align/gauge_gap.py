"""Scales that the lengths of matched units give evidence for.

Trained networks of two seeds hold unlike units even after matching, and their lengths differ because the units do.
Scales that even out such differences bring nothing together. A difference of scale shows otherwise: where a unit of B
is too short as it is written, it is too long, by the same factor, as it is read. So with t₊ the ln of the scale that
would give B's written slices the lengths of A's, and t₋ the same for the slices that read the unit, E[t₊ t₋] over the
units of a wire is the mean square of the true ln-scale, and the best linear estimate of that is λ (t₊ + t₋) / 2 with
λ = E[t₊ t₋] / E[((t₊ + t₋) / 2)²]. Networks trained alike have λ = 0 and stay as they are; for a network that only was
rescaled λ = 1.

Where a unit has one side only (weights before a BatchNorm) there is nothing to compare with. There the spread of B's
ln-lengths over a wire is compared with that of A's: rescaling widens or narrows it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from intertwine.align.pair import Pair
from intertwine.align.scales import DEAD, LARGEST
from intertwine.shapes import Float
from intertwine.symmetry.element import identity_move

#: Evidence below so many standard errors is none.
ERRORS = 4.0
#: Fewer units than this tell nothing of a spread.
FEWEST = 8


def close_gap(pair: Pair, s: int) -> bool:
    """Give the units of a strand the scales there is evidence for, whether or not that lowers the distance."""
    move = identity_move(pair.strands, s)
    if move.scale is None:
        return False
    logs = torch.stack([_log_scale(pair, s, k) for k in range(pair.strands[s].scales)])
    if not bool(logs.any()):
        return False
    scale = logs.clamp(-LARGEST, LARGEST).exp().reshape(move.scale.shape)
    return pair.step({s: replace(move, scale=scale)}, least=-torch.inf)


def _log_scale(pair: Pair, s: int, k: int) -> Float[Tensor, " units"]:
    written, seen = _side(pair, s, k, 1)
    read, heard = _side(pair, s, k, -1)
    if bool(heard.any()) and bool(seen.any()):
        both = seen & heard
        return torch.where(both, estimate(written[both], read[both]) * (written + read) / 2, 0.0)
    t, known = (written, seen) if bool(seen.any()) else (read, heard)
    lengths = [_log_lengths(pair, s, k, which) for which in ("a", "b")]
    return torch.where(known, _share_of_one_side(t[known], *(x[known] for x in lengths)) * t, 0.0)


def estimate(t: Float[Tensor, " units"], u: Float[Tensor, " units"]) -> float:
    """λ, between 0 and 1; 0 where the evidence could be chance."""
    if len(t) < FEWEST:
        return float(len(t) > 0 and torch.allclose(t, u, rtol=1e-3, atol=1e-6))
    together = float((t * u).mean())
    chance = float((t.square().mean() * u.square().mean() / len(t)).sqrt())
    alone = float(((t + u) / 2).square().mean())
    return min(together / alone, 1.0) if together > ERRORS * chance and alone > 0 else 0.0


def _share_of_one_side(t: Float[Tensor, " units"], a: Float[Tensor, " units"], b: Float[Tensor, " units"]) -> float:
    """How much of t is a difference of scale, by the spreads of ln-lengths; 0 where they may be the same."""
    if len(t) < FEWEST:
        return 0.0
    spreads = [_spread(x) for x in (a, b, t)]
    if min(spreads[2], max(spreads[:2])) <= 0:
        return 0.0
    narrow, wide = sorted(spreads[:2])
    sure = narrow <= 0 or torch.tensor(wide / narrow).log() > ERRORS / (len(t) ** 0.5)
    return min((wide**2 - narrow**2) / spreads[2] ** 2, 1.0) if bool(sure) else 0.0


def _spread(x: Float[Tensor, " units"]) -> float:
    """Half of what lies between the outer sixths: a standard deviation that single units do not sway."""
    low, high = torch.quantile(x, torch.tensor([0.159, 0.841], dtype=x.dtype))
    return float(high - low) / 2


def _side(pair: Pair, s: int, k: int, side: int) -> tuple[Float[Tensor, " units"], Tensor]:
    """ln of the scale that gives B's slices the lengths of A's, over places with exponents of one sign; where known."""
    count = pair.strands[s].size * pair.copies(s)
    above, below = torch.zeros(2, count, dtype=torch.float64)
    for place in pair.places[s]:
        power = place.leaf.power[k]
        if power * side > 0:
            a, b = (_lengths(x) for x in (pair.rows_of_a(place), pair.rows_of_b(place)))
            there = (a.square() > DEAD) & (b.square() > DEAD)
            weight = pair.rows_of_a(place).shape[-1] * there
            above += weight * power * (torch.where(there, a, 1.0) / torch.where(there, b, 1.0)).log()
            below += weight * power * power
    return torch.where(below > 0, above / below.clamp(min=1e-300), 0.0), below > 0


def _log_lengths(pair: Pair, s: int, k: int, which: str) -> Float[Tensor, " units"]:
    """ln of the length of every unit's slices in one of the networks, over the places the scale enters."""
    rows = pair.rows_of_a if which == "a" else pair.rows_of_b
    squares = sum(_lengths(rows(place)).square() for place in pair.places[s] if place.leaf.power[k])
    return torch.as_tensor(squares).clamp(min=DEAD).log() / 2


def _lengths(rows: Float[Tensor, "copies n entries"]) -> Float[Tensor, " units"]:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).flatten().cpu()
