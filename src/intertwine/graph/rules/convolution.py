"""Rules for convolutions of any dimension, grouped, depthwise and transposed.

Channels of a grouped convolution are read as (group, channel within the group); everything else follows.
"""

from __future__ import annotations

from intertwine.graph.registry import rule
from intertwine.graph.tape import PINNED, Label, Tape, Value


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def conv(
    t: Tape,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: object = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
) -> Value:
    return _convolve(t, x, weight, bias, groups, transposed=False)


@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def conv_transpose(
    t: Tape,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: object = 1,
    padding: object = 0,
    output_padding: object = 0,
    groups: int = 1,
    dilation: object = 1,
) -> Value:
    return _convolve(t, x, weight, bias, groups, transposed=True)


@rule("aten.convolution", "aten._convolution")
def convolution(
    t: Tape,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    *_: object,
) -> Value:
    return _convolve(t, x, weight, bias, groups, transposed)


def _convolve(t: Tape, x: Value, weight: Value, bias: Value | None, groups: int, transposed: bool) -> Value:
    space = weight.ndim - 2
    batch: list[Label] = ["batch"] * (x.ndim - space - 1)
    lead, spatial = len(batch), [PINNED] * space
    kernel = [PINNED] * space
    if groups == 1:
        channels = ["in", "out"] if transposed else ["out", "in"]
        terms = [[(x, [*batch, "in", *spatial]), (weight, [*channels, *kernel])], [(bias, ["out"])]]
        return t.multilinear(terms, [*batch, "out", *spatial])
    grouped_x = t.reshape(x, (*x.shape[:lead], groups, x.shape[lead] // groups, *x.shape[lead + 1 :]))
    grouped_w = t.reshape(weight, (groups, weight.shape[0] // groups, *weight.shape[1:]))
    out = t.shape[lead]
    grouped_b = t.reshape(bias, (groups, out // groups)) if bias is not None else None
    channels = ["group", "in", "out"] if transposed else ["group", "out", "in"]
    terms = [
        [(grouped_x, [*batch, "group", "in", *spatial]), (grouped_w, [*channels, *kernel])],
        [(grouped_b, ["group", "out"])],
    ]
    shape = (*t.shape[:lead], groups, out // groups, *t.shape[lead + 1 :])
    return t.reshape(t.multilinear(terms, [*batch, "group", "out", *spatial], shape), t.shape)
