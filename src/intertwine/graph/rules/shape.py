"""Rules for ops that only move or copy entries: identities, reshapes, permutes, broadcasts, shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intertwine.graph.registry import rule
from intertwine.graph.rules.elementwise import out_labels, spread
from intertwine.graph.tape import PINNED, Tape, Value


@rule(
    "aten.alias", "aten.clone", "aten.contiguous", "aten.detach", "aten.dropout", "aten.feature_dropout",
    "aten.alpha_dropout", "aten.lift_fresh_copy", "aten.lift_fresh", "aten.lift", "aten.requires_grad_",
    "aten.resolve_conj", "aten.resolve_neg", "aten.positive",
)  # fmt: skip
def identity(t: Tape, x: Value, *_: Any, **__: Any) -> Value:
    return x


@rule("aten.to", "aten._to_copy", "aten.type_as", "aten.float", "aten.double", "aten.half", "aten.bfloat16")
def cast(t: Tape, x: Value, *_: Any, **__: Any) -> Value:
    assert t.call is not None
    if x.floating and t.call.dtype is not None and not t.call.dtype.is_floating_point:
        labels = t.labels(x)  # rounding to integers: positions keep their places, scales do not pass
        return t.joint([(x, labels)], labels, x.shape)
    return x


@rule("aten.bool", "aten.int", "aten.long")
def to_integer(t: Tape, x: Value, *_: Any) -> Value:
    labels = t.labels(x)
    return t.joint([(x, labels)], labels, x.shape)


@rule(
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.view_as", "aten.reshape_as", "aten.flatten",
    "aten.unflatten", "aten.squeeze", "aten.unsqueeze", "aten.ravel", "aten.atleast_1d", "aten.atleast_2d",
    "aten._reshape_alias", "aten.view_copy",
)  # fmt: skip
def reshape(t: Tape, x: Value, *args: Any, **_: Any) -> Value:
    if args and isinstance(args[0], torch.dtype):  # view(dtype) reinterprets the bits
        (result,) = t.opaque([x], [t.shape], f"its bits are reinterpreted ({t.here})")
        assert result is not None
        return result
    return t.reshape(x, t.shape)


@rule("aten.permute", "aten.permute_copy")
def permute(t: Tape, x: Value, dims: Sequence[int]) -> Value:
    return t.permute(x, dims)


@rule("aten.transpose", "aten.swapaxes", "aten.swapdims")
def transpose(t: Tape, x: Value, a: int, b: int) -> Value:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return t.permute(x, order)


@rule("aten.t", "aten.numpy_T", "aten.mT", "aten.matrix_H", "aten.mH", "aten.adjoint")
def matrix_transpose(t: Tape, x: Value) -> Value:
    assert t.call is not None
    whole = t.call.op.startswith(("aten.t.", "aten.numpy_T"))
    order = list(range(x.ndim))[::-1] if whole else [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2]
    return t.permute(x, order) if x.ndim > 1 else x


@rule("aten.movedim", "aten.moveaxis")
def movedim(t: Tape, x: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    sources = [d % x.ndim for d in ([source] if isinstance(source, int) else source)]
    targets = [d % x.ndim for d in ([destination] if isinstance(destination, int) else destination)]
    rest = iter(d for d in range(x.ndim) if d not in sources)
    order = [sources[targets.index(d)] if d in targets else next(rest) for d in range(x.ndim)]
    return t.permute(x, order)


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to", "aten.expand_copy")
def expand(t: Tape, x: Value, *_: Any, **__: Any) -> Value:
    if x.shape == t.shape:
        return x
    return t.multilinear([[(x, spread(t, x))]], out_labels(t))


expand.creates = True  # type: ignore[attr-defined]  # also a constant is alike along an axis it is spread over


@rule("aten.copy", "aten.copy_")
def copy(t: Tape, old: Value, x: Value, *_: Any) -> Value:
    return t.multilinear([[(x, spread(t, x))]], out_labels(t))


@rule("aten.repeat", "aten.tile")
def repeat(t: Tape, x: Value, repeats: Sequence[int]) -> Value:
    """Each axis becomes (copies, axis); the copies are alike, so they may change places freely."""
    repeats = [*[1] * (x.ndim - len(repeats)), *repeats]
    padded = t.reshape(x, (*[1] * (len(repeats) - x.ndim), *x.shape))
    shape = [n for r, s in zip(repeats, padded.shape, strict=True) for n in (r, s)]
    labels = [("axis", i) for i in range(padded.ndim)]
    out = [label for i in range(padded.ndim) for label in (("copy", i), ("axis", i))]
    return t.reshape(t.multilinear([[(padded, labels)]], out, tuple(shape)), t.shape)


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(t: Tape, x: Value, repeats: int, dim: int | None = None, **_: Any) -> Value:
    if dim is None:
        x, dim = t.reshape(x, (_size(x.shape),)), 0
    dim %= x.ndim
    labels = t.labels(x)
    out = [*labels[: dim + 1], "copy", *labels[dim + 1 :]]
    shape = (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
    return t.reshape(t.multilinear([[(x, labels)]], out, shape), t.shape)


def _size(shape: Sequence[int]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


@rule("aten.pixel_shuffle")
def pixel_shuffle(t: Tape, x: Value, factor: int) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    x = t.reshape(x, (*lead, c // factor**2, factor, factor, h, w))
    return t.reshape(t.permute(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2]), t.shape)


@rule("aten.pixel_unshuffle")
def pixel_unshuffle(t: Tape, x: Value, factor: int) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    x = t.reshape(x, (*lead, c, h // factor, factor, w // factor, factor))
    return t.reshape(t.permute(x, [*range(n), n, n + 2, n + 4, n + 1, n + 3]), t.shape)


@rule("aten.channel_shuffle", "aten.native_channel_shuffle")
def channel_shuffle(t: Tape, x: Value, groups: int) -> Value:
    c = x.shape[1]
    x = t.reshape(x, (x.shape[0], groups, c // groups, *x.shape[2:]))
    return t.reshape(t.permute(x, [0, 2, 1, *range(3, x.ndim)]), t.shape)


@rule("aten.diagonal")
def diagonal(t: Tape, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    dims = {dim1 % x.ndim, dim2 % x.ndim}
    labels = [PINNED if d in dims else ("lead", d) for d in range(x.ndim)]
    return t.multilinear([[(x, labels)]], [*(label for label in labels if label is not PINNED), PINNED])
