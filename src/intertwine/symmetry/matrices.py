"""Matrix groups: axis variables on which a whole matrix may act, because they only meet linear maps.

A variable in linear constraints only carries GL(n), contragredient on the two sides of a contraction (queries and keys,
values and output projection, for each head). If besides linear maps it meets only lengths (RMS normalisation) and
diagonal weights that can be folded into their consumers, it carries O(n).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from intertwine.graph.axes import AxisVariable, resolve
from intertwine.graph.constraints import Constraint, Label, PointwiseRule, ReshapeConstraint, ScaleRule, Value, Window
from intertwine.graph.graph import Graph
from intertwine.symmetry.activation import activation_group
from intertwine.symmetry.geometry import VariableSlot, variable_slots
from intertwine.symmetry.scales import Equations, Unknown

#: A tensor → the slots of axis variables on each of its axes.
SlotsOf = Mapping[Value, list[list[VariableSlot]]]
#: What takes part in a label of a constraint: a tensor, its window, and the slots in that.
Participants = list[tuple[Value, Window, list[VariableSlot]]]

#: An elementwise square, as the key of a pointwise rule names it.
SQUARE = re.compile(r"aten\.(square_?\.default\('x',\)|pow_?\.(Tensor_)?Scalar\('x', 2(\.0)?\))\[\]")


@dataclass
class MatrixGroups:
    """Axis variables that carry a matrix group, and the diagonal weights that must be folded to ones first."""

    kind: dict[AxisVariable, str] = field(default_factory=dict)
    diagonals: dict[AxisVariable, set[Value]] = field(default_factory=lambda: defaultdict(set))
    squares: set[Value] = field(default_factory=set)  # x² inside a length: no orthogonal map acts on these


def find_matrices(
    graph: Graph,
    equations: Equations,
    scales: Mapping[AxisVariable, list[dict[Unknown, Fraction]]],
    over: Mapping[AxisVariable, tuple[AxisVariable, ...]],
) -> MatrixGroups:
    """All variables of the graph's parameters that carry GL(n) or O(n)."""
    places = {v: variable_slots(v) for v in graph.builder.values if not v.lazy}
    found = MatrixGroups(squares=_squares_that_are_summed(graph))
    seen = _Survey(graph, places, found)
    bases = {a for own in over.values() for a in own}
    for variable, vectors in scales.items():
        if variable in seen.obstacles or variable in bases or variable.frozen is not None or variable.size < 2:
            continue
        weights = found.diagonals.get(variable, set())
        if variable in seen.lengths:
            if _can_fold(weights, vectors, equations, places):
                found.kind[variable] = "O"
        elif not weights and _moves_all_alike(variable, vectors, equations):
            found.kind[variable] = "GL"
    return found


class _Survey:
    """Variables through which no matrix passes (`obstacles`), and of which only lengths are read (`lengths`)."""

    def __init__(self, graph: Graph, places: SlotsOf, found: MatrixGroups) -> None:
        self.obstacles, self.lengths = set[AxisVariable](), set[AxisVariable]()
        self._graph, self._places, self._found = graph, places, found
        self._linear: dict[str, bool] = {}
        for constraint in graph.builder.constraints:
            if isinstance(constraint, ReshapeConstraint):
                self.obstacles |= _reread(constraint, places)
            else:
                self.obstacles |= _uncovered(constraint, places)
                for label in constraint.rules:
                    self._take(constraint, label)

    def _take(self, constraint: Constraint, label: Label) -> None:
        held = _held(constraint, label, self._places)
        variables = {o.variable for _, _, occurred in held for o in occurred}
        if _is_linear(constraint.rules[label], self._linear):
            self.obstacles |= {a for a in variables if _meets_itself_moved(a, held)}
        elif self._reads_lengths(constraint, label) and all(_alone(v, w) for v, w, _ in held):
            self.lengths |= variables
            self._weigh(variables, None if constraint.length is None else constraint.length.weight)
        elif (weight := _diagonal(constraint, label, held, self._graph)) is not None:
            self._weigh(variables, weight)
        else:
            self.obstacles |= variables

    def _reads_lengths(self, constraint: Constraint, label: Label) -> bool:
        takes_length = constraint.length is not None and constraint.length.label == label
        return takes_length or any(operand.value in self._found.squares for operand in constraint.operands)

    def _weigh(self, variables: set[AxisVariable], weight: Value | None) -> None:
        if weight is not None:
            for variable in variables:
                self._found.diagonals[variable].add(weight)


