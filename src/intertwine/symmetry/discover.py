"""Discovery: from a graph to its wires, their groups and dependent axes, and the layout of every tensor."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from intertwine.graph.axes import Axis, AxisVariable, Fixed, Product, resolve, variables_of
from intertwine.graph.constraints import Constraint, Value
from intertwine.graph.graph import Graph
from intertwine.symmetry.element import WireSpec
from intertwine.symmetry.geometry import (
    FixedAxis,
    Layout,
    LayoutAxis,
    ProductAxis,
    SumAxis,
    VariableSlot,
    WireAxis,
    constant_variables,
    variable_slots,
)
from intertwine.symmetry.matrices import MatrixGroups, find_matrices
from intertwine.symmetry.scales import Equations, Unknown, collect, independent_on, solve
from intertwine.symmetry.wire import Frozen, Slot, Wire, WireGroup

Vector = dict[Unknown, Fraction]
_ZERO = Fraction(0)


@dataclass(frozen=True)
class Geometry:
    """Where every wire stands: the graph, its wires, what is frozen, and the layout of every tensor.

    `wire_specs`: what elements act on, one per wire, then the bases that do not move. `layouts`: of the parameters and
    buffers; tied tensors have one, under their first name. `signature`: a hash of the group and of where it acts.
    """

    graph: Graph
    wires: tuple[Wire, ...]
    frozen: tuple[Frozen, ...]
    wire_specs: tuple[WireSpec, ...]
    layouts: Mapping[str, Layout]
    signature: str
    _solved: SolvedGroups

    @property
    def diagonals(self) -> tuple[str, ...]:
        """Parameters that must be folded into their consumers before a matrix can act."""
        found = self._solved.matrices
        return tuple(sorted({v.name for a, kind in found.kind.items() if kind for v in found.diagonals.get(a, ())}))

    def predicts(self, value: Value) -> bool:
        """Whether a tensor moves as its layout says; only the squares inside a length do not, under a rotation."""
        return not value.lazy and value not in self._solved.matrices.squares

    def layout(self, value: Value) -> Layout:
        """The layout of any tensor of the graph, hidden features included."""
        return self._solved.layout(value, self.graph.builder.variances)


@dataclass(frozen=True)
class SolvedGroups:
    """The groups of all axis variables that have one."""

    equations: Equations
    scales: Mapping[AxisVariable, list[Vector]]
    signs: Mapping[AxisVariable, list[Vector]]
    wire_of: Mapping[AxisVariable, int]
    matrices: MatrixGroups

    def wire_axis(self, value: Value, o: VariableSlot) -> WireAxis:
        if self.matrices.kind.get(o.variable) == "O":
            return WireAxis(self.wire_of[o.variable], o.variable.size, (Fraction(1),))
        unknown = self.equations.at(value, o)
        powers = tuple(v.get(unknown, _ZERO) for v in self.scales.get(o.variable, ()))
        flips = tuple(int(v.get(unknown, _ZERO)) for v in self.signs.get(o.variable, ()))
        return WireAxis(self.wire_of[o.variable], o.variable.size, powers, flips)

    def layout(self, value: Value, variances: Mapping[str, float]) -> Layout:
        pairs = zip(value.axes, variable_slots(value), strict=True)
        trees = tuple(self._tree(resolve(axis), value, iter(slots)) for axis, slots in pairs)
        return Layout(trees, variances.get(value.name, 0.0))

    def _tree(self, axis: Axis, value: Value, places: Iterator[VariableSlot]) -> LayoutAxis:
        """Slots come in the order in which the axis is walked, so they are consumed one by one."""
        if isinstance(axis, Fixed):
            return FixedAxis(axis.size)
        if isinstance(axis, AxisVariable):
            o = next(places)
            folded = axis in self.matrices.kind and value in self.matrices.diagonals.get(axis, ())
            return self.wire_axis(value, o) if axis in self.wire_of and not folded else FixedAxis(axis.size)
        if isinstance(axis, Product):
            return ProductAxis(tuple(self._tree(f, value, places) for f in axis.factors))
        return SumAxis(tuple(self._tree(t, value, places) for t in axis.terms))


def discover(graph: Graph, continuous: bool = False) -> Geometry:
    """Solve a graph for its symmetry; `continuous` lets whole matrices act where only linear maps and lengths meet."""
    equations = collect(graph)
    over = {b: tuple(a for a in bases if a.size > 1) for b, bases in dependent_axes(graph).items()}
    slots_of = _slots_of(graph)
    scales, signs = _scales(equations, over, slots_of)
    over = {a: over.get(a, ()) for a in slots_of if (a.frozen is None and a.size > 1) or scales[a] or signs[a]}
    matrices = find_matrices(graph, equations, scales, over) if continuous else MatrixGroups()
    for variable, kind in matrices.kind.items():
        scales[variable], signs[variable] = scales[variable] if kind == "GL" else [], []
    wired = [a for a in slots_of if (a.frozen is None and a.size > 1) or scales[a] or signs[a]]
    wire_of = {a: i for i, a in enumerate(wired)}
    for a in wired:
        for base in over.get(a, ()):
            wire_of.setdefault(base, len(wire_of))
    solved = SolvedGroups(equations, scales, signs, wire_of, matrices)
    names = _names(graph, wired, slots_of)
    specs = tuple(_wire_spec(a, names, over, solved) for a in wire_of)
    wires = tuple(_wire(a, specs, slots_of[a], solved, graph) for a in wired)
    parameters = {name: solved.layout(v, graph.builder.variances) for name, v in graph.parameters.items()}
    signature = hashlib.sha256(repr([(w.name, str(w.group), w.over, w.slots) for w in wires]).encode()).hexdigest()[:16]
    return Geometry(graph, wires, _frozen(slots_of, solved, specs), specs, parameters, signature, solved)


def _slots_of(graph: Graph) -> dict[AxisVariable, list[tuple[Value, VariableSlot]]]:
    """Axis variable → where it stands in parameters and buffers, in the model's own order."""
    slots: dict[AxisVariable, list[tuple[Value, VariableSlot]]] = defaultdict(list)
    for value in graph.parameters.values():
        for axis in variable_slots(value):
            for o in axis:
                slots[o.variable].append((value, o))
    return slots


