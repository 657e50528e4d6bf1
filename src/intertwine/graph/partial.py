"""Slices of weights that leave a part unread, and weights that are not read at all.

What a forward reads of a table of positions, a mask or a stored state often depends on the sizes of its inputs
(`position[:, : x.shape[1]]`), and a captured program has seen one size. At another size the part left out is read, and
together with the part read here; so an axis of which only a part is read keeps its order and its scales.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from intertwine.graph import axes as ax
from intertwine.graph.axes import Atom
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
    """Nothing acts along an axis of weights of which some part is cut off and read nowhere."""
    if not tape.cuts:
        return
    readers = _readers(tape)
    for cut in [cut for cut in tape.cuts if _leaves_a_part(cut, readers, program)]:
        why = f"only a part of it is read with inputs of these sizes (slice at {cut.call.place})"
        tape.boundary_along(cut.source, cut.dim, why)


#: The name of a call that reads something, and the last tensor of the meeting, which tells slices of one call apart.
Reader = tuple[str, Value]


def _readers(tape: Tape) -> dict[Atom, list[Reader]]:
    """Atom → who reads it. Looking at a tensor in another shape or order is no reading."""
    readers: dict[Atom, list[Reader]] = defaultdict(list)
    for meeting in tape.meetings:
        if isinstance(meeting, Reshaped) or meeting.operands[-1].value.view is not None:
            continue
        reader = meeting.call.name if meeting.call else "", meeting.operands[-1].value
        for operand in meeting.operands:
            for w in operand.windows:
                for atom in ax.atoms(ax.part(operand.value.axes[w.axis], w.start, w.size)):
                    readers[atom].append(reader)
    return readers


def _leaves_a_part(cut: Cut, readers: Mapping[Atom, list[Reader]], program: Program) -> bool:
    """Whether a cut leaves something out that no op reads but those which lead to the cut."""
    whole, kept = (set(ax.atoms(v.axes[cut.dim])) for v in (cut.source, cut.result))
    if not (left := whole - kept):
        return False
    before = _upstream(program, cut.call)
    return not all(
        any(name not in before and last is not cut.result for name, last in readers.get(atom, ())) for atom in left
    )


def _upstream(program: Program, call: Call) -> set[str]:
    """Names of the calls that a call depends on."""
    found: set[str] = set()
    wanted = set(call.reads)
    for earlier in reversed(program.calls):
        if earlier.name in wanted:
            found.add(earlier.name)
            wanted |= earlier.reads
    return found
