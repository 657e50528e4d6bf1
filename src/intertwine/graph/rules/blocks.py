"""Rules for ops that lay tensors side by side or take them apart: cat, stack, split, chunk, slice, select, pad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intertwine.graph.registry import rule
from intertwine.graph.tape import PINNED, Tape, Value


@rule("aten.cat", "aten.concat", "aten.concatenate")
def cat(t: Tape, tensors: Sequence[Value], dim: int = 0) -> Value:
    return t.concat(tensors, dim)


@rule("aten.stack")
def stack(t: Tape, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(t.shape)
    shape = (*t.shape[:dim], 1, *t.shape[dim + 1 :])
    return t.concat([t.reshape(x, shape) for x in tensors], dim)


@rule(
    "aten.split.Tensor",
    "aten.split_with_sizes",
    "aten.chunk",
    "aten.tensor_split",
    "aten.split_with_sizes_copy",
    "aten.split.sizes",
    "aten.split_copy.Tensor",
    "aten.unsafe_split.Tensor",
)
def split(t: Tape, x: Value, _sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    assert t.call is not None
    dim %= x.ndim
    pieces, start = [], 0
    for i, shape in enumerate(t.call.shapes):
        assert shape is not None
        pieces.append(t.fixed(shape) if i in t.unread else t.narrow(x, dim, start, shape[dim]))
        start += shape[dim]
    return tuple(pieces)


@rule("aten.unbind", "aten.unbind_copy")
def unbind(t: Tape, x: Value, dim: int = 0) -> tuple[Value, ...]:
    shape = t.shape
    return tuple(t.fixed(shape) if i in t.unread else _pick(t, x, dim % x.ndim, i) for i in range(x.shape[dim]))


@rule("aten.select.int", "aten.select_copy.int")
def select(t: Tape, x: Value, dim: int, index: int) -> Value:
    dim %= x.ndim
    return _pick(t, x, dim, index % x.shape[dim])


def _pick(t: Tape, x: Value, dim: int, index: int) -> Value:
    return t.reshape(t.narrow(x, dim, index, 1), (*x.shape[:dim], *x.shape[dim + 1 :]))


@rule("aten.narrow")
def narrow(t: Tape, x: Value, dim: int, start: int, length: int) -> Value:
    return t.narrow(x, dim % x.ndim, start + x.shape[dim] if start < 0 else start, length)


@rule("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(t: Tape, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    dim %= x.ndim
    n = x.shape[dim]
    start, _, _ = slice(start, end, step).indices(n)
    if step == 1:
        return t.narrow(x, dim, start, t.shape[dim])
    if n % step == 0 and start < step and t.shape[dim] == n // step:
        paired = t.reshape(x, (*x.shape[:dim], n // step, step, *x.shape[dim + 1 :]))
        return t.reshape(t.narrow(paired, dim + 1, start, 1), t.shape)
    t.freeze(x, [dim], f"every {_ordinal(step)} entry is taken ({t.here})")
    labels = [PINNED if d == dim else ("lead", d) for d in range(x.ndim)]
    return t.multilinear([[(x, labels)]], labels)


def _ordinal(n: int) -> str:
    """2nd, 3rd, 4th, 11th, 21st."""
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{n}{'th' if 10 <= n % 100 <= 20 else ends.get(n % 10, 'th')}"


@rule(
    "aten.pad",
    "aten.constant_pad_nd",
    "aten.reflection_pad1d",
    "aten.reflection_pad2d",
    "aten.replication_pad2d",
    "aten.replication_pad1d",
)
def pad(t: Tape, x: Value, pads: Sequence[int], mode: Any = "constant", value: float | None = None) -> Value:
    assert t.call is not None
    constant = mode == "constant" or not isinstance(mode, str)
    if not isinstance(mode, str):  # constant_pad_nd(x, pads, value)
        value = mode
    if t.call.op.startswith(("aten.reflection", "aten.replication")):
        constant = False
    touched = [x.ndim - 1 - i // 2 for i in range(0, len(pads), 2) if pads[i] or pads[i + 1]]
    for d in touched:
        before, after = pads[2 * (x.ndim - 1 - d)], pads[2 * (x.ndim - 1 - d) + 1]
        x = (
            _pad_axis(t, x, d, before, after, float(value or 0))
            if constant
            else _pin_axis(t, x, d, x.shape[d] + before + after)
        )
    return x


def _pad_axis(t: Tape, x: Value, dim: int, before: int, after: int, value: float) -> Value:
    """Constant padding lays uniform blocks beside the axis; they are free to move among themselves."""
    start, length = max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0)
    x = t.narrow(x, dim, start, length)
    blocks = [
        t.uniform((*x.shape[:dim], n, *x.shape[dim + 1 :]), zero=value == 0) if n > 0 else None for n in (before, after)
    ]
    return t.concat([b for b in (blocks[0], x, blocks[1]) if b is not None], dim)


def _pin_axis(t: Tape, x: Value, dim: int, size: int) -> Value:
    labels = [PINNED if d == dim else ("lead", d) for d in range(x.ndim)]
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return t.multilinear([[(x, labels)]], labels, shape)
