"""Rules for reductions: sums, extrema, norms, softmax, pooling and resizing, distances between rows, losses of a
difference.

Reduced positions are all treated alike, so permutations pass; what scale survives along the other axes is the degree of
the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intertwine.graph.builder import PINNED, GraphBuilder, rule
from intertwine.graph.constraints import Label, Length, ScaleRule, Value
from intertwine.graph.rules.linear import matmul_labels

Dims = int | Sequence[int] | None

_NOTHING = ScaleRule(({0: 1},), ({0: 1},))
_POSITIVE = ScaleRule(({0: 1, 1: -1},), ({0: 1}, {1: 1}))
#: Along the features of two operands: no scales, and a sign only where both sides carry it.
_COMMON_SIGNS = ScaleRule(({0: 1}, {1: 1}), ({0: 1, 1: 1},))


# -- Sums, means, extrema, norms, variances, softmax ------------------------------------------------------------------


def _reduced(t: GraphBuilder, x: Value, dim: Dims) -> tuple[list[int], list[Label]]:
    """The reduced axes of `x` and the labels of the result, in which they are gone or of size 1."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        dims = list(range(x.ndim))
    else:
        dims = [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    keeps = len(t.shape) == x.ndim
    labels = enumerate(t.labels(x))
    return dims, [("gone", d) if d in dims else label for d, label in labels if keeps or d not in dims]


def _reduce(
    t: GraphBuilder, x: Value, dim: Dims, outside: ScaleRule, inside: ScaleRule = _NOTHING, euclidean: bool = False
) -> Value:
    """A symmetric reduction: one rule along the axes that stay, another along those that are reduced."""
    dims, out = _reduced(t, x, dim)
    labels = t.labels(x)
    rules = {label: inside if d in dims else outside for d, label in enumerate(labels)}
    length = Length(labels[dims[0]]) if euclidean and len(dims) == 1 else None
    return t.joint([(x, labels)], out, mixes=[labels[d] for d in dims], rules=rules, length=length)


@rule("aten.sum", "aten.mean")
def total(t: GraphBuilder, x: Value, dim: Dims = None, keepdim: bool = False, **_: Any) -> Value:
    return t.linear(x, t.labels(x), _reduced(t, x, dim)[1])


@rule("aten.amax", "aten.amin", "aten.max.default", "aten.min.default")
def extremum_along(t: GraphBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return _reduce(t, x, dim, _POSITIVE)


@rule("aten.aminmax")
def both_extrema(t: GraphBuilder, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    return extremum_along(t, x, dim), extremum_along(t, x, dim)


@rule("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim")
def vector_norm(
    t: GraphBuilder, x: Value, order: int | float | None = 2, dim: Dims = None, *_: Any, **__: Any
) -> Value:
    # the norm of order 0 counts entries, so it does not depend on their sizes
    outside = ScaleRule(({1: 1},), ({1: 1},)) if order == 0 else ScaleRule(({0: 1, 1: -1},), ({1: 1},))
    return _reduce(t, x, dim, outside, ScaleRule(({0: 1},), ()), euclidean=order in (2, None))


@rule("aten.frobenius_norm.dim")
def frobenius_norm(t: GraphBuilder, x: Value, dim: Dims, *_: Any) -> Value:
    return vector_norm(t, x, 2, dim)


@rule("aten.var", "aten.std")
def variance(t: GraphBuilder, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    degree = 2 if ".var" in t.op else 1
    return _reduce(t, x, None if isinstance(dim, bool) else dim, ScaleRule(({0: degree, 1: -1},), ({1: 1},)))


@rule("aten.var_mean", "aten.std_mean")
def variance_and_mean(t: GraphBuilder, x: Value, dim: Any = None, *_: Any, **__: Any) -> tuple[Value, Value]:
    linear = ScaleRule(({0: 1, 1: -1},), ({0: 1, 1: 1},))
    return variance(t, x, dim), _reduce(t, x, None if isinstance(dim, bool) else dim, linear)


@rule("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten.softmin", "aten.special_softmax")
def softmax(t: GraphBuilder, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    return t.joint([(x, t.out)], t.out, mixes=[t.out[dim % x.ndim]])


@rule("aten.logsumexp", "aten.prod", "aten.any", "aten.all", "aten.nansum", "aten.count_nonzero")
def other_reduction(t: GraphBuilder, x: Value, dim: Dims = None, *_: Any, **__: Any) -> Value:
    return _reduce(t, x, dim, ScaleRule(({0: 1}, {1: 1}), ({0: 1}, {1: 1})))


# -- Pooling and resizing: averages and interpolations are linear, maxima pass positive scales only --------------------


def _spatial(t: GraphBuilder, x: Value) -> list[Label]:
    """Labels of a tensor whose last axes (1, 2 or 3, by the name of the op) are positions in space."""
    space = next(n for n in (1, 2, 3) if f"{n}d" in t.op)
    return [*t.labels(x, space), *[PINNED] * space]


@rule(
    "aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", "aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d",
    "aten.adaptive_avg_pool3d", "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d", "aten.upsample_nearest1d",
    "aten.upsample_nearest2d", "aten.upsample_nearest3d", "aten._upsample_nearest_exact2d", "aten.upsample_bilinear2d",
    "aten.upsample_bicubic2d", "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa", "aten.upsample_linear1d",
    "aten.upsample_trilinear3d",
)  # fmt: skip
def average(t: GraphBuilder, x: Value, *_: Any, **__: Any) -> Value:
    return t.linear(x, _spatial(t, x), _spatial(t, x))


@rule("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d")
def maximum(t: GraphBuilder, x: Value, *_: Any, **__: Any) -> Value:
    return t.joint([(x, _spatial(t, x))], _spatial(t, x), rules=_POSITIVE)


@rule(
    "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", "aten.max_pool1d_with_indices",
    "aten.adaptive_max_pool2d", "aten.adaptive_max_pool1d", "aten.adaptive_max_pool3d",
)  # fmt: skip
def maximum_and_place(t: GraphBuilder, x: Value, *_: Any, **__: Any) -> tuple[Value, Value]:
    labels = _spatial(t, x)
    places = ScaleRule(({1: 1},), ({0: 1}, {1: 1}))  # a positive scale does not change where the maximum lies
    return maximum(t, x), t.joint([(x, labels)], labels, rules=places)


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sample(t: GraphBuilder, x: Value, grid: Value, *_: Any) -> Value:
    space = [PINNED] * (x.ndim - 2)
    labels: list[Label] = ["batch", "channel", *space]
    scales = {"channel": ScaleRule(({0: 1, 2: -1},), ({0: 1, 2: 1},))}
    return t.joint([(x, labels), (grid, ["batch", *space, PINNED])], labels, rules=scales)


# -- Distances and angles between rows: any common order of the features passes, no scale does -------------------------


@rule("aten.cdist")
def cdist(t: GraphBuilder, x: Value, y: Value, p: float = 2.0, *_: object) -> Value:
    """Every row of x with every row of y, as in x @ y.mT."""
    of_x, of_y, out = matmul_labels(x.shape, (*y.shape[:-2], y.shape[-1], y.shape[-2]))
    operands = [(x, of_x), (y, [*of_y[:-2], "column", "inner"])]
    return t.joint(operands, out, mixes=["inner"], rules={"inner": _COMMON_SIGNS})


@rule("aten.cosine_similarity")
def cosine_similarity(t: GraphBuilder, x: Value, y: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    return _row_by_row(t, x, y, dim, _COMMON_SIGNS)


@rule("aten.pairwise_distance")
def pairwise_distance(
    t: GraphBuilder, x: Value, y: Value, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Value:
    """|x − y + eps|: the eps is added to every feature, so no sign passes unless it is zero."""
    return _row_by_row(t, x, y, -1, None if eps else _COMMON_SIGNS)


def _row_by_row(t: GraphBuilder, x: Value, y: Value, dim: int, inside: ScaleRule | None) -> Value:
    """Rows of one with rows of the other, broadcast; the features `dim` are gone from the result, or of size 1."""
    shape = tuple(torch.broadcast_shapes(x.shape, y.shape))
    labels: list[Label] = [("lead", i) for i in range(len(shape))]
    features = labels[dim]
    keeps = len(t.shape) == len(shape)
    out = [("gone", 0) if label == features else label for label in labels if keeps or label != features]
    operands = [(x, t.spread(x, shape)), (y, t.spread(y, shape))]
    return t.joint(operands, out, mixes=[features], rules={features: inside} if inside else None)


@rule("aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss")
def difference_loss(
    t: GraphBuilder, x: Value, y: Value, reduction: int = 1, *bend: int | float, **named: int | float
) -> Value:
    """An elementwise function of x − y, added up or averaged unless `reduction` is 0."""
    assert t.call is not None
    loss = t.call.target
    shape = tuple(torch.broadcast_shapes(x.shape, y.shape))
    labels: list[Label] = [("lead", i) for i in range(len(shape))]
    gap = t.multilinear([[(x, t.spread(x, shape))], [(y, t.spread(y, shape))]], labels, shape)
    each = t.pointwise(lambda v: loss(v, torch.zeros_like(v), 0, *bend, **named), gap, f"{t.op}{bend}{named}")
    return each if reduction == 0 else t.linear(each, labels, [])
