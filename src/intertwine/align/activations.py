"""Solver `activations`: units are matched by what they compute on data, each wire on its own (after Li et al. 2016).

One pass over the data keeps, for every wire, how each unit of A varies with each unit of B. The best order of a wire
does not depend on the other wires, so one assignment per wire is the optimum of the solver's own cost. The distance of
the weights, which all solvers log, may rise on the way: it is reported, and decides only what features do not tell
apart (see `still`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from intertwine.align.choice import Choice, factors, size, sources
from intertwine.align.descent import Step
from intertwine.align.fits import Features, Moving
from intertwine.align.hidden import watch
from intertwine.align.pair import Pair
from intertwine.align.products import Products
from intertwine.align.still import settle
from intertwine.align.task import Found, Task
from intertwine.errors import InputError
from intertwine.symmetry.element import Element, Move

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


def solve_activations(task: Task, options: ActivationOptions) -> Found:
    """The element that matches features best, and one step per wire; the pair is left at that element."""
    features = listen(task.pair, options)
    watch(task.pair.symmetry, task.a, task.b, task.data, [features])
    return match_features(task.pair, features, options)


def listen(pair: Pair, options: ActivationOptions) -> Features:
    """What has to hear both networks before their features can be matched."""
    if options.cost not in COSTS:
        raise InputError(f"cost={options.cost!r} was asked for. Choose one of {', '.join(map(repr, COSTS))}.")
    moving = Moving(pair.strands, pair.movable)
    return Features(moving, pair.movable, options.at, options.signs, options.scales)


def match_features(pair: Pair, features: Features, options: ActivationOptions) -> Found:
    """The same, once the features were heard."""
    cost = _Cost(features, options.cost)
    element = pair.symmetry.identity()
    pair.start_at(element)
    history = [Step("activations", 0, "", pair.objective, cost.of(element))]
    for s in features.moving.in_order:
        moves = cost.choice.moves(s, element)
        if options.scales and s in features.products:
            moves |= _scaled(features, s, replace(element, moves={**element.moves, **moves}))
        if not moves:
            continue
        element = replace(element, moves={**element.moves, **moves})
        pair.start_at(element)
        history.append(Step("activations", 1, pair.strands[s].name, pair.objective, cost.of(element)))

    def note(s: int) -> None:
        history.append(Step("still units", 1, pair.strands[s].name, pair.objective, cost.of(pair.element)))

    settle(pair, cost.choice, note)
    return pair.element, history


class _Cost:
    """What the solver lowers: a sum over wires of how far matched units are from equal."""

    def __init__(self, features: Features, kind: str) -> None:
        inner = kind == "inner"
        fits = features.fits(Products.inner if inner else Products.correlation)
        self.total, self.weight = 0.0, 2.0 if inner else 1.0
        for s, kinds in features.products.items():
            if inner:
                self.total += sum(float(x.sum()) for products in kinds.values() for x in products.lengths())
            else:  # wires count by their units, however many kinds of tensors speak for them
                fits[s] = {flips: fit / len(kinds) for flips, fit in fits[s].items()}
                self.total += size(features.moving.strands, s)
        self.choice = Choice(features.moving, fits, features.signs)

    def of(self, element: Element) -> float:
        """With b moved by an element; scales left out."""
        return self.total - self.weight * sum(self.choice.fit(s, element) for s in self.choice.fits)


def _scaled(features: Features, s: int, element: Element) -> dict[int, Move]:
    """Least-squares scales ⟨h_A, P·h_B⟩ / ‖P·h_B‖² of matched units, one kind of tensors after the other.

    A kind counts if exactly one scale of the group acts in it and no earlier kind has set that scale. Units that do not
    point the same way keep theirs.
    """
    move = element.moves[s]
    if move.scale is None:
        return {}
    scale = move.scale.clone()
    source, taken = sources(element, s), set[int]()
    for kind, products in features.products[s].items():
        acting = [k for k, power in enumerate(kind.powers) if power]
        if len(acting) != 1 or acting[0] in taken:
            continue
        k = acting[0]
        taken.add(k)
        inner = products.inner()[torch.arange(len(source)), source] * factors(element, s, kind.flips)[source]
        ratio = _positive_ratio(inner, products.lengths()[1][source])
        flat = scale[k].flatten()
        flat[source] = ratio ** (1 / kind.powers[k])
        scale[k] = flat.reshape(scale[k].shape)
    return {s: replace(move, scale=scale)}


def _positive_ratio(x: Tensor, y: Tensor) -> Tensor:
    """x / y where both are positive; 1 elsewhere."""
    there = (x > 0) & (y > 0)
    return torch.where(there, torch.where(there, x, 1.0) / torch.where(there, y, 1.0), 1.0)
