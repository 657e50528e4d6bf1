"""Several copies of the samples at once: whether the back takes them apart, and the values around a cut for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.errors import InputError
from intertwine.features.batches import Call
from intertwine.stitch.batching import NotBySample, repeated, sample_axis
from intertwine.stitch.half import Half
from intertwine.stitch.hooked import Taken


@dataclass(frozen=True, eq=False)
class Copying:
    """Along which axes the values around a cut are repeated for several copies; or why several cannot pass at once."""

    axes: tuple[Any, ...] = ()
    problem: str = ""

    def around(self, values: tuple[Any, ...], copies: int) -> tuple[Any, ...]:
        """Values around a cut for so many copies; always new tensors, as the back may overwrite them."""

        def several(x: Tensor, axis: int | None) -> Tensor:
            return x.clone() if axis is None else torch.cat([x] * copies, axis)

        if copies == 1:
            return tuple(tree_map(torch.clone, value) for value in values)
        return tuple(tree_map(several, value, axis) for value, axis in zip(values, self.axes, strict=True))


def copyings(back: Half, small: Call, begun: Mapping[int, Taken]) -> list[Copying]:
    """How a back takes several copies of the samples at each of its cuts. `begun`: what it has there for the call."""
    try:
        double = back.run.start(repeated(small, 2), begun, begun)
    except Exception as reason:  # noqa: BLE001 - foreign code that does not take twice the samples
        return [Copying(problem=f"it does not take its example twice over ({reason})")] * len(begun)
    return [_proved(back, cut, small, begun[cut], double[cut]) for cut in sorted(begun)]


def _proved(back: Half, cut: int, call: Call, own: Taken, twice: Taken) -> Copying:
    """How a back takes copies at one cut, proved by passing two that differ at once and one by one."""
    try:
        found = Copying(tuple(tree_map(sample_axis, a, a, b) for a, b in zip(own.around, twice.around, strict=True)))
        _check_axis(back, cut, own.tensor, sample_axis(own.tensor, own.tensor, twice.tensor))
        pair = own.tensor, 1.5 * own.tensor
        both = torch.cat(pair, back.layouts[cut].index("n"))
        with torch.no_grad():
            alone = [back.run.finish(cut, x.clone(), found.around(own.around, 1), call) for x in pair]
            together = back.run.finish(cut, both, found.around(own.around, 2), call, copies=2)
        for leaves in zip(*(tree_leaves(y) for y in (*alone, together)), strict=True):
            if isinstance(leaves[-1], Tensor):
                sample_axis(*leaves)
    except NotBySample as reason:
        return Copying(problem=f"a value of it does not hold sample after sample: {reason}")
    return found


def _check_axis(back: Half, cut: int, x: Tensor, axis: int | None) -> None:
    layout, site = back.layouts[cut], str(back.run.places[cut])
    if axis is not None and axis != layout.index("n"):
        raise InputError(
            f"At {site!r} the samples lie along axis {axis} of a tensor {tuple(x.shape)}, and not where its layout "
            f"{layout!r} has them. Say what the axes are with layouts={{{site!r}: 'tnc'}}, and give inputs that "
            "have their samples first."
        )
