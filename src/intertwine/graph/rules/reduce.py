"""Rules for reductions: sums, extrema, norms, softmax, pooling and resizing, distances between rows, losses of a
difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intertwine.graph.builder import PINNED, GraphBuilder, rule
from intertwine.graph.constraints import Label, Length, ScaleRule, Value
from intertwine.graph.rules.elementwise import out_labels, spread
from intertwine.graph.rules.linear import matmul_labels

# ----------------------------------------------------------------------------------------------------
# Rules for reductions: sums, means, extrema, norms, variances, softmax.
#
# All of these treat the reduced positions alike, so permutations pass; what scale survives along the other axes is the
# degree of the reduction.


Dims = int | Sequence[int] | None


def _dims(x: Value, dim: Dims) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    return [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]


def _reduced(
    t: GraphBuilder, x: Value, dims: Sequence[int], shape: tuple[int, ...]
) -> tuple[list[Label], list[Label], bool]:
    """Labels of the input and of the result, and whether the result keeps the reduced axes at size 1."""
    labels = t.labels(x)
    keep = len(shape) == x.ndim
    return labels, [label for d, label in enumerate(labels) if keep or d not in dims], keep


def _reduce(
    t: GraphBuilder, x: Value, dims: Sequence[int], law: ScaleRule, inside: ScaleRule, euclidean: bool = False
) -> Value:
    """A symmetric reduction: `law` along the axes that stay, `inside` along those that are reduced."""
    labels, out, keep = _reduced(t, x, dims, t.shape)
    out = [("gone", d) if keep and d in dims else label for d, label in enumerate(out)] if keep else out
    mixes = [labels[d] for d in dims]
    laws = {label: inside if d in dims else law for d, label in enumerate(labels)}
    length = Length(labels[dims[0]]) if euclidean and len(dims) == 1 else None
    return t.joint([(x, labels)], out, mixes=mixes, rules=laws, length=length)


@rule("aten.sum", "aten.mean")
def total(t: GraphBuilder, x: Value, dim: Dims = None, keepdim: bool = False, **_: Any) -> Value:
    dims = _dims(x, dim)
    labels, out, keep = _reduced(t, x, dims, t.shape)
    out = [("gone", d) if keep and d in dims else label for d, label in enumerate(out)] if keep else out
    return t.multilinear([[(x, labels)]], out)


_DEGREE_ONE_POSITIVE = ScaleRule(({0: 1, 1: -1},), ({0: 1}, {1: 1}))
_NOTHING = ScaleRule(({0: 1},), ({0: 1},))
_SIGN_BLIND_INSIDE = ScaleRule(({0: 1},), ())


@rule("aten.amax", "aten.amin")
def extremum_along(t: GraphBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return _reduce(t, x, _dims(x, dim), _DEGREE_ONE_POSITIVE, _NOTHING)


@rule("aten.max.default", "aten.min.default")
def extremum_of_all(t: GraphBuilder, x: Value) -> Value:
    return _reduce(t, x, range(x.ndim), _DEGREE_ONE_POSITIVE, _NOTHING)


@rule("aten.aminmax")
def both_extrema(t: GraphBuilder, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    return extremum_along(t, x, dim), extremum_along(t, x, dim)


@rule("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim")
def vector_norm(
    t: GraphBuilder, x: Value, order: int | float | None = 2, dim: Dims = None, *_: Any, **__: Any
) -> Value:
    # the norm of order 0 counts entries, which does not care for their sizes
    law = ScaleRule(({1: 1},), ({1: 1},)) if order == 0 else ScaleRule(({0: 1, 1: -1},), ({1: 1},))
    return _reduce(t, x, _dims(x, dim), law, _SIGN_BLIND_INSIDE, euclidean=order in (2, None))


@rule("aten.frobenius_norm.dim")
def frobenius_norm(t: GraphBuilder, x: Value, dim: Dims, *_: Any) -> Value:
    return vector_norm(t, x, 2, dim)


@rule("aten.var", "aten.std")
def variance(t: GraphBuilder, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    assert t.call is not None
    degree = 2 if ".var" in t.call.op else 1
    dims = _dims(x, None if isinstance(dim, bool) else dim)
    return _reduce(t, x, dims, ScaleRule(({0: degree, 1: -1},), ({1: 1},)), _NOTHING)


@rule("aten.var_mean", "aten.std_mean")
def variance_and_mean(t: GraphBuilder, x: Value, dim: Any = None, *_: Any, **__: Any) -> tuple[Value, Value]:
    assert t.call is not None
    degree = 2 if "var_mean" in t.call.op else 1
    dims = _dims(x, None if isinstance(dim, bool) else dim)
    spread = _reduce(t, x, dims, ScaleRule(({0: degree, 1: -1},), ({1: 1},)), _NOTHING)
    return spread, _reduce(t, x, dims, ScaleRule(({0: 1, 1: -1},), ({0: 1, 1: 1},)), _NOTHING)


@rule("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten.softmin", "aten.special_softmax")
def softmax(t: GraphBuilder, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    labels = out_labels(t)
    return t.joint([(x, labels)], labels, mixes=[labels[dim % x.ndim]])


@rule("aten.logsumexp", "aten.prod", "aten.any", "aten.all", "aten.nansum", "aten.count_nonzero")
def other_reduction(t: GraphBuilder, x: Value, dim: Dims = None, *_: Any, **__: Any) -> Value:
    return _reduce(t, x, _dims(x, dim), ScaleRule(({0: 1}, {1: 1}), ({0: 1}, {1: 1})), _NOTHING)


# ----------------------------------------------------------------------------------------------------
# Rules for pooling and resizing: they work on spatial axes, channel by channel.
#
# Averages and interpolations are linear, so everything on the channels passes; maxima pass positive scales only.


def _spatial(x: Value, space: int) -> list[Label]:
    return [*(("lead", i) for i in range(x.ndim - space)), *[PINNED] * space]


def _space(t: GraphBuilder) -> int:
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
def average(t: GraphBuilder, x: Value, *_: Any, **__: Any) -> Value:
    labels = _spatial(x, _space(t))
    return t.multilinear([[(x, labels)]], labels)


@rule("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d")
def maximum(t: GraphBuilder, x: Value, *_: Any, **__: Any) -> Value:
    return _maximum(t, x)


@rule(
    "aten.max_pool2d_with_indices",
    "aten.max_pool3d_with_indices",
    "aten.max_pool1d_with_indices",
    "aten.adaptive_max_pool2d",
    "aten.adaptive_max_pool1d",
    "aten.adaptive_max_pool3d",
)
def maximum_and_place(t: GraphBuilder, x: Value, *_: Any, **__: Any) -> tuple[Value, Value]:
    labels = _spatial(x, _space(t))
    places = ScaleRule(({1: 1},), ({0: 1}, {1: 1}))  # where the maximum lies does not care for a positive scale
    return _maximum(t, x), t.joint(
        [(x, labels)], labels, rules={label: places for label in labels if label is not PINNED}
    )


def _maximum(t: GraphBuilder, x: Value) -> Value:
    labels = _spatial(x, _space(t))
    law = ScaleRule(({0: 1, 1: -1},), ({0: 1}, {1: 1}))
    return t.joint([(x, labels)], labels, rules={label: law for label in labels if label is not PINNED})


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sample(t: GraphBuilder, x: Value, grid: Value, *_: Any) -> Value:
    space = x.ndim - 2
    batch: list[Label] = ["batch"]
    where = [*batch, *[PINNED] * (space + 1)]
    return t.joint(
        [(x, [*batch, "channel", *[PINNED] * space]), (grid, where)],
        [*batch, "channel", *[PINNED] * space],
        rules={"channel": ScaleRule(({0: 1, 2: -1},), ({0: 1, 2: 1},))},
    )


# ----------------------------------------------------------------------------------------------------
# Rules for distances and angles between rows: cdist, pairwise_distance, cosine_similarity.
#
# All of them treat features alike, so any order that both sides share passes. No scale does: stretching one feature
# changes how far apart two rows are.


#: Along the features of two operands: no scales, and a sign only where both sides carry it.
_COMMON_SIGNS = ScaleRule(({0: 1}, {1: 1}), ({0: 1, 1: 1},))


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


def _row_by_row(t: GraphBuilder, x: Value, y: Value, dim: int, law: ScaleRule | None) -> Value:
    """Rows of one with rows of the other, broadcast; the features `dim` are gone from the result, or of size 1."""
    ndim = max(x.ndim, y.ndim)
    shape = tuple(max(sizes) for sizes in zip(_padded(x, ndim), _padded(y, ndim), strict=True))
    features: Label = ("lead", dim % ndim)
    keeps = len(t.shape) == ndim
    labels: list[Label] = [("lead", i) for i in range(ndim)]
    out = [("gone", 0) if label == features else label for label in labels if keeps or label != features]
    operands = [(x, spread(t, x, shape)), (y, spread(t, y, shape))]
    return t.joint(operands, out, mixes=[features], rules={features: law} if law else None)


def _padded(x: Value, ndim: int) -> tuple[int, ...]:
    return (*(1,) * (ndim - x.ndim), *x.shape)


# ----------------------------------------------------------------------------------------------------
# Rules for losses of a difference: mse_loss, smooth_l1_loss, huber_loss.
#
# Each is an elementwise function of x − y, added up or averaged unless it is asked not to be.


@rule("aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss")
def difference_loss(
    t: GraphBuilder, x: Value, y: Value, reduction: int = 1, *bend: int | float, **named: int | float
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
