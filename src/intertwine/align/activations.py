"""Method `activations`: match units by their activations on data, one assignment per wire (Li et al. 2016). Units that
activations cannot tell apart are matched by their weights.

One pass over the data collects, for every wire, the products of each unit of A with each unit of B. The best order of a
wire does not depend on the other wires, so one assignment per wire is the optimum of the method's cost.
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
from intertwine.align.similarity import CrossMoments, Flips, PairedActivations
from intertwine.align.solver import AlignmentTask, Solution
from intertwine.align.state import AlignmentStep, MatchingState
from intertwine.errors import InputError, unknown_name
from intertwine.symmetry.element import Element, Move

#: How often all wires are visited to break ties: ambiguous units of neighbouring wires depend on each other.
ROUNDS = 3
COSTS = ("correlation", "inner")


@dataclass(frozen=True)
class ActivationOptions:
    """`cost`: "correlation" (Σ 1 − r over matched units; ignores means and scales) or "inner" (Σ ‖H_A − P·H_B‖²).

    `at`: "post" (after nonlinearities) or "pre"; see `activation_sites`. `signs`: choose signs where the group has
    them. `scales`: also give matched units the least-squares scale of their features where the group has one.
    """

    cost: str = "correlation"
    at: str = "post"
    signs: bool = True
    scales: bool = False


def solve_activations(task: AlignmentTask, options: ActivationOptions) -> Solution:
    """The element that matches features best, and one step per wire; the matching state ends at that element."""
    features = paired_activations(task.state, options)
    run_side_by_side(task.state.symmetry, task.a, task.b, task.data, [features])
    return match_features(task.state, features, options)


def paired_activations(state: MatchingState, options: ActivationOptions) -> PairedActivations:
    """The observer that collects activations for `match_features`."""
    if options.cost not in COSTS:
        raise InputError(unknown_name("cost", options.cost, COSTS))
    return PairedActivations(state.wires, state.movable, options.at, options.signs, options.scales)


def match_features(state: MatchingState, features: PairedActivations, options: ActivationOptions) -> Solution:
    """The element that matches the collected features best, and one step per wire."""
    cost = _Cost(features, options.cost)
    element = state.symmetry.identity()
    state.start_at(element)
    history = [AlignmentStep("activations", 0, "", state.objective, cost.of(element))]
    for w in features.wires.in_order:
        moves = cost.matching.moves(w, element)
        if options.scales and w in features.products:
            moves |= _scaled(features, w, replace(element, moves={**element.moves, **moves}))
        if not moves:
            continue
        element = replace(element, moves={**element.moves, **moves})
        state.start_at(element)
        history.append(AlignmentStep("activations", 1, state.wire_specs[w].name, state.objective, cost.of(element)))

    def on_move(w: int) -> None:
        name = state.wire_specs[w].name
        history.append(AlignmentStep("ambiguous units", 1, name, state.objective, cost.of(state.element)))

    break_ties(state, cost.matching, on_move)
    return state.element, history


class _Cost:
    """The quantity minimised: a sum over wires of the distance between matched units."""

    def __init__(self, features: PairedActivations, kind: str) -> None:
        inner = kind == "inner"
        similarities = features.similarities(CrossMoments.inner if inner else CrossMoments.correlation)
        self.total, self.weight = 0.0, 2.0 if inner else 1.0
        for w, kinds in features.products.items():
            if inner:
                self.total += sum(float(x.sum()) for products in kinds.values() for x in products.lengths())
            else:  # wires count by their units, however many kinds of tensors they have
                similarities[w] = {flips: matrix / len(kinds) for flips, matrix in similarities[w].items()}
                self.total += unit_count(features.wires.wire_specs, w)
        self.matching = FeatureMatching(features.wires, similarities, features.signs)

    def of(self, element: Element) -> float:
        """The cost with b moved by an element; scales are ignored."""
        return self.total - self.weight * sum(self.matching.total(w, element) for w in self.matching.similarities)


def _scaled(features: PairedActivations, w: int, element: Element) -> dict[int, Move]:
    """Least-squares scales ⟨h_A, P·h_B⟩ / ‖P·h_B‖² of matched units, one kind of tensors after the other.

    A kind counts if exactly one scale of the group acts in it and no earlier kind has set that scale. Units without a
    positive inner product keep their scale.
    """
    move = element.moves[w]
    if move.scale is None:
        return {}
    scale = move.scale.clone()
    source, done = source_units(element, w), set[int]()
    for kind, products in features.products[w].items():
        acting = [k for k, power in enumerate(kind.powers) if power]
        if len(acting) != 1 or acting[0] in done:
            continue
        k = acting[0]
        done.add(k)
        inner = products.inner()[torch.arange(len(source)), source] * sign_factors(element, w, kind.flips)[source]
        length = products.lengths()[1][source]
        positive = (inner > 0) & (length > 0)
        ratio = torch.where(positive, torch.where(positive, inner, 1.0) / torch.where(positive, length, 1.0), 1.0)
        flat = scale[k].flatten()
        flat[source] = ratio ** (1 / kind.powers[k])
        scale[k] = flat.reshape(scale[k].shape)
    return {w: replace(move, scale=scale)}


# -- Tie-breaking --


def break_ties(state: MatchingState, matching: FeatureMatching, on_move: Callable[[int], None]) -> None:
    """Match units that activations cannot tell apart by their weights, where that lowers the distance.

    A unit that is zero on all data is equally similar to every unit, and so is a constant unit under correlations. A
    wire may also have no activation site (the inner layers of an LSTM, which is one op), and a sign may appear in no
    compared tensor (before a batch norm, or before an even function). `on_move` is called with every wire that moved.
    """
    ambiguous: dict[int, tuple[Tensor, Tensor]] = {}  # permuting wire → its ambiguous units in A and in B
    for w, matrices in matching.similarities.items():
        zero = torch.stack([matrix == 0 for matrix in matrices.values()]).all(0)
        if w in matching.wires.permuted and bool(zero.all(1).any() | zero.all(0).any()):
            ambiguous[w] = zero.all(1), zero.all(0)
    for _ in range(ROUNDS):
        moved = False
        for w in matching.wires.in_order:
            if state.slots[w] and _break_ties_of(state, matching, w, ambiguous.get(w)):
                moved = True
                on_move(w)
        if not moved:
            break


def _break_ties_of(
    state: MatchingState, matching: FeatureMatching, w: int, ambiguous: tuple[Tensor, Tensor] | None
) -> bool:
    """Break the ties of one wire; whether anything moved."""
    if w not in matching.similarities and not any(t in matching.similarities for t in matching.wires.nested(w)):
        return permutation_step(state, w, matching.signs)
    moved = False
    if ambiguous is not None:
        rows, columns = ambiguous
        moved |= _reorder(state, w, rows)
        moved |= _reorder(state, w, columns[source_units(state.element, w)])
    return (matching.signs and _flip(state, matching, w)) or moved


def _reorder(state: MatchingState, w: int, units: Tensor) -> bool:
    """Reorder some units of a wire among themselves, copy by copy, if that lowers the objective; whether it did."""
    n = state.wire_specs[w].size
    order = torch.arange(n).repeat(state.copies(w), 1)
    products = [(state.rows_of_a(x).double() @ state.rows_of_b(x).double().mT).cpu() for x in state.slots[w]]
    for copy, (matrix, chosen) in enumerate(zip(sum(products[1:], products[0]), units.reshape(-1, n), strict=True)):
        where = chosen.nonzero().flatten()
        order[copy, where] = where[linear_assignment(matrix[where][:, where])]
    return state.step({w: state.move(w, permutation=order)})


def _flip(state: MatchingState, matching: FeatureMatching, w: int) -> bool:
    """Change the signs of a wire that features do not determine if that lowers the objective; whether it did."""
    count = state.wire_specs[w].signs
    known = {k for flips in matching.similarities.get(w, {}) for k, flip in enumerate(flips) if flip % 2}
    if len(known) == count:
        return False
    products: dict[Flips, Tensor] = {}
    for slot in state.slots[w]:
        flips = tuple(0 if k in known else int(flip) % 2 for k, flip in enumerate(slot.axis.flips))
        inner = (state.rows_of_a(slot).double() * state.rows_of_b(slot).double()).sum(-1).flatten().cpu()
        products[flips] = products[flips] + inner if flips in products else inner
    sign = best_signs(products, count, (state.copies(w) * state.wire_specs[w].size,))[1]
    return bool((sign < 0).any()) and state.step({w: state.move(w, sign=sign)})
