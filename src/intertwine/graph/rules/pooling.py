"""Rules for pooling and resizing: they work on spatial axes, channel by channel.

Averages and interpolations are linear, so everything on the channels passes; maxima pass positive scales only.
"""

from __future__ import annotations

from typing import Any

from intertwine.graph.registry import rule
from intertwine.graph.tape import PINNED, Label, Law, Tape, Value


def _spatial(x: Value, space: int) -> list[Label]:
    return [*(("lead", i) for i in range(x.ndim - space)), *[PINNED] * space]


def _space(t: Tape) -> int:
    """Number of spatial axes, read off the op's name."""
    assert t.call is not None
    return next(n for n in (1, 2, 3) if f"{n}d" in t.call.op)


@rule(
    "aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", "aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d",
    "aten.adaptive_avg_pool3d", "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d", "aten.upsample_nearest1d",
    "aten.upsample_nearest2d", "aten.upsample_nearest3d", "aten._upsample_nearest_exact2d", "aten.upsample_bilinear2d",
    "aten.upsample_bicubic2d", "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa", "aten.upsample_linear1d",
    "aten.upsample_trilinear3d",
)  # fmt: skip
def average(t: Tape, x: Value, *_: Any, **__: Any) -> Value:
    labels = _spatial(x, _space(t))
    return t.multilinear([[(x, labels)]], labels)


@rule("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d")
def maximum(t: Tape, x: Value, *_: Any, **__: Any) -> Value:
    return _maximum(t, x)


@rule(
    "aten.max_pool2d_with_indices",
    "aten.max_pool3d_with_indices",
    "aten.max_pool1d_with_indices",
    "aten.adaptive_max_pool2d",
    "aten.adaptive_max_pool1d",
    "aten.adaptive_max_pool3d",
)
def maximum_and_place(t: Tape, x: Value, *_: Any, **__: Any) -> tuple[Value, Value]:
    labels = _spatial(x, _space(t))
    places = Law(({1: 1},), ({0: 1}, {1: 1}))  # where the maximum lies does not care for a positive scale
    return _maximum(t, x), t.joint(
        [(x, labels)], labels, laws={label: places for label in labels if label is not PINNED}
    )


def _maximum(t: Tape, x: Value) -> Value:
    labels = _spatial(x, _space(t))
    law = Law(({0: 1, 1: -1},), ({0: 1}, {1: 1}))
    return t.joint([(x, labels)], labels, laws={label: law for label in labels if label is not PINNED})


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sample(t: Tape, x: Value, grid: Value, *_: Any) -> Value:
    space = x.ndim - 2
    batch: list[Label] = ["batch"]
    where = [*batch, *[PINNED] * (space + 1)]
    return t.joint(
        [(x, [*batch, "channel", *[PINNED] * space]), (grid, where)],
        [*batch, "channel", *[PINNED] * space],
        laws={"channel": Law(({0: 1, 2: -1},), ({0: 1, 2: 1},))},
    )
