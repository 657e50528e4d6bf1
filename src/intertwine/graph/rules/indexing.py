"""Rules for ops that read or write entries by position: embedding, index, gather, scatter, sorting, scans, unfold.

The axis that is indexed or written by position keeps its order; all other axes pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intertwine.graph.builder import PINNED, GraphBuilder, rule
from intertwine.graph.constraints import Label, ScaleRule, Value


@rule("aten.embedding")
def embedding(t: GraphBuilder, weight: Value, indices: Value, *_: Any) -> Value:
    t.freeze(weight, [0], f"its rows are looked up by index ({t.here})")
    lead = t.labels(indices)
    return t.multilinear([[(weight, [None, "feature"]), (indices, lead)]], [*lead, "feature"])


@rule("aten.embedding_bag")
def embedding_bag(
    t: GraphBuilder, weight: Value, indices: Value, offsets: Value, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Value | None = None, *_: Any,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Rows are looked up and summed, averaged (mode 1) or compared (mode 2) in bags."""
    if any(v is not None and v.live for v in (indices, offsets, per_sample_weights)):
        raise ValueError("places or weights in a bag are computed from parameters")
    t.freeze(weight, [0], f"its rows are looked up by index ({t.here})")
    sign = ({0: 1}, {1: 1}) if mode == 2 else ({0: 1, 1: 1},)
    bags = t.joint([(weight, [PINNED, "feature"])], [PINNED, "feature"], rules=ScaleRule(({0: 1, 1: -1},), sign))
    return bags, *(None if shape is None else t.fixed(shape, floating=False) for shape in t.shapes[1:])


@rule("aten.index_select")
def index_select(t: GraphBuilder, x: Value, dim: int, index: Value) -> Value:
    _pin_table(t, index)
    return _along(t, x, [dim])


def _pin_table(t: GraphBuilder, table: Value) -> None:
    """The places of a table turn up as positions of the result, which keep their order."""
    if table.live:
        t.freeze(table, range(table.ndim), f"it indexes another tensor ({t.here})")


@rule("aten.roll", "aten.flip", "aten.cumsum", "aten.tril", "aten.triu", "aten.cumsum_")
def rearrange(t: GraphBuilder, x: Value, *args: Any, **_: Any) -> Value:
    """Linear ops that tell positions along some axes apart."""
    name = t.op.split(".")[1].removesuffix("_")
    if name in ("tril", "triu"):
        return _along(t, x, (-2, -1))
    if name == "roll":
        args = args[1:] or (range(x.ndim),)
    return _along(t, x, [args[0]] if isinstance(args[0], int) else args[0])


