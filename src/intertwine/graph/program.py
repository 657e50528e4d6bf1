"""Programs: a captured forward as data. Inputs and weights, the op calls in order, the outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Ref:
    """A use of the value called `name`."""

    name: str


@dataclass(frozen=True)
class Call:
    """One op: `target(*args, **kwargs)`, its results named `name`, with shapes, source line and module path."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: tuple[tuple[int, ...] | None, ...]  # one per result tensor; None for a result that is not a tensor
    dtype: torch.dtype | None
    where: str
    path: str
    aliases: bool  # whether the result shares storage with the first argument

    @property
    def place(self) -> str:
        """Where the call stands, for a reader: `model.py:12` or `layer1.conv2`, or both."""
        return " in ".join(x for x in (self.where, self.path) if x) or "the model's forward"

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of the values the call takes."""
        return _names((self.args, dict(self.kwargs)))

    @property
    def inplace(self) -> bool:
        """Whether the first argument is written to."""
        schema = getattr(self.target, "_schema", None)
        return schema is not None and bool(schema.arguments) and bool(schema.arguments[0].is_write)

    @property
    def also_written(self) -> frozenset[str]:
        """Names of the values besides the first argument that are written to (`out=`)."""
        schema = getattr(self.target, "_schema", None)
        if schema is None:
            return frozenset()
        given = {a.name: v for a, v in zip(schema.arguments, self.args, strict=False)} | dict(self.kwargs)
        return _names([given.get(a.name) for a in schema.arguments[1:] if a.is_write])

    @property
    def updated(self) -> frozenset[str]:
        """Names of the running statistics that a norm in training mode writes, of which its schema says nothing."""
        if not self.op.startswith(("aten.batch_norm.", "aten.instance_norm.")) or self.args[5] is not True:
            return frozenset()
        return _names(self.args[3:5])

    @property
    def gives_list(self) -> bool:
        """Whether its result is a list of tensors, be it of one."""
        schema = getattr(self.target, "_schema", None)
        return schema is not None and any(isinstance(r.type, torch.ListType) for r in schema.returns)

    @property
    def op(self) -> str:
        return self.target.__name__ if self.target is operator.getitem else str(self.target)


@dataclass(frozen=True)
class ProgramInput:
    """A tensor that enters the graph: a parameter, a buffer, a constant or an input of the model."""

    name: str
    kind: str  # "parameter" | "buffer" | "constant" | "input"
    shape: tuple[int, ...]
    dtype: torch.dtype
    target: str | None = None  # qualified name of the parameter or buffer; tied tensors share the first of their names
    moves: bool = False  # whether a group element may change it
    tensor: Tensor | None = field(default=None, compare=False)  # the value of a constant
    weight: str | None = None  # the parameter or buffer that a function holds and reads as this constant


@dataclass(frozen=True)
class Program:
    """A captured forward: what enters, the calls in order, what leaves."""

    inputs: tuple[ProgramInput, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Ref, ...]
    training: bool
    tied: Mapping[str, str] = field(default_factory=dict)  # every name of a tensor → the first of its names
    kept: Mapping[str, str] = field(default_factory=dict)  # weight → attribute with what later forwards read instead

    def __len__(self) -> int:
        return len(self.calls)

    @cached_property
    def read_weights(self) -> frozenset[str]:
        """First names of the parameters and buffers that some call reads, or that are returned."""
        names = {name for call in self.calls for name in call.reads} | {out.name for out in self.outputs}
        return frozenset(s.target for s in self.inputs if s.target is not None and s.name in names)

    def written_inputs(self) -> frozenset[str]:
        """Names of inputs that some call writes to: in place, as its `out=` or on the side, or through a view."""
        home = {source.name: source.name for source in self.inputs}
        written = set()
        for call in self.calls:
            first = call.args[0] if call.args and isinstance(call.args[0], Ref) else None
            if first is not None and first.name in home and call.aliases:
                home[call.name] = home[first.name]
                if call.inplace:
                    written.add(home[first.name])
            written |= {home[name] for name in call.also_written | call.updated if name in home}
        return frozenset(written)


def _names(tree: Any) -> frozenset[str]:
    return frozenset(leaf.name for leaf in tree_leaves(tree) if isinstance(leaf, Ref))


def replaced(tree: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Nested arguments with every object of a kind replaced; lists become tuples."""
    if isinstance(tree, kind):
        return convert(tree)
    if isinstance(tree, (list, tuple)):
        return tuple(replaced(v, kind, convert) for v in tree)
    if isinstance(tree, dict):
        return {k: replaced(v, kind, convert) for k, v in tree.items()}
    return tree


def fed_by_inputs(program: Program) -> frozenset[str]:
    """Names of the tensors that depend on an input, or on a state that the forward writes."""
    written = program.written_inputs()
    fed = {s.name for s in program.inputs if s.kind == "input" or s.name in written}
    for call in program.calls:
        if not fed.isdisjoint(call.reads):
            fed.add(call.name)
    return frozenset(fed)
