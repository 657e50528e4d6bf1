"""Matrix groups: atoms on which a whole matrix may act, because they only meet linear maps.

An atom whose every meeting is linear carries GL(n), contragredient on the two sides of a contraction (queries and keys,
values and output projection, per head by fibres). If besides linear maps it meets only lengths (RMS normalisation) and
diagonal weights that can be folded into their consumers, it carries O(n).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from intertwine.graph.axes import AxisVariable, resolve
from intertwine.graph.constraints import Constraint, Label, PointwiseRule, ReshapeConstraint, ScaleRule, Value, Window
from intertwine.graph.graph import Graph
from intertwine.symmetry.activation import activation_group
from intertwine.symmetry.geometry import VariableSlot, variable_slots
from intertwine.symmetry.scales import Equations, Unknown

#: A tensor → the occurrences of atoms on each of its axes.
SlotsOf = Mapping[Value, list[list[VariableSlot]]]
#: Who takes part in a label of a meeting: a tensor, its window, and the occurrences in that.
Participants = list[tuple[Value, Window, list[VariableSlot]]]


#: An elementwise square, as the key of a pointwise law names it.
SQUARE = re.compile(r"aten\.(square_?\.default\('x',\)|pow_?\.(Tensor_)?Scalar\('x', 2(\.0)?\))\[\]")


@dataclass
class MatrixGroups:
    """Atoms that carry a matrix group, and the diagonal weights that must be folded to ones first."""

    kind: dict[AxisVariable, str] = field(default_factory=dict)
    diagonals: dict[AxisVariable, set[Value]] = field(default_factory=lambda: defaultdict(set))
    squares: set[Value] = field(default_factory=set)  # x² inside a length: no orthogonal map acts on these


def find_matrices(
    graph: Graph,
    equations: Equations,
    scales: Mapping[AxisVariable, list[dict[Unknown, Fraction]]],
    over: Mapping[AxisVariable, tuple[AxisVariable, ...]],
) -> MatrixGroups:
    """All atoms of the graph's parameters that carry GL(n) or O(n)."""
    places = {v: variable_slots(v) for v in graph.builder.values if not v.lazy}
    found = MatrixGroups(squares=_squares_that_are_summed(graph))
    seen = _Survey(graph, places, found)
    bases = {a for own in over.values() for a in own}
    for atom, vectors in scales.items():
        if atom in seen.obstacles or atom in bases or atom.frozen is not None or atom.size < 2:
            continue
        weights = found.diagonals.get(atom, set())
        if atom in seen.lengths:
            if _can_fold(weights, vectors, equations, places):
                found.kind[atom] = "O"
        elif not weights and _moves_all_alike(atom, vectors, equations):
            found.kind[atom] = "GL"
    return found


class _Survey:
    """What the meetings of a graph make of its atoms: where no matrix can pass, where only lengths are looked at."""

    def __init__(self, graph: Graph, places: SlotsOf, found: MatrixGroups) -> None:
        self.obstacles, self.lengths = set[AxisVariable](), set[AxisVariable]()
        self._graph, self._places, self._found = graph, places, found
        self._linear: dict[str, bool] = {}
        for meeting in graph.builder.constraints:
            if isinstance(meeting, ReshapeConstraint):
                self.obstacles |= _reread(meeting, places)
            else:
                self.obstacles |= _uncovered(meeting, places)
                for label in meeting.rules:
                    self._take(meeting, label)

    def _take(self, meeting: Constraint, label: Label) -> None:
        held = _held(meeting, label, self._places)
        atoms = {o.atom for _, _, occurred in held for o in occurred}
        if _is_linear(meeting.rules[label], self._linear):
            self.obstacles |= {a for a in atoms if _meets_itself_moved(a, held)}
        elif self._looks_at_lengths(meeting, label, held):
            self.lengths |= atoms
            self._weigh(atoms, None if meeting.length is None else meeting.length.weight)
        elif (weight := _diagonal(meeting, label, held, self._graph)) is not None:
            self._weigh(atoms, weight)
        else:
            self.obstacles |= atoms

    def _looks_at_lengths(self, meeting: Constraint, label: Label, held: Participants) -> bool:
        lengths = _takes_length(meeting, label) or _of_squares(meeting, self._found.squares)
        return lengths and all(_alone(v, w) for v, w, _ in held)

    def _weigh(self, atoms: set[AxisVariable], weight: Value | None) -> None:
        if weight is not None:
            for atom in atoms:
                self._found.diagonals[atom].add(weight)


def _meets_itself_moved(atom: AxisVariable, held: Participants) -> bool:
    """Whether two tensors hold an atom at different places of one label: a matrix would mix what belongs apart."""
    keys = [frozenset(o.key(w) for o in occurred if o.atom is atom) for _, w, occurred in held]
    return len({own for own in keys if own}) > 1


