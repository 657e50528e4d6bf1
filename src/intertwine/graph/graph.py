"""The graph: every tensor of a captured program with its axes, made by running one rule per call."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from intertwine.errors import RuleError
from intertwine.graph import axes as ax
from intertwine.graph.axes import Axis, AxisVariable, Product, Sum
from intertwine.graph.builder import GraphBuilder, find_rule
from intertwine.graph.constraints import AxisSlice, ReshapeConstraint, Value, values_in
from intertwine.graph.program import Call, Program, ProgramInput, Ref, fed_by_inputs, replaced

#: Why a weight that a lambda or a hook holds too may not move: in a copy of the model these may read the original.
HELD_ELSEWHERE = (
    "read through something else that holds it (a lambda, a hook, a partial, a list), not as an attribute of a module"
)


@dataclass(frozen=True)
class Graph:
    """A captured program, what its rules built, and the value behind every name.

    `values` holds tensors by their name in the program; `parameters` maps qualified parameter and buffer names to
    theirs. `sites` maps a module path to the name of the tensor that module returns.
    """

    program: Program
    builder: GraphBuilder
    values: Mapping[str, Value]
    parameters: Mapping[str, Value]
    sites: Mapping[str, str]

    def __repr__(self) -> str:
        made = f"{len(self.parameters)} parameters, {len(self.builder.constraints)} constraints"
        return f"Graph({len(self.program)} calls, {made})"


def build_graph(program: Program, distrusted: frozenset[str] = frozenset()) -> Graph:
    """Run the rules over a program. Calls named in `distrusted` are treated as if they had no rule."""
    import intertwine.graph.rules  # noqa: F401  (registers the built-in rules)

    builder = GraphBuilder()
    memory = _Memory(builder)
    parameters: dict[str, Value] = {}
    held = {source.weight for source in program.inputs}
    for source in program.inputs:
        memory.keep(source.name, _enter(builder, source, parameters, _immovable_reason(program, source.target, held)))
    read, fed = _results_read(program), fed_by_inputs(program)
    for call in program.calls:
        builder.call = call
        builder.of_weights = call.name not in fed
        builder.unread = frozenset(range(len(call.shapes))) - read[call.name]
        _run(builder, call, memory, distrusted)
    builder.call = None
    freeze_partly_read(builder, program)
    for ref in program.outputs:
        value = memory.values.get(ref.name)
        if isinstance(value, Value):
            builder.boundary(memory.read(ref.name), "it is an axis of the model's output")
    _tie_states(builder, program, memory)
    tensors = {name: value for name, value in memory.made.items() if isinstance(value, Value)}
    return Graph(program, builder, tensors, parameters, _sites(program, tensors))


def _results_read(program: Program) -> dict[str, set[int]]:
    """Name of a call → which of its results some other call or the caller reads."""
    others = (call.reads for call in program.calls if call.target is not operator.getitem)
    names = frozenset(ref.name for ref in program.outputs).union(*others)
    read = {call.name: {0} if call.name in names else set[int]() for call in program.calls}
    for call in program.calls:
        if call.target is operator.getitem:  # capture keeps those alone that something reads
            read[call.args[0].name].add(call.args[1])
    return read


def _immovable_reason(program: Program, weight: str | None, held: Collection[str | None]) -> str:
    """Why a weight must not be moved, whatever the forward does with it; empty for one that may be."""
    if weight in program.kept:
        return f"what is computed from it stays in {program.kept[weight]} for later forwards"
    if weight in held:
        return f"it is {HELD_ELSEWHERE}"
    return "" if weight in program.read_weights else "the forward never reads it with these inputs"


def _enter(builder: GraphBuilder, source: ProgramInput, parameters: dict[str, Value], immovable: str) -> Value:
    """The value of an input of the program; `immovable`: why a weight may not move, if it may not."""
    floating = source.dtype.is_floating_point
    if source.moves and source.target is not None:
        if source.target not in parameters:
            parameters[source.target] = builder.value(
                source.shape, [AxisVariable(n) for n in source.shape], floating, source.target
            )
            if immovable:
                builder.boundary(parameters[source.target], immovable)
        return parameters[source.target]
    if source.target is not None:
        why = f"it meets the constant buffer {source.target}"
    elif source.weight is not None:
        why = f"it meets {source.weight}, which is {HELD_ELSEWHERE}"
    else:
        why = "it meets an input of the model" if source.kind == "input" else "it meets a constant"
    return builder.fixed(source.shape, why, floating)


def _tie_states(builder: GraphBuilder, program: Program, memory: _Memory) -> None:
    """What a forward writes into an input (a state, a cache) is what the next forward, or the caller, reads there."""
    written = program.written_inputs()
    for source in program.inputs:
        before = memory.made[source.name]
        if source.name in written and (after := memory.read(source.name)) is not before:
            labels = builder.labels(before)
            builder.multilinear([[(before, labels)], [(after, labels)]], labels, before.shape)


class _Memory:
    """Name → value, with the aliasing that in-place ops need: two names of one storage change together."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder
        self.values: dict[str, Any] = {}  # what a name holds now
        self.made: dict[str, Any] = {}  # what the call of that name returned
        self._family: dict[str, set[str]] = {}
        self._stale: dict[str, Value] = {}  # names whose storage was written through another view → the written value

    def keep(self, name: str, value: Any) -> None:
        self.values[name] = self.made[name] = value

    def read(self, name: str) -> Any:
        value = self.values[name]
        if name in self._stale and isinstance(value, Value):
            written = self._stale.pop(name)
            why = f"it is written in place through a view ({self.builder.here})"
            self.builder.boundary(value, why)
            self.builder.boundary(written, why)
            value.zero = False
        return value

    def share(self, name: str, other: str, only_if_shared: bool = False) -> None:
        if only_if_shared and other not in self._family:
            return
        family = self._family.setdefault(other, {other})
        family.add(name)
        self._family[name] = family

    def overwrite(self, target: str, result: Value) -> None:
        old = self.values[target]
        for name in self._family.get(target, {target}):
            held = self.values.get(name)
            if held is old:
                self.values[name] = result
            elif isinstance(held, Value) and held is not result:
                self._stale[name] = result