def _meets_itself_moved(variable: AxisVariable, held: Participants) -> bool:
    """Whether two tensors hold a variable at different places of one label, which a matrix would mix."""
    keys = [frozenset(o.key(w) for o in occurred if o.variable is variable) for _, w, occurred in held]
    return len({own for own in keys if own}) > 1


def _moves_all_alike(variable: AxisVariable, vectors: list[dict[Unknown, Fraction]], equations: Equations) -> bool:
    """Whether one scale acts on the variable, with exponent 1 or −1, wherever the variable stands."""
    return len(vectors) == 1 and all(abs(vectors[0].get(u, 0)) == 1 for u in equations.unknowns_of[variable])


def _can_fold(
    weights: set[Value], vectors: list[dict[Unknown, Fraction]], equations: Equations, places: SlotsOf
) -> bool:
    """Whether every diagonal weight has a scale that moves it and none of the others."""
    own = {w: equations.at(w, places[w][0][0]) for w in weights}
    alone = [[w for w, u in own.items() if vector.get(u)] for vector in vectors]
    return {moved[0] for moved in alone if len(moved) == 1} == weights


def _held(constraint: Constraint, label: Label, places: SlotsOf) -> Participants:
    """(tensor, window, slots in it) for every operand that takes part in a label."""
    return [
        (operand.value, w, [o for o in places[operand.value][w.axis] if o.meets(w)])
        for operand in constraint.operands
        for w in operand.windows
        if w.label == label
    ]


def _uncovered(constraint: Constraint, places: SlotsOf) -> set[AxisVariable]:
    found = set()
    for operand in constraint.operands:
        covered = {w.axis for w in operand.windows}
        found |= {o.variable for i, axis in enumerate(places[operand.value]) if i not in covered for o in axis}
    return found


def _reread(constraint: ReshapeConstraint, places: SlotsOf) -> set[AxisVariable]:
    """Axis variables that stand in another number of places after a reshape."""
    before, after = (
        Counter(o.variable for axis in places[value] for o in axis) for value in (constraint.source, constraint.result)
    )
    return {a for a in {*before, *after} if before[a] != after[a]}


def _is_linear(rule: ScaleRule | PointwiseRule, known: dict[str, bool]) -> bool:
    if isinstance(rule, ScaleRule):
        return rule.linear
    if rule.key not in known:
        known[rule.key] = activation_group(rule.fn).kind == "all"
    return known[rule.key]


def _alone(value: Value, window: Window) -> bool:
    return isinstance(resolve(value.axes[window.axis]), AxisVariable) and window.size == value.shape[window.axis]


def _squares_that_are_summed(graph: Graph) -> set[Value]:
    """Tensors that are a square of another and are used for nothing but a sum over their last axis: lengths."""
    uses: dict[Value, list[Constraint | ReshapeConstraint]] = defaultdict(list)
    for constraint in graph.builder.constraints:
        if isinstance(constraint, Constraint):
            values = {o.value for o in constraint.operands}
        else:
            values = {constraint.source, constraint.result}
        for value in values:
            uses[value].append(constraint)
    found = set()
    for constraint in graph.builder.constraints:
        if not isinstance(constraint, Constraint) or len(constraint.operands) != 2:
            continue
        square = constraint.operands[1].value
        rules = constraint.rules.values()
        if len(uses[square]) != 2 or not any(isinstance(r, PointwiseRule) and SQUARE.fullmatch(r.key) for r in rules):
            continue
        total = uses[square][1]
        if not isinstance(total, Constraint) or len(total.operands) != 2 or total.call is None:
            continue
        kept = {w.label for w in total.operands[1].windows}
        if total.call.op.startswith(("aten.sum", "aten.mean")) and ("lead", square.ndim - 1) not in kept:
            found.add(square)
    return found


def _diagonal(constraint: Constraint, label: Label, held: Participants, graph: Graph) -> Value | None:
    """The parameter vector of a plain product `x * weight` along this label, if that is what the constraint is."""
    rule = constraint.rules[label]
    if not isinstance(rule, ScaleRule) or [sorted(e.values()) for e in rule.real] != [[-1, 1, 1]]:
        return None
    if not all(_alone(v, w) for v, w, _ in held):
        return None
    weights = [v for v, _, _ in held if v.ndim == 1 and graph.parameters.get(v.name) is v]
    return weights[0] if len(weights) == 1 and len(held) == 3 else None
