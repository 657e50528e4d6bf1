"""Method `scale-aware`: permutations, positive scales and signs from weights alone.

Exact scales for networks of one orbit, and a shrinkage estimate of relative unit scales for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from intertwine.align.solver import (
    AlignmentTask,
    NoOptions,
    Solution,
    coordinate_descent,
    coordinate_step,
    permutations_of,
    scales_of,
)
from intertwine.align.state import AlignmentStep, MatchingState
from intertwine.align.weights import ONE_SWEEP, WeightsOptions, solve_weights
from intertwine.argument_types import Float
from intertwine.canonical.scales import ScaleNormaliser
from intertwine.symmetry.blocks import SHORTEST, block_weights, transform_weights
from intertwine.symmetry.element import Element, identity_move

# ----------------------------------------------------------------------------------------------------
# The best positive scales of one strand, all else held still.
#
# With one scale t = ln s per unit, the objective is Σ_p N_p e^{2pt} − 2 C_p e^{pt}. Here p runs over the exponents with
# which the scale enters (+1 where a unit is written, −1 where it is read), N_p is the squared length of B's slices there
# and C_p their inner product with A's. There may be two minima, so Newton's method has several starts, the best is kept.
#
# This is for networks of one orbit, up to noise. Between others the minimum is not what brings them together: where
# matched units are unlike, C is small, and the distance falls most when B's slices shrink, whatever A's lengths are
# (`gauge_gap` is for those). So a scale goes from where it is towards the one with which B's slices have the lengths of
# A's, and only as far as the objective falls.


FINEST = 1e-9  # a change of ln s that is worth a step
LEAST_GAIN = 1e-7  # a fall of the objective, as a share of it, that is worth a step
STEPS = 60  # of Newton's method, each at most one unit of ln s long
LARGEST = 20.0  # of |ln s|: the square of a larger scale, which a running variance needs, leaves single precision
DEAD = SHORTEST**2  # a squared length below this is that of a dead unit
SHORTER = 4  # how often a step that does not lower the objective is halved


@dataclass(frozen=True)
class ScaleTerms:
    """What the objective of one scale per unit is made of, for one exponent."""

    inner: Float[Tensor, "*units"]  # C: ⟨a, b⟩
    length_a: Float[Tensor, "*units"]  # ‖a‖²
    length_b: Float[Tensor, "*units"]  # N: ‖b‖²

    def __add__(self, other: ScaleTerms) -> ScaleTerms:
        return ScaleTerms(self.inner + other.inner, self.length_a + other.length_a, self.length_b + other.length_b)


def scale_step(pair: MatchingState, s: int) -> bool:
    """Give every unit of a strand its best scales, one kind of scale after the other; whether anything moved."""
    moved = [_rescale_one(pair, s, k) for k in range(pair.wire_specs[s].scales)]
    return any(moved)


def _rescale_one(pair: MatchingState, s: int, k: int) -> bool:
    move = identity_move(pair.wire_specs, s)
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


def _terms(pair: MatchingState, s: int, k: int) -> dict[float, ScaleTerms]:
    """Exponent → its terms, for the k-th scale of a strand."""
    found: dict[float, ScaleTerms] = {}
    for place in pair.places[s]:
        power = place.axis.power[k]
        if power:
            terms = ScaleTerms(*_lengths_scales(pair.rows_of_a(place), pair.rows_of_b(place)))
            found[power] = found[power] + terms if power in found else terms
    return found


def _lengths_scales(a: Tensor, b: Tensor) -> list[Float[Tensor, "copies n"]]:
    """⟨a, b⟩, ‖a‖² and ‖b‖² of every row, accumulated in double precision."""
    squares = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square() for x in (a, b)]
    return [x.cpu() for x in ((a * b).sum(-1, dtype=torch.float64), *squares)]


def best_log_scale(terms: Mapping[float, ScaleTerms]) -> Float[Tensor, "*units"]:
    """ln of the best scale between 1 and the one that gives B's slices the lengths of A's; 0 for dead units."""
    alike = {p: replace(x, inner=(x.length_a * x.length_b).sqrt()) for p, x in terms.items()}
    same = _minimise(alike, _starts(alike))
    best = _minimise(terms, [torch.zeros_like(same), same])
    inside = torch.minimum(torch.maximum(best, same.clamp(max=0.0)), same.clamp(min=0.0))
    measured = torch.stack([(x.length_a > DEAD) & (x.length_b > DEAD) for x in terms.values()]).any(0)
    falls = _value(terms, inside) < _value(terms, torch.zeros_like(inside))
    return torch.where(measured & falls, inside, 0.0)


def _starts(terms: Mapping[float, ScaleTerms]) -> list[Tensor]:
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


def _minimise(terms: Mapping[float, ScaleTerms], starts: list[Tensor]) -> Tensor:
    ends = torch.cat([starts[0][None], _newton(terms, torch.stack(starts))])
    return ends.gather(0, _value(terms, ends).argmin(0, keepdim=True))[0]


def _value(terms: Mapping[float, ScaleTerms], t: Float[Tensor, "*points"]) -> Float[Tensor, "*points"]:
    """The part of the objective that depends on the scales."""
    return sum((x.length_b * (2 * p * t).exp() - 2 * x.inner * (p * t).exp() for p, x in terms.items()), 0 * t)


def _newton(terms: Mapping[float, ScaleTerms], t: Float[Tensor, "*points"]) -> Float[Tensor, "*points"]:
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


# ----------------------------------------------------------------------------------------------------
# Scales that the lengths of matched units give evidence for.
#
# Trained networks of two seeds hold unlike units even after matching, and their lengths differ because the units do.
# Scales that even out such differences bring nothing together. A difference of scale shows otherwise: where a unit of B
# is too short as it is written, it is too long, by the same factor, as it is read. So with t₊ the ln of the scale that
# would give B's written slices the lengths of A's, and t₋ the same for the slices that read the unit, E[t₊ t₋] over the
# units of a wire is the mean square of the true ln-scale, and the best linear estimate of that is λ (t₊ + t₋) / 2 with
# λ = E[t₊ t₋] / E[((t₊ + t₋) / 2)²]. Networks trained alike have λ = 0 and stay as they are; for a network that only was
# rescaled λ = 1.
#
# Where a unit has one side only (weights before a BatchNorm) there is nothing to compare with. There the spread of B's
# ln-lengths over a wire is compared with that of A's: rescaling widens or narrows it.


#: Evidence below so many standard errors is none.
ERRORS = 4.0
#: Fewer units than this tell nothing of a spread.
FEWEST = 8


def evidence_scale_step(pair: MatchingState, s: int) -> bool:
    """Give the units of a strand the scales there is evidence for, whether or not that lowers the distance."""
    move = identity_move(pair.wire_specs, s)
    if move.scale is None:
        return False
    logs = torch.stack([_log_scale(pair, s, k) for k in range(pair.wire_specs[s].scales)])
    if not bool(logs.any()):
        return False
    scale = logs.clamp(-LARGEST, LARGEST).exp().reshape(move.scale.shape)
    return pair.step({s: replace(move, scale=scale)}, least=-torch.inf)


def _log_scale(pair: MatchingState, s: int, k: int) -> Float[Tensor, " units"]:
    written, seen = _side(pair, s, k, 1)
    read, heard = _side(pair, s, k, -1)
    if bool(heard.any()) and bool(seen.any()):
        both = seen & heard
        return torch.where(both, shrinkage(written[both], read[both]) * (written + read) / 2, 0.0)
    t, known = (written, seen) if bool(seen.any()) else (read, heard)
    lengths = [_log_lengths(pair, s, k, which) for which in ("a", "b")]
    return torch.where(known, _share_of_one_side(t[known], *(x[known] for x in lengths)) * t, 0.0)


def shrinkage(t: Float[Tensor, " units"], u: Float[Tensor, " units"]) -> float:
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


def _side(pair: MatchingState, s: int, k: int, side: int) -> tuple[Float[Tensor, " units"], Tensor]:
    """ln of the scale that gives B's slices the lengths of A's, over places with exponents of one sign; where known."""
    count = pair.wire_specs[s].size * pair.copies(s)
    above, below = torch.zeros(2, count, dtype=torch.float64)
    for place in pair.places[s]:
        power = place.axis.power[k]
        if power * side > 0:
            a, b = (_lengths(x) for x in (pair.rows_of_a(place), pair.rows_of_b(place)))
            there = (a.square() > DEAD) & (b.square() > DEAD)
            weight = pair.rows_of_a(place).shape[-1] * there
            above += weight * power * (torch.where(there, a, 1.0) / torch.where(there, b, 1.0)).log()
            below += weight * power * power
    return torch.where(below > 0, above / below.clamp(min=1e-300), 0.0), below > 0


def _log_lengths(pair: MatchingState, s: int, k: int, which: str) -> Float[Tensor, " units"]:
    """ln of the length of every unit's slices in one of the networks, over the places the scale enters."""
    rows = pair.rows_of_a if which == "a" else pair.rows_of_b
    squares = sum(_lengths(rows(place)).square() for place in pair.places[s] if place.axis.power[k])
    return torch.as_tensor(squares).clamp(min=DEAD).log() / 2