def _run(builder: GraphBuilder, call: Call, memory: _Memory, distrusted: frozenset[str]) -> None:
    if call.target is operator.getitem:
        source, index = call.args
        memory.keep(call.name, memory.values[source.name][index])
        memory.share(call.name, source.name, only_if_shared=True)
        return
    args, kwargs = replaced((call.args, dict(call.kwargs)), Ref, lambda ref: memory.read(ref.name))
    result = _apply(builder, call, args, kwargs, call.name in distrusted)
    for name in call.also_written:
        why = f"it is written by {builder.here}"
        for value in values_in((args, kwargs, result)):
            builder.boundary(value, why)
        memory.overwrite(name, builder.fixed(memory.values[name].shape, why))
    memory.keep(call.name, result)
    first = call.args[0] if call.args and isinstance(call.args[0], Ref) else None
    if first is not None and call.aliases:
        memory.share(call.name, first.name)
        if call.inplace and isinstance(result, Value):
            memory.overwrite(first.name, result)


def _apply(builder: GraphBuilder, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], distrusted: bool) -> Any:
    from intertwine.graph.rules.elementwise import generic_pointwise

    inputs = values_in((args, kwargs))
    found = None if distrusted else find_rule(call.op)
    if not any(v.live for v in inputs) and not getattr(found, "creates", False):
        return _pack(call, builder.opaque([], call.shapes, ""))
    pointwise = torch.Tag.pointwise in getattr(call.target, "tags", ())
    if found is None and not distrusted and len(call.shapes) == 1 and pointwise:
        found = generic_pointwise
    if found is None:
        why = (
            f"the certificate failed at {builder.here}"
            if distrusted
            else f"there is no rule for {call.op} ({call.place})"
        )
        builder.unsupported.append((call.op, call.place))
        return _pack(call, builder.opaque(inputs, call.shapes, why))
    try:
        return found(builder, *args, **kwargs)
    except (TypeError, ValueError, IndexError, KeyError, AssertionError) as error:
        if not found.__module__.startswith("intertwine."):
            raise RuleError(
                f"Your rule for {call.op} ({found.__module__}.{found.__name__}) failed on the call at {call.place}: "
                f"{error}. Compare its arguments and labels with the op's schema and the shapes of its tensors."
            ) from error
        # a use of the op that the built-in rule does not know: its constraints so far only restrict, so freeze the rest
        builder.unsupported.append((call.op, call.place))
        why = f"the rule for {call.op} does not know this use of it ({call.place}: {error})"
        return _pack(call, builder.opaque(inputs, call.shapes, why))


def _pack(call: Call, results: tuple[Value | None, ...]) -> Any:
    return results if len(results) > 1 or call.gives_list else results[0] if results else None


def _sites(program: Program, values: Mapping[str, Value]) -> dict[str, str]:
    """Module path → name of the last tensor computed under it, which is what the module returns."""
    sites: dict[str, str] = {}
    for call in program.calls:
        if call.name not in values or (call.target is operator.getitem and call.args[1] != 0):
            continue
        path = call.path
        while path:
            sites[path] = call.name
            path = path.rpartition(".")[0]
    return sites


