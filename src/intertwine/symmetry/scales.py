"""Scales and signs: the null space of the homogeneous equations that follow from the constraints of a graph.

Every slot of an axis variable in a tensor carries one unknown exponent; every constraint relates the exponents of the
tensors in it, variable by variable and with the same coefficients at each index. A basis of the solutions, seen on the
parameters, is the group of positive scales of that variable; the same equations modulo 2 give its signs. Equations with
two unknowns are merged by union-find, the few longer ones are eliminated exactly with fractions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, lcm

from intertwine.graph.axes import AxisVariable
from intertwine.graph.constraints import Constraint, PointwiseRule, ReshapeConstraint, ScaleRule, Value
from intertwine.graph.graph import Graph
from intertwine.symmetry.activation import ActivationGroup, activation_group
from intertwine.symmetry.geometry import Key, VariableSlot, variable_slots

Unknown = int
Equation = dict[Unknown, int]  # Σ coefficient · unknown = 0
Solution = dict[Unknown, Fraction]  # also a row of fractions
_ZERO, _ONE = Fraction(0), Fraction(1)


@dataclass
class Equations:
    """The unknowns of all axis variables and the equations between them, real and modulo 2."""

    unknown: dict[tuple[Value, int, int, int, AxisVariable], Unknown] = field(default_factory=dict)
    variable_of: list[AxisVariable] = field(default_factory=list)
    real: dict[AxisVariable, list[Equation]] = field(default_factory=lambda: defaultdict(list))
    sign: dict[AxisVariable, list[Equation]] = field(default_factory=lambda: defaultdict(list))
    unknowns_of: dict[AxisVariable, list[Unknown]] = field(default_factory=lambda: defaultdict(list))

    def at(self, value: Value, o: VariableSlot) -> Unknown:
        key = (value, o.axis, o.offset, o.stride, o.variable)
        if key not in self.unknown:
            self.unknown[key] = len(self.variable_of)
            self.variable_of.append(o.variable)
            self.unknowns_of[o.variable].append(self.unknown[key])
        return self.unknown[key]

    def zero(self, unknown: Unknown) -> None:
        for store in (self.real, self.sign):
            store[self.variable_of[unknown]].append({unknown: 1})


def collect(graph: Graph) -> Equations:
    """All equations of a graph."""
    equations = Equations()
    groups: dict[str, ActivationGroup] = {}
    places: dict[Value, list[list[VariableSlot]]] = {}
    for value in (value for value in graph.builder.values if not value.lazy):
        places[value] = variable_slots(value)
        for o in (o for axis in places[value] for o in axis):
            equations.at(value, o)
    for constraint in graph.builder.constraints:
        if isinstance(constraint, ReshapeConstraint):
            _collect_reshape(equations, constraint, places)
        else:
            _collect_constraint(equations, constraint, places, groups)
        _collect_variances(equations, constraint, graph.builder.variances, places)
    return equations


def _collect_variances(
    equations: Equations,
    constraint: Constraint | ReshapeConstraint,
    variances: Mapping[str, float],
    places: dict[Value, list[list[VariableSlot]]],
) -> None:
    """A running variance moves as (v + eps), so whatever reads it as anything else lets no scale pass."""
    if isinstance(constraint, ReshapeConstraint):
        read, as_variance = [constraint.source], None
    else:
        read, as_variance = [operand.value for operand in constraint.operands], constraint.variance
    for value in read:
        if value.name in variances and (value is not as_variance or sum(v is value for v in read) > 1):
            for o in (o for axis in places[value] for o in axis):
                equations.zero(equations.at(value, o))


def _collect_reshape(
    equations: Equations, constraint: ReshapeConstraint, places: dict[Value, list[list[VariableSlot]]]
) -> None:
    found: list[dict[Key, list[Unknown]]] = []
    for value in (constraint.source, constraint.result):
        keys: dict[Key, list[Unknown]] = defaultdict(list)
        for o in (o for axis in places[value] for o in axis):
            keys[o.flat_key(value.shape)].append(equations.at(value, o))
        found.append(keys)
    _apply_rule(equations, ScaleRule(({0: 1, 1: -1},), ({0: 1, 1: 1},)), found, {})


def _collect_constraint(
    equations: Equations,
    constraint: Constraint,
    places: dict[Value, list[list[VariableSlot]]],
    groups: dict[str, ActivationGroup],
) -> None:
    by_label: dict[object, list[dict[Key, list[Unknown]]]] = {
        label: [defaultdict(list) for _ in constraint.operands] for label in constraint.rules
    }
    for i, operand in enumerate(constraint.operands):
        covered = {w.axis for w in operand.windows}
        for o in (o for axis, own in enumerate(places[operand.value]) if axis not in covered for o in own):
            equations.zero(equations.at(operand.value, o))
        for window in (w for w in operand.windows if w.label in by_label):
            for o in places[operand.value][window.axis]:
                if o.meets(window):
                    by_label[window.label][i][o.key(window)].append(equations.at(operand.value, o))
    for label, rule in constraint.rules.items():
        _apply_rule(equations, rule, by_label[label], groups)


def _apply_rule(
    equations: Equations,
    rule: ScaleRule | PointwiseRule,
    operands: Sequence[dict[Key, list[Unknown]]],
    groups: dict[str, ActivationGroup],
) -> None:
    """Add the equations of a rule for every place where an axis variable stands in the operands."""
    if isinstance(rule, PointwiseRule):
        if rule.key not in groups:
            groups[rule.key] = activation_group(rule.fn)
        rule = pointwise_rule(groups[rule.key])
    # dicts keep their order, so that the basis found is the same in every process
    for variable in dict.fromkeys(key[0] for keys in operands for key in keys):
        keys = [[k for k in operand if k[0] is variable] for operand in operands]
        holders = [k for k in keys if k]
        if all(set(k) == set(holders[0]) for k in holders):
            for key in holders[0]:
                _write(equations, rule, [operand.get(key, []) for operand in operands])
        else:  # the operands read the axis differently, so no scale can be followed through
            for own, operand in zip(keys, operands, strict=True):
                for unknown in (u for k in own for u in operand[k]):
                    equations.zero(unknown)


def _write(equations: Equations, rule: ScaleRule, operands: Sequence[list[Unknown]]) -> None:
    for store, rules in ((equations.real, rule.real), (equations.sign, rule.sign)):
        for relation in rules:
            equation: Equation = defaultdict(int)
            for i, coefficient in relation.items():
                for unknown in operands[i]:
                    equation[unknown] += coefficient
            kept = {u: c for u, c in equation.items() if c != 0}
            if kept:
                store[equations.variable_of[next(iter(kept))]].append(kept)


def pointwise_rule(group: ActivationGroup) -> ScaleRule:
    """What an elementwise function does to exponents: out = degree · in, or nothing passes."""
    if group.degree is None:
        real: tuple[dict[int, int], ...] = ({0: 1}, {1: 1})
    else:
        real = ({0: group.degree.numerator, 1: -group.degree.denominator},)
    sign = ({0: 1}, {1: 1}) if group.parity is None else ({0: 1 if group.parity < 0 else 0, 1: 1},)
    return ScaleRule(real, sign, linear=group.kind == "all")


def solve(unknowns: Sequence[Unknown], equations: Sequence[Equation], modulus: int = 0) -> list[Solution]:
    """A basis of the null space, vectors as unknown → coefficient; `modulus` 2 solves over the two-element field."""
    classes = _Classes(modulus)
    longer = [e for e in equations if not classes.merge(e)]
    expressed = _eliminate([classes.in_roots(e) for e in longer], modulus)
    basis: dict[Unknown, Solution] = {}
    for u in unknowns:
        root, ratio = classes.find(u)
        if root not in classes.zero:
            for free, c in expressed.get(root, {root: _ONE}).items():
                basis.setdefault(free, {})[u] = c if ratio == 1 else -c
    return [_primitive(vector) for vector in basis.values()]


class _Classes:
    """Union-find over unknowns that are equal or opposite, or zero: what almost all equations say."""

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus
        self.parent: dict[Unknown, tuple[Unknown, int]] = {}  # unknown → (nearer to the root, ratio to it)
        self.zero: set[Unknown] = set()

    def find(self, u: Unknown) -> tuple[Unknown, int]:
        """The root of an unknown's class and the ratio to it, with path compression."""
        way = []
        while u in self.parent:
            way.append(u)
            u = self.parent[u][0]
        ratio = 1
        for w in reversed(way):
            ratio *= self.parent[w][1]
            self.parent[w] = (u, ratio)
        return u, self.parent[way[0]][1] if way else 1

    def merge(self, equation: Equation) -> bool:
        """Merge classes by an equation of one unknown, or of two with coefficients ±1; False for any other."""
        terms = [(u, c % 2 if self.modulus else c) for u, c in equation.items()]
        terms = [(u, c) for u, c in terms if c]
        if len(terms) > 2 or (len(terms) == 2 and any(abs(c) != 1 for _, c in terms)):
            return False
        if len(terms) == 1:
            self.zero.add(self.find(terms[0][0])[0])
        elif terms:
            (u, c), (v, d) = terms
            self._join(u, v, 1 if self.modulus else -c * d)
        return True

    def _join(self, u: Unknown, v: Unknown, ratio: int) -> None:
        """Let u = ratio · v."""
        (a, p), (b, q) = self.find(u), self.find(v)
        if a != b:
            self.parent[a] = (b, p * q * ratio)
            if a in self.zero:
                self.zero.add(b)
        elif p != q * ratio:
            self.zero.add(a)  # an unknown that equals its opposite

    def in_roots(self, equation: Equation) -> Solution:
        """The equation between the classes its unknowns belong to."""
        found: Solution = defaultdict(Fraction)
        for u, c in equation.items():
            root, ratio = self.find(u)
            if root not in self.zero:
                found[root] += c * ratio
        return found