def _scales(
    equations: Equations,
    over: Mapping[AxisVariable, tuple[AxisVariable, ...]],
    slots_of: Mapping[AxisVariable, list[tuple[Value, VariableSlot]]],
) -> tuple[dict[AxisVariable, list[Vector]], dict[AxisVariable, list[Vector]]]:
    """Independent scales and signs of every axis variable, dependent axes before their bases.

    A scale on a base is left out if it acts on every parameter like some scale of a dependent axis that is constant
    along that axis.
    """
    scales: dict[AxisVariable, list[Vector]] = {}
    signs: dict[AxisVariable, list[Vector]] = {}
    dependents: dict[AxisVariable, list[AxisVariable]] = defaultdict(list)
    for b, bases in over.items():
        for a in bases:
            dependents[a].append(b)
    for variable in sorted(slots_of, key=lambda a: -len(over.get(a, ()))):
        own = {equations.at(v, o) for v, o in slots_of[variable]}
        beside = {b: _beside_dependent(equations, variable, slots_of.get(b, ())) for b in dependents[variable]}
        for store, equations_of, modulus in ((scales, equations.real, 0), (signs, equations.sign, 2)):
            basis = solve(equations.unknowns_of[variable], equations_of[variable], modulus)
            known = [_along_base(vector, beside[b]) for b in dependents[variable] for vector in store.get(b, ())]
            store[variable] = independent_on(basis, own, known, modulus)
    return scales, signs


def _beside_dependent(
    equations: Equations, base: AxisVariable, places: Iterable[tuple[Value, VariableSlot]]
) -> dict[Unknown, tuple[Unknown, int]]:
    """Unknown of a dependent axis in a parameter → the unknown of its base beside it, and the tensor axis it is in."""
    found: dict[Unknown, tuple[Unknown, int]] = {}
    for value, o in places:
        bases = [p for axis in variable_slots(value) for p in axis if p.variable is base]
        near = [p for p in bases if p.axis == o.axis and p.region == o.region] or bases
        found[equations.at(value, o)] = equations.at(value, near[0]), o.axis
    return found


