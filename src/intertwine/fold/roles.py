"""Roles: what every axis of a parameter does with features, read off the calls that use it.

"write": an output of a layer, one slice per feature (rows of a weight, bias). "read": an input of a layer, which adds
features up. "each": one number or kernel per feature, on its way (depthwise convolution, PReLU, layer scale).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from intertwine.graph.program import Call, Program, Ref

#: Calls that hand a tensor on as it is.
SAME = ("aten.alias.default", "aten.contiguous.default", "aten.clone.default", "aten.detach.default")
#: Calls that combine features with one number each.
POINTWISE = ("aten.mul.Tensor", "aten.add.Tensor", "aten.sub.Tensor", "aten.div.Tensor", "aten.mul_.Tensor",
             "aten.add_.Tensor")  # fmt: skip
#: Norms whose statistics run over features.
ACROSS = ("layer_norm", "rms_norm", "group_norm")


@dataclass(frozen=True)
class Layer:
    """A linear or convolution layer right before a BatchNorm; `axis` is that of its weight which writes features."""

    weight: str
    bias: str | None
    axis: int
    role: str


@dataclass(frozen=True)
class Norm:
    """A BatchNorm with running statistics, by the names of its tensors; `layer` is what it can be folded into."""

    weight: str | None
    bias: str | None
    mean: str
    var: str
    eps: float
    layer: Layer | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n in (self.weight, self.bias, self.mean, self.var) if n is not None)


@dataclass(frozen=True)
class Roles:
    """`axes`: (parameter, axis) → role. `unclear`: parameter → why its roles are not known. `norms`: all BatchNorms."""

    axes: Mapping[tuple[str, int], str]
    unclear: Mapping[str, str]
    norms: tuple[Norm, ...]


def roles_of(program: Program) -> Roles:
    """The roles of all parameters and buffers of a captured forward."""
    reader = _Reader(program)
    for call in program.calls:
        reader.take(call)
    return Roles(reader.axes, reader.unclear, tuple(reader.norms))


def arguments(call: Call) -> list[Any]:
    """The arguments of a call in the order of its schema, keywords and defaults among them."""
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return list(call.args)
    left = schema.arguments[len(call.args) :]
    return [*call.args, *(call.kwargs.get(argument.name, argument.default_value) for argument in left)]


class _Reader:
    def __init__(self, program: Program) -> None:
        self.axes: dict[tuple[str, int], str] = {}
        self.unclear: dict[str, str] = {}
        self.norms: list[Norm] = []
        self.targets = {s.name: s.target for s in program.sources if s.target is not None}
        self.shapes = {s.target: s.shape for s in program.sources if s.target is not None}
        self.made = {call.name: call for call in program.calls}
        self.readers = Counter(name for call in program.calls for name in call.reads)
        self.readers.update(out.name for out in program.outputs)
        tied = Counter(program.tied.values())
        self.used = Counter({t: self.readers[s] + (tied[t] > 1) for s, t in self.targets.items()})

    def take(self, call: Call) -> None:
        """Note what one call does with the parameters it reads."""
        args = arguments(call)
        if call.op in SAME and isinstance(args[0], Ref) and args[0].name in self.targets:
            self.targets[call.name] = self.targets[args[0].name]
            return
        named = {i: t for i, a in enumerate(args) if isinstance(a, Ref) and (t := self.targets.get(a.name))}
        if "batch_norm" in call.op and (norm := self._norm(args, named)) is not None:
            self.norms.append(norm)
            return
        if named:
            known = dict(self._known(call, args, named))
            for i, target in named.items():
                self._note(call, target, known.get(i))
        for target in _inside(args, self.targets):
            self._note(call, target, None)

    def _known(self, call: Call, args: list[Any], named: dict[int, str]) -> Iterator[tuple[int, dict[int, str]]]:
        """(argument, axis → role) for the calls that are understood."""
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
        elif op in POINTWISE:
            yield from ((i, dict.fromkeys(range(len(self.shapes[t])), "each")) for i, t in named.items())

    def _convolution(self, op: str, args: list[Any], named: dict[int, str]) -> dict[int, str] | None:
        groups = args[6]
        shape = self.shapes.get(named.get(1, ""))
        if not isinstance(groups, int) or shape is None:
            return None
        if groups == 1:
            return {1: "write", 0: "read"} if "transpose" in op else {0: "write", 1: "read"}
        return {0: "each"} if groups == shape[0] and shape[1] == 1 else None

    def _note(self, call: Call, target: str, axes: dict[int, str] | None) -> None:
        if axes is None:
            what = call.op.removeprefix("aten.").split(".")[0]
            if any(norm in call.op for norm in ACROSS):
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

    def _norm(self, args: list[Any], named: dict[int, str]) -> Norm | None:
        """A BatchNorm that uses running statistics, each tensor of it in this call alone."""
        if args[5] or 3 not in named or 4 not in named or any(self.used[t] > 1 for t in named.values()):
            return None
        return Norm(named.get(1), named.get(2), named[3], named[4], float(args[7]), self._layer(args[0]))

    def _layer(self, source: Any) -> Layer | None:
        """The layer whose output goes into a BatchNorm and nowhere else, its tensors in no other call."""
        while isinstance(source, Ref) and source.name in self.made and self.readers[source.name] == 1:
            call, args = self.made[source.name], arguments(self.made[source.name])
            if "conv" in call.op or call.op == "aten.linear.default":
                return self._own_layer(call, args)
            if call.op not in SAME:
                return None
            source = args[0]
        return None

    def _own_layer(self, call: Call, args: list[Any]) -> Layer | None:
        named = {i: t for i, a in enumerate(args) if isinstance(a, Ref) and (t := self.targets.get(a.name))}
        roles = dict(self._known(call, args, named)).get(1, {})
        axis = next((i for i, role in roles.items() if role != "read"), None)
        own = all(self.used[t] == 1 for t in named.values()) and (2 in named or args[2] is None)
        return Layer(named[1], named.get(2), axis, roles[axis]) if axis is not None and own and 1 in named else None


def _inside(args: list[Any], targets: Mapping[str, str]) -> Iterator[str]:
    """Parameters inside lists of arguments (torch.cat of weights)."""
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else ():
            if isinstance(item, Ref) and item.name in targets:
                yield targets[item.name]
