"""Run two networks side by side, call by call, on the same inputs, and choose the activation sites: which activations
are used to match each wire (after or before nonlinearities).

The program captured from the network runs on both, so results of functions and of modules that are called twice are
seen like outputs of modules. A program is specialised to the shapes of its inputs; every new batch shape is captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from intertwine.data.batches import Call as Arguments
from intertwine.data.batches import Fingerprint, Hasher, calls, on_device_of, samples_of
from intertwine.data.layers import evaluating
from intertwine.errors import InputError, MismatchError
from intertwine.graph.capture import capture
from intertwine.graph.constraints import Constraint, PointwiseRule, Value
from intertwine.graph.model import copy_module
from intertwine.graph.program import Call, Program, Ref
from intertwine.graph.runner import ProgramRunner
from intertwine.symmetry.discover import Geometry
from intertwine.symmetry.geometry import Layout
from intertwine.symmetry.symmetry import Symmetry, from_program

#: Nonlinear functions of several tensors, entry by entry.
GATES = frozenset({"prelu", "_prelu_kernel", "glu", "maximum", "minimum", "fmax", "fmin"})
SIDES = ("post", "pre")


@dataclass(frozen=True, eq=False)
class CapturedForward:
    """The forward on batches of one shape: its program, and which wires stand on the axes of what it computes."""

    geometry: Geometry

    @property
    def program(self) -> Program:
        return self.geometry.graph.program

    @cached_property
    def from_data(self) -> frozenset[str]:
        """Names of what depends on the inputs; weights that are only reshaped or normalised do not."""
        names = {source.name for source in self.program.inputs if source.kind == "input"}
        for call in self.program.calls:
            if call.reads & names:
                names.add(call.name)
        return frozenset(names)

    @cached_property
    def layouts(self) -> Mapping[int, Layout]:
        """Position of a call → the layout of its result, for every new tensor of features on which a wire acts."""
        found: dict[int, Layout] = {}
        seen: set[int] = set()
        for position, call in enumerate(self.program.calls):
            value = self.value(call.name)
            if value is None or call.name not in self.from_data or id(value) in seen:
                continue
            seen.add(id(value))
            if value.floating and self.geometry.predicts(value):
                layout = self.geometry.layout(value)
                if layout.moves:
                    found[position] = layout
        return found

    def value(self, name: str) -> Value | None:
        """The tensor of the graph with a name."""
        return self.geometry.graph.values.get(name)

    @cached_property
    def made_at(self) -> Mapping[int, int]:
        """The identity of a tensor of the graph → the position of the call that made it."""
        found: dict[int, int] = {}
        for position, call in enumerate(self.program.calls):
            found.setdefault(id(self.value(call.name)), position)
        return found


@runtime_checkable
class CallObserver(Protocol):
    """Observes every call of two networks: what they read, by name, and what they computed."""

    def on_call(
        self,
        captured: CapturedForward,
        position: int,
        read: tuple[Mapping[str, Any], Mapping[str, Any]],
        a: Any,
        b: Any,
    ) -> None: ...


def run_side_by_side(
    symmetry: Symmetry, a: nn.Module, b: nn.Module, data: Any, observers: Sequence[CallObserver]
) -> Fingerprint:
    """Run both networks on all data, in evaluation mode, and pass every call to the observers; the data is read once.

    Args:
        symmetry: of both networks. data: batches of (inputs, targets); both networks run on each batch in turn.

    Returns:
        The fingerprint of the data.

    Example:
        >>> import torch, intertwine
        >>> class Count:
        ...     calls = 0
        ...     def on_call(self, captured, position, read, a, b):
        ...         self.calls += torch.equal(a, b)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> sym, count = intertwine.symmetry(model, torch.zeros(1, 3)), Count()
        >>> run_side_by_side(sym, model, model, [(torch.randn(5, 3), None)], [count]).samples, count.calls > 0
        (5, True)
    """
    devices = [next((t.device for t in [*m.parameters(), *m.buffers()]), None) for m in (a, b)]
    b = b if devices[0] == devices[1] else copy_module(b).to(devices[0])
    known: dict[Any, CapturedForward] = {}
    hasher = Hasher()
    with evaluating(a):
        for call in calls(data):
            if not samples_of(call):
                continue
            hasher.add(call)
            inputs = [on_device_of(call, model) for model in (a, b)]
            leaves, structure = tree_flatten(inputs[0])
            key = structure, tuple((v.shape, v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves)
            if key not in known:
                known[key] = _captured(symmetry, a, inputs[0])
            _run(known[key], (a, b), inputs, observers)
    if not hasher.samples:
        raise InputError(
            "The data holds no samples, so there are no features to compare. Pass at least one batch (inputs, "
            "targets); a generator can be read only once, so pass a list or a DataLoader where data is needed twice."
        )
    return hasher.fingerprint


def _captured(symmetry: Symmetry, model: nn.Module, call: Arguments) -> CapturedForward:
    args, kwargs = call
    found = from_program(capture(model, args, kwargs), symmetry.continuous, symmetry.distrusted)
    if found.signature != symmetry.signature:
        shapes = [tuple(v.shape) for v in tree_flatten(call)[0] if isinstance(v, Tensor)]
        raise MismatchError(
            f"On a batch of shapes {shapes}, in evaluation mode, the network has another symmetry than on the example "
            "inputs, so its features cannot be assigned to wires. Put both networks in evaluation mode before "
            "(model.eval()), and pass example inputs like those of the data."
        )
    return CapturedForward(found.geometry)


def _run(
    captured: CapturedForward,
    models: tuple[nn.Module, nn.Module],
    inputs: Sequence[Arguments],
    observers: Sequence[CallObserver],
) -> None:
    runners = [ProgramRunner(captured.program, m, call, exact=False) for m, call in zip(models, inputs, strict=True)]
    for position, call in enumerate(captured.program.calls):
        try:
            made = [runner.evaluate(position, runner.values) for runner in runners]
        except RuntimeError as error:
            raise InputError(
                f"The networks could not be run on a batch of the data: {call.op} raised {error}. Pass inputs that the "
                "networks themselves accept."
            ) from error
        for observer in observers:
            observer.on_call(captured, position, (runners[0].values, runners[1].values), *made)
        for runner, result in zip(runners, made, strict=True):
            runner.values[call.name] = result
            runner.forget(position)


def activation_sites(captured: CapturedForward, at: str) -> Mapping[int, tuple[int, ...]]:
    """Wire → positions of the calls whose results are compared to match it.

    After nonlinearities ("post"): the results of nonlinear elementwise functions (ReLU, GELU, PReLU) and of products of
    two features (gates). Before them ("pre"): what those functions read. A wire that meets no nonlinearity, such as the
    stream of a transformer, is compared at every hidden tensor it stands in.
    """
    if at not in SIDES:
        raise InputError(f"Unknown at={at!r}. Choose 'post' (after nonlinearities) or 'pre' (before).")
    nonlinear = _nonlinear_calls(captured)
    chosen: set[int] = set()
    for position, call in enumerate(captured.program.calls):
        if call.name not in nonlinear and not _is_gate(call, captured):
            continue
        if at == "post":
            chosen.add(position)
        else:
            read = {id(captured.value(name)) for name in call.reads & captured.from_data}
            chosen |= {captured.made_at[value] for value in read if value in captured.made_at}
    every: dict[int, list[int]] = {}
    for position, layout in captured.layouts.items():
        for wire in dict.fromkeys(axis.wire for axis in layout.wire_axes()):
            every.setdefault(wire, []).append(position)
    return {w: tuple(p for p in places if p in chosen) or tuple(places) for w, places in every.items()}


def _nonlinear_calls(captured: CapturedForward) -> set[str]:
    """Names of the calls that apply a nonlinear elementwise function."""
    found = set()
    for constraint in captured.geometry.graph.builder.constraints:
        if isinstance(constraint, Constraint) and constraint.call is not None:
            rules = [rule for rule in constraint.rules.values() if isinstance(rule, PointwiseRule)]
            if rules and _is_nonlinear(rules[0]):
                found.add(constraint.call.name)
    return found


def _is_nonlinear(rule: PointwiseRule) -> bool:
    values = rule.fn(torch.linspace(-3, 3, 25, dtype=torch.float64)).double()
    return not bool((values.diff().diff().abs() <= 1e-9 * (1 + values.abs().max())).all())


def _is_gate(call: Call, captured: CapturedForward) -> bool:
    name = call.op.removeprefix("aten.").split(".")[0].removesuffix("_")
    if name == "mul" or name == "__imul__":
        return sum(isinstance(v, Ref) and v.name in captured.from_data for v in call.args) > 1
    return name in GATES
