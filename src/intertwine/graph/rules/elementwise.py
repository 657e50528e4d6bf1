"""Rules for elementwise ops: every pointwise op has one, whether it is named here or not.

One tensor: the function itself is handed on, and its intertwiner group decides which scales and signs pass. Several
tensors: sums, products and quotients are multilinear; selections and extrema pass what they can; anything else passes
permutations and stops scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from intertwine.graph.builder import GraphBuilder, rule
from intertwine.graph.constraints import Label, ScaleRule, Value


def spread(t: GraphBuilder, x: Value | None, shape: tuple[int, ...] | None = None) -> list[Label | None]:
    """Labels of `x` in a broadcast against the result: no label where a single entry is spread over many."""
    if x is None:
        return []
    shape = t.shape if shape is None else shape
    shift = len(shape) - x.ndim
    return [None if n == 1 and shape[shift + i] != 1 else ("lead", shift + i) for i, n in enumerate(x.shape)]


def out_labels(t: GraphBuilder) -> list[Label]:
    return [("lead", i) for i in range(len(t.shape))]


def generic_pointwise(t: GraphBuilder, *args: Any, **kwargs: Any) -> Value:
    """The rule for a pointwise op without one of its own."""
    tensors = list(_tensors((args, kwargs)))
    assert t.call is not None
    if len(tensors) == 1 and tensors[0].shape == t.shape and tensors[0].floating:
        return t.pointwise(_of_one_tensor(t.call.target, args, kwargs), tensors[0], _key(t.call.op, args, kwargs))
    return t.joint([(x, spread(t, x)) for x in tensors], out_labels(t))


def _of_one_tensor(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(v: torch.Tensor) -> torch.Tensor:
        # an in-place op must not see the caller's tensor
        def put(a: Any) -> Any:
            return v.clone() if isinstance(a, Value) else a

        return target(*map(put, args), **{k: put(a) for k, a in kwargs.items()})

    return fn


def _key(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return (
        f"{op}{tuple('x' if isinstance(a, Value) else a for a in args)}{sorted((k, str(a)) for k, a in kwargs.items())}"
    )


def _tensors(value: Any) -> Iterator[Value]:
    if isinstance(value, Value):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@rule(
    "aten.relu", "aten.relu6", "aten.leaky_relu", "aten.elu", "aten.celu", "aten.selu", "aten.gelu", "aten.silu",
    "aten.mish", "aten.softplus", "aten.hardtanh", "aten.hardswish", "aten.hardsigmoid", "aten.log_sigmoid",
    "aten.softshrink", "aten.hardshrink", "aten.threshold", "aten.logit", "aten.sigmoid", "aten.tanh", "aten.rrelu",
)  # fmt: skip
def named_activation(t: GraphBuilder, *args: Any, **kwargs: Any) -> Value:
    """Activations that some releases of torch do not mark as pointwise, or not in their in-place spelling."""
    return generic_pointwise(t, *args, **kwargs)


@rule(
    "aten.add.Tensor",
    "aten.sub.Tensor",
    "aten.add_.Tensor",
    "aten.sub_.Tensor",
    "aten.__iadd__",
    "aten.__isub__",
    "aten.rsub.Tensor",
)
def add(t: GraphBuilder, a: Value, b: Any, alpha: float = 1) -> Value:
    if not isinstance(b, Value) or not isinstance(a, Value):
        return generic_pointwise(t, a, b)
    return t.multilinear([[(a, spread(t, a))], [(b, spread(t, b))]], out_labels(t))


@rule("aten.mul.Tensor", "aten.mul_.Tensor", "aten.__imul__")
def mul(t: GraphBuilder, a: Value, b: Any) -> Value:
    if not isinstance(b, Value) or not isinstance(a, Value):
        return generic_pointwise(t, a, b)
    return t.multilinear([[(a, spread(t, a)), (b, spread(t, b))]], out_labels(t))


@rule("aten.div.Tensor", "aten.div_.Tensor")
def div(t: GraphBuilder, a: Value, b: Any) -> Value:
    if not isinstance(b, Value) or not isinstance(a, Value):
        return generic_pointwise(t, a, b)
    return t.multilinear([[(a, spread(t, a)), (b, spread(t, b), -1)]], out_labels(t))


@rule("aten.addcmul")
def addcmul(t: GraphBuilder, x: Value, a: Value, b: Value, value: float = 1) -> Value:
    return t.multilinear([[(x, spread(t, x))], [(a, spread(t, a)), (b, spread(t, b))]], out_labels(t))


@rule("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(t: GraphBuilder, condition: Value, a: Any, b: Any) -> Value:
    return _choose(t, condition, a, b)


@rule("aten.masked_fill", "aten.masked_fill_")
def masked_fill(t: GraphBuilder, x: Value, mask: Value, value: Any) -> Value:
    return _choose(t, mask, x, value)


def _choose(t: GraphBuilder, condition: Value, *choices: Any) -> Value:
    """Entries of one tensor or another: scales and signs pass where all choices carry the same, zero passes always."""
    tensors = [x for x in choices if isinstance(x, Value)]
    constant = any(not isinstance(x, Value) and x != 0 and x not in (float("inf"), float("-inf")) for x in choices)
    infinite = any(not isinstance(x, Value) and x in (float("inf"), float("-inf")) for x in choices)
    operands = [(condition, spread(t, condition)), *((x, spread(t, x)) for x in tensors)]
    last = len(operands)
    laws = {}
    for label in out_labels(t):
        real: list[dict[int, int]] = [
            {i: 1, last: -1} if label in operands[i][1] else {last: 1} for i in range(1, last)
        ]
        real += [{0: 1}] + ([{last: 1}] if constant else [])
        laws[label] = ScaleRule(tuple(real), tuple(real) + (({last: 1},) if infinite else ()))
    return t.joint(operands, out_labels(t), rules=laws)


@rule("aten.maximum", "aten.minimum", "aten.max.other", "aten.min.other", "aten.fmax", "aten.fmin")
def extremum(t: GraphBuilder, a: Value, b: Value) -> Value:
    operands = [(a, spread(t, a)), (b, spread(t, b))]
    laws = {}
    for label in out_labels(t):
        real = tuple({i: 1, 2: -1} if label in operands[i][1] else {2: 1} for i in range(2))
        laws[label] = ScaleRule(real, ({0: 1}, {1: 1}, {2: 1}))
    return t.joint(operands, out_labels(t), rules=laws)


@rule("aten.prelu", "aten._prelu_kernel")
def prelu(t: GraphBuilder, x: Value, weight: Value) -> Value:
    channel = 1 if x.ndim > 1 else 0
    labels = out_labels(t)
    own: list[Label | None] = [labels[channel] if weight.shape[0] == x.shape[channel] and weight.shape[0] > 1 else None]
    if weight.ndim > 1:
        own = spread(t, weight)
    laws = {label: ScaleRule(({0: 1, 2: -1}, {1: 1}), ({0: 1}, {1: 1}, {2: 1})) for label in labels}
    return t.joint([(x, labels), (weight, own)], labels, rules=laws)


@rule("aten.glu")
def glu(t: GraphBuilder, x: Value, dim: int = -1) -> Value:
    dim %= x.ndim
    half = x.shape[dim] // 2
    value, gate = t.narrow(x, dim, 0, half), t.narrow(x, dim, half, half)
    gate = t.pointwise(torch.sigmoid, gate, "sigmoid")
    labels = out_labels(t)
    return t.multilinear([[(value, labels), (gate, labels)]], labels)
