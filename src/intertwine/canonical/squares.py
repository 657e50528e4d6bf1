"""Naturality squares: for every call of a program, does it commute with the move of the tensors it reads and makes?

The network b runs as it is. Before each call the tensors it reads are moved by τ, and the call is run on them with the
weights of a; what comes out should be b's own result, moved. No error is handed on to the next call, so each square
stands for itself. What is computed from weights alone belongs to the weights.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from intertwine.canonical.batches import Inputs
from intertwine.graph.program import Call, Ref
from intertwine.graph.value import Value
from intertwine.symmetry.element import Element
from intertwine.symmetry.runner import ProgramRunner
from intertwine.symmetry.symmetry import Symmetry

MASK = 1e30  # larger numbers stand for "minus infinity"
LARGEST_REACH = 1e6  # larger inputs are masks, and say nothing of rounding
CANCELLED = 1e-6  # a result this much smaller than what went in is judged by what went in


@dataclass(frozen=True)
class Gap:
    """How far two tensors are apart, as sums of squares that add up over batches; `least` is the size of rounding."""

    apart: float = 0.0
    left: float = 0.0
    right: float = 0.0
    least: float = 0.0

    @staticmethod
    def between(a: Tensor, b: Tensor, around: float) -> Gap:
        finite = a.isfinite()
        if a.shape != b.shape or not torch.equal(finite, b.isfinite()):
            return Gap(apart=float("inf"))
        kept = finite & ~((a.abs() > MASK) & (b.abs() > MASK))
        a, b = a[kept], b[kept]
        least = (CANCELLED * min(around, LARGEST_REACH)) ** 2 * a.numel()
        apart, left, right = (float(t.square().sum()) for t in (a - b, a, b))
        return Gap(apart, left, right, least)

    def __add__(self, other: Gap) -> Gap:
        return Gap(self.apart + other.apart, self.left + other.left, self.right + other.right, self.least + other.least)

    @property
    def residual(self) -> float:
        """The distance relative to the larger of the two; between 0 and 2, infinite where infinities disagree."""
        size = max(self.left, self.right, self.least)
        return (self.apart / size) ** 0.5 if size else self.apart


class Squares:
    """One walk through a program; iterating gives (position of the call, gap) for every tensor that was compared."""

    def __init__(self, symmetry: Symmetry, g: Element, a: nn.Module, b: nn.Module, inputs: Inputs) -> None:
        self.symmetry, self.g, self.graph = symmetry, g, symmetry._discovery.graph
        self.program = self.graph.program
        self.a, self.b = (ProgramRunner(self.program, m, inputs) for m in (a, b))
        self.fluid = {s.name for s in self.program.sources if s.kind == "input"}  # names that depend on the inputs
        self.inner: dict[str, Any] = {}  # results on which no τ is known; they are handed on as they came out
        self.held: dict[str, Value] = dict(self.graph.values)  # what a name stands for now; calls in place change it
        self.family: dict[str, set[str]] = {}  # names of one storage
        self.raw: set[str] = set()  # memory nothing was written to yet
        self.maker: dict[str, int] = {}  # name → the call that made it

    def __iter__(self) -> Iterator[tuple[int, Gap]]:
        for position, call in enumerate(self.program.calls):
            self.maker[call.name] = position
            if not call.reads & self.fluid:
                self.a.step(position)
                self.b.step(position)
                self._track(call)
                continue
            around = self.b.size_of_inputs(position)
            moved = self.b.evaluate(position, {name: self._moved(name) for name in call.reads})
            own = self.b.step(position)
            self.a.forget(position)
            self.fluid.add(call.name)
            self._track(call)
            if self._is_raw(call):
                continue
            if self._has_move(call, own):
                yield self._position(call), Gap.between(self._act(call.name, own), moved, around)
            else:
                self._hand_on(call, moved)

    def _moved(self, name: str) -> Any:
        """What a call of a reads under a name: a's own weights, or what b computed there, moved."""
        if name in self.inner:
            return _copied(self.inner[name])
        if name not in self.fluid:
            return _copied(self.a.values[name])
        return _copied(self._act(name, self.b.values[name]))

    def _act(self, name: str, x: Any) -> Any:
        value = self.held.get(name)
        if not isinstance(x, Tensor) or not x.is_floating_point() or value is None:
            return x
        return self.symmetry._act_on_value(self.g, name, value, x)

    def _has_move(self, call: Call, own: Any) -> bool:
        """Whether a result is a tensor with a τ: whole numbers, tuples and the squares inside a length have none."""
        value = self.graph.values.get(call.name)
        if value is None or not isinstance(own, Tensor) or not own.is_floating_point():
            return False
        return tuple(own.shape) == value.shape and (value.lazy or self.symmetry._discovery.predicts(value))

    def _hand_on(self, call: Call, moved: Any) -> None:
        self.inner[call.name] = moved
        if call.inplace and isinstance(call.args[0], Ref) and call.args[0].name in self.inner:
            self.inner[call.args[0].name] = moved

    def _position(self, call: Call) -> int:
        """The call itself, or the one that returned the tuple it takes its result from."""
        taken = call.target is operator.getitem and isinstance(call.args[0], Ref)
        return self.maker.get(call.args[0].name, self.maker[call.name]) if taken else self.maker[call.name]

    def _is_raw(self, call: Call) -> bool:
        first = call.args[0] if call.args else None
        seen = isinstance(first, Ref) and first.name in self.raw and call.aliases and not call.inplace
        if "empty" in call.op or seen:
            self.raw.add(call.name)
        return call.name in self.raw

    def _track(self, call: Call) -> None:
        """Follow storages: after a call in place all names of the tensor it wrote to stand for the result."""
        first = call.args[0] if call.args and isinstance(call.args[0], Ref) else None
        if first is None or not (call.aliases or first.name in self.family):
            return
        family = self.family.setdefault(first.name, {first.name})
        if call.aliases:
            family.add(call.name)
            self.family[call.name] = family
        if call.inplace and call.name in self.held and first.name in self.held:
            old, new = self.held[first.name], self.held[call.name]
            self.held |= {name: new for name in family if self.held.get(name) is old}
            self.fluid |= family if call.name in self.fluid else set()


def _copied(x: Any) -> Any:
    """Fresh and laid out in order: calls may write to what they read, and views must fit."""
    return tree_map(lambda t: t.clone(memory_format=torch.contiguous_format) if isinstance(t, Tensor) else t, x)