def _moves_all_alike(atom: AxisVariable, vectors: list[dict[Unknown, Fraction]], equations: Equations) -> bool:
    """Whether one scale acts on the atom, by its size or its inverse, wherever the atom stands."""
    return len(vectors) == 1 and all(abs(vectors[0].get(u, 0)) == 1 for u in equations.unknowns_of[atom])


def _can_fold(
    weights: set[Value],
    vectors: list[dict[Unknown, Fraction]],
    equations: Equations,
    places: SlotsOf,
) -> bool:
    """Whether every diagonal weight has a scale that moves it and no other of them."""
    own = {w: equations.at(w, places[w][0][0]) for w in weights}
    alone = [[w for w, u in own.items() if vector.get(u)] for vector in vectors]
    return {moved[0] for moved in alone if len(moved) == 1} == weights


def _held(meeting: Constraint, label: Label, places: SlotsOf) -> Participants:
    """(tensor, window, occurrences in it) for every operand that takes part in a label."""
    return [
        (operand.value, w, [o for o in places[operand.value][w.axis] if o.meets(w)])
        for operand in meeting.operands
        for w in operand.windows
        if w.label == label
    ]


def _uncovered(meeting: Constraint, places: SlotsOf) -> set[AxisVariable]:
    found = set()
    for operand in meeting.operands:
        covered = {w.axis for w in operand.windows}
        found |= {o.atom for i, axis in enumerate(places[operand.value]) if i not in covered for o in axis}
    return found


def _reread(meeting: ReshapeConstraint, places: SlotsOf) -> set[AxisVariable]:
    """Atoms that a reshape shows in another number of places than before."""
    counts: list[dict[AxisVariable, int]] = []
    for value in (meeting.source, meeting.result):
        count: dict[AxisVariable, int] = defaultdict(int)
        for axis in places[value]:
            for o in axis:
                count[o.atom] += 1
        counts.append(count)
    return {a for a in {*counts[0], *counts[1]} if counts[0].get(a) != counts[1].get(a)}


def _is_linear(law: ScaleRule | PointwiseRule, known: dict[str, bool]) -> bool:
    if isinstance(law, ScaleRule):
        return law.linear
    if law.key not in known:
        known[law.key] = activation_group(law.fn).kind == "all"
    return known[law.key]


def _alone(value: Value, window: Window) -> bool:
    return isinstance(resolve(value.axes[window.axis]), AxisVariable) and window.size == value.shape[window.axis]


def _squares_that_are_summed(graph: Graph) -> set[Value]:
    """Tensors that are a square of another and are used for nothing but a sum over their last axis: lengths."""
    uses: dict[Value, list[Constraint | ReshapeConstraint]] = defaultdict(list)
    for meeting in graph.builder.constraints:
        values = (
            [o.value for o in meeting.operands] if isinstance(meeting, Constraint) else [meeting.source, meeting.result]
        )
        for value in set(values):
            uses[value].append(meeting)
    found = set()
    for meeting in graph.builder.constraints:
        if not isinstance(meeting, Constraint) or len(meeting.operands) != 2:
            continue
        square = meeting.operands[1].value
        is_square = any(isinstance(law, PointwiseRule) and SQUARE.fullmatch(law.key) for law in meeting.rules.values())
        if is_square and len(uses[square]) == 2:
            total = uses[square][1]
            last = square.ndim - 1
            if (
                isinstance(total, Constraint)
                and len(total.operands) == 2
                and total.call is not None
                and total.call.op.startswith(("aten.sum", "aten.mean"))
                and all(w.label != ("lead", last) for w in total.operands[1].windows)
            ):
                found.add(square)
    return found


def _takes_length(meeting: Constraint, label: Label) -> bool:
    return meeting.length is not None and meeting.length.label == label


def _of_squares(meeting: Constraint, squares: set[Value]) -> bool:
    return any(operand.value in squares for operand in meeting.operands)


def _diagonal(meeting: Constraint, label: Label, held: Participants, graph: Graph) -> Value | None:
    """The parameter vector of a plain product `x * weight` along this label, if that is what the meeting is."""
    law = meeting.rules[label]
    if (
        not isinstance(law, ScaleRule)
        or len(law.real) != 1
        or sorted(law.real[0].values()) != [-1, 1, 1]
        or not all(_alone(v, w) for v, w, _ in held)
    ):
        return None
    weights = [v for v, _, _ in held if v.ndim == 1 and graph.parameters.get(v.name) is v]
    return weights[0] if len(weights) == 1 and len(held) == 3 else None
