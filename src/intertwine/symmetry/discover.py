"""Discovery: from a graph to its wires, their dependent axes (wreath products), their groups, and the layout of every
tensor.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from intertwine.graph.axes import Axis, AxisVariable, Fixed, Product, resolve
from intertwine.graph.axes import variables_of as atoms_of
from intertwine.graph.constraints import Constraint, Operand, Value
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

# ----------------------------------------------------------------------------------------------------
# Fibres: atoms whose group element may differ for every index of another atom (the wreath products).
#
# An atom b is fibred over an atom a if a stands beside b in every tensor in which b stands, the two are paired the same
# way in all tensors of every meeting, and nothing mixes along a while b is there. Heads and head dimensions, groups and
# channels within a group, experts and their widths: all are this.


Pairing = dict[AxisVariable, int]  # base atom → the axis it stands in


def dependent_axes(graph: Graph) -> dict[AxisVariable, tuple[AxisVariable, ...]]:
    """For every atom, the atoms it is fibred over, outermost first."""
    places = {v: variable_slots(v) for v in graph.builder.values if not v.lazy}
    bases: dict[AxisVariable, set[AxisVariable]] = {}
    pairings: dict[tuple[Value, VariableSlot], Pairing] = {}
    for value, axes in places.items():
        always = [constant_variables(a) for a in value.axes]
        for o in (o for axis in axes for o in axis):
            pairing = _pair(o, axes, always)
            pairings[value, o] = pairing
            bases[o.atom] = set(pairing) if o.atom not in bases else bases[o.atom] & set(pairing)
    for meeting in graph.builder.constraints:
        if isinstance(meeting, Constraint):
            _check_meeting(meeting, places, pairings, bases)
    return _closed(bases)


def _pair(o: VariableSlot, axes: list[list[VariableSlot]], always: list[tuple[AxisVariable, ...]]) -> Pairing:
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
    meeting: Constraint,
    places: dict[Value, list[list[VariableSlot]]],
    pairings: dict[tuple[Value, VariableSlot], Pairing],
    bases: dict[AxisVariable, set[AxisVariable]],
) -> None:
    """Strike out the bases that the tensors of a meeting pair differently, or that are mixed under the fibre."""
    seen: dict[tuple[object, AxisVariable], dict[AxisVariable, object]] = defaultdict(dict)
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


def _closed(bases: dict[AxisVariable, set[AxisVariable]]) -> dict[AxisVariable, tuple[AxisVariable, ...]]:
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


# ----------------------------------------------------------------------------------------------------
# Discovery: from a graph to the wires of a network, their groups, and the layout of every tensor.


Vector = dict[Unknown, Fraction]
_ZERO = Fraction(0)


@dataclass(frozen=True)
class Geometry:
    """What was found: wires, what is frozen, the strands elements act on, and how to lay out any tensor."""

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
    """The groups of all atoms that have one."""

    equations: Equations
    scales: Mapping[AxisVariable, list[Vector]]
    signs: Mapping[AxisVariable, list[Vector]]
    strand_of: Mapping[AxisVariable, int]
    matrices: MatrixGroups

    def wire_axis(self, value: Value, o: VariableSlot) -> WireAxis:
        if self.matrices.kind.get(o.atom) == "O":
            return WireAxis(self.strand_of[o.atom], o.atom.size, (Fraction(1),))
        unknown = self.equations.at(value, o)
        powers = tuple(v.get(unknown, _ZERO) for v in self.scales.get(o.atom, ()))
        flips = tuple(int(v.get(unknown, _ZERO)) for v in self.signs.get(o.atom, ()))
        return WireAxis(self.strand_of[o.atom], o.atom.size, powers, flips)

    def layout(self, value: Value, variances: Mapping[str, float]) -> Layout:
        trees = []
        for axis, places in zip(value.axes, variable_slots(value), strict=True):
            trees.append(self._tree(resolve(axis), value, iter(places)))
        return Layout(tuple(trees), variances.get(value.name, 0.0))

    def _tree(self, axis: Axis, value: Value, places: Iterable[VariableSlot]) -> LayoutAxis:
        """Occurrences come in the order in which the axis is walked, so they are consumed one by one."""
        if isinstance(axis, Fixed):
            return FixedAxis(axis.size)
        if isinstance(axis, AxisVariable):
            o = next(iter(places))
            folded = axis in self.matrices.kind and value in self.matrices.diagonals.get(axis, ())
            return self.wire_axis(value, o) if axis in self.strand_of and not folded else FixedAxis(axis.size)
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
    for atom, kind in matrices.kind.items():
        scales[atom], signs[atom] = scales[atom] if kind == "GL" else [], []
    wired = [a for a in slots_of if (a.frozen is None and a.size > 1) or scales[a] or signs[a]]
    strand_of = {a: i for i, a in enumerate(wired)}
    for a in wired:
        for base in over.get(a, ()):
            strand_of.setdefault(base, len(strand_of))
    solved = SolvedGroups(equations, scales, signs, strand_of, matrices)
    names = _names(graph, wired, slots_of)
    strands = tuple(_strand(a, names, over, solved) for a in strand_of)
    wires = tuple(_wire(a, strands, slots_of[a], solved, graph) for a in wired)
    parameters = {name: solved.layout(v, graph.builder.variances) for name, v in graph.parameters.items()}
    signature = hashlib.sha256(repr([(w.name, str(w.group), w.over, w.slots) for w in wires]).encode()).hexdigest()[:16]
    return Geometry(graph, wires, _frozen(slots_of, solved, strands), strands, parameters, signature, solved)


def _slots_of(graph: Graph) -> dict[AxisVariable, list[tuple[Value, VariableSlot]]]:
    """Atom → where it stands in parameters and buffers, in the model's own order."""
    slots: dict[AxisVariable, list[tuple[Value, VariableSlot]]] = defaultdict(list)
    for value in graph.parameters.values():
        for axis in variable_slots(value):
            for o in axis:
                slots[o.atom].append((value, o))
    return slots


