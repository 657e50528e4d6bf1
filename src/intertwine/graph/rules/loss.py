"""Rules for losses of a difference: mse_loss, smooth_l1_loss, huber_loss.

Each is an elementwise function of x − y, added up or averaged unless it is asked not to be.
"""

from __future__ import annotations

from typing import Any

import torch

from intertwine.graph.registry import rule
from intertwine.graph.rules.elementwise import spread
from intertwine.graph.tape import Label, Tape, Value


@rule("aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss")
def loss_of_difference(
    t: Tape, x: Value, y: Value, reduction: int = 1, *bend: int | float, **named: int | float
) -> Value:
    assert t.call is not None
    loss = t.call.target
    shape = tuple(torch.broadcast_shapes(x.shape, y.shape))
    labels: list[Label] = [("lead", i) for i in range(len(shape))]
    gap = t.multilinear([[(x, spread(t, x, shape))], [(y, spread(t, y, shape))]], labels, shape)

    def of_gap(v: torch.Tensor) -> Any:
        return loss(v, torch.zeros_like(v), 0, *bend, **named)

    each = t.pointwise(of_gap, gap, f"{t.call.op}{bend}{named}")
    return each if reduction == 0 else t.multilinear([[(each, labels)]], [])
