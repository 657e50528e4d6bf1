"""Rules for reductions: sums, means, extrema, norms, variances, softmax.

All of these treat the reduced positions alike, so permutations pass; what scale survives along the other axes is the
degree of the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intertwine.graph.registry import rule
from intertwine.graph.rules.elementwise import out_labels
from intertwine.graph.tape import Label, Law, Length, Tape, Value

Dims = int | Sequence[int] | None


def _dims(x: Value, dim: Dims) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    return [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]


def _reduced(t: Tape, x: Value, dims: Sequence[int], shape: tuple[int, ...]) -> tuple[list[Label], list[Label], bool]:
    """Labels of the input and of the result, and whether the result keeps the reduced axes at size 1."""
    labels = t.labels(x)
    keep = len(shape) == x.ndim
    return labels, [label for d, label in enumerate(labels) if keep or d not in dims], keep


def _reduce(t: Tape, x: Value, dims: Sequence[int], law: Law, inside: Law, euclidean: bool = False) -> Value:
    """A symmetric reduction: `law` along the axes that stay, `inside` along those that are reduced."""
    labels, out, keep = _reduced(t, x, dims, t.shape)
    out = [("gone", d) if keep and d in dims else label for d, label in enumerate(out)] if keep else out
    mixes = [labels[d] for d in dims]
    laws = {label: inside if d in dims else law for d, label in enumerate(labels)}
    length = Length(labels[dims[0]]) if euclidean and len(dims) == 1 else None
    return t.joint([(x, labels)], out, mixes=mixes, laws=laws, length=length)


@rule("aten.sum", "aten.mean")
def total(t: Tape, x: Value, dim: Dims = None, keepdim: bool = False, **_: Any) -> Value:
    dims = _dims(x, dim)
    labels, out, keep = _reduced(t, x, dims, t.shape)
    out = [("gone", d) if keep and d in dims else label for d, label in enumerate(out)] if keep else out
    return t.multilinear([[(x, labels)]], out)


_DEGREE_ONE_POSITIVE = Law(({0: 1, 1: -1},), ({0: 1}, {1: 1}))
_NOTHING = Law(({0: 1},), ({0: 1},))
_SIGN_BLIND_INSIDE = Law(({0: 1},), ())


@rule("aten.amax", "aten.amin")
def extremum_along(t: Tape, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return _reduce(t, x, _dims(x, dim), _DEGREE_ONE_POSITIVE, _NOTHING)


@rule("aten.max.default", "aten.min.default")
def extremum_of_all(t: Tape, x: Value) -> Value:
    return _reduce(t, x, range(x.ndim), _DEGREE_ONE_POSITIVE, _NOTHING)


@rule("aten.aminmax")
def both_extrema(t: Tape, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    return extremum_along(t, x, dim), extremum_along(t, x, dim)


@rule("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim")
def vector_norm(t: Tape, x: Value, order: int | float | None = 2, dim: Dims = None, *_: Any, **__: Any) -> Value:
    # the norm of order 0 counts entries, which does not care for their sizes
    law = Law(({1: 1},), ({1: 1},)) if order == 0 else Law(({0: 1, 1: -1},), ({1: 1},))
    return _reduce(t, x, _dims(x, dim), law, _SIGN_BLIND_INSIDE, euclidean=order in (2, None))


@rule("aten.frobenius_norm.dim")
def frobenius_norm(t: Tape, x: Value, dim: Dims, *_: Any) -> Value:
    return vector_norm(t, x, 2, dim)


@rule("aten.var", "aten.std")
def variance(t: Tape, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    assert t.call is not None
    degree = 2 if ".var" in t.call.op else 1
    dims = _dims(x, None if isinstance(dim, bool) else dim)
    return _reduce(t, x, dims, Law(({0: degree, 1: -1},), ({1: 1},)), _NOTHING)


@rule("aten.var_mean", "aten.std_mean")
def variance_and_mean(t: Tape, x: Value, dim: Any = None, *_: Any, **__: Any) -> tuple[Value, Value]:
    assert t.call is not None
    degree = 2 if "var_mean" in t.call.op else 1
    dims = _dims(x, None if isinstance(dim, bool) else dim)
    spread = _reduce(t, x, dims, Law(({0: degree, 1: -1},), ({1: 1},)), _NOTHING)
    return spread, _reduce(t, x, dims, Law(({0: 1, 1: -1},), ({0: 1, 1: 1},)), _NOTHING)


@rule("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten.softmin", "aten.special_softmax")
def softmax(t: Tape, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    labels = out_labels(t)
    return t.joint([(x, labels)], labels, mixes=[labels[dim % x.ndim]])


@rule("aten.logsumexp", "aten.prod", "aten.any", "aten.all", "aten.nansum", "aten.count_nonzero")
def other_reduction(t: Tape, x: Value, dim: Dims = None, *_: Any, **__: Any) -> Value:
    return _reduce(t, x, _dims(x, dim), Law(({0: 1}, {1: 1}), ({0: 1}, {1: 1})), _NOTHING)