def _lengths(rows: Float[Tensor, "copies n entries"]) -> Float[Tensor, " units"]:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).flatten().cpu()


# ----------------------------------------------------------------------------------------------------
# Solver `scale-aware`: permutations, positive scales and signs together, without data.
#
# Networks of one orbit, up to noise, are brought together exactly: from canonical forms, and from paired units. For
# others, units are matched as they are (`weights`), and once more with both networks in their normal form of scales,
# where scales cannot mislead. Then scales are given where lengths show that they differ (`gauge_gap`), and orders and
# signs are improved again. The nearest of these and the result of `weights` is kept, so the result is never farther
# than that of `weights`.
#
# Scales are not chosen to lower the distance. It falls most when units of B that fit nothing shrink, and deep networks
# aligned that way had higher barriers than without any scales.


#: A sweep that lowers the objective by less than this share of it is the last.
FINE = 1e-5
#: Squared distances below this share of the squared length are taken for rounding.
ROUNDING = 1e-12
#: Networks whose squared distance is below this share of their squared length are of one orbit, up to noise.
NEAR = 0.05
ROUNDS = 2  # of order and scale, on one wire or on all of them


def solve_scale_aware(task: AlignmentTask, _options: NoOptions) -> Solution:
    """The best element found, and every step on the objective; the pair is left at that element."""
    pair = task.pair
    generator = torch.Generator().manual_seed(task.seed)
    steps = _one_orbit(task, generator)
    if steps:
        return pair.element, steps
    plain, history = solve_weights(task, WeightsOptions())
    best = pair.objective, plain
    ways: dict[str, Callable[[], Element]] = {"weights": lambda: plain}
    if not task.problem.matrices:
        ways["normal scales"] = lambda: _matched_in_normal_form(task)
    for name, make in ways.items():
        element = make()
        for _ in range(ROUNDS):
            pair.start_at(permutations_of(element, "sign", "matrix"))
            for s in sorted(pair.movable) * 2:  # twice: what one wire shows depends on the scales of those beside it
                evidence_scale_step(pair, s)
            history += coordinate_descent(pair, _order, name, generator, task.sweeps, FINE)
            element = pair.element
            if pair.objective < best[0] and _stays_finite(task, element):
                best = pair.objective, element
    pair.start_at(best[1])
    return best[1], [*history, AlignmentStep("the best of these", 0, "", pair.objective)]


