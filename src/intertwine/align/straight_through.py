"""Solver `straight-through`: free weights learn from the task loss, and b follows them (after Ainsworth et al. 2023).

The free weights begin at a and may go anywhere. At every step b is matched to them, one sweep over the wires from the
order it has, and the loss is taken between a and b so ordered. An order has no slope; so the slope of the loss in the
ordered weights is given to the free weights, as if they themselves had been used.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from intertwine.align.assignment import assign
from intertwine.align.descent import descend
from intertwine.align.differentiable import Search, check_loss, search
from intertwine.align.line_loss import LineOptions
from intertwine.align.pair import Pair
from intertwine.align.task import Found, Task
from intertwine.canonical.blocks import moved


@dataclass(frozen=True)
class StraightThroughOptions(LineOptions):
    """Settings of `straight-through`, beside those of the loss (`LineOptions`).

    `rate`: of Adam on the free weights, as a share of the root mean square of each tensor.
    """

    rate: float | int = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rate", self.rate > 0 and isfinite(self.rate), "a finite number above 0")


def solve_straight_through(task: Task, options: StraightThroughOptions) -> Found:
    """The element with the lowest task loss found, and every element on the way; the pair is left at that element."""
    return search(task, options, lambda found: _learn(found, options))


def _learn(found: Search, options: StraightThroughOptions) -> None:
    symmetry = found.task.problem.symmetry
    free = _free_weights(found)
    optimizer = torch.optim.Adam([{"params": [x], "lr": options.rate * _size(x)} for x in free.values()])
    generator = torch.Generator().manual_seed(found.task.seed)
    element = symmetry.identity()
    for step, batch, t in found.loss.batches(generator):
        pair = Pair(symmetry, free, {name: found.b[name] for name in free}, found.strands)
        pair.start_at(element)
        descend(pair, assign, "", generator, sweeps=1)
        element = pair.element
        found.look_at(element @ found.start, "straight-through", step)
        b = moved(symmetry, element, found.b)
        used = {name: b[name].clone().requires_grad_(True) for name in free}
        value = found.loss.of({**b, **used}, batch, t)
        check_loss(value, step)
        # a weight that the loss does not depend on stays where it is
        slopes = torch.autograd.grad(value, list(used.values()), allow_unused=True)
        for x, slope in zip(free.values(), slopes, strict=True):
            x.grad = None if slope is None else slope.to(x.device, x.dtype)
        optimizer.step()


def _free_weights(found: Search) -> dict[str, Tensor]:
    """A copy of the weights of a that the objective counts, in single precision or finer."""
    counted = found.task.pair.weights_a
    return {name: x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for name, x in counted.items()}


def _size(x: Tensor) -> float:
    """The root mean square."""
    return float(x.square().mean().sqrt())
