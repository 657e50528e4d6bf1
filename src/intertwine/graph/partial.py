"""Slices of weights that leave a part unread, and weights that are not read at all.

What a forward reads of a table of positions, a mask or a stored state often depends on the sizes of its inputs
(`position[:, : x.shape[1]]`), and a captured program has seen one size. At another size the part left out is read, and
together with the part read here; so an axis of which only a part is read keeps its order and its scales.
"""

from __future__ import annotations

from collections.abc import Iterable

from intertwine.graph import axes as ax
from intertwine.graph.axes import Atom
from intertwine.graph.meeting import Cut, Meeting, Reshaped
from intertwine.graph.program import Call, Program
from intertwine.graph.tape import Tape

NEVER_READ = "the forward never reads it with these inputs"


def fed_by_inputs(program: Program) -> frozenset[str]:
    """Names of the tensors that depend on an input, or on a state that the forward writes."""
    written = program.written_sources()
    fed = {s.name for s in program.sources if s.kind == "input" or s.name in written}
    for call in program.calls:
        if not fed.isdisjoint(call.reads):
            fed.add(call.name)
    return frozenset(fed)


def freeze_partly_read(tape: Tape, program: Program) -> None:
    """Nothing acts along an axis of weights of which some part is cut off and read nowhere."""
    for cut in [cut for cut in tape.cuts if _leaves_a_part(cut, tape, program)]:
        why = f"only a part of it is read with inputs of these sizes (slice at {cut.call.place})"
        tape.boundary_along(cut.source, cut.dim, why)


def _leaves_a_part(cut: Cut, tape: Tape, program: Program) -> bool:
    whole, kept = (set(ax.atoms(v.axes[cut.dim])) for v in (cut.source, cut.result))
    left = whole - kept
    return bool(left) and not left <= _read(tape.meetings, left, cut, _upstream(program, cut.call))


def _upstream(program: Program, call: Call) -> set[str]:
    """Names of the calls that a call depends on."""
    found: set[str] = set()
    wanted = set(call.reads)
    for earlier in reversed(program.calls):
        if earlier.name in wanted:
            found.add(earlier.name)
            wanted |= earlier.reads
    return found


def _read(meetings: Iterable[Meeting | Reshaped], wanted: set[Atom], cut: Cut, upstream: set[str]) -> set[Atom]:
    """Those of some atoms that an op reads which does not lead to the cut; views of a tensor are no reading."""
    found: set[Atom] = set()
    for meeting in meetings:
        if isinstance(meeting, Reshaped) or (meeting.call is not None and meeting.call.name in upstream):
            continue
        last = meeting.operands[-1].value
        if last is cut.result or last.view is not None:
            continue
        for operand in meeting.operands:
            for w in operand.windows:
                axis = operand.value.axes[w.axis]
                part = axis if w.size == axis.size else ax.part(axis, w.start, w.size)
                found |= wanted.intersection(ax.atoms(part))
    return found