# -- Slices that leave a part unread -----------------------------------------------------------------------------------


def freeze_partly_read(builder: GraphBuilder, program: Program) -> None:
    """Freeze what nothing reads because a slice leaves it out; of weights, all of the sliced axis.

    What a forward reads of a table of positions, a mask or a stored state often depends on the sizes of its inputs
    (`position[:, : x.shape[1]]`), and a captured program has seen one size. At another size the part left out is read
    together with the part read here; so an axis of weights of which only a part is read keeps its order and scales.
    What is computed from the input is sliced like that too, but more often a hidden layer is split into pieces of fixed
    sizes: there the part that nothing reads stays as it is, and the part that is read may move.
    """
    if not builder.slices:
        return
    found = _Readers(builder, program)
    for cut, left in [(cut, left) for cut in builder.slices if (left := found.unread(cut))]:
        if cut.of_weights:
            why = f"only a part of it is read with inputs of these sizes (slice at {cut.call.place})"
            builder.boundary_along(cut.source, cut.dim, why)
            continue
        why = f"nothing reads it with inputs of these sizes (left out by the slice at {cut.call.place})"
        for variable in left:
            ax.freeze(variable, why)
        for start, length in list(_stretches(cut.source.axes[cut.dim], left)):
            builder.unscale(builder.narrow(cut.source, cut.dim, start, length), cut.dim)


class _Reader(NamedTuple):
    """The call that reads a variable, and the last tensor of the constraint, which separates slices of one call."""

    call: str
    result: Value
    sums: bool  # whether what is read is added up there: other parts of the result come to depend on it


class _Readers:
    """Which calls read which axis variables. A reshape or a permute of a tensor does not read it."""

    def __init__(self, builder: GraphBuilder, program: Program) -> None:
        self.program = program
        self.position = {call.name: i for i, call in enumerate(program.calls)}
        self.of: dict[AxisVariable, list[_Reader]] = defaultdict(list)
        for constraint in builder.constraints:
            if isinstance(constraint, ReshapeConstraint) or constraint.operands[-1].value.view is not None:
                continue
            name, result = constraint.call.name if constraint.call else "", constraint.operands[-1]
            kept = {w.label for w in result.windows}
            for operand in constraint.operands:
                for w in operand.windows:
                    reader = _Reader(name, result.value, w.label not in kept)
                    for variable in ax.variables_of(ax.part(operand.value.axes[w.axis], w.start, w.size)):
                        self.of[variable].append(reader)

    def unread(self, cut: AxisSlice) -> set[AxisVariable]:
        """What a slice leaves out and no op reads, except those that lead to the slice.

        In a tensor that depends on the input, what is added up on the way to the slice (the keys of an attention) is
        read there.
        """
        whole, kept = (set(ax.variables_of(v.axes[cut.dim])) for v in (cut.source, cut.result))
        return {variable for variable in whole - kept if not self._is_read(variable, cut)}

    def _is_read(self, variable: AxisVariable, cut: AxisSlice) -> bool:
        at = self.position[cut.call.name]
        earlier = []
        for reader in self.of.get(variable, ()):
            if reader.result is cut.result:
                continue
            if (reader.sums and not cut.of_weights) or self.position.get(reader.call, at) >= at:
                return True
            earlier.append(reader.call)
        return bool(earlier) and not _upstream(self.program, cut.call).issuperset(earlier)


def _stretches(axis: Axis, variables: Set[AxisVariable], offset: int = 0) -> Iterator[tuple[int, int]]:
    """Where on an axis some variables stand, as (start, length)."""
    axis = ax.resolve(axis)
    if isinstance(axis, Sum):
        for term in axis.terms:
            yield from _stretches(term, variables, offset)
            offset += term.size
    elif isinstance(axis, Product):
        if any(factor in variables for factor in axis.factors if isinstance(factor, AxisVariable)):
            yield offset, axis.size
            return
        inner = prod(factor.size for factor in axis.factors[1:])
        for start, length in _stretches(axis.factors[0], variables):
            yield offset + start * inner, length * inner
    elif isinstance(axis, AxisVariable) and axis in variables:
        yield offset, axis.size


def _upstream(program: Program, call: Call) -> set[str]:
    """Names of the calls that a call depends on."""
    found: set[str] = set()
    wanted = set(call.reads)
    for earlier in reversed(program.calls):
        if earlier.name in wanted:
            found.add(earlier.name)
            wanted |= earlier.reads
    return found
