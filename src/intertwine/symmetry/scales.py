"""Scales and signs: the null space of the homogeneous equations that the meetings of a graph write down.

Every occurrence of an atom in a tensor carries one unknown exponent; every meeting relates the exponents of the
tensors in it, atom by atom and with the same coefficients at each index. A basis of the solutions, seen on the
parameters, is the group of positive scales of that atom; the same equations modulo 2 give its signs. Equations with
two unknowns are merged by union-find, the few longer ones are eliminated exactly with fractions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, lcm

from intertwine.graph.axes import Atom
from intertwine.graph.graph import Graph
from intertwine.graph.tape import Law, Meeting, Pointwise, Reshaped, Value
from intertwine.symmetry.activation import ActivationGroup, activation_group
from intertwine.symmetry.occurrence import Occurrence, occurrences

Unknown = int
Equation = dict[Unknown, Fraction]
Key = tuple[Atom, int, int]


@dataclass
class Equations:
    """The unknowns of all atoms and the equations between them, real and modulo 2."""

    unknown: dict[tuple[Value, int, int, int, Atom], Unknown] = field(default_factory=dict)
    atom_of: list[Atom] = field(default_factory=list)
    real: dict[Atom, list[Equation]] = field(default_factory=lambda: defaultdict(list))
    sign: dict[Atom, list[Equation]] = field(default_factory=lambda: defaultdict(list))
    unknowns_of: dict[Atom, list[Unknown]] = field(default_factory=lambda: defaultdict(list))

    def at(self, value: Value, o: Occurrence) -> Unknown:
        key = (value, o.axis, o.offset, o.stride, o.atom)
        if key not in self.unknown:
            self.unknown[key] = len(self.atom_of)
            self.atom_of.append(o.atom)
            self.unknowns_of[o.atom].append(self.unknown[key])
        return self.unknown[key]

    def add(self, real: Iterable[Equation], sign: Iterable[Equation]) -> None:
        for store, equations in ((self.real, real), (self.sign, sign)):
            for equation in equations:
                if equation:
                    store[self.atom_of[next(iter(equation))]].append(equation)

    def zero(self, unknown: Unknown) -> None:
        self.add([{unknown: Fraction(1)}], [{unknown: Fraction(1)}])


def collect(graph: Graph) -> Equations:
    """All equations of a graph."""
    equations = Equations()
    groups: dict[str, ActivationGroup] = {}
    places: dict[Value, list[list[Occurrence]]] = {}
    for value in graph.tape.values:
        if not value.lazy:
            places[value] = occurrences(value)
            for axis in places[value]:
                for o in axis:
                    equations.at(value, o)
    for meeting in graph.tape.meetings:
        if isinstance(meeting, Reshaped):
            _collect_reshape(equations, meeting, places)
        else:
            _collect_meeting(equations, meeting, places, groups)
    return equations


def _collect_reshape(equations: Equations, meeting: Reshaped, places: dict[Value, list[list[Occurrence]]]) -> None:
    found: list[dict[Key, list[Unknown]]] = []
    for value in (meeting.source, meeting.result):
        keys: dict[Key, list[Unknown]] = defaultdict(list)
        step = 1
        for axis in reversed(range(value.ndim)):
            for o in places[value][axis]:
                keys[o.atom, o.offset * step, o.stride * step].append(equations.at(value, o))
            step *= value.shape[axis]
        found.append(keys)
    law = Law(({0: 1, 1: -1},), ({0: 1, 1: 1},))
    _apply_law(equations, law, found, {})


def _collect_meeting(equations: Equations, meeting: Meeting, places: dict[Value, list[list[Occurrence]]], groups: dict[str, ActivationGroup]) -> None:
    by_label: dict[object, list[dict[Key, list[Unknown]]]] = {
        label: [defaultdict(list) for _ in meeting.operands] for label in meeting.laws
    }
    for i, operand in enumerate(meeting.operands):
        covered = {w.axis for w in operand.windows}
        for axis in range(operand.value.ndim):
            if axis not in covered:
                for o in places[operand.value][axis]:
                    equations.zero(equations.at(operand.value, o))
        for window in operand.windows:
            if window.label not in by_label:
                continue
            for o in places[operand.value][window.axis]:
                if o.meets(window):
                    by_label[window.label][i][o.key(window)].append(equations.at(operand.value, o))
    for label, law in meeting.laws.items():
        _apply_law(equations, law, by_label[label], groups)


def _apply_law(equations: Equations, law: Law | Pointwise, operands: Sequence[dict[Key, list[Unknown]]], groups: dict[str, ActivationGroup]) -> None:
    """Write a law's equations for every place where an atom stands in the operands."""
    if isinstance(law, Pointwise):
        if law.key not in groups:
            groups[law.key] = activation_group(law.fn)
        law = pointwise_law(groups[law.key])
    atoms = {key[0] for keys in operands for key in keys}
    for atom in atoms:
        keys = [{k for k in operand if k[0] is atom} for operand in operands]
        holders = [k for k in keys if k]
        if all(k == holders[0] for k in holders):
            for key in holders[0]:
                _write(equations, law, [operand.get(key, []) for operand in operands])
        else:  # the operands read the axis differently, so no scale can be followed through
            for own, operand in zip(keys, operands, strict=True):
                for unknown in (u for k in own for u in operand[k]):
                    equations.zero(unknown)


