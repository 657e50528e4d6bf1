"""The role of every axis of a parameter, and the double-precision working tensors in which features are merged.

Roles: "write", an output of a layer with one slice per feature (rows of a weight, bias); "read", an input of a layer,
which sums over features; "each", one number or kernel per feature (depthwise convolution, PReLU, layer scale).

With norm="fold" a BatchNorm in evaluation mode is a scale s = γ/√(v+eps) and a shift per feature. Right behind a layer
the scale goes into the rows of the layer, and |γ|, |γ|·√(v+eps), β, s·mean and s·bias are kept beside. All of these
are merged by the same sums as the rows, and give back a BatchNorm and a layer at the end, so that the smaller network
can be trained like the larger one. Elsewhere scale and shift stay as two numbers per feature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from intertwine.graph.program import Call, Program, Ref
from intertwine.symmetry.geometry import Layout, LayoutAxis, ProductAxis, SumAxis, WireAxis

#: Calls that return their input.
IDENTITY_OPS = ("aten.alias.default", "aten.contiguous.default", "aten.clone.default", "aten.detach.default")
#: Calls that combine features with one number each.
POINTWISE_OPS = tuple(f"aten.{op}.Tensor" for op in ("mul", "add", "sub", "div", "mul_", "add_"))
#: Norms whose statistics run over features.
NORMS_ACROSS_FEATURES = ("layer_norm", "rms_norm", "group_norm")


@dataclass(frozen=True)
class LayerBeforeNorm:
    """A linear or convolution layer right before a BatchNorm; `axis` of its weight writes features."""

    weight: str
    bias: str | None
    axis: int
    role: str


@dataclass(frozen=True)
class BatchNormTensors:
    """The tensor names of a BatchNorm with running statistics; `layer` is the layer that it can be folded into."""

    weight: str | None
    bias: str | None
    mean: str
    var: str
    eps: float
    layer: LayerBeforeNorm | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n in (self.weight, self.bias, self.mean, self.var) if n is not None)


@dataclass(frozen=True)
class Roles:
    """`axes`: (parameter, axis) → role. `unclear`: parameter → why its roles are not known. `norms`: all BatchNorms."""

    axes: Mapping[tuple[str, int], str]
    unclear: Mapping[str, str]
    norms: tuple[BatchNormTensors, ...]


def roles_of(program: Program) -> Roles:
    """The roles of all parameters and buffers of a captured forward."""
    finder = _RoleFinder(program)
    for call in program.calls:
        finder.visit(call)
    return Roles(finder.axes, finder.unclear, tuple(finder.norms))


def arguments(call: Call) -> list[Any]:
    """The arguments of a call in the order of its schema, keywords and defaults among them."""
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return list(call.args)
    left = schema.arguments[len(call.args) :]
    return [*call.args, *(call.kwargs.get(argument.name, argument.default_value) for argument in left)]


class _RoleFinder:
    def __init__(self, program: Program) -> None:
        self.axes: dict[tuple[str, int], str] = {}
        self.unclear: dict[str, str] = {}
        self.norms: list[BatchNormTensors] = []
        self.targets = {s.name: s.target for s in program.inputs if s.target is not None}
        self.shapes = {s.target: s.shape for s in program.inputs if s.target is not None}
        self.calls = {call.name: call for call in program.calls}
        self.readers = Counter(name for call in program.calls for name in call.reads)
        self.readers.update(out.name for out in program.outputs)
        tied = Counter(program.tied.values())
        self.used = Counter({t: self.readers[s] + (tied[t] > 1) for s, t in self.targets.items()})

    def visit(self, call: Call) -> None:
        """Record the roles of the parameters that a call reads."""
        args = arguments(call)
        if call.op in IDENTITY_OPS and isinstance(args[0], Ref) and args[0].name in self.targets:
            self.targets[call.name] = self.targets[args[0].name]
            return
        named = self._named(args)
        if "batch_norm" in call.op and (norm := self._norm(args, named)) is not None:
            self.norms.append(norm)
            return
        if named:
            known = dict(self._known(call, args, named))
            for i, target in named.items():
                self._record(call, target, known.get(i))
        for arg in args:  # parameters inside lists of arguments (torch.cat of weights)
            for item in arg if isinstance(arg, (list, tuple)) else ():
                if isinstance(item, Ref) and item.name in self.targets:
                    self._record(call, self.targets[item.name], None)

    def _named(self, args: list[Any]) -> dict[int, str]:
        """Argument → the parameter or buffer that it is."""
        return {i: t for i, a in enumerate(args) if isinstance(a, Ref) and (t := self.targets.get(a.name))}

    def _known(self, call: Call, args: list[Any], named: dict[int, str]) -> Iterator[tuple[int, dict[int, str]]]:
        """(argument, axis → role) for the supported calls."""
        op = call.op
        if op == "aten.linear.default":
            yield from ((1, {0: "write", 1: "read"}), (2, {0: "write"}))
        elif "conv" in op:
            writes = self._convolution(op, args, named)
            if writes is not None:
                yield from ((1, writes), (2, {0: "each" if "each" in writes.values() else "write"}))
        elif "prelu" in op or "instance_norm" in op or "batch_norm" in op:
            yield from ((i, {0: "each"}) for i in range(1, 5))
        elif op == "aten.embedding.default":
            yield 0, {1: "write"}
        elif op in POINTWISE_OPS:
            yield from ((i, dict.fromkeys(range(len(self.shapes[t])), "each")) for i, t in named.items())

    def _convolution(self, op: str, args: list[Any], named: dict[int, str]) -> dict[int, str] | None:
        groups = args[6]
        shape = self.shapes.get(named.get(1, ""))
        if not isinstance(groups, int) or shape is None:
            return None
        if groups == 1:
            return {1: "write", 0: "read"} if "transpose" in op else {0: "write", 1: "read"}
        return {0: "each"} if groups == shape[0] and shape[1] == 1 else None

    def _record(self, call: Call, target: str, axes: dict[int, str] | None) -> None:
        if axes is None:
            what = call.op.removeprefix("aten.").split(".")[0]
            if any(norm in call.op for norm in NORMS_ACROSS_FEATURES):
                why = f"{what} at {call.place} takes statistics over all features together, so their number matters"
            elif "conv" in call.op:
                why = f"{what} at {call.place} has groups of several channels, and merging two of them is not exact"
            else:
                why = f"{target} goes into {what} at {call.place}, where it is not known what its axes do with features"
            self.unclear.setdefault(target, why)
            return
        for axis, role in axes.items():
            if self.axes.setdefault((target, axis), role) != role:
                self.unclear.setdefault(target, f"{target} is used in two ways")

    def _norm(self, args: list[Any], named: dict[int, str]) -> BatchNormTensors | None:
        """A BatchNorm that uses running statistics, each tensor of it in this call alone."""
        if args[5] or 3 not in named or 4 not in named or any(self.used[t] > 1 for t in named.values()):
            return None
        return BatchNormTensors(named.get(1), named.get(2), named[3], named[4], float(args[7]), self._layer(args[0]))

    def _layer(self, source: Any) -> LayerBeforeNorm | None:
        """The layer whose output goes into a BatchNorm and nowhere else, its tensors in no other call."""
        while isinstance(source, Ref) and source.name in self.calls and self.readers[source.name] == 1:
            call, args = self.calls[source.name], arguments(self.calls[source.name])
            if "conv" in call.op or call.op == "aten.linear.default":
                named = self._named(args)
                roles = dict(self._known(call, args, named)).get(1, {})
                axis = next((i for i, role in roles.items() if role != "read"), None)
                own = all(self.used[t] == 1 for t in named.values()) and (2 in named or args[2] is None)
                if axis is None or not own or 1 not in named:
                    return None
                return LayerBeforeNorm(named[1], named.get(2), axis, roles[axis])
            if call.op not in IDENTITY_OPS:
                return None
            source = args[0]
        return None


@dataclass(frozen=True)
class WorkingTensor:
    """One tensor that merging changes. `counted`: whether distances look at it: "in", "bias" or None."""

    name: str
    data: Tensor
    axes: tuple[LayoutAxis, ...]
    roles: tuple[str | None, ...]
    counted: str | None


Finisher = Callable[[], dict[str, Tensor]]  # gives tensors of the network once everything is merged


@dataclass(frozen=True)
class WorkingTensors:
    """All working tensors, and the functions that give back the network's own tensors."""

    tensors: tuple[WorkingTensor, ...]
    finishes: tuple[Finisher, ...]

    def weights(self) -> dict[str, Tensor]:
        """The network's tensors as they stand, at full width; features merged into others are zero."""
        return {name: tensor for finish in self.finishes for name, tensor in finish().items()}


