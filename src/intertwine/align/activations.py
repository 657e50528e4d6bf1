"""Method `activations`: match units by their activations on data, one assignment per wire (Li et al.

2016). Units that activations cannot tell apart are matched by their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from intertwine.align.activation_sites import run_side_by_side
from intertwine.align.matching import (
    FeatureMatching,
    best_signs,
    linear_assignment,
    permutation_step,
    sign_factors,
    source_units,
    unit_count,
)
from intertwine.align.similarity import CrossMoments, Flips, MovableStrands, PairedActivations
from intertwine.align.solver import AlignmentTask, Solution
from intertwine.align.state import AlignmentStep, MatchingState
from intertwine.errors import InputError
from intertwine.symmetry.element import Element, Move, identity_move

# ----------------------------------------------------------------------------------------------------
# What features do not speak of is settled by the weights, where that lowers their distance.
#
# A unit that is zero on all data fits every other unit equally well, and so does a unit that never varies where
# correlations are taken. The order of such units among themselves costs nothing. A strand may also be carried by no
# hidden tensor at all (the inner layers of an LSTM, which is one op), and a sign by none of the compared ones (before a
# batch norm, or before an even function).


#: How often all wires are looked at: still units of neighbouring wires wait for each other.
ROUNDS = 3


def break_ties(pair: MatchingState, choice: FeatureMatching, note: Callable[[int], None]) -> None:
    """Settle by weights what a choice by features left open, from where the pair is; `note` is told what moved."""
    still = _still_units(choice)
    for _ in range(ROUNDS):
        moved = [s for s in choice.moving.in_order if _settled(pair, choice, s, still) and [note(s)]]
        if not moved:
            break


def _settled(pair: MatchingState, choice: FeatureMatching, s: int, still: dict[int, tuple[Tensor, Tensor]]) -> bool:
    """Settle one strand; whether anything moved."""
    if not pair.places[s]:
        return False
    if s not in choice.fits and not any(t in choice.fits for t in choice.moving.inside(s)):
        return permutation_step(pair, s, choice.signs)
    moved = False
    if s in still:
        rows, columns = still[s]
        moved |= _reorder(pair, s, rows)
        moved |= _reorder(pair, s, columns[source_units(pair.element, s)])
    return (choice.signs and _flip(pair, choice, s)) or moved


def _still_units(choice: FeatureMatching) -> dict[int, tuple[Tensor, Tensor]]:
    """Permuting strand → which of its units fit nothing, in A and in B; strands without any are left out."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for s, fits in choice.fits.items():
        silent = torch.stack([fit == 0 for fit in fits.values()]).all(0)
        if s in choice.moving.permuted and bool(silent.all(1).any() | silent.all(0).any()):
            found[s] = silent.all(1), silent.all(0)
    return found


def _reorder(pair: MatchingState, s: int, units: Tensor) -> bool:
    """Let some units of a strand change places, copy by copy, where that lowers the objective; whether it did."""
    move = identity_move(pair.wire_specs, s)
    assert move.permutation is not None
    order = move.permutation.reshape(-1, pair.wire_specs[s].size).clone()
    fits = [(pair.rows_of_a(p).double() @ pair.rows_of_b(p).double().mT).cpu() for p in pair.places[s]]
    for copy, (fit, chosen) in enumerate(zip(sum(fits[1:], fits[0]), units.reshape(order.shape), strict=True)):
        places = chosen.nonzero().flatten()
        order[copy, places] = places[linear_assignment(fit[places][:, places])]
    step: dict[int, Move] = {s: replace(move, permutation=order.reshape(move.permutation.shape))}
    return pair.step(step)


def _flip(pair: MatchingState, choice: FeatureMatching, s: int) -> bool:
    """Change the signs of a strand that features do not show where that lowers the objective; whether it did."""
    move = identity_move(pair.wire_specs, s)
    shown = {k for flips in choice.fits.get(s, {}) for k, flip in enumerate(flips) if flip % 2}
    if move.sign is None or len(shown) == len(move.sign):
        return False
    fits: dict[Flips, Tensor] = {}
    for place in pair.places[s]:
        flips = tuple(0 if k in shown else int(flip) % 2 for k, flip in enumerate(place.axis.flips))
        fit = (pair.rows_of_a(place).double() * pair.rows_of_b(place).double()).sum(-1).flatten().cpu()
        fits[flips] = fits[flips] + fit if flips in fits else fit
    sign = best_signs(fits, len(move.sign), (move.sign[0].numel(),))[1].reshape(move.sign.shape)
    return bool((sign < 0).any()) and pair.step({s: replace(move, sign=sign)})


# ----------------------------------------------------------------------------------------------------
# Solver `activations`: units are matched by what they compute on data, each wire on its own (after Li et al. 2016).
#
# One pass over the data keeps, for every wire, how each unit of A varies with each unit of B. The best order of a wire
# does not depend on the other wires, so one assignment per wire is the optimum of the solver's own cost. The distance of
# the weights, which all solvers log, may rise on the way: it is reported, and decides only what features do not tell
# apart (see `still`).


