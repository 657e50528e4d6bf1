"""Rules for elementwise ops: every pointwise op has one, whether it is named here or not.

One tensor: the intertwiner group of the function itself decides which scales and signs pass. Several tensors: sums,
products and quotients are multilinear; selections and extrema pass what they can; anything else passes permutations and
stops scales.
"""

from __future__ import annotations

from typing import Any

import torch

from intertwine.graph.builder import GraphBuilder, rule
from intertwine.graph.constraints import Label, ScaleRule, Value, values_in

_INFINITIES = (float("inf"), float("-inf"))


def generic_pointwise(t: GraphBuilder, *args: Any, **kwargs: Any) -> Value:
    """The rule for a pointwise op without one of its own."""
    tensors = values_in((args, kwargs))
    if len(tensors) != 1 or tensors[0].shape != t.shape or not tensors[0].floating:
        return t.joint([(x, t.spread(x)) for x in tensors], t.out)
    assert t.call is not None
    target = t.call.target

    def fn(v: torch.Tensor) -> torch.Tensor:
        def put(a: Any) -> Any:
            return v.clone() if isinstance(a, Value) else a  # an in-place op must not see the caller's tensor

        return target(*map(put, args), **{k: put(a) for k, a in kwargs.items()})

    shown = tuple("x" if isinstance(a, Value) else a for a in args)
    return t.pointwise(fn, tensors[0], f"{t.op}{shown}{sorted((k, str(a)) for k, a in kwargs.items())}")


@rule(
    "aten.relu", "aten.relu6", "aten.leaky_relu", "aten.elu", "aten.celu", "aten.selu", "aten.gelu", "aten.silu",
    "aten.mish", "aten.softplus", "aten.hardtanh", "aten.hardswish", "aten.hardsigmoid", "aten.log_sigmoid",
    "aten.softshrink", "aten.hardshrink", "aten.threshold", "aten.logit", "aten.sigmoid", "aten.tanh", "aten.rrelu",
)  # fmt: skip
def named_activation(t: GraphBuilder, *args: Any, **kwargs: Any) -> Value:
    """Activations that some releases of torch do not mark as pointwise, or not in their in-place spelling."""
    return generic_pointwise(t, *args, **kwargs)


@rule(
    "aten.add.Tensor", "aten.sub.Tensor", "aten.add_.Tensor", "aten.sub_.Tensor", "aten.__iadd__", "aten.__isub__",
    "aten.rsub.Tensor",
)  # fmt: skip
def add(t: GraphBuilder, a: Value, b: Any, alpha: float = 1) -> Value:
    if not isinstance(b, Value) or not isinstance(a, Value):
        return generic_pointwise(t, a, b)
    return t.multilinear([[(a, t.spread(a))], [(b, t.spread(b))]], t.out)


@rule("aten.mul.Tensor", "aten.mul_.Tensor", "aten.__imul__")
def mul(t: GraphBuilder, a: Value, b: Any) -> Value:
    return _product(t, a, b, 1)


@rule("aten.div.Tensor", "aten.div_.Tensor")
def div(t: GraphBuilder, a: Value, b: Any) -> Value:
    return _product(t, a, b, -1)


def _product(t: GraphBuilder, a: Any, b: Any, power: int) -> Value:
    if not isinstance(b, Value) or not isinstance(a, Value):
        return generic_pointwise(t, a, b)
    return t.multilinear([[(a, t.spread(a)), (b, t.spread(b), power)]], t.out)


@rule("aten.addcmul")
def addcmul(t: GraphBuilder, x: Value, a: Value, b: Value, value: float = 1) -> Value:
    return t.multilinear([[(x, t.spread(x))], [(a, t.spread(a)), (b, t.spread(b))]], t.out)


@rule("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(t: GraphBuilder, condition: Value, *choices: Any) -> Value:
    """Entries of one tensor or another: scales and signs pass where all choices carry the same, zero passes always."""
    tensors = [x for x in choices if isinstance(x, Value)]
    numbers = [x for x in choices if not isinstance(x, Value)]
    constant = any(x != 0 and x not in _INFINITIES for x in numbers)
    infinite = any(x in _INFINITIES for x in numbers)
    operands = [(condition, t.spread(condition)), *((x, t.spread(x)) for x in tensors)]
    last = len(operands)
    rules = {}
    for label in t.out:
        real = [{i: 1, last: -1} if label in operands[i][1] else {last: 1} for i in range(1, last)]
        real += [{0: 1}] + ([{last: 1}] if constant else [])
        rules[label] = ScaleRule(tuple(real), tuple(real) + (({last: 1},) if infinite else ()))
    return t.joint(operands, t.out, rules=rules)


@rule("aten.masked_fill", "aten.masked_fill_")
def masked_fill(t: GraphBuilder, x: Value, mask: Value, value: Any) -> Value:
    return where(t, mask, x, value)


@rule("aten.maximum", "aten.minimum", "aten.max.other", "aten.min.other", "aten.fmax", "aten.fmin")
def extremum(t: GraphBuilder, a: Value, b: Value) -> Value:
    operands = [(a, t.spread(a)), (b, t.spread(b))]
    rules = {}
    for label in t.out:
        real = tuple({i: 1, 2: -1} if label in operands[i][1] else {2: 1} for i in range(2))
        rules[label] = ScaleRule(real, ({0: 1}, {1: 1}, {2: 1}))
    return t.joint(operands, t.out, rules=rules)


@rule("aten.prelu", "aten._prelu_kernel")
def prelu(t: GraphBuilder, x: Value, weight: Value) -> Value:
    channel = 1 if x.ndim > 1 else 0
    own: list[Label | None] = [t.out[channel] if weight.shape[0] == x.shape[channel] > 1 else None]
    if weight.ndim > 1:
        own = t.spread(weight)
    positive = ScaleRule(({0: 1, 2: -1}, {1: 1}), ({0: 1}, {1: 1}, {2: 1}))
    return t.joint([(x, t.out), (weight, own)], t.out, rules=positive)


@rule("aten.glu")
def glu(t: GraphBuilder, x: Value, dim: int = -1) -> Value:
    dim %= x.ndim
    half = x.shape[dim] // 2
    value, gate = t.narrow(x, dim, 0, half), t.narrow(x, dim, half, half)
    return t.multilinear([[(value, t.out), (t.pointwise(torch.sigmoid, gate, "sigmoid"), t.out)]], t.out)
