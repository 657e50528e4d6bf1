"""Rules for ops that reshape, permute, join, split, slice and pad tensors, or create filled ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intertwine.graph.builder import PINNED, GraphBuilder, rule
from intertwine.graph.constraints import Value

# -- Ops that only move or copy entries: identities, reshapes, permutes, broadcasts, shuffles --------------------------


@rule(
    "aten.alias", "aten.clone", "aten.contiguous", "aten.detach", "aten.dropout", "aten.feature_dropout",
    "aten.alpha_dropout", "aten.lift_fresh_copy", "aten.lift_fresh", "aten.lift", "aten.requires_grad_",
    "aten.resolve_conj", "aten.resolve_neg", "aten.positive",
)  # fmt: skip
def identity(t: GraphBuilder, x: Value, *_: Any, **__: Any) -> Value:
    return x


@rule("aten.to", "aten._to_copy", "aten.type_as", "aten.float", "aten.double", "aten.half", "aten.bfloat16")
def cast(t: GraphBuilder, x: Value, *_: Any, **__: Any) -> Value:
    assert t.call is not None
    rounds = x.floating and t.call.dtype is not None and not t.call.dtype.is_floating_point
    return to_integer(t, x) if rounds else x


@rule("aten.bool", "aten.int", "aten.long")
def to_integer(t: GraphBuilder, x: Value, *_: Any) -> Value:
    """Positions keep their places, scales do not pass."""
    return t.joint([(x, t.labels(x))], t.labels(x), x.shape)


@rule(
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.view_as", "aten.reshape_as", "aten.flatten",
    "aten.unflatten", "aten.squeeze", "aten.unsqueeze", "aten.ravel", "aten.atleast_1d", "aten.atleast_2d",
    "aten._reshape_alias", "aten.view_copy",
)  # fmt: skip
def reshape(t: GraphBuilder, x: Value, *args: Any, **_: Any) -> Value:
    if args and isinstance(args[0], torch.dtype):  # view(dtype) reinterprets the bits
        (result,) = t.opaque([x], [t.shape], f"its bits are reinterpreted ({t.here})")
        assert result is not None
        return result
    return t.reshape(x, t.shape)


@rule("aten.permute", "aten.permute_copy")
def permute(t: GraphBuilder, x: Value, dims: Sequence[int]) -> Value:
    return t.permute(x, dims)


@rule("aten.transpose", "aten.swapaxes", "aten.swapdims")
def transpose(t: GraphBuilder, x: Value, a: int, b: int) -> Value:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return t.permute(x, order)


@rule("aten.t", "aten.numpy_T", "aten.mT", "aten.matrix_H", "aten.mH", "aten.adjoint")
def matrix_transpose(t: GraphBuilder, x: Value) -> Value:
    if x.ndim < 2:
        return x
    order = list(range(x.ndim))
    return t.permute(x, order[::-1] if t.op.startswith(("aten.t.", "aten.numpy_T")) else [*order[:-2], -1, -2])


@rule("aten.movedim", "aten.moveaxis")
def movedim(t: GraphBuilder, x: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    sources = [d % x.ndim for d in ([source] if isinstance(source, int) else source)]
    targets = [d % x.ndim for d in ([destination] if isinstance(destination, int) else destination)]
    rest = iter(d for d in range(x.ndim) if d not in sources)
    return t.permute(x, [sources[targets.index(d)] if d in targets else next(rest) for d in range(x.ndim)])


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to", "aten.expand_copy")
def expand(t: GraphBuilder, x: Value, *_: Any, **__: Any) -> Value:
    return x if x.shape == t.shape else t.linear(x, t.spread(x), t.out)


@rule("aten.copy", "aten.copy_")
def copy(t: GraphBuilder, old: Value, x: Value, *_: Any) -> Value:
    return t.linear(x, t.spread(x), t.out)


@rule("aten.repeat", "aten.tile")
def repeat(t: GraphBuilder, x: Value, repeats: Sequence[int]) -> Value:
    """Each axis becomes (copies, axis); the copies are alike, so they may change places freely."""
    repeats = [*[1] * (x.ndim - len(repeats)), *repeats]
    padded = t.reshape(x, (*[1] * (len(repeats) - x.ndim), *x.shape))
    shape = tuple(n for pair in zip(repeats, padded.shape, strict=True) for n in pair)
    out = [label for i, axis in enumerate(t.labels(padded)) for label in (("copy", i), axis)]
    return t.reshape(t.linear(padded, t.labels(padded), out, shape), t.shape)


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(t: GraphBuilder, x: Value, repeats: int, dim: int | None = None, **_: Any) -> Value:
    if dim is None:
        x, dim = t.reshape(x, (torch.Size(x.shape).numel(),)), 0
    after = dim % x.ndim + 1
    labels = t.labels(x)
    shape = (*x.shape[:after], repeats, *x.shape[after:])
    return t.reshape(t.linear(x, labels, [*labels[:after], "copy", *labels[after:]], shape), t.shape)


@rule("aten.pixel_shuffle")
def pixel_shuffle(t: GraphBuilder, x: Value, factor: int) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    x = t.reshape(x, (*lead, c // factor**2, factor, factor, h, w))
    return t.reshape(t.permute(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2]), t.shape)


@rule("aten.pixel_unshuffle")
def pixel_unshuffle(t: GraphBuilder, x: Value, factor: int) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    x = t.reshape(x, (*lead, c, h // factor, factor, w // factor, factor))
    return t.reshape(t.permute(x, [*range(n), n, n + 2, n + 4, n + 1, n + 3]), t.shape)


@rule("aten.channel_shuffle", "aten.native_channel_shuffle")
def channel_shuffle(t: GraphBuilder, x: Value, groups: int) -> Value:
    x = t.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    return t.reshape(t.permute(x, [0, 2, 1, *range(3, x.ndim)]), t.shape)


@rule("aten.diagonal")
def diagonal(t: GraphBuilder, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    labels = t.pinned(x, (dim1, dim2))
    return t.linear(x, labels, [*(label for label in labels if label is not PINNED), PINNED])


# -- Ops that lay tensors side by side or take them apart: cat, stack, split, chunk, slice, select, pad ----------------


@rule("aten.cat", "aten.concat", "aten.concatenate")
def cat(t: GraphBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    return t.concat(tensors, dim)


@rule("aten.stack")
def stack(t: GraphBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(t.shape)
    shape = (*t.shape[:dim], 1, *t.shape[dim + 1 :])
    return t.concat([t.reshape(x, shape) for x in tensors], dim)


@rule(
    "aten.split.Tensor", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split", "aten.split_with_sizes_copy",
    "aten.split.sizes", "aten.split_copy.Tensor", "aten.unsafe_split.Tensor",
)  # fmt: skip
def split(t: GraphBuilder, x: Value, _sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    dim %= x.ndim
    pieces, start = [], 0
    for i, shape in enumerate(t.shapes):
        assert shape is not None
        pieces.append(t.fixed(shape) if i in t.unread else t.narrow(x, dim, start, shape[dim]))
        start += shape[dim]
    return tuple(pieces)


@rule("aten.unbind", "aten.unbind_copy")
def unbind(t: GraphBuilder, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(t.fixed(t.shape) if i in t.unread else select(t, x, dim, i) for i in range(x.shape[dim]))


@rule("aten.select.int", "aten.select_copy.int")
def select(t: GraphBuilder, x: Value, dim: int, index: int) -> Value:
    dim %= x.ndim
    return t.reshape(t.narrow(x, dim, index % x.shape[dim], 1), (*x.shape[:dim], *x.shape[dim + 1 :]))


@rule("aten.narrow")
def narrow(t: GraphBuilder, x: Value, dim: int, start: int, length: int) -> Value:
    return t.narrow(x, dim % x.ndim, start + x.shape[dim] if start < 0 else start, length)


@rule("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(
    t: GraphBuilder, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    dim %= x.ndim
    n = x.shape[dim]
    start, _, _ = slice(start, end, step).indices(n)
    if step == 1:
        return t.narrow(x, dim, start, t.shape[dim])
    if n % step == 0 and start < step and t.shape[dim] == n // step:
        paired = t.reshape(x, (*x.shape[:dim], n // step, step, *x.shape[dim + 1 :]))
        return t.reshape(t.narrow(paired, dim + 1, start, 1), t.shape)
    ending = "th" if 10 <= step % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(step % 10, "th")
    t.freeze(x, [dim], f"every {step}{ending} entry is taken ({t.here})")
    return t.linear(x, t.pinned(x, [dim]), t.pinned(x, [dim]))


@rule(
    "aten.pad", "aten.constant_pad_nd", "aten.reflection_pad1d", "aten.reflection_pad2d", "aten.replication_pad2d",
    "aten.replication_pad1d",
)  # fmt: skip
def pad(t: GraphBuilder, x: Value, pads: Sequence[int], mode: Any = "constant", value: float | None = None) -> Value:
    if not isinstance(mode, str):  # constant_pad_nd(x, pads, value)
        mode, value = "constant", mode
    constant = mode == "constant" and not t.op.startswith(("aten.reflection", "aten.replication"))
    for i in range(0, len(pads), 2):
        before, after, dim = pads[i], pads[i + 1], x.ndim - 1 - i // 2
        if constant and (before or after):
            x = _pad_axis(t, x, dim, before, after, zero=not value)
        elif before or after:
            shape = (*x.shape[:dim], x.shape[dim] + before + after, *x.shape[dim + 1 :])
            x = t.linear(x, t.pinned(x, [dim]), t.pinned(x, [dim]), shape)
    return x


def _pad_axis(t: GraphBuilder, x: Value, dim: int, before: int, after: int, zero: bool) -> Value:
    """Constant padding lays uniform blocks beside the axis; they are free to move among themselves."""
    x = t.narrow(x, dim, max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0))
    shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in (before, after)]
    left, right = (t.uniform(shape, zero=zero) if shape[dim] > 0 else None for shape in shapes)
    return t.concat([block for block in (left, x, right) if block is not None], dim)


# -- Tensors made on the spot: filled with one number they are alike along every axis, else constants ------------------


@rule("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.zero", "aten.zero_")
def zeros(t: GraphBuilder, *_: Any, **__: Any) -> Value:
    return t.uniform(t.shape, zero=True)


@rule(
    "aten.ones", "aten.ones_like", "aten.new_ones", "aten.full", "aten.full_like", "aten.new_full", "aten.fill",
    "aten.fill_",
)  # fmt: skip
def full(t: GraphBuilder, *_: Any, **__: Any) -> Value:
    return t.uniform(t.shape)


@rule(
    "aten.empty", "aten.empty_like", "aten.new_empty", "aten.arange", "aten.eye", "aten.linspace", "aten.scalar_tensor"
)
def constant(t: GraphBuilder, *_: Any, **__: Any) -> Value:
    return t.fixed(t.shape, "it meets a constant")


@rule(
    "aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_size", "aten.size", "aten.sym_numel",
    "aten._assert_scalar",
)  # fmt: skip
def nothing(t: GraphBuilder, *_: Any, **__: Any) -> None:
    return None


for _rule in (expand, zeros, full):
    _rule.creates = True  # type: ignore[attr-defined]  # runs on constants too: its result is alike along an axis