COSTS = ("correlation", "inner")


@dataclass(frozen=True)
class ActivationOptions:
    """`cost`: "correlation" (Σ 1 − r over matched units; blind to means and scales) or "inner" (Σ ‖H_A − P·H_B‖²).

    `at`: "post" (after nonlinearities) or "pre"; see `carriers`. `signs`: choose signs where the group has them.
    `scales`: also give matched units the least-squares scale of their features where the group has one.
    """

    cost: str = "correlation"
    at: str = "post"
    signs: bool = True
    scales: bool = False


def solve_activations(task: AlignmentTask, options: ActivationOptions) -> Solution:
    """The element that matches features best, and one step per wire; the pair is left at that element."""
    features = paired_activations(task.pair, options)
    run_side_by_side(task.pair.symmetry, task.a, task.b, task.data, [features])
    return match_features(task.pair, features, options)


def paired_activations(pair: MatchingState, options: ActivationOptions) -> PairedActivations:
    """What has to hear both networks before their features can be matched."""
    if options.cost not in COSTS:
        raise InputError(f"cost={options.cost!r} was asked for. Choose one of {', '.join(map(repr, COSTS))}.")
    moving = MovableStrands(pair.wire_specs, pair.movable)
    return PairedActivations(moving, pair.movable, options.at, options.signs, options.scales)


def match_features(pair: MatchingState, features: PairedActivations, options: ActivationOptions) -> Solution:
    """The same, once the features were heard."""
    cost = _Cost(features, options.cost)
    element = pair.symmetry.identity()
    pair.start_at(element)
    history = [AlignmentStep("activations", 0, "", pair.objective, cost.of(element))]
    for s in features.moving.in_order:
        moves = cost.choice.moves(s, element)
        if options.scales and s in features.products:
            moves |= _scaled(features, s, replace(element, moves={**element.moves, **moves}))
        if not moves:
            continue
        element = replace(element, moves={**element.moves, **moves})
        pair.start_at(element)
        history.append(AlignmentStep("activations", 1, pair.wire_specs[s].name, pair.objective, cost.of(element)))

    def note(s: int) -> None:
        history.append(AlignmentStep("still units", 1, pair.wire_specs[s].name, pair.objective, cost.of(pair.element)))

    break_ties(pair, cost.choice, note)
    return pair.element, history


class _Cost:
    """What the solver lowers: a sum over wires of how far matched units are from equal."""

    def __init__(self, features: PairedActivations, kind: str) -> None:
        inner = kind == "inner"
        fits = features.fits(CrossMoments.inner if inner else CrossMoments.correlation)
        self.total, self.weight = 0.0, 2.0 if inner else 1.0
        for s, kinds in features.products.items():
            if inner:
                self.total += sum(float(x.sum()) for products in kinds.values() for x in products.lengths())
            else:  # wires count by their units, however many kinds of tensors speak for them
                fits[s] = {flips: fit / len(kinds) for flips, fit in fits[s].items()}
                self.total += unit_count(features.moving.wire_specs, s)
        self.choice = FeatureMatching(features.moving, fits, features.signs)

    def of(self, element: Element) -> float:
        """With b moved by an element; scales left out."""
        return self.total - self.weight * sum(self.choice.fit(s, element) for s in self.choice.fits)


def _scaled(features: PairedActivations, s: int, element: Element) -> dict[int, Move]:
    """Least-squares scales ⟨h_A, P·h_B⟩ / ‖P·h_B‖² of matched units, one kind of tensors after the other.

    A kind counts if exactly one scale of the group acts in it and no earlier kind has set that scale. Units that do not
    point the same way keep theirs.
    """
    move = element.moves[s]
    if move.scale is None:
        return {}
    scale = move.scale.clone()
    source, taken = source_units(element, s), set[int]()
    for kind, products in features.products[s].items():
        acting = [k for k, power in enumerate(kind.powers) if power]
        if len(acting) != 1 or acting[0] in taken:
            continue
        k = acting[0]
        taken.add(k)
        inner = products.inner()[torch.arange(len(source)), source] * sign_factors(element, s, kind.flips)[source]
        ratio = _positive_ratio(inner, products.lengths()[1][source])
        flat = scale[k].flatten()
        flat[source] = ratio ** (1 / kind.powers[k])
        scale[k] = flat.reshape(scale[k].shape)
    return {s: replace(move, scale=scale)}


def _positive_ratio(x: Tensor, y: Tensor) -> Tensor:
    """x / y where both are positive; 1 elsewhere."""
    there = (x > 0) & (y > 0)
    return torch.where(there, torch.where(there, x, 1.0) / torch.where(there, y, 1.0), 1.0)