def _along_base(vector: Vector, beside: Mapping[Unknown, tuple[Unknown, int]]) -> Vector:
    """A scale of a dependent axis, constant along that axis, as a scale of its base.

    Slots in one axis are blocks side by side and must agree; those in different axes act together and add up.
    """
    blocks: dict[tuple[Unknown, int], set[Fraction]] = defaultdict(set)
    for u, place in beside.items():
        blocks[place].add(vector.get(u, _ZERO))
    seen: Vector = defaultdict(Fraction)
    for (base, _), values in blocks.items():
        if len(values) > 1:
            return {}
        seen[base] += next(iter(values))
    return seen


def _names(
    graph: Graph, wired: Iterable[AxisVariable], slots_of: Mapping[AxisVariable, list[tuple[Value, VariableSlot]]]
) -> dict[AxisVariable, str]:
    """A readable, unique name per wire: the module whose weight produces it, and which part of the axis it is."""
    names: dict[AxisVariable, str] = {}
    counts: dict[str, int] = {}
    for variable in wired:
        value, o = next(((v, o) for v, o in slots_of[variable] if v.ndim > 1 and o.axis == 0), slots_of[variable][0])
        stem = value.name.removesuffix(".weight").removesuffix(".bias")
        name = stem + _part(resolve(value.axes[o.axis]), o)
        counts[name] = counts.get(name, 0) + 1
        names[variable] = name if counts[name] == 1 else f"{name}#{counts[name]}"
    return names


def _part(axis: Axis, o: VariableSlot) -> str:
    """Which part of an axis a slot is: `[offset]` of a block, `/outer`, `/middle` or `/inner` of a product."""
    block = "" if isinstance(axis, (AxisVariable, Product)) and o.offset == 0 else f"[{o.offset}]"
    if not o.beside:
        return block
    length = o.region[1] - o.region[0]
    return block + ("/inner" if o.stride == 1 else "/outer" if o.variable.size * o.stride == length else "/middle")


def _wire_spec(
    variable: AxisVariable,
    names: Mapping[AxisVariable, str],
    over: Mapping[AxisVariable, tuple[AxisVariable, ...]],
    solved: SolvedGroups,
) -> WireSpec:
    if variable not in names:  # a base that does not move itself
        return WireSpec(f"still {solved.wire_of[variable]}", variable.size)
    bases = tuple(solved.wire_of[a] for a in over.get(variable, ()))
    if variable in solved.matrices.kind:
        return WireSpec(names[variable], variable.size, bases, matrix=solved.matrices.kind[variable])
    permutes = variable.frozen is None and variable.size > 1
    return WireSpec(
        names[variable], variable.size, bases, permutes, len(solved.scales[variable]), len(solved.signs[variable])
    )


def _wire(
    variable: AxisVariable,
    specs: tuple[WireSpec, ...],
    places: Iterable[tuple[Value, VariableSlot]],
    solved: SolvedGroups,
    graph: Graph,
) -> Wire:
    s = specs[solved.wire_of[variable]]
    group = WireGroup(s.size, tuple(specs[b].size for b in s.bases), s.permutes, s.scales, s.signs, s.matrix)
    slots = []
    for value, o in places:
        if s.matrix and value in solved.matrices.diagonals.get(variable, ()):
            slots.append(Slot(value.name, o.axis, "folded to ones", o.offset, o.stride))
            continue
        wire_axis = solved.wire_axis(value, o)
        if not (s.permutes or s.matrix or any(wire_axis.powers) or any(wire_axis.flips)):
            continue
        role = "variance" if value.name in graph.builder.variances else _role(wire_axis)
        slots.append(Slot(value.name, o.axis, role, o.offset, o.stride, wire_axis.powers, wire_axis.flips))
    over = tuple(specs[b].name for b in s.bases)
    pinned = None if s.permutes or s.matrix else variable.frozen or "it has one index"
    return Wire(s.name, s.size, group, tuple(slots), over, pinned)


def _role(wire_axis: WireAxis) -> str:
    if any(p > 0 for p in wire_axis.powers):
        return "scaled"
    return "inverse" if any(p < 0 for p in wire_axis.powers) else "flipped" if any(wire_axis.flips) else "permuted"