@rule("aten.rot90")
def quarter_turn(t: GraphBuilder, x: Value, times: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    return _along(t, x, dims)


def _along(t: GraphBuilder, x: Value, dims: Sequence[int]) -> Value:
    return t.linear(x, t.pinned(x, dims), t.pinned(x, dims))


@rule("aten.cumprod", "aten.logcumsumexp")
def running(t: GraphBuilder, x: Value, dim: int, **_: Any) -> Value:
    """Scans that let no scale pass: the k-th product has the k-th power of one, a sum of exponentials none at all."""
    return t.joint([(x, t.pinned(x, [dim]))], t.pinned(x, [dim]))


@rule("aten.cummax", "aten.cummin")
def running_extremum(t: GraphBuilder, x: Value, dim: int) -> tuple[Value, Value]:
    return _ranked(t, x, dim, PINNED, 0), _ranked(t, x, dim, PINNED, 1)


@rule("aten.diff")
def differences(t: GraphBuilder, x: Value, n: int = 1, dim: int = -1, *ends: Value | None) -> Value:
    labels = t.pinned(x, [dim])
    return t.multilinear([[(v, labels)] for v in (x, *ends) if v is not None], labels)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(t: GraphBuilder, x: Value, indices: Sequence[Value | None]) -> Value:
    """`x[:, table]`: indexed axes are replaced by the axes of the tables, in place or in front as in numpy."""
    tables = {i: v for i, v in enumerate(indices) if v is not None}
    for table in tables.values():
        _pin_table(t, table)
    used = list(tables)
    at = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    labels = t.pinned(x, used)
    rest = [label for label in labels if label is not PINNED]
    return t.linear(x, labels, [*rest[:at], *[PINNED] * max(v.ndim for v in tables.values()), *rest[at:]])


@rule("aten.gather")
def gather(t: GraphBuilder, x: Value, dim: int, index: Value, **_: Any) -> Value:
    dim %= x.ndim
    labels = [PINNED if d == dim or x.shape[d] != index.shape[d] else ("lead", d) for d in range(x.ndim)]
    scales = ScaleRule(({0: 1, 2: -1}, {1: 1}), ({0: 1, 2: 1}, {1: 1}))
    return t.joint([(x, labels), (index, labels)], labels, rules=scales)


@rule("aten.im2col")
def unfold_patches(t: GraphBuilder, x: Value, kernel: Sequence[int], *_: Any) -> Value:
    """Patches of an image become columns: channels turn into (channel, kernel row, kernel column)."""
    labels = t.pinned(x, (-2, -1))
    shape = (*x.shape[:-2], kernel[0] * kernel[1], t.shape[-1])
    return t.reshape(t.linear(x, labels, labels, shape), t.shape)


@rule("aten.col2im")
def fold_patches(t: GraphBuilder, x: Value, size: Sequence[int], kernel: Sequence[int], *_: Any) -> Value:
    area = kernel[0] * kernel[1]
    x = t.reshape(x, (*x.shape[:-2], x.shape[-2] // area, area, x.shape[-1]))
    return _along(t, x, (-2, -1))


@rule("aten.unfold")
def unfold_windows(t: GraphBuilder, x: Value, dim: int, size: int, step: int) -> Value:
    return t.linear(x, t.pinned(x, [dim]), [*t.pinned(x, [dim]), PINNED])


@rule("aten.max.dim", "aten.min.dim", "aten.topk", "aten.sort", "aten.kthvalue", "aten.median.dim")
def ranked(t: GraphBuilder, x: Value, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
    """Positions along one axis are compared. Sorted, the values do not tell in which order they stood; places do."""
    at = 1 if t.op.startswith(("aten.topk", "aten.kthvalue")) else 0
    dim = kwargs.get("dim", args[at] if len(args) > at else -1)
    in_order = not t.op.startswith("aten.topk") or kwargs.get("sorted", args[3] if len(args) > 3 else True)
    if 1 not in t.unread or not in_order:
        return _ranked(t, x, dim, PINNED, 0), _ranked(t, x, dim, PINNED, 1)
    return _ranked(t, x, dim, t.labels(x)[dim], 0), t.fixed(t.shape, floating=False)


@rule("aten.argsort", "aten.argmax", "aten.argmin")
def places(t: GraphBuilder, x: Value, *args: Any, **kwargs: Any) -> Value:
    dim = kwargs.get("dim", args[0] if args else -1 if t.op.startswith("aten.argsort") else None)
    if dim is None:
        return t.joint([(x, [PINNED] * x.ndim)], [PINNED] * len(t.shape))
    return _ranked(t, x, dim, PINNED, 1)


def _ranked(t: GraphBuilder, x: Value, dim: int, compared: Label, result: int) -> Value:
    """Values (result 0), which scale with the input, or places (1), which a positive scale does not change."""
    own, out = t.pinned(x, [dim]), t.pinned(x, [dim])
    own[dim] = compared
    if len(t.shape) < x.ndim:
        del out[dim]
    scales = ScaleRule(({0: 1, 1: -1},) if result == 0 else ({1: 1},), ({0: 1}, {1: 1}))
    rules = {label: scales for label in out if label is not PINNED}
    return t.joint([(x, own)], out, t.shape, mixes=[compared] if compared is not PINNED else (), rules=rules)


# -- Writing at places given by a table, as graph networks do with messages --------------------------------------------


@rule("aten.index_add")
def index_add(t: GraphBuilder, x: Value, dim: int, index: Value, source: Value, **_: Any) -> Value:
    _pin_table(t, index)
    labels = t.pinned(x, [dim])
    return t.multilinear([[(x, labels)], [(source, labels)]], labels)


@rule("aten.scatter.src", "aten.scatter_.src", "aten.scatter_add")
def scatter(t: GraphBuilder, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _scatter(t, x, dim, index, source, positive=False)


@rule("aten.scatter_reduce.two", "aten.scatter_reduce_.two")
def scatter_reduce(t: GraphBuilder, x: Value, dim: int, index: Value, source: Value, reduce: str, **_: Any) -> Value:
    if reduce == "prod":
        raise ValueError("products of a number of rows that differs from place to place")
    return _scatter(t, x, dim, index, source, positive=reduce in ("amax", "amin"))


def _scatter(t: GraphBuilder, x: Value, dim: int, index: Value, source: Value, positive: bool) -> Value:
    """Old and new entries carry the same scale; extrema pass positive ones only."""
    whole = [len({v.shape[d] for v in (x, index, source)}) == 1 and d != dim % x.ndim for d in range(x.ndim)]
    labels: list[Label] = [label if whole[d] else PINNED for d, label in enumerate(t.labels(x))]
    real = ({0: 1, 3: -1}, {2: 1, 3: -1}, {1: 1})
    scales = ScaleRule(real, ({0: 1}, {1: 1}, {2: 1}, {3: 1}) if positive else real)
    return t.joint([(v, labels) for v in (x, index, source)], labels, rules=scales)