def _scales(
    equations: Equations,
    over: Mapping[AxisVariable, tuple[AxisVariable, ...]],
    slots_of: Mapping[AxisVariable, list[tuple[Value, VariableSlot]]],
) -> tuple[dict[AxisVariable, list[Vector]], dict[AxisVariable, list[Vector]]]:
    """Independent scales and signs of every atom, fibres before their bases.

    A scale on a base that acts on every parameter as some scale of its fibres does, constant along the fibre, adds
    nothing; it is left out.
    """
    scales: dict[AxisVariable, list[Vector]] = {}
    signs: dict[AxisVariable, list[Vector]] = {}
    fibres_over: dict[AxisVariable, list[AxisVariable]] = defaultdict(list)
    for b, bases in over.items():
        for a in bases:
            fibres_over[a].append(b)
    for atom in sorted(slots_of, key=lambda a: -len(over.get(a, ()))):
        own = {equations.at(v, o) for v, o in slots_of[atom]}
        beside = {b: _beside_fibre(equations, atom, slots_of.get(b, ())) for b in fibres_over[atom]}
        for store, laws, modulus in ((scales, equations.real, 0), (signs, equations.sign, 2)):
            basis = solve(equations.unknowns_of[atom], laws[atom], modulus)
            known = [_along_base(vector, beside[b]) for b in fibres_over[atom] for vector in store.get(b, ())]
            store[atom] = independent_on(basis, own, known, modulus)
    return scales, signs


def _beside_fibre(
    equations: Equations, base: AxisVariable, places: Iterable[tuple[Value, VariableSlot]]
) -> dict[Unknown, tuple[Unknown, int]]:
    """The unknown of a fibre in a parameter → the unknown of its base beside it, and the axis the fibre stands in."""
    found: dict[Unknown, tuple[Unknown, int]] = {}
    for value, o in places:
        bases = [p for axis in variable_slots(value) for p in axis if p.atom is base]
        near = [p for p in bases if p.axis == o.axis and p.region == o.region] or bases
        found[equations.at(value, o)] = equations.at(value, near[0]), o.axis
    return found


