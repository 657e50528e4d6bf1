"""Slices that leave a part unread, and weights that are not read at all.

What a forward reads of a table of positions, a mask or a stored state often depends on the sizes of its inputs
(`position[:, : x.shape[1]]`), and a captured program has seen one size. At another size the part left out is read, and
together with the part read here; so an axis of weights of which only a part is read keeps its order and its scales.
What is computed from the input (`scores[..., : x.shape[1]]`) is sliced like that too, but more often a hidden layer is
cut in pieces of fixed sizes: there the part that nothing reads stays as it is, and the part that is read may move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from math import prod
from typing import NamedTuple

from intertwine.graph import axes as ax
from intertwine.graph.axes import Atom, Axis, Product, Sum
from intertwine.graph.meeting import Cut, Reshaped
from intertwine.graph.program import Call, Program
from intertwine.graph.tape import Tape
from intertwine.graph.value import Value

NEVER_READ = "the forward never reads it with these inputs"
#: Of a weight that a lambda or a hook holds too: in a copy of the model these may still read that of the original.
HELD = (
    "read through something else that holds it (a lambda, a hook, a partial, a list), not as an attribute of a module"
)


def fed_by_inputs(program: Program) -> frozenset[str]:
    """Names of the tensors that depend on an input, or on a state that the forward writes."""
    written = program.written_sources()
    fed = {s.name for s in program.sources if s.kind == "input" or s.name in written}
    for call in program.calls:
        if not fed.isdisjoint(call.reads):
            fed.add(call.name)
    return frozenset(fed)


def freeze_partly_read(tape: Tape, program: Program) -> None:
    """What nothing reads because a slice leaves it out stays as it is; weights do so with all of the sliced axis."""
    if not tape.cuts:
        return
    found = _Readers(tape, program)
    for cut, left in [(cut, left) for cut in tape.cuts if (left := found.unread(cut))]:
        if cut.of_weights:
            why = f"only a part of it is read with inputs of these sizes (slice at {cut.call.place})"
            tape.boundary_along(cut.source, cut.dim, why)
            continue
        for atom in left:
            ax.freeze(atom, f"nothing reads it with inputs of these sizes (left out by the slice at {cut.call.place})")
        for start, length in list(_stretches(cut.source.axes[cut.dim], left)):
            tape.unscale(tape.narrow(cut.source, cut.dim, start, length), cut.dim)


class _Reader(NamedTuple):
    """The call that reads something, and the last tensor of the meeting, which tells slices of one call apart."""

    call: str
    result: Value
    sums: bool  # whether what is read is added up there: other parts of the result come to depend on it


class _Readers:
    """Who reads which atoms. Looking at a tensor in another shape or order is no reading."""

    def __init__(self, tape: Tape, program: Program) -> None:
        self.program = program
        self.position = {call.name: i for i, call in enumerate(program.calls)}
        self.of: dict[Atom, list[_Reader]] = defaultdict(list)
        for meeting in tape.meetings:
            if isinstance(meeting, Reshaped) or meeting.operands[-1].value.view is not None:
                continue
            name, result = meeting.call.name if meeting.call else "", meeting.operands[-1]
            kept = {w.label for w in result.windows}
            for operand in meeting.operands:
                for w in operand.windows:
                    reader = _Reader(name, result.value, w.label not in kept)
                    for atom in ax.atoms(ax.part(operand.value.axes[w.axis], w.start, w.size)):
                        self.of[atom].append(reader)

    def unread(self, cut: Cut) -> set[Atom]:
        """What a cut leaves out, if some of it is read by no op but those which lead to the cut.

        Of a tensor that depends on the input only those parts are meant; what is added up on the way to the cut (the
        keys of an attention) is read there.
        """
        whole, kept = (set(ax.atoms(v.axes[cut.dim])) for v in (cut.source, cut.result))
        return {atom for atom in whole - kept if not self._is_read(atom, cut)}

    def _is_read(self, atom: Atom, cut: Cut) -> bool:
        at = self.position[cut.call.name]
        earlier = []
        for reader in self.of.get(atom, ()):
            if reader.result is cut.result:
                continue
            if (reader.sums and not cut.of_weights) or self.position.get(reader.call, at) >= at:
                return True
            earlier.append(reader.call)
        return bool(earlier) and not _upstream(self.program, cut.call).issuperset(earlier)


def _stretches(axis: Axis, atoms: Set[Atom], offset: int = 0) -> Iterator[tuple[int, int]]:
    """Where on an axis some atoms stand, as (start, length)."""
    axis = ax.resolve(axis)
    if isinstance(axis, Sum):
        for term in axis.terms:
            yield from _stretches(term, atoms, offset)
            offset += term.size
    elif isinstance(axis, Product):
        if any(factor in atoms for factor in axis.factors if isinstance(factor, Atom)):
            yield offset, axis.size
            return
        inner = prod(factor.size for factor in axis.factors[1:])
        for start, length in _stretches(axis.factors[0], atoms):
            yield offset + start * inner, length * inner
    elif isinstance(axis, Atom) and axis in atoms:
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