def working_tensors(
    layouts: Mapping[str, Layout], roles: Roles, weights: Mapping[str, Tensor], norm: str
) -> WorkingTensors:
    """Working tensors of a network. The given weights are not changed."""
    own = {name: t.detach().to("cpu", torch.float64, copy=True).contiguous() for name, t in weights.items()}
    builder = _WorkingTensorBuilder(layouts, roles, own)
    for found in roles.norms:
        builder.add_norm(found, norm)
    for name in weights:
        if name not in builder.added:
            builder.add_plain(name)
    return WorkingTensors(tuple(builder.tensors), tuple(builder.finishes))


class _WorkingTensorBuilder:
    def __init__(self, layouts: Mapping[str, Layout], roles: Roles, own: dict[str, Tensor]) -> None:
        self.layouts, self.roles, self.own = layouts, roles, own
        self.tensors: list[WorkingTensor] = []
        self.finishes: list[Finisher] = []
        self.added: set[str] = set()

    def add_plain(self, name: str) -> None:
        """A tensor that is merged as it is."""
        axes = self.layouts[name].axes
        roles = tuple(self.roles.axes.get((name, axis)) for axis in range(len(axes)))
        counted = "bias" if roles == ("write",) else "in"
        self.tensors.append(WorkingTensor(name, self.own[name], axes, roles, counted))
        self.finishes.append(lambda: {name: self.own[name]})

    def add_norm(self, norm: BatchNormTensors, how: str) -> None:
        layer = (norm.layer.weight, norm.layer.bias) if norm.layer else ()
        names = {name for name in (*norm.names, *layer) if name is not None}
        if not names <= self.own.keys():  # no wire moves it
            return
        self.added |= names
        axis = self.layouts[norm.weight or norm.mean].axes[0]
        if how == "sum":
            self._raw(norm, axis)
        elif norm.layer is None:
            self._affine(norm, axis)
        else:
            self._folded(norm, norm.layer, axis)

    def _layer(self, layer: LayerBeforeNorm, axis: LayoutAxis) -> None:
        """The weight of a layer before a BatchNorm; the scales of the norm act on it."""
        axes = list(self.layouts[layer.weight].axes)
        axes[layer.axis] = axis
        roles = tuple(self.roles.axes.get((layer.weight, axis)) for axis in range(len(axes)))
        self.tensors.append(WorkingTensor(layer.weight, self.own[layer.weight], tuple(axes), roles, "in"))

    def _vector(self, name: str, data: Tensor, axis: LayoutAxis, role: str, counted: str | None = None) -> Tensor:
        self.tensors.append(WorkingTensor(name, data, (axis,), (role,), counted))
        return data

    def _raw(self, norm: BatchNormTensors, axis: LayoutAxis) -> None:
        """The rule of the paper's code: every vector of the norm is merged like the rows, statistics too."""
        role = norm.layer.role if norm.layer else "each"
        names = list(norm.names)
        if norm.layer:
            self._layer(norm.layer, axis)
            self.finishes.append(lambda n=norm.layer.weight: {n: self.own[n]})
        for name in names:
            self._vector(name, self.own[name], axis, role)
        if norm.layer and norm.layer.bias:
            names.append(norm.layer.bias)
            self._vector(norm.layer.bias, self.own[norm.layer.bias], axis, role, "bias")
        self.finishes.append(
            lambda: {n: self.own[n] for n in names} | {norm.var: _divisible(self.own[norm.var], norm.eps)}
        )

    def _parts(self, norm: BatchNormTensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """γ, β, running mean and √(v+eps) of a norm."""
        mean, deviation = self.own[norm.mean], (self.own[norm.var] + norm.eps).sqrt()
        gamma = self.own[norm.weight] if norm.weight else torch.ones_like(mean)
        return gamma, self.own[norm.bias] if norm.bias else torch.zeros_like(mean), mean, deviation

    def _affine(self, norm: BatchNormTensors, axis: LayoutAxis) -> None:
        """A norm that cannot be folded into a layer: a scale and a shift per feature."""
        gamma, beta, mean, deviation = self._parts(norm)
        ratio = _ratio(axis if norm.weight else None, self.layouts[norm.mean].axes[0])
        scale = self._vector(f"{norm.mean} scale", gamma / deviation, ratio, "each", "in")
        shift = self._vector(f"{norm.mean} shift", beta - gamma / deviation * mean, axis, "each", "bias")
        center = self._vector(norm.mean, mean.clone(), axis, "each")
        spread = self._vector(norm.var, self.own[norm.var].clone(), axis, "each")

        def finish() -> dict[str, Tensor]:
            found = {norm.mean: center, norm.var: _divisible(spread, norm.eps)}
            if norm.weight:
                found[norm.weight] = scale * (spread + norm.eps).sqrt()
            if norm.bias:
                found[norm.bias] = shift + scale * center
            return found

        self.finishes.append(finish)

    def _folded(self, norm: BatchNormTensors, layer: LayerBeforeNorm, axis: LayoutAxis) -> None:
        gamma, beta, mean, deviation = self._parts(norm)
        scale = gamma / deviation
        rows = [1] * self.own[layer.weight].ndim
        rows[layer.axis] = -1
        old_var, old_mean = self.own[norm.var].clone(), mean.clone()
        old_bias = self.own[layer.bias].clone() if layer.bias else None
        weight = self.own[layer.weight].mul_(scale.view(rows))
        self._layer(layer, axis)

        def vector(what: str, data: Tensor, counted: str | None = None) -> Tensor:
            return self._vector(f"{norm.mean} {what}", data, axis, layer.role, counted)

        size, spread = vector("size", gamma.abs()), vector("spread", gamma.abs() * deviation)
        start, center = vector("start", beta.clone()), vector("center", scale * mean)
        offset = vector("offset", scale * old_bias) if old_bias is not None else None
        vector("shift", beta + (0 if old_bias is None else scale * old_bias) - scale * mean, "bias")

        def finish() -> dict[str, Tensor]:
            alive = size > 0
            signed = torch.where(gamma < 0, -size, size)
            new = torch.where(alive, spread / torch.where(alive, size, 1.0), (old_var + norm.eps).sqrt())
            unscale = torch.where(alive, new / torch.where(alive, signed, 1.0), 0.0)
            found = {
                layer.weight: weight * unscale.view(rows),
                norm.mean: torch.where(alive, center * unscale, old_mean),
                norm.var: torch.where(alive, (new.square() - norm.eps).clamp(min=0), old_var),  # rounding below zero
            }
            if layer.bias and offset is not None and old_bias is not None:
                found[layer.bias] = torch.where(alive, offset * unscale, old_bias)
            optional = {norm.weight: signed, norm.bias: start}
            return found | {name: tensor for name, tensor in optional.items() if name is not None}

        self.finishes.append(finish)


def _ratio(gamma: LayoutAxis | None, mean: LayoutAxis) -> LayoutAxis:
    """The axis of γ/√(v+eps): the scales before the norm cancel. Without γ, the axis of 1/√(v+eps)."""
    match mean:
        case WireAxis():
            own = gamma.powers if isinstance(gamma, WireAxis) else (Fraction(0),) * len(mean.powers)
            return replace(mean, powers=tuple(a - b for a, b in zip(own, mean.powers, strict=True)))
        case ProductAxis() | SumAxis():
            parts = gamma.parts if isinstance(gamma, (ProductAxis, SumAxis)) else [None] * len(mean.parts)
            return replace(mean, parts=tuple(_ratio(a, b) for a, b in zip(parts, mean.parts, strict=True)))
    return mean


def _divisible(var: Tensor, eps: float) -> Tensor:
    """Variances without zeros, those of merged features, where the norm has no eps and would divide by them."""
    return var if eps > 0 else torch.where(var > 0, var, 1.0)
