"""The best positive scales of one strand, all else held still.

With one scale t = ln s per unit, the objective is Σ_p N_p e^{2pt} − 2 C_p e^{pt}. Here p runs over the exponents with
which the scale enters (+1 where a unit is written, −1 where it is read), N_p is the squared length of B's slices there
and C_p their inner product with A's. There may be two minima, so Newton's method has several starts, the best is kept.

This is for networks of one orbit, up to noise. Between others the minimum is not what brings them together: where
matched units are unlike, C is small, and the distance falls most when B's slices shrink, whatever A's lengths are
(`gauge_gap` is for those). So a scale goes from where it is towards the one with which B's slices have the lengths of
A's, and only as far as the objective falls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from intertwine.align.pair import Pair
from intertwine.canonical.blocks import SHORTEST
from intertwine.shapes import Float
from intertwine.symmetry.element import identity_move

FINEST = 1e-9  # a change of ln s that is worth a step
LEAST_GAIN = 1e-7  # a fall of the objective, as a share of it, that is worth a step
STEPS = 60  # of Newton's method, each at most one unit of ln s long
LARGEST = 20.0  # of |ln s|: the square of a larger scale, which a running variance needs, leaves single precision
DEAD = SHORTEST**2  # a squared length below this is that of a dead unit
SHORTER = 4  # how often a step that does not lower the objective is halved


@dataclass(frozen=True)
class Terms:
    """What the objective of one scale per unit is made of, for one exponent."""

    inner: Float[Tensor, "*units"]  # C: ⟨a, b⟩
    length_a: Float[Tensor, "*units"]  # ‖a‖²
    length_b: Float[Tensor, "*units"]  # N: ‖b‖²

    def __add__(self, other: Terms) -> Terms:
        return Terms(self.inner + other.inner, self.length_a + other.length_a, self.length_b + other.length_b)


def rescale(pair: Pair, s: int) -> bool:
    """Give every unit of a strand its best scales, one kind of scale after the other; whether anything moved."""
    moved = [_rescale_one(pair, s, k) for k in range(pair.strands[s].scales)]
    return any(moved)


def _rescale_one(pair: Pair, s: int, k: int) -> bool:
    move = identity_move(pair.strands, s)
    assert move.scale is not None
    terms = _terms(pair, s, k)
    if not terms:
        return False
    step = best_log_scale(terms).reshape(move.scale.shape[1:])
    for _ in range(SHORTER if s in pair.around[s] else 1):
        if not bool((step.abs() > FINEST).any()):
            return False
        scale = move.scale.clone()
        scale[k] = step.exp()
        if pair.step({s: replace(move, scale=scale)}, LEAST_GAIN):
            return True
        step = step / 2  # a strand that enters one block twice is judged by its slope only
    return False


def _terms(pair: Pair, s: int, k: int) -> dict[float, Terms]:
    """Exponent → its terms, for the k-th scale of a strand."""
    found: dict[float, Terms] = {}
    for place in pair.places[s]:
        power = place.leaf.power[k]
        if power:
            terms = Terms(*_lengths(pair.rows_of_a(place), pair.rows_of_b(place)))
            found[power] = found[power] + terms if power in found else terms
    return found


def _lengths(a: Tensor, b: Tensor) -> list[Float[Tensor, "copies n"]]:
    """⟨a, b⟩, ‖a‖² and ‖b‖² of every row, accumulated in double precision."""
    squares = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square() for x in (a, b)]
    return [x.cpu() for x in ((a * b).sum(-1, dtype=torch.float64), *squares)]


def best_log_scale(terms: Mapping[float, Terms]) -> Float[Tensor, "*units"]:
    """ln of the best scale between 1 and the one that gives B's slices the lengths of A's; 0 for dead units."""
    alike = {p: replace(x, inner=(x.length_a * x.length_b).sqrt()) for p, x in terms.items()}
    same = _minimise(alike, _starts(alike))
    best = _minimise(terms, [torch.zeros_like(same), same])
    inside = torch.minimum(torch.maximum(best, same.clamp(max=0.0)), same.clamp(min=0.0))
    measured = torch.stack([(x.length_a > DEAD) & (x.length_b > DEAD) for x in terms.values()]).any(0)
    falls = _value(terms, inside) < _value(terms, torch.zeros_like(inside))
    return torch.where(measured & falls, inside, 0.0)


def _starts(terms: Mapping[float, Terms]) -> list[Tensor]:
    """Stay as it is; what each exponent alone would have, by inner products and by lengths; where B is balanced."""
    zero = torch.zeros_like(next(iter(terms.values())).inner)
    starts = [zero]
    for power, t in terms.items():
        starts.append(_log_ratio(t.inner, t.length_b) / power)
        starts.append(_log_ratio(t.length_a, t.length_b) / (2 * power))
    alone = {p: replace(t, inner=zero) for p, t in terms.items()}
    return [*starts, _newton(alone, zero[None])[0]]


def _log_ratio(x: Tensor, y: Tensor) -> Tensor:
    """ln x / y; 0 where either is not positive, or that of a dead unit."""
    there = (x > DEAD) & (y > DEAD)
    return (torch.where(there, x, 1.0) / torch.where(there, y, 1.0)).log()


def _minimise(terms: Mapping[float, Terms], starts: list[Tensor]) -> Tensor:
    ends = torch.cat([starts[0][None], _newton(terms, torch.stack(starts))])
    return ends.gather(0, _value(terms, ends).argmin(0, keepdim=True))[0]


def _value(terms: Mapping[float, Terms], t: Float[Tensor, "*points"]) -> Float[Tensor, "*points"]:
    """The part of the objective that depends on the scales."""
    return sum((x.length_b * (2 * p * t).exp() - 2 * x.inner * (p * t).exp() for p, x in terms.items()), 0 * t)


def _newton(terms: Mapping[float, Terms], t: Float[Tensor, "*points"]) -> Float[Tensor, "*points"]:
    """Stationary points near t. Where the curve bends the wrong way the step follows the slope, with its size held.

    In numpy, all exponents at once: the arrays are short and the steps many, so what counts is the number of calls.
    """
    shape = (-1, *[1] * t.ndim)
    power = np.array(list(terms)).reshape(shape)
    length, inner = (
        np.stack([x.numpy() for x in parts])[:, None]
        for parts in ([x.length_b for x in terms.values()], [x.inner for x in terms.values()])
    )
    found = t.numpy()
    for _ in range(STEPS):
        once = np.exp(power * found)
        long, short = length * once * once, inner * once
        slope = (power * (long - short)).sum(0)
        bend = np.abs((power * power * (2 * long - short)).sum(0))
        step = np.divide(slope, bend, out=np.zeros_like(slope), where=bend != 0).clip(-1.0, 1.0)
        found = (found - step).clip(-LARGEST, LARGEST)
        if not (np.abs(step) > FINEST / 10).any():
            break
    return torch.from_numpy(found)