def _frozen(
    slots_of: Mapping[AxisVariable, list[tuple[Value, VariableSlot]]],
    solved: SolvedGroups,
    specs: tuple[WireSpec, ...],
) -> tuple[Frozen, ...]:
    """Every parameter axis (or block of one) on which nothing acts, with its reason."""
    found: dict[tuple[str, int], Frozen] = {}
    for variable, places in slots_of.items():
        spec = specs[solved.wire_of[variable]] if variable in solved.wire_of else None
        if spec is not None and (spec.permutes or spec.matrix):
            continue
        for value, o in places:
            wire_axis = solved.wire_axis(value, o) if spec is not None else None
            if wire_axis is not None and (any(wire_axis.powers) or any(wire_axis.flips)):
                continue
            whole = len(list(variables_of(value.axes[o.axis]))) == 1
            block = "" if whole else f" from {o.offset} (size {variable.size}, step {o.stride})"
            reason = variable.frozen or "it has a single index, and no scale of it could be followed"
            what = f"{value.name} axis {o.axis}{block}"
            found[value.name + block, o.axis] = Frozen(what, reason, value.name, o.axis)
    return tuple(found.values())


# -- Dependent axes (wreath products) ----------------------------------------------------------------------------------

Pairing = dict[AxisVariable, int]  # base → the axis it stands in


def dependent_axes(graph: Graph) -> dict[AxisVariable, tuple[AxisVariable, ...]]:
    """For every axis variable, the variables it depends on, outermost first.

    A variable b depends on a if its group element may differ for every index of a (a wreath product): a stands beside b
    in every tensor in which b stands, the two are paired the same way in all tensors of every constraint, and nothing
    mixes along a while b is there. Heads and head dimensions, groups and channels within a group are like that.
    """
    places = {v: variable_slots(v) for v in graph.builder.values if not v.lazy}
    bases: dict[AxisVariable, set[AxisVariable]] = {}
    pairings: dict[tuple[Value, VariableSlot], Pairing] = {}
    for value, axes in places.items():
        always = [constant_variables(a) for a in value.axes]
        for o in (o for axis in axes for o in axis):
            pairing = _pair(o, axes, always)
            pairings[value, o] = pairing
            bases[o.variable] = set(pairing) if o.variable not in bases else bases[o.variable] & set(pairing)
    for constraint in graph.builder.constraints:
        if isinstance(constraint, Constraint):
            _check_constraint(constraint, places, pairings, bases)
    return _closed(bases)


def _pair(o: VariableSlot, axes: list[list[VariableSlot]], always: list[tuple[AxisVariable, ...]]) -> Pairing:
    """The variables that stand beside a slot, each at one unmistakable place: its own axis first, else one other."""
    pairing: Pairing = {a: o.axis for a in set(o.beside) if a is not o.variable and o.beside.count(a) == 1}
    for i, a in ((i, a) for i, variables in enumerate(always) if i != o.axis for a in variables):
        if a is not o.variable and a not in o.beside and sum(p.variable is a for axis in axes for p in axis) == 1:
            pairing[a] = i
    return pairing


def _check_constraint(
    constraint: Constraint,
    places: dict[Value, list[list[VariableSlot]]],
    pairings: dict[tuple[Value, VariableSlot], Pairing],
    bases: dict[AxisVariable, set[AxisVariable]],
) -> None:
    """Remove the bases that the tensors of a constraint pair differently, or that are mixed."""
    seen: dict[tuple[object, AxisVariable], dict[AxisVariable, object]] = defaultdict(dict)
    for operand in constraint.operands:
        shape = operand.value.shape
        labels = {w.axis: w.label for w in operand.windows if w.start == 0 and w.size == shape[w.axis]}
        for window in operand.windows:
            for o in places[operand.value][window.axis]:
                if not o.meets(window):
                    continue
                for a in list(bases[o.variable]):
                    axis = pairings[operand.value, o].get(a)
                    label = ("same",) if axis == o.axis else labels.get(axis) if axis is not None else None
                    agreed = seen[window.label, o.variable].setdefault(a, label)
                    mixed = label in constraint.mixes and window.label not in constraint.mixes
                    if label is None or agreed != label or mixed:
                        bases[o.variable].discard(a)


def _closed(bases: dict[AxisVariable, set[AxisVariable]]) -> dict[AxisVariable, tuple[AxisVariable, ...]]:
    """Drop bases whose own bases are missing: without them the law of composition would not close.

    Of two variables that depend on each other, the larger one stays dependent; that gives the larger group.
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