def _eliminate(equations: Sequence[Solution], modulus: int) -> dict[Unknown, Solution]:
    """Exact elimination: some unknowns expressed in the others."""
    expressed: dict[Unknown, Solution] = {}

    def reduced(c: Fraction) -> Fraction:
        return Fraction(c.numerator % 2) if modulus else c

    def rewrite(row: Solution, u: Unknown, by: Solution) -> Solution:
        c = row[u]
        result = {v: d for v, d in row.items() if v != u}
        for v, d in by.items():
            result[v] = reduced(result.get(v, _ZERO) + c * d)
        return {v: d for v, d in result.items() if d != 0}

    for equation in equations:
        row = {u: reduced(c) for u, c in equation.items() if reduced(c) != 0}
        for u in list(row):
            if u in expressed:
                row = rewrite(row, u, expressed[u]) if u in row else row
        if row:
            pivot = next(iter(row))
            by = {u: reduced(-c / row[pivot]) for u, c in row.items() if u != pivot}
            expressed = {u: rewrite(e, pivot, by) if pivot in e else e for u, e in expressed.items()}
            expressed[pivot] = by
    return expressed


def _primitive(vector: Solution) -> Solution:
    """The same direction with coprime integer coefficients, the first one positive."""
    many = lcm(*(c.denominator for c in vector.values()))
    common = gcd(*(int(c * many) for c in vector.values()))
    common = common if vector[min(vector)] > 0 else -common
    return {u: c * many / common for u, c in vector.items()}


def independent_on(
    basis: Sequence[Solution], seen: set[Unknown], known: Sequence[Solution] = (), modulus: int = 0
) -> list[Solution]:
    """Those vectors of a basis that are independent of each other and of `known` ones on the unknowns `seen`."""
    rows: list[tuple[Unknown, Solution]] = []

    def adds(vector: Solution) -> bool:
        """Whether a vector lies outside the span of the rows so far; if so it joins them."""
        for pivot, row in rows:
            if vector.get(pivot):
                factor = vector[pivot] / row[pivot]
                for u, c in row.items():
                    left = vector.get(u, Fraction(0)) - factor * c
                    vector[u] = Fraction(left.numerator % 2) if modulus else left
                vector = {u: c for u, c in vector.items() if c != 0}
        if vector:
            rows.append((next(iter(vector)), vector))
        return bool(vector)

    def visible(vector: Solution) -> Solution:
        reduced = {u: Fraction(c.numerator % 2) if modulus else c for u, c in vector.items() if u in seen}
        return {u: c for u, c in reduced.items() if c}

    for vector in known:
        adds(visible(vector))
    return [vector for vector in basis if adds(visible(vector))]
