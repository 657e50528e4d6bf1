"""Fibres: atoms whose group element may differ for every index of another atom (the wreath products).

An atom b is fibred over an atom a if a stands beside b in every tensor in which b stands, the two are paired the same
way in all tensors of every meeting, and nothing mixes along a while b is there. Heads and head dimensions, groups and
channels within a group, experts and their widths: all are this.
"""

from __future__ import annotations

from collections import defaultdict

from intertwine.graph.axes import Atom
from intertwine.graph.graph import Graph
from intertwine.graph.tape import Meeting, Operand, Value
from intertwine.symmetry.occurrence import Occurrence, constant_atoms, occurrences

Pairing = dict[Atom, int]  # base atom → the axis it stands in


def fibres(graph: Graph) -> dict[Atom, tuple[Atom, ...]]:
    """For every atom, the atoms it is fibred over, outermost first."""
    places = {v: occurrences(v) for v in graph.tape.values if not v.lazy}
    bases: dict[Atom, set[Atom]] = {}
    pairings: dict[tuple[Value, Occurrence], Pairing] = {}
    for value, axes in places.items():
        always = [constant_atoms(a) for a in value.axes]
        for o in (o for axis in axes for o in axis):
            pairing = _pair(o, axes, always)
            pairings[value, o] = pairing
            bases[o.atom] = set(pairing) if o.atom not in bases else bases[o.atom] & set(pairing)
    for meeting in graph.tape.meetings:
        if isinstance(meeting, Meeting):
            _check_meeting(meeting, places, pairings, bases)
    return _closed(bases)


def _pair(o: Occurrence, axes: list[list[Occurrence]], always: list[tuple[Atom, ...]]) -> Pairing:
    """The atoms that stand beside an occurrence, each at one unmistakable place: its own axis first, else one other."""
    pairing: Pairing = {}
    for a in set(o.beside):
        if a is not o.atom and o.beside.count(a) == 1:
            pairing[a] = o.axis
    for i, atoms in enumerate(always):
        for a in atoms:
            if i == o.axis or a is o.atom or a in o.beside:
                continue
            everywhere = sum(p.atom is a for axis in axes for p in axis)
            if everywhere == 1:
                pairing[a] = i
    return pairing


def _check_meeting(
    meeting: Meeting,
    places: dict[Value, list[list[Occurrence]]],
    pairings: dict[tuple[Value, Occurrence], Pairing],
    bases: dict[Atom, set[Atom]],
) -> None:
    """Strike out the bases that the tensors of a meeting pair differently, or that are mixed under the fibre."""
    seen: dict[tuple[object, Atom], dict[Atom, object]] = defaultdict(dict)
    for operand in meeting.operands:
        labels = _labels(operand)
        for window in operand.windows:
            for o in places[operand.value][window.axis]:
                if not o.meets(window):
                    continue
                for a in list(bases[o.atom]):
                    axis = pairings[operand.value, o].get(a)
                    label = ("same",) if axis == o.axis else labels.get(axis) if axis is not None else None
                    agreed = seen[window.label, o.atom].setdefault(a, label)
                    mixed = label in meeting.mixes and window.label not in meeting.mixes
                    if label is None or agreed != label or mixed:
                        bases[o.atom].discard(a)


def _labels(operand: Operand) -> dict[int, object]:
    """Axis → label, for axes that take part as a whole."""
    return {w.axis: w.label for w in operand.windows if w.start == 0 and w.size == operand.value.shape[w.axis]}


def _closed(bases: dict[Atom, set[Atom]]) -> dict[Atom, tuple[Atom, ...]]:
    """Drop bases whose own bases are missing: without them the law of composition would not close.

    Of two atoms that are each a fibre of the other, the larger one stays a fibre; that gives the larger group.
    """
    rank = {b: (b.size, i) for i, b in enumerate(bases)}
    for b, own in bases.items():
        for a in list(own):
            if b in bases.get(a, ()) and rank[b] < rank[a]:
                own.discard(a)
    changed = True
    while changed:
        changed = False
        for own in bases.values():
            for a in list(own):
                if not bases.get(a, set()) <= own:
                    own.discard(a)
                    changed = True
    # outermost first, and in an order that does not depend on the process
    return {b: tuple(sorted(own, key=lambda a: (len(bases.get(a, ())), rank[a][1]))) for b, own in bases.items()}
