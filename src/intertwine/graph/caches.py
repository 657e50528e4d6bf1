"""What a forward leaves in plain attributes of its modules; a function of the weights there does not move with them.

Weights that one forward reads through what it computed from them, and later ones through what it kept, are frozen.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.graph.partial import fed_by_inputs
from intertwine.graph.program import Call, Program

#: Where a module keeps what is registered with it, and what torch keeps for itself.
REGISTERED = frozenset(vars(nn.Module()))

#: An op that models do not run of their own accord.
MARK = "aten.alias_copy.default"

Place = tuple[str, str]  # path of a module, name of its attribute


@dataclass(frozen=True)
class _Blank:
    """What is remembered of a tensor that a trace computed: no numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Kept:
    """Watches a model while it is traced: which attributes came to hold tensors that were not there before.

    Every such tensor is marked at the end of the trace by a call of `MARK` that nothing reads.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before = {place for place, _ in _tensors(model)}
        self.marked: list[Place] = []
        self.values: dict[Place, Any] = {}
        model.register_forward_hook(self._mark)

    def _mark(self, model: nn.Module, _inputs: Any, _output: Any) -> None:
        self.marked = []
        for (path, name), tensor in _tensors(model):
            if (path, name) not in self.before and isinstance(tensor, FakeTensor):
                torch.ops.aten.alias_copy(tensor)
                self.marked.append((path, name))
                self.values[path, name] = tree_map(_blank, vars(model.get_submodule(path))[name])

    def taken_from(self, calls: list[Call]) -> dict[str, Place]:
        """Take the marks out of some calls: name of what each of them marks → where it was kept."""
        marks = [call for call in calls if call.op == MARK]
        if not self.marked or len(marks) < len(self.marked):
            return {}
        marks = marks[-len(self.marked) :]
        calls[:] = [call for call in calls if not any(call is mark for mark in marks)]
        return {mark.args[0].name: place for mark, place in zip(marks, self.marked, strict=True)}

    def put_into(self, model: nn.Module, place: Place) -> None:
        """Let a model hold zeros in that attribute, as it holds something after a forward."""
        zeros = tree_map(lambda v: v.zeros() if isinstance(v, _Blank) else v, self.values[place])
        vars(model.get_submodule(place[0]))[place[1]] = zeros

    @staticmethod
    def holds(model: nn.Module, place: Place) -> bool:
        """Whether a model holds tensors in that attribute."""
        return any(place == found for found, _ in _tensors(model))


def made_of_weights(program: Program, marked: Mapping[str, Place]) -> dict[Place, frozenset[str]]:
    """Those places where something is kept that weights alone decide → first names of these weights."""
    fed = fed_by_inputs(program)
    made = {s.name: frozenset((s.target,)) for s in program.sources if s.moves and s.target is not None}
    weights = set(made)
    for call in program.calls:
        made[call.name] = frozenset[str]().union(*(made.get(name, ()) for name in call.reads))
    found: dict[Place, frozenset[str]] = {}
    for name, place in marked.items():
        if made.get(name) and name not in fed and name not in weights:
            found[place] = found.get(place, frozenset()) | made[name]
    return found


def same_ops(a: Program, b: Program) -> bool:
    """Whether two programs run the same ops in the same order."""
    first, second = ([c.op for c in program.calls if c.target is not operator.getitem] for program in (a, b))
    return first == second


def _tensors(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in REGISTERED:
                yield from (((path, name), v) for v in tree_leaves(value) if isinstance(v, Tensor))


def _blank(value: Any) -> Any:
    return _Blank(tuple(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else value
