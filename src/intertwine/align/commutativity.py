"""Solver `commutativity`: the order in which differences of weights and differences of features cancel (004-L16).

It lowers Σ ‖(W_A − g·W_B)(H_A − g·H_B)‖² over linear and convolution layers, at a bounded number of positions of the
data. It begins at what `weights` and `activations` find and at the identity, the best `starts` of them, so it is never
worse than they are by this cost. Each wire in turn is given the order that fits best by the slope of the cost; if that
does not lower the cost itself, the cycles of that order are tried one by one, then the exchanges of two units that
promise most. A visit takes a few products of each layer of the wire with its samples. Signs stay those of the start:
norms have a part in them that this cost does not see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from intertwine.align.activations import ActivationOptions, listen, match_features
from intertwine.align.choice import Choice, size
from intertwine.align.commuting import Commuting
from intertwine.align.descent import Step
from intertwine.align.fits import Moving
from intertwine.align.hidden import watch
from intertwine.align.layers import Layers
from intertwine.align.task import Found, Task
from intertwine.align.weights import WeightsOptions, solve_weights
from intertwine.errors import InputError
from intertwine.symmetry.element import Element, Move, identity_move


@dataclass(frozen=True)
class CommutativityOptions:
    """`samples`: how many positions are kept per layer; memory and time grow with it.

    `exchanges`: how many exchanges of two units are tried when the slope helps no more.
    """

    samples: int = 512
    exchanges: int = 16


def solve_commutativity(task: Task, options: CommutativityOptions) -> Found:
    """The best element found, and every step of every start; the pair is left at that element."""
    if options.samples < 1 or options.exchanges < 0:
        raise InputError(
            f"samples={options.samples} and exchanges={options.exchanges} were asked for; at least one sample is "
            "needed, and a number of exchanges that is not negative. Leave them out for the defaults."
        )
    pair = task.pair
    generator = torch.Generator().manual_seed(task.seed)
    layers = Layers(options.samples, generator)
    features = listen(pair, ActivationOptions())
    watch(pair.symmetry, task.a, task.b, task.data, [features, layers])
    if not layers.found:
        raise InputError(
            "No linear or convolution layer of this network reads a weight of its own, so there is nothing whose "
            "differences could cancel. The methods 'weights' and 'activations' need no such layers."
        )
    moving = Moving(pair.strands, pair.movable)
    commuting = Commuting(pair.symmetry, moving, layers.found.values(), (task.problem.a, task.problem.b))
    starts: dict[str, Element] = {
        "identity": pair.symmetry.identity(),
        "weights": solve_weights(task, WeightsOptions())[0],
        "activations": match_features(pair, features, ActivationOptions())[0],
    }
    runs: list[tuple[float, float, Element, list[Step]]] = []
    for name, element in starts.items():
        pair.start_at(element)
        commuting.start_at(element)
        history = [Step(name, 0, "", pair.objective, commuting.cost)]
        runs.append((commuting.cost, pair.objective, element, history))
    runs.sort(key=lambda run: run[:2])  # of equals, the one whose weights are nearer
    for i, (_, _, element, history) in enumerate(runs[: task.starts]):
        commuting.start_at(element)
        history += _descend(task, commuting, history[0].start, generator, options.exchanges)
        runs[i] = commuting.cost, history[-1].objective, commuting.element, history
    runs.sort(key=lambda run: run[:2], reverse=True)
    best = runs[-1][2]
    pair.start_at(best)
    return best, [step for *_, history in runs for step in history]  # the run that was kept comes last


def _descend(task: Task, commuting: Commuting, start: str, generator: torch.Generator, exchanges: int) -> list[Step]:
    """Visit every wire until none moves; a wire is looked at again after any other has moved."""
    pair, history = task.pair, list[Step]()
    strands = [s for s in commuting.moving.in_order if commuting.touched[s]]
    waiting = set(strands)
    for sweep in range(1, task.sweeps + 1):
        for i in torch.randperm(len(strands), generator=generator).tolist():
            s = strands[i]
            if s not in waiting:
                continue
            waiting.discard(s)
            if _visit(commuting, s, exchanges):
                beside = {t for t in strands if set(commuting.touched[t]) & set(commuting.touched[s])}
                waiting |= beside
                pair.start_at(commuting.element)
                history.append(Step(start, sweep, pair.strands[s].name, pair.objective, commuting.cost))
        if not waiting:
            break
    return history


def _visit(commuting: Commuting, s: int, exchanges: int) -> bool:
    """Lower the cost by one strand; whether that was possible."""
    inside = commuting.moving.inside(s)
    fits = {t: fit for t in (s, *inside) if (fit := commuting.fits(t))}
    if not fits:
        return False
    moves = Choice(commuting.moving, fits, signs=False).moves(s, commuting.symmetry.identity())
    if moves and commuting.step(moves):
        return True
    if s not in fits or not commuting.moving.strands[s].permutes:
        return False
    parts = _cycles(moves[s]) if s in moves and not inside else []
    tried = [commuting.step({s: part}) for part in [*parts, *_exchanges(commuting, s, fits[s], exchanges)]]
    return any(tried)


def _cycles(move: Move) -> list[Move]:
    """The permutation of a move cut into its cycles, each a move of its own; signs are left out."""
    assert move.permutation is not None
    order = move.permutation.reshape(-1, move.permutation.shape[-1])
    found: list[Move] = []
    for copy, row in enumerate(order.tolist()):
        seen: set[int] = set()
        for first in range(len(row)):
            if first in seen or row[first] == first:
                continue
            part, here = torch.arange(len(row)).repeat(len(order), 1), first
            while here not in seen:
                seen.add(here)
                part[copy, here] = row[here]
                here = row[here]
            found.append(_with_order(move, part))
    return found if len(found) > 1 else []


def _with_order(move: Move, order: Tensor) -> Move:
    assert move.permutation is not None
    sign = None if move.sign is None else torch.ones_like(move.sign)
    return replace(move, permutation=order.reshape(move.permutation.shape), sign=sign)


def _exchanges(commuting: Commuting, s: int, fits: dict[tuple[int, ...], Tensor], count: int) -> list[Move]:
    """The exchanges of two units that promise most by the slope; signs stay."""
    strands = commuting.moving.strands
    n, units = strands[s].size, size(strands, s)
    fit = sum(fits.values(), torch.zeros(units, units, dtype=torch.float64)).reshape(units // n, n, units // n, n)
    own = torch.stack([fit[c, :, c] for c in range(units // n)])
    stay = own.diagonal(dim1=1, dim2=2)
    gain = (own + own.mT - stay[:, :, None] - stay[:, None, :]).triu(1).flatten()
    move = identity_move(strands, s)
    found: list[Move] = []
    for index in gain.topk(min(count, len(gain))).indices.tolist():
        if gain[index] <= 0:
            break
        copy, i, j = index // (n * n), index // n % n, index % n
        order = torch.arange(n).repeat(units // n, 1)
        order[copy, i], order[copy, j] = j, i
        found.append(_with_order(move, order))
    return found
