"""Rules for distances and angles between rows: cdist, pairwise_distance, cosine_similarity.

All of them treat features alike, so any order that both sides share passes. No scale does: stretching one feature
changes how far apart two rows are.
"""

from __future__ import annotations

from intertwine.graph.registry import rule
from intertwine.graph.rules.elementwise import spread
from intertwine.graph.rules.linear import matmul_labels
from intertwine.graph.tape import Label, Law, Tape, Value

#: Along the features of two operands: no scales, and a sign only where both sides carry it.
_COMMON_SIGNS = Law(({0: 1}, {1: 1}), ({0: 1, 1: 1},))


@rule("aten.cdist")
def cdist(t: Tape, x: Value, y: Value, p: float = 2.0, *_: object) -> Value:
    """Every row of x with every row of y, as in x @ y.mT."""
    of_x, of_y, out = matmul_labels(x.shape, (*y.shape[:-2], y.shape[-1], y.shape[-2]))
    operands = [(x, of_x), (y, [*of_y[:-2], "column", "inner"])]
    return t.joint(operands, out, mixes=["inner"], laws={"inner": _COMMON_SIGNS})


@rule("aten.cosine_similarity")
def cosine_similarity(t: Tape, x: Value, y: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    return _row_by_row(t, x, y, dim, _COMMON_SIGNS)


@rule("aten.pairwise_distance")
def pairwise_distance(t: Tape, x: Value, y: Value, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Value:
    """|x − y + eps|: the eps is added to every feature, so no sign passes unless it is zero."""
    return _row_by_row(t, x, y, -1, None if eps else _COMMON_SIGNS)


def _row_by_row(t: Tape, x: Value, y: Value, dim: int, law: Law | None) -> Value:
    """Rows of one with rows of the other, broadcast; the features `dim` are gone from the result, or of size 1."""
    ndim = max(x.ndim, y.ndim)
    shape = tuple(max(sizes) for sizes in zip(_padded(x, ndim), _padded(y, ndim), strict=True))
    features: Label = ("lead", dim % ndim)
    keeps = len(t.shape) == ndim
    labels: list[Label] = [("lead", i) for i in range(ndim)]
    out = [("gone", 0) if label == features else label for label in labels if keeps or label != features]
    operands = [(x, spread(t, x, shape)), (y, spread(t, y, shape))]
    return t.joint(operands, out, mixes=[features], laws={features: law} if law else None)


def _padded(x: Value, ndim: int) -> tuple[int, ...]:
    return (*(1,) * (ndim - x.ndim), *x.shape)