def _write(equations: Equations, law: Law, operands: Sequence[list[Unknown]]) -> None:
    for store, laws in ((equations.real, law.real), (equations.sign, law.sign)):
        for relation in laws:
            equation: Equation = defaultdict(Fraction)
            for i, coefficient in relation.items():
                for unknown in operands[i]:
                    equation[unknown] += coefficient
            kept = {u: c for u, c in equation.items() if c != 0}
            if kept:
                store[equations.atom_of[next(iter(kept))]].append(kept)


def pointwise_law(group: ActivationGroup) -> Law:
    """What an elementwise function does to exponents: out = degree · in, or nothing passes."""
    if group.degree is None:
        real: tuple[dict[int, int], ...] = ({0: 1}, {1: 1})
    else:
        real = ({0: group.degree.numerator, 1: -group.degree.denominator},)
    sign = ({0: 1}, {1: 1}) if group.parity is None else ({0: 1 if group.parity < 0 else 0, 1: 1},)
    return Law(real, sign, linear=group.kind == "all")


def solve(unknowns: Sequence[Unknown], equations: Sequence[Equation], modulus: int = 0) -> list[dict[Unknown, Fraction]]:
    """A basis of the null space, each vector as unknown → coefficient. `modulus` 2 solves over the two-element field."""
    reduce = (lambda c: Fraction(c.numerator % 2)) if modulus else (lambda c: c)
    pivots: dict[Unknown, Equation] = {}  # unknown → its expression in other unknowns

    def substitute(equation: Equation) -> Equation:
        todo, result = dict(equation), defaultdict(Fraction)
        while todo:
            u, c = todo.popitem()
            if u in pivots:
                for v, d in pivots[u].items():
                    todo[v] = todo.get(v, Fraction(0)) + c * d
            else:
                result[u] += c
        return {u: c for u, c in ((u, reduce(c)) for u, c in result.items()) if c != 0}

    def find(u: Unknown) -> None:
        """Shorten the chain of substitutions below a pivot, so that it is walked once."""
        chain = []
        while u in pivots and len(pivots[u]) == 1 and next(iter(pivots[u])) in pivots:
            chain.append(u)
            u = next(iter(pivots[u]))
        for w in reversed(chain):
            pivots[w] = substitute(pivots[w])

    for equation in sorted(equations, key=len):
        for u in equation:
            if u in pivots:
                find(u)
        row = substitute(equation)
        if row:
            pivot = next(iter(row))
            pivots[pivot] = {u: reduce(-c / row[pivot]) for u, c in row.items() if u != pivot}
    free = [u for u in unknowns if u not in pivots]
    basis: dict[Unknown, dict[Unknown, Fraction]] = {u: {u: Fraction(1)} for u in free}
    for u in unknowns:
        if u in pivots:
            find(u)
            for v, c in substitute({u: Fraction(1)}).items():
                basis[v][u] = c
    return [_whole(vector) for vector in basis.values()]


def _whole(vector: dict[Unknown, Fraction]) -> dict[Unknown, Fraction]:
    """The same direction with whole coprime coefficients, the first one positive."""
    many = lcm(*(c.denominator for c in vector.values()))
    common = gcd(*(int(c * many) for c in vector.values()))
    return {u: c * many / common for u, c in vector.items()}


def independent_on(
    basis: Sequence[dict[Unknown, Fraction]], seen: set[Unknown], known: Sequence[dict[Unknown, Fraction]] = (), modulus: int = 0
) -> list[dict[Unknown, Fraction]]:
    """Those vectors of a basis that are independent of each other and of `known` ones where it can be `seen`."""
    rows: list[tuple[Unknown, dict[Unknown, Fraction]]] = []

    def adds(vector: dict[Unknown, Fraction]) -> bool:
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

    def visible(vector: dict[Unknown, Fraction]) -> dict[Unknown, Fraction]:
        return {u: Fraction(c.numerator % 2) if modulus else c for u, c in vector.items() if u in seen and (c % 2 if modulus else c)}

    for vector in known:
        adds(visible(vector))
    return [vector for vector in basis if adds(visible(vector))]
