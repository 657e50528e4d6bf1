"""Solver `sinkhorn`: orders learnt from the task loss through doubly stochastic matrices (after Peña et al. 2023).

Every strand has a table of scores Z. Scaling the rows and columns of exp(Z / temperature) in turn until they add up to
one (Sinkhorn) gives shares with which the units of b are mixed. The loss of a network between a and b so mixed has a
slope in Z. As the temperature falls, the shares come near a permutation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, log

import torch
from torch import Tensor

from intertwine.align.differentiable import Search, check_loss, search
from intertwine.align.line_loss import LineOptions
from intertwine.align.relaxed import Mixture, Relaxed, mixed, nearest_permutation
from intertwine.align.task import Found, Task
from intertwine.shapes import Float
from intertwine.symmetry.element import Element, copies, identity_move

ROUNDS = 20  # of scaling rows and columns


@dataclass(frozen=True)
class SinkhornOptions(LineOptions):
    """Settings of `sinkhorn`, beside those of the loss (`LineOptions`).

    `rate`: of Adam on the scores. `temperature`, `coolest`: at the first and the last step.
    """

    rate: float | int = 0.1
    temperature: float | int = 1.0
    coolest: float | int = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rate", "temperature"):
            value = getattr(self, name)
            self.check(name, value > 0 and isfinite(value), "a finite number above 0")
        self.check("coolest", 0 < self.coolest <= self.temperature, "above 0 and at most the temperature")

    def temperature_at(self, step: int) -> float:
        """Falls by the same factor at every step."""
        return self.temperature * (self.coolest / self.temperature) ** ((step - 1) / max(self.steps - 1, 1))


def solve_sinkhorn(task: Task, options: SinkhornOptions) -> Found:
    """The element with the lowest task loss found, and every element on the way; the pair is left at that element."""
    return search(task, options, lambda found: _learn(found, options))


def _learn(found: Search, options: SinkhornOptions) -> None:
    scores = {s: _first_scores(found, s, float(options.temperature)) for s in found.strands}
    optimizer = torch.optim.Adam(scores.values(), lr=options.rate)
    symmetry = found.task.problem.symmetry
    for step, batch, t in found.loss.batches(torch.Generator().manual_seed(found.task.seed)):
        shares = {s: sinkhorn(z / options.temperature_at(step)) for s, z in scores.items()}
        actor = Relaxed(symmetry.strands, {s: Mixture(p) for s, p in shares.items()})
        value = found.loss.of(mixed(symmetry, actor, found.b), batch, t)
        check_loss(value, step)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.look_at(_rounded(found, scores) @ found.start, "sinkhorn", step)


def _first_scores(found: Search, s: int, temperature: float) -> Float[Tensor, "*copies n n"]:
    """At the first temperature every unit has as large a share in itself as in all others together."""
    strands = found.task.pair.strands
    n, many = strands[s].size, copies(strands, s)
    device = found.task.pair.a[0].device
    own = torch.eye(n, device=device) * (temperature * log(max(n - 1, 1)))
    return own.expand(*many, n, n).clone().requires_grad_(True)


def _rounded(found: Search, scores: Mapping[int, Tensor]) -> Element:
    """The orders with the highest scores, which are those that the shares come near to as the temperature falls."""
    identity = found.task.problem.symmetry.identity()
    orders = {s: nearest_permutation(z) for s, z in scores.items()}
    moves = {s: replace(identity_move(identity.strands, s), permutation=order) for s, order in orders.items()}
    return replace(identity, moves={**identity.moves, **moves})


def sinkhorn(scores: Float[Tensor, "*copies n n"], rounds: int = ROUNDS) -> Float[Tensor, "*copies n n"]:
    """Shares in proportion to exp(scores), rows and columns scaled so that they add up to one; rows exactly.

    Logarithms are scaled, so that no score is too large. Gradients are those of the rounds themselves.

    >>> sinkhorn(torch.tensor([[4.0, 0.0], [0.0, 4.0]])).round(decimals=3)
    tensor([[0.9820, 0.0180], [0.0180, 0.9820]])
    """
    for _ in range(rounds):
        scores = scores - scores.logsumexp(-2, keepdim=True)
        scores = scores - scores.logsumexp(-1, keepdim=True)
    return scores.exp()
