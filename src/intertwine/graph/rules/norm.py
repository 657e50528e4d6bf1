"""Rules for normalisations: batch, layer, group, instance and RMS norm, and weight norm.

A normalisation divides its input's scale out; what scale its output carries is the scale of its own weight and bias.
Because of eps that is exact only where the statistics are stored (batch norm in evaluation mode), so elsewhere the
input may not be scaled at all; signs pass wherever the mean of the axis itself is not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intertwine.graph.builder import GraphBuilder, rule
from intertwine.graph.constraints import Label, Length, ScaleRule, Value

Named = dict[str, int]  # an equation: name of an operand → coefficient
_AFFINE: list[Named] = [{"x": 1}, {"out": 1, "weight": -1}, {"bias": 1, "out": -1}]
_SIGNS: list[Named] = [{"out": 1, "x": 1, "weight": 1}, {"bias": 1, "out": 1}]


def _scale_rule(real: Sequence[Named], sign: Sequence[Named], operands: dict[str, Value | None]) -> ScaleRule:
    """Equations by name → by position; an absent operand has no scale, an equation that begins with one is dropped."""
    names = [name for name, v in operands.items() if v is not None] + ["out"]

    def numbered(side: Sequence[Named]) -> tuple[dict[int, int], ...]:
        kept = [equation for equation in side if next(iter(equation)) in names]
        return tuple({names.index(name): c for name, c in equation.items() if name in names} for equation in kept)

    return ScaleRule(numbered(real), numbered(sign))


@rule("aten.batch_norm", "aten._native_batch_norm_legit_no_training", "aten.cudnn_batch_norm")
def batch_norm(
    t: GraphBuilder, x: Value, weight: Value | None, bias: Value | None, mean: Value | None, var: Value | None,
    *rest: Any,
) -> Value:  # fmt: skip
    training, _, eps = (*rest[:3], *(False, 0.1, 1e-5)[len(rest) :])
    return _channel_norm(t, x, weight, bias, mean, var, eps, stored=not training and mean is not None)


@rule("aten.instance_norm")
def instance_norm(
    t: GraphBuilder, x: Value, weight: Value | None, bias: Value | None, mean: Value | None, var: Value | None,
    *rest: Any,
) -> Value:  # fmt: skip
    use_input_stats, _, eps = rest[:3]
    return _channel_norm(t, x, weight, bias, mean, var, eps, stored=not use_input_stats)


def _channel_norm(
    t: GraphBuilder, x: Value, weight: Value | None, bias: Value | None, mean: Value | None, var: Value | None,
    eps: float, stored: bool,
) -> Value:  # fmt: skip
    channel = t.out[1]
    given = {"x": x, "weight": weight, "bias": bias, "mean": mean, "var": var}
    variance = t.variance(var, eps)
    real: list[Named] = [{"mean": 1, "x": -1}, {"var": 1, "x": -2}, *_AFFINE[1:]]
    if not stored or variance is None:
        real.append({"x": 1})
    scales = _scale_rule(real, [{"mean": 1, "x": 1}, {"var": 1}, *_SIGNS], given)
    operands = [(v, t.out if name == "x" else [channel]) for name, v in given.items()]
    mixes = () if stored else [label for label in t.out if label != channel]
    return t.joint(operands, t.out, mixes=mixes, rules={channel: scales}, variance=variance)


@rule("aten.layer_norm")
def layer_norm(
    t: GraphBuilder, x: Value, shape: Sequence[int], weight: Value | None = None, bias: Value | None = None, *_: object
) -> Value:
    return _normalise(t, x, t.out[x.ndim - len(shape) :], weight, bias, centred=True)


@rule("aten.rms_norm", "aten._fused_rms_norm")
def rms_norm(
    t: GraphBuilder, x: Value, shape: Sequence[int], weight: Value | None = None, eps: float | None = None
) -> Value:
    return _normalise(t, x, t.out[x.ndim - len(shape) :], weight, None, centred=False)


def _normalise(
    t: GraphBuilder, x: Value, over: Sequence[Label], weight: Value | None, bias: Value | None, centred: bool
) -> Value:
    """Normalise over some axes of `x`, then scale and shift by tensors that span the same axes."""
    sign = [*_SIGNS, {"x": 1}] if centred else _SIGNS
    scales = _scale_rule(_AFFINE, sign, {"x": x, "weight": weight, "bias": bias})
    length = Length(over[0], weight) if len(over) == 1 and not centred else None
    operands = [(x, t.out), (weight, over), (bias, over)]
    return t.joint(operands, t.out, mixes=over, rules=dict.fromkeys(over, scales), length=length)


@rule("aten.group_norm")
def group_norm(
    t: GraphBuilder, x: Value, groups: int, weight: Value | None = None, bias: Value | None = None, *_: object
) -> Value:
    within = x.shape[1] // groups
    shape = (x.shape[0], groups, within, *x.shape[2:])
    grouped = t.reshape(x, shape)
    weight, bias = (None if v is None else t.reshape(v, (groups, within)) for v in (weight, bias))
    labels = t.labels(grouped)
    given = {"x": x, "weight": weight, "bias": bias}
    # a whole group may change its sign, mean and all
    rules = {labels[1]: _scale_rule(_AFFINE, _SIGNS, given), labels[2]: _scale_rule(_AFFINE, _AFFINE, given)}
    operands = [(grouped, labels), (weight, labels[1:3]), (bias, labels[1:3])]
    return t.reshape(t.joint(operands, labels, shape, mixes=labels[2:], rules=rules), x.shape)


@rule("aten._weight_norm", "aten._weight_norm_interface")
def weight_norm(t: GraphBuilder, v: Value, g: Value, dim: int = 0) -> Value | tuple[Value, Value]:
    labels = t.labels(v)
    normed = ScaleRule(({0: 1}, {2: 1}), ({0: 1, 2: 1},))  # a norm is taken along this axis: signs pass, scales do not
    if g.ndim == 0:  # one norm of the whole weight
        return t.joint([(v, labels), (g, [])], labels, v.shape, mixes=labels, rules=normed)
    own = [label if n == size else None for label, n, size in zip(labels, g.shape, v.shape, strict=True)]
    kept = ScaleRule(({2: 1, 1: -1},), ({0: 1, 1: 1, 2: 1},))  # the direction loses its scale, the length carries it
    rules = {label: normed if mine is None else kept for label, mine in zip(labels, own, strict=True)}
    mixes = [label for label, mine in zip(labels, own, strict=True) if mine is None]
    result = t.joint([(v, labels), (g, own)], labels, v.shape, mixes=mixes, rules=rules)
    norms = t.shapes[1] if len(t.shapes) > 1 else None
    return result if norms is None else (result, t.fixed(norms))
