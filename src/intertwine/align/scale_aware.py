"""Method `scale-aware`: permutations, positive scales and signs from weights alone. Exact scales for networks of one
orbit, and a shrinkage estimate of relative unit scales for all others.

Networks of one orbit, up to noise, are aligned exactly: from canonical forms, and from paired units. For others, units
are matched as they are (`weights`), and once more with the scales of both networks normalised, where scales cannot
mislead. Then units get scales where there is evidence that they differ, and orders and signs are improved again. The
nearest of these and the result of `weights` is kept, so the result is never farther than that of `weights`.

Scales are not chosen to lower the distance: it falls most when unmatched units of B shrink, and deep networks aligned
that way had higher barriers than without any scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

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
)
from intertwine.align.state import AlignmentStep, MatchingState
from intertwine.align.weights import ONE_SWEEP, WeightsOptions, solve_weights
from intertwine.argument_types import Float
from intertwine.canonical.scales import ScaleNormaliser
from intertwine.symmetry.blocks import SHORTEST, block_weights, transform_weights
from intertwine.symmetry.element import Element

FINEST = 1e-9  # a change of ln s that is worth a step
LEAST_GAIN = 1e-7  # a decrease of the objective, as a share of it, that is worth a step
STEPS = 60  # of Newton's method, each at most one unit of ln s long
LARGEST = 20.0  # of |ln s|: the square of a larger scale, as a running variance needs, overflows single precision
DEAD = SHORTEST**2  # a squared length below this is that of a dead unit
SHORTER = 4  # how often a step that does not lower the objective is halved
#: Evidence below so many standard errors counts as none.
ERRORS = 4.0
#: The fewest units for an estimate of their spread.
FEWEST = 8
#: The last sweep lowers the objective by less than this share of it.
FINE = 1e-5
#: Squared distances below this share of the squared length count as rounding.
ROUNDING = 1e-12
#: Networks whose squared distance is below this share of their squared length are of one orbit, up to noise.
NEAR = 0.05
ROUNDS = 2  # of order and scale, on one wire or on all of them


def solve_scale_aware(task: AlignmentTask, _options: NoOptions) -> Solution:
    """The best element found, and every step on the objective; the matching state ends at that element."""
    state = task.state
    generator = torch.Generator().manual_seed(task.seed)
    steps = _one_orbit(task, generator)
    if steps:
        return state.element, steps
    plain, history = solve_weights(task, WeightsOptions())
    best = state.objective, plain
    ways: dict[str, Callable[[], Element]] = {"weights": lambda: plain}
    if not task.problem.matrices:
        ways["normal scales"] = lambda: _matched_in_normal_form(task)
    for name, make in ways.items():
        element = make()
        for _ in range(ROUNDS):
            state.start_at(permutations_of(element, "sign", "matrix"))
            for w in sorted(state.movable) * 2:  # twice: the evidence on one wire depends on its neighbours' scales
                evidence_scale_step(state, w)
            history += coordinate_descent(state, _order_step, name, generator, task.sweeps, FINE)
            element = state.element
            if state.objective < best[0] and _stays_finite(task, element):
                best = state.objective, element
    state.start_at(best[1])
    return best[1], [*history, AlignmentStep("best start", 0, "", state.objective)]


def _one_orbit(task: AlignmentTask, generator: torch.Generator) -> list[AlignmentStep]:
    """The steps to the element between two networks of one orbit, up to noise, where the state ends; else empty."""
    problem, state = task.problem, task.state
    equal = state.unmoved + ROUNDING * state.size
    ways: dict[str, Callable[[], Element]] = {
        "canonical": lambda: problem.between_forms,
        "paired": lambda: problem.paired,
    }
    if problem.matrices:  # there is no canonical form
        ways = {"embeddings": lambda: problem.from_embeddings(signs=True)}
    for name, make in ways.items():
        whole = make().only(*problem.wires)
        for element in (permutations_of(whole, "matrix"), whole):
            state.start_at(element)
            if state.objective <= equal:
                return [AlignmentStep(name, 0, "", state.objective)]
        steps = coordinate_descent(state, _order_and_scale_step, name, generator, task.sweeps, ONE_SWEEP)
        if state.objective <= state.unmoved + NEAR * state.size:
            steps += coordinate_descent(state, _order_and_scale_step, name, generator, task.sweeps, FINE)
            if _stays_finite(task, state.element):
                return steps
    return []


def _order_step(state: MatchingState, w: int) -> bool:
    """Order and signs of one wire, or its matrix."""
    return coordinate_step(state, w, signs=True)


def _order_and_scale_step(state: MatchingState, w: int) -> bool:
    """Order and signs, then scales, until the order stays; or the matrix."""
    moved = False
    for _ in range(ROUNDS):
        ordered, scaled = _order_step(state, w), scale_step(state, w)
        moved |= ordered or scaled
        if not scaled:
            break
    return moved


def _stays_finite(task: AlignmentTask, element: Element) -> bool:
    """Whether moving b gives no new infinities or NaN, also in batch statistics, which the state does not hold.

    A scale enters a running variance squared, so a nearly dead unit can overflow there.
    """
    after = transform_weights(task.problem.symmetry, element, task.problem.b)
    return all(torch.equal(after[name].isfinite(), x.isfinite()) for name, x in task.problem.b.items())


def _matched_in_normal_form(task: AlignmentTask) -> Element:
    """Orders and signs found with all scales normalised."""
    problem, state = task.problem, task.state
    symmetry, identity = state.symmetry, state.symmetry.identity()

    def normalised(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scales = ScaleNormaliser(block_weights(symmetry, weights, copy=True)).run()
        moves = {i: replace(m, scale=scales.get(i, m.scale)) for i, m in identity.moves.items()}
        return transform_weights(symmetry, replace(identity, moves=moves).only(*problem.wires), weights)

    normal = MatchingState(symmetry, normalised(state.weights_a), normalised(state.weights_b), state.movable)
    generator = torch.Generator().manual_seed(task.seed)
    best: tuple[float, Element] | None = None
    for name, element in problem.starts(task.starts, task.seed, signs=True):
        normal.start_at(permutations_of(element, "sign"))
        coordinate_descent(normal, _order_step, name, generator, task.sweeps, ONE_SWEEP)
        if best is None or normal.objective < best[0]:
            best = normal.objective, normal.element
        if best[0] <= normal.unmoved + ROUNDING * normal.size:
            break
    assert best is not None
    return best[1]


# -- The best scales of one wire, for networks of one orbit --


@dataclass(frozen=True)
class ScaleTerms:
    """The terms of the objective of one scale per unit, for one exponent."""

    inner: Float[Tensor, "*units"]  # C: ⟨a, b⟩
    length_a: Float[Tensor, "*units"]  # ‖a‖²
    length_b: Float[Tensor, "*units"]  # N: ‖b‖²

    def __add__(self, other: ScaleTerms) -> ScaleTerms:
        return ScaleTerms(self.inner + other.inner, self.length_a + other.length_a, self.length_b + other.length_b)


def scale_step(state: MatchingState, w: int) -> bool:
    """Give every unit of a wire its best scales, one kind of scale after the other; whether anything moved.

    With one scale t = ln s per unit, the objective is Σ_p N_p e^{2pt} − 2 C_p e^{pt}. Here p runs over the exponents of
    the scale (+1 where a unit is written, −1 where it is read), N_p is the squared length of B's slices there and C_p
    their inner product with A's. There may be two minima, so Newton's method has several starts.

    This is for networks of one orbit, up to noise. Between others the minimum does not bring them together: where
    matched units differ, C is small, and the distance falls most when B's slices shrink (`evidence_scale_step` is for
    those). So a scale moves towards the one that gives B's slices the lengths of A's, as far as the objective falls.
    """
    moved = [_scale_step(state, w, k) for k in range(state.wire_specs[w].scales)]
    return any(moved)


def _scale_step(state: MatchingState, w: int, k: int) -> bool:
    terms: dict[float, ScaleTerms] = {}
    for slot in state.slots[w]:
        power = slot.axis.power[k]
        if power:
            a, b = state.rows_of_a(slot), state.rows_of_b(slot)
            inner = (a * b).sum(-1, dtype=torch.float64)
            found = ScaleTerms(inner.cpu(), _row_norms(a).square(), _row_norms(b).square())
            terms[power] = terms[power] + found if power in terms else found
    if not terms:
        return False
    step = best_log_scale(terms)
    for _ in range(SHORTER if w in state.neighbours[w] else 1):
        if not bool((step.abs() > FINEST).any()):
            return False
        scale = torch.ones(state.wire_specs[w].scales, *step.shape, dtype=torch.float64)
        scale[k] = step.exp()
        if state.step({w: state.move(w, scale=scale)}, LEAST_GAIN):
            return True
        step = step / 2  # for a wire that enters one block twice, only the gradient is known
    return False


def _row_norms(rows: Float[Tensor, "copies n entries"]) -> Float[Tensor, "copies n"]:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).cpu()


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
    """No scale; the optimum of each exponent alone, by inner products and by lengths; and where B is balanced."""
    zero = torch.zeros_like(next(iter(terms.values())).inner)
    starts = [zero]
    for power, t in terms.items():
        starts.append(_log_ratio(t.inner, t.length_b) / power)
        starts.append(_log_ratio(t.length_a, t.length_b) / (2 * power))
    alone = {p: replace(t, inner=zero) for p, t in terms.items()}
    return [*starts, _newton(alone, zero[None])[0]]


def _log_ratio(x: Tensor, y: Tensor) -> Tensor:
    """ln x / y of squared lengths; 0 where either is not positive, or that of a dead unit."""
    there = (x > DEAD) & (y > DEAD)
    return (torch.where(there, x, 1.0) / torch.where(there, y, 1.0)).log()


def _minimise(terms: Mapping[float, ScaleTerms], starts: list[Tensor]) -> Tensor:
    ends = torch.cat([starts[0][None], _newton(terms, torch.stack(starts))])
    return ends.gather(0, _value(terms, ends).argmin(0, keepdim=True))[0]


def _value(terms: Mapping[float, ScaleTerms], t: Float[Tensor, "*points"]) -> Float[Tensor, "*points"]:
    """The part of the objective that depends on the scales."""
    return sum((x.length_b * (2 * p * t).exp() - 2 * x.inner * (p * t).exp() for p, x in terms.items()), 0 * t)


def _newton(terms: Mapping[float, ScaleTerms], t: Float[Tensor, "*points"]) -> Float[Tensor, "*points"]:
    """Stationary points near t. Where the second derivative is negative, its absolute value is used.

    In numpy, all exponents at once: the arrays are short and the steps many, so the number of calls sets the time.
    """
    power = np.array(list(terms)).reshape(-1, *[1] * t.ndim)
    length = np.stack([x.length_b.numpy() for x in terms.values()])[:, None]
    inner = np.stack([x.inner.numpy() for x in terms.values()])[:, None]
    found = t.numpy()
    for _ in range(STEPS):
        once = np.exp(power * found)
        long, short = length * once * once, inner * once
        slope = (power * (long - short)).sum(0)
        curvature = np.abs((power * power * (2 * long - short)).sum(0))
        step = np.divide(slope, curvature, out=np.zeros_like(slope), where=curvature != 0).clip(-1.0, 1.0)
        found = (found - step).clip(-LARGEST, LARGEST)
        if not (np.abs(step) > FINEST / 10).any():
            break
    return torch.from_numpy(found)


# -- Shrinkage estimates of relative unit scales, for all other networks --


def evidence_scale_step(state: MatchingState, w: int) -> bool:
    """Give the units of a wire the scales there is evidence for, whether or not that lowers the distance.

    Trained networks of two seeds hold different units even after matching, and their lengths differ because the units
    do. Evening out such differences brings nothing together. A difference of scale is visible otherwise: a unit of B
    that is too short where it is written is too long, by the same factor, where it is read. Let t₊ be the ln of the
    scale that gives B's written slices the lengths of A's, and t₋ the same for the slices that read the unit. E[t₊ t₋]
    over the units of a wire is then the mean square of the true ln-scale, whose best linear estimate is λ (t₊ + t₋) / 2
    with λ = E[t₊ t₋] / E[((t₊ + t₋) / 2)²]. Networks trained alike have λ = 0; a rescaled network has λ = 1.

    A unit with one side only (weights before a BatchNorm) has no such comparison. There the spread of B's ln-lengths
    over a wire is compared with that of A's: rescaling widens or narrows it.
    """
    if not state.wire_specs[w].scales:
        return False
    logs = torch.stack([_log_scale(state, w, k) for k in range(state.wire_specs[w].scales)])
    scale = logs.clamp(-LARGEST, LARGEST).exp()
    return bool(logs.any()) and state.step({w: state.move(w, scale=scale)}, least=-torch.inf)


def _log_scale(state: MatchingState, w: int, k: int) -> Float[Tensor, " units"]:
    written, at_written = _side(state, w, k, 1)
    read, at_read = _side(state, w, k, -1)
    if bool(at_read.any()) and bool(at_written.any()):
        both = at_written & at_read
        return torch.where(both, shrinkage(written[both], read[both]) * (written + read) / 2, 0.0)
    t, known = (written, at_written) if bool(at_written.any()) else (read, at_read)
    lengths = [_log_lengths(state, w, k, side) for side in ("a", "b")]
    return torch.where(known, _one_sided_shrinkage(t[known], *(x[known] for x in lengths)) * t, 0.0)


def shrinkage(t: Float[Tensor, " units"], u: Float[Tensor, " units"]) -> float:
    """λ, between 0 and 1; 0 where the evidence could be chance."""
    if len(t) < FEWEST:
        return float(len(t) > 0 and torch.allclose(t, u, rtol=1e-3, atol=1e-6))
    together = float((t * u).mean())
    chance = float((t.square().mean() * u.square().mean() / len(t)).sqrt())
    alone = float(((t + u) / 2).square().mean())
    return min(together / alone, 1.0) if together > ERRORS * chance and alone > 0 else 0.0


def _one_sided_shrinkage(t: Float[Tensor, " units"], a: Float[Tensor, " units"], b: Float[Tensor, " units"]) -> float:
    """How much of t is a difference of scale, by the spreads of ln-lengths; 0 where they may be the same."""
    if len(t) < FEWEST:
        return 0.0
    narrow, wide = sorted((_deviation(a), _deviation(b)))
    own = _deviation(t)
    if min(own, wide) <= 0:
        return 0.0
    sure = narrow <= 0 or np.log(wide / narrow) > ERRORS / len(t) ** 0.5
    return min((wide**2 - narrow**2) / own**2, 1.0) if sure else 0.0


def _deviation(x: Float[Tensor, " units"]) -> float:
    """Half the distance between the outer sixths: a standard deviation that is robust to single units."""
    low, high = torch.quantile(x, torch.tensor([0.159, 0.841], dtype=x.dtype))
    return float(high - low) / 2


def _side(state: MatchingState, w: int, k: int, side: int) -> tuple[Float[Tensor, " units"], Tensor]:
    """ln of the scale that gives B's slices the lengths of A's, over slots with exponents of one sign; where known."""
    above, below = torch.zeros(2, state.wire_specs[w].size * state.copies(w), dtype=torch.float64)
    for slot in state.slots[w]:
        power = slot.axis.power[k]
        if power * side > 0:
            a, b = (_row_norms(x).flatten() for x in (state.rows_of_a(slot), state.rows_of_b(slot)))
            there = (a.square() > DEAD) & (b.square() > DEAD)
            weight = state.rows_of_a(slot).shape[-1] * there
            above += weight * power * (torch.where(there, a, 1.0) / torch.where(there, b, 1.0)).log()
            below += weight * power * power
    return torch.where(below > 0, above / below.clamp(min=1e-300), 0.0), below > 0


def _log_lengths(state: MatchingState, w: int, k: int, side: Literal["a", "b"]) -> Float[Tensor, " units"]:
    """ln of the length of every unit's slices in one of the networks, over the slots that the scale acts on."""
    rows = state.rows_of_a if side == "a" else state.rows_of_b
    squares = sum(_row_norms(rows(slot)).square().flatten() for slot in state.slots[w] if slot.axis.power[k])
    return torch.as_tensor(squares).clamp(min=DEAD).log() / 2