def _along_base(vector: Vector, beside: Mapping[Unknown, tuple[Unknown, int]]) -> Vector:
    """What a scale of a fibre, taken constant along the fibre, does to each parameter, as a scale of the base.

    Occurrences in one axis are blocks side by side and must agree to look like a scale of the base; those in different
    axes act together and add up.
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
    taken: dict[str, int] = {}
    for atom in wired:
        value, o = next(((v, o) for v, o in slots_of[atom] if v.ndim > 1 and o.axis == 0), slots_of[atom][0])
        stem = value.name.removesuffix(".weight").removesuffix(".bias")
        name = stem + _part(resolve(value.axes[o.axis]), o)
        taken[name] = taken.get(name, 0) + 1
        names[atom] = name if taken[name] == 1 else f"{name}#{taken[name]}"
    return names


def _part(axis: Axis, o: VariableSlot) -> str:
    """Which part of an axis an occurrence is: `[offset]` of a block, `/outer`, `/middle` or `/inner` of a product."""
    block = "" if isinstance(axis, (AxisVariable, Product)) and o.offset == 0 else f"[{o.offset}]"
    if not o.beside:
        return block
    length = o.region[1] - o.region[0]
    return block + ("/inner" if o.stride == 1 else "/outer" if o.atom.size * o.stride == length else "/middle")


def _strand(
    atom: AxisVariable,
    names: Mapping[AxisVariable, str],
    over: Mapping[AxisVariable, tuple[AxisVariable, ...]],
    solved: SolvedGroups,
) -> WireSpec:
    if atom not in names:  # a base that does not move itself
        return WireSpec(f"still {solved.strand_of[atom]}", atom.size)
    bases = tuple(solved.strand_of[a] for a in over.get(atom, ()))
    if atom in solved.matrices.kind:
        return WireSpec(names[atom], atom.size, bases, matrix=solved.matrices.kind[atom])
    permutes = atom.frozen is None and atom.size > 1
    return WireSpec(names[atom], atom.size, bases, permutes, len(solved.scales[atom]), len(solved.signs[atom]))


def _wire(
    atom: AxisVariable,
    strands: tuple[WireSpec, ...],
    places: Iterable[tuple[Value, VariableSlot]],
    solved: SolvedGroups,
    graph: Graph,
) -> Wire:
    s = strands[solved.strand_of[atom]]
    group = WireGroup(s.size, tuple(strands[b].size for b in s.bases), s.permutes, s.scales, s.signs, s.matrix)
    slots = []
    for value, o in places:
        if s.matrix and value in solved.matrices.diagonals.get(atom, ()):
            slots.append(Slot(value.name, o.axis, "folded to ones", o.offset, o.stride))
            continue
        leaf = solved.wire_axis(value, o)
        if not (s.permutes or s.matrix or any(leaf.powers) or any(leaf.flips)):
            continue
        role = "variance" if value.name in graph.builder.variances else _role(leaf)
        slots.append(Slot(value.name, o.axis, role, o.offset, o.stride, leaf.powers, leaf.flips))
    over = tuple(strands[b].name for b in s.bases)
    pinned = None if s.permutes or s.matrix else atom.frozen or "it has one index"
    return Wire(s.name, s.size, group, tuple(slots), over, pinned)


def _role(leaf: WireAxis) -> str:
    if any(p > 0 for p in leaf.powers):
        return "scaled"
    return "inverse" if any(p < 0 for p in leaf.powers) else "flipped" if any(leaf.flips) else "permuted"


def _frozen(
    slots_of: Mapping[AxisVariable, list[tuple[Value, VariableSlot]]],
    solved: SolvedGroups,
    strands: tuple[WireSpec, ...],
) -> tuple[Frozen, ...]:
    """Every parameter axis (or block of one) on which nothing acts, with its reason."""
    found: dict[tuple[str, int], Frozen] = {}
    for atom, places in slots_of.items():
        strand = strands[solved.strand_of[atom]] if atom in solved.strand_of else None
        if strand is not None and (strand.permutes or strand.matrix):
            continue
        for value, o in places:
            leaf = solved.wire_axis(value, o) if strand is not None else None
            if leaf is not None and (any(leaf.powers) or any(leaf.flips)):
                continue
            whole = len(list(atoms_of(value.axes[o.axis]))) == 1
            block = "" if whole else f" from {o.offset} (size {atom.size}, step {o.stride})"
            reason = atom.frozen or "it has a single index, and no scale of it could be followed"
            what = f"{value.name} axis {o.axis}{block}"
            found[value.name + block, o.axis] = Frozen(what, reason, value.name, o.axis)
    return tuple(found.values())