def _one_orbit(task: AlignmentTask, generator: torch.Generator) -> list[AlignmentStep]:
    """For networks of one orbit, up to noise: the steps to the element between them, where the pair stays."""
    problem, pair = task.problem, task.pair
    equal = pair.unmoved + ROUNDING * pair.size
    ways: dict[str, Callable[[], Element]] = {
        "canonical": lambda: problem.between_forms,
        "paired": lambda: problem.paired,
    }
    if problem.matrices:  # there are no normal forms to start from
        ways = {"embeddings": lambda: problem.from_embeddings(signs=True)}
    for name, make in ways.items():
        whole = make().only(*problem.wires)
        for element in (permutations_of(whole, "matrix"), whole):
            pair.start_at(element)
            if pair.objective <= equal:
                return [AlignmentStep(name, 0, "", pair.objective)]
        steps = coordinate_descent(pair, _visit, name, generator, task.sweeps, ONE_SWEEP)
        if pair.objective <= pair.unmoved + NEAR * pair.size:
            steps += coordinate_descent(pair, _visit, name, generator, task.sweeps, FINE)
            if _stays_finite(task, pair.element):
                return steps
    return []


def _order(pair: MatchingState, s: int) -> bool:
    """Order and signs of one wire, or its matrix."""
    return coordinate_step(pair, s, signs=True)


def _stays_finite(task: AlignmentTask, element: Element) -> bool:
    """Whether b moved by an element is made of finite numbers, batch statistics included, which the pair does not hold.

    A scale enters a running variance squared, so a nearly dead unit can take it out of its precision.
    """
    after = transform_weights(task.problem.symmetry, element, task.problem.b)
    return all(torch.equal(after[name].isfinite(), x.isfinite()) for name, x in task.problem.b.items())


def _visit(pair: MatchingState, s: int) -> bool:
    """Order and signs, then scales, until the order stays; or the matrix."""
    moved_at_all = False
    for _ in range(ROUNDS):
        ordered = coordinate_step(pair, s, signs=True)
        scaled = scale_step(pair, s)
        moved_at_all |= ordered or scaled
        if not scaled:
            break
    return moved_at_all


def _matched_in_normal_form(task: AlignmentTask) -> Element:
    """Orders and signs found with all scales normalised."""
    problem, pair = task.problem, task.pair
    cuts = [block_weights(pair.symmetry, weights, copy=True) for weights in (pair.weights_a, pair.weights_b)]
    here, there = (scales_of(pair, ScaleNormaliser(cut).run()).only(*problem.wires) for cut in cuts)
    normal = MatchingState(
        pair.symmetry,
        transform_weights(pair.symmetry, here, pair.weights_a),
        transform_weights(pair.symmetry, there, pair.weights_b),
        pair.movable,
    )
    generator = torch.Generator().manual_seed(task.seed)
    found: tuple[float, Element] | None = None
    for name, element in problem.starts(task.starts, task.seed, signs=True):
        normal.start_at(permutations_of(element, "sign"))
        coordinate_descent(normal, _order, name, generator, task.sweeps, ONE_SWEEP)
        if found is None or normal.objective < found[0]:
            found = normal.objective, normal.element
        if found[0] <= normal.unmoved + ROUNDING * normal.size:
            break
    assert found is not None
    return found[1]
