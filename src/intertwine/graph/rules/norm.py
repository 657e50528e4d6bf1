"""Rules for normalisations: batch, layer, group, instance, RMS and local response norm, and weight norm.

A normalisation divides its input's scale out; what scale its output carries is the scale of its own weight and bias.
Because of eps that is exact only where the statistics are stored (batch norm in evaluation mode), so elsewhere the
input may not be scaled at all; signs pass wherever the mean of the axis itself is not taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from intertwine.graph.builder import GraphBuilder, rule
from intertwine.graph.constraints import Label, Length, ScaleRule, Value
from intertwine.graph.rules.elementwise import out_labels

Equations = tuple[dict[int, int], ...]


@rule("aten.batch_norm", "aten._native_batch_norm_legit_no_training", "aten.cudnn_batch_norm")
def batch_norm(
    t: GraphBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: object,
) -> Value:
    stored = not training and mean is not None
    return _channel_norm(t, x, weight, bias, mean, var, eps, stored)


@rule("aten.instance_norm")
def instance_norm(
    t: GraphBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *_: object,
) -> Value:
    return _channel_norm(t, x, weight, bias, mean, var, eps, stored=not use_input_stats)


def _channel_norm(
    t: GraphBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    eps: float,
    stored: bool,
) -> Value:
    labels = out_labels(t)
    channel = labels[1]
    given = {"x": x, "weight": weight, "bias": bias, "mean": mean, "var": var}
    names = [name for name, v in given.items() if v is not None] + ["out"]
    moving = t.variance(var, eps)
    real = [{"mean": 1, "x": -1}, {"var": 1, "x": -2}, {"out": 1, "weight": -1}, {"bias": 1, "out": -1}]
    if not stored or moving is None:
        real.append({"x": 1})
    sign = [{"mean": 1, "x": 1}, {"var": 1}, {"out": 1, "x": 1, "weight": 1}, {"bias": 1, "out": 1}]
    law = ScaleRule(_number(real, names), _number(sign, names))
    operands = [(v, labels if name == "x" else [channel]) for name, v in given.items()]
    mixes = () if stored else [label for label in labels if label != channel]
    return t.joint(operands, labels, mixes=mixes, rules={channel: law}, variance=moving)


def _number(equations: Sequence[dict[str, int]], names: Sequence[str]) -> Equations:
    """Equations by name → by position; an absent tensor has no scale, an equation that begins with one is dropped."""
    kept = [e for e in equations if next(iter(e)) in names]
    return tuple({names.index(name): c for name, c in e.items() if name in names} for e in kept)


@rule("aten.layer_norm")
def layer_norm(
    t: GraphBuilder,
    x: Value,
    shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: object,
) -> Value:
    return normalise(t, x, out_labels(t)[x.ndim - len(shape) :], weight, bias, centred=True)


@rule("aten.rms_norm", "aten._fused_rms_norm")
def rms_norm(
    t: GraphBuilder, x: Value, shape: Sequence[int], weight: Value | None = None, eps: float | None = None
) -> Value:
    return normalise(t, x, out_labels(t)[x.ndim - len(shape) :], weight, None, centred=False)


def normalise(
    t: GraphBuilder, x: Value, over: Sequence[Label], weight: Value | None, bias: Value | None, centred: bool
) -> Value:
    """Normalise over some axes of `x`, then scale and shift by tensors that span the same axes."""
    labels = out_labels(t)
    operands = [(v, own) for v, own in ((x, labels), (weight, list(over)), (bias, list(over))) if v is not None]
    names = ["x", *(["weight"] if weight is not None else []), *(["bias"] if bias is not None else []), "out"]
    real = [{"x": 1}, {"out": 1, "weight": -1}, {"bias": 1, "out": -1}]
    sign = [{"out": 1, "x": 1, "weight": 1}, {"bias": 1, "out": 1}, *([{"x": 1}] if centred else [])]
    law = ScaleRule(_number(real, names), _number(sign, names))
    length = Length(over[0], weight) if len(over) == 1 and not centred else None
    return t.joint(operands, labels, mixes=over, rules=dict.fromkeys(over, law), length=length)


@rule("aten.group_norm")
def group_norm(
    t: GraphBuilder,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: object,
) -> Value:
    within = x.shape[1] // groups
    shape = (x.shape[0], groups, within, *x.shape[2:])
    grouped = t.reshape(x, shape)
    weight, bias = (None if v is None else t.reshape(v, (groups, within)) for v in (weight, bias))
    labels: list[Label] = [("lead", i) for i in range(len(shape))]
    names = ["x", *(["weight"] if weight is not None else []), *(["bias"] if bias is not None else []), "out"]
    affine = [{"x": 1}, {"out": 1, "weight": -1}, {"bias": 1, "out": -1}]
    flip = [{"out": 1, "x": 1, "weight": 1}, {"bias": 1, "out": 1}]  # a whole group may change its sign, mean and all
    laws = {
        labels[1]: ScaleRule(_number(affine, names), _number(flip, names)),
        labels[2]: ScaleRule(*(_number(affine, names),) * 2),
    }
    operands = [(grouped, labels), (weight, labels[1:3]), (bias, labels[1:3])]
    result = t.joint(operands, labels, shape, mixes=labels[2:], rules=laws)
    return t.reshape(result, x.shape)


@rule("aten._weight_norm", "aten._weight_norm_interface")
def weight_norm(t: GraphBuilder, v: Value, g: Value, dim: int = 0) -> Value | tuple[Value, Value]:
    labels = t.labels(v)
    if g.ndim == 0:  # one norm of the whole weight
        signs = ScaleRule(({0: 1}, {2: 1}), ({0: 1, 2: 1},))
        return t.joint([(v, labels), (g, [])], labels, v.shape, mixes=labels, rules=dict.fromkeys(labels, signs))
    own = [label if n == v.shape[i] else None for i, (label, n) in enumerate(zip(labels, g.shape, strict=True))]
    laws = {}
    for i, label in enumerate(labels):
        if own[i] is not None:  # direction divides its own scale out, length carries it
            laws[label] = ScaleRule(({2: 1, 1: -1},), ({0: 1, 1: 1, 2: 1},))
        else:  # a norm is taken along this axis: signs pass, scales do not
            laws[label] = ScaleRule(({0: 1}, {2: 1}), ({0: 1, 2: 1},))
    result = t.joint(
        [(v, labels), (g, own)], labels, v.shape, mixes=[x for i, x in enumerate(labels) if own[i] is None], rules=laws
    )
    assert t.call is not None
    return (result, t.fixed(t.call.shapes[1])) if len(t.call.shapes) > 1 and t.call.shapes[1] is not None else result
