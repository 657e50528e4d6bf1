"""What all alignment methods share: the coordinate step on one wire, coordinate descent over wires, the starting
elements, and the interface of a solver (`AlignmentTask`, `Solver`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from intertwine.align.matching import permutation_step
from intertwine.align.matrices import head_step, matrix_step
from intertwine.align.state import AlignmentStep, MatchingState
from intertwine.canonical.form import canonical_element
from intertwine.canonical.pairing import pair_units
from intertwine.errors import InputError, did_you_mean
from intertwine.symmetry.element import Element, WireSpec, identity_move
from intertwine.symmetry.symmetry import Symmetry

# ----------------------------------------------------------------------------------------------------
# A visit: one strand brought to its best by whatever acts on it, all others held still.


def coordinate_step(pair: MatchingState, s: int, signs: bool = False) -> bool:
    """Give a strand its best matrix, or its best order (with `signs`: order and signs); whether anything moved."""
    if pair.wire_specs[s].matrix:
        return matrix_step(pair, s)
    matched = head_step(pair, s)
    return permutation_step(pair, s, signs) or matched


# ----------------------------------------------------------------------------------------------------
# Descent over wires: every wire in turn is brought to its best, until none of them moves.
#
# A wire is looked at again only after a wire beside it has moved. The order of a sweep is random.


CoordinateStep = Callable[[MatchingState, int], bool]  # brings one strand to its best; whether it moved


def coordinate_descent(
    pair: MatchingState, visit: CoordinateStep, start: str, generator: torch.Generator, sweeps: int, least: float = 0.0
) -> list[AlignmentStep]:
    """Lower the objective until no strand moves, or a whole sweep gains less than a share `least` of the objective."""
    strands = sorted(s for s in pair.movable if pair.places[s])
    waiting = set(strands)
    history = [AlignmentStep(start, 0, "", pair.objective)]
    for sweep in range(1, sweeps + 1):
        before = pair.objective
        order = [strands[i] for i in torch.randperm(len(strands), generator=generator).tolist()]
        for s in order:
            if s not in waiting:
                continue
            waiting.discard(s)
            if visit(pair, s):
                waiting.update(t for t in pair.around[s] if t in pair.movable)
                history.append(AlignmentStep(start, sweep, pair.wire_specs[s].name, pair.objective))
        if not waiting or before - pair.objective <= least * before:
            break
    return history


# ----------------------------------------------------------------------------------------------------
# A start from the outside in: wires that embeddings or outputs show alone come first, then what is seen beside them.
#
# A tensor in which a single wire is unknown tells how that wire must move, whatever the others do. Token and position
# embeddings show the residual stream so; with it, the weights of a layer show its hidden units and its heads. The wire
# of which the largest share of weights can be read this way goes next, on those weights alone. No data is needed.


StrandGroup = tuple[int, ...]  # a strand and the strands fibred over it; they are read together


def from_embeddings(
    symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], movable: Collection[int], signs: bool = False
) -> Element:
    """The element of permutations and matrices (with `signs`: and signs) found from the outside in."""
    element = symmetry.identity()
    met = {
        name: layout.wires & {*movable}
        for name, layout in symmetry.layouts.items()
        if name in a and a[name].is_floating_point()
    }
    waiting = _families(symmetry.wire_specs, movable)
    while waiting:
        unknown = {s for family in waiting for s in family}

        def read(family: StrandGroup, unknown: set[int] = unknown) -> list[str]:
            return [n for n, there in met.items() if there & {*family} and not (there & unknown) - {*family}]

        def share(family: StrandGroup) -> tuple[float, int]:
            whole = sum(a[n].numel() for n, there in met.items() if there & {*family})
            part = sum(a[n].numel() for n in read(family))
            return part / max(whole, 1), part

        family = max(waiting, key=share)
        waiting.remove(family)
        names = read(family)
        pair = MatchingState(symmetry, {n: a[n] for n in names}, {n: b[n] for n in names}, family)
        pair.start_at(element)
        for s in family:
            if pair.places[s]:
                coordinate_step(pair, s, signs)
        element = pair.element
    return element


def _families(strands: tuple[WireSpec, ...], movable: Collection[int]) -> list[StrandGroup]:
    """Movable strands by the outermost base they share, bases before fibres."""
    found: dict[int, list[int]] = {}
    for s in sorted(movable, key=lambda s: len(strands[s].bases)):
        found.setdefault(strands[s].bases[0] if strands[s].bases else s, []).append(s)
    return [tuple(family) for family in found.values()]


# ----------------------------------------------------------------------------------------------------
# Starts: elements from which descent begins.
#
# Descent over wires ends in the nearest place where no single wire can do better, which depends on where it began.
# Networks of one orbit have one canonical form, so the element between two forms is the answer for them, and a
# start for others; pairing units by lengths and distances does the same through noise. Where matrices act there is no
# canonical form, and the way from the embeddings inwards takes its place.


@dataclass(frozen=True)
class AlignmentProblem:
    """Two networks' weights, all that the functions read, and the wires that may move."""

    symmetry: Symmetry
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    wires: tuple[str, ...]

    def starts(self, count: int, seed: int, signs: bool = False) -> Iterator[tuple[str, Element]]:
        """(name, element): the identity, the ways to a by canonical forms, pairs of units and embeddings, then random.

        With `signs` the embeddings are also asked for signs.
        """
        ways: dict[str, Callable[[], Element]] = {
            "identity": self.symmetry.identity,
            "canonical": lambda: self.between_forms,
            "paired": lambda: self.paired,
            "embeddings": lambda: self.from_embeddings(signs),
        }
        if self.matrices:
            ways = {name: ways[name] for name in ("embeddings", "identity")}
        ways |= {f"random {i}": lambda i=i: self.symmetry.random(seed + i) for i in range(max(count - len(ways), 0))}
        for name, make in list(ways.items())[:count]:
            yield name, make().only(*self.wires)

    @property
    def matrices(self) -> bool:
        """Whether whole matrices act."""
        return any(s.matrix for s in self.symmetry.wire_specs)

    def from_embeddings(self, signs: bool = False) -> Element:
        """The way from the tensors that show one wire alone inwards."""
        movable = [i for i, wire in enumerate(self.symmetry.wires) if wire.name in self.wires]
        return from_embeddings(self.symmetry, self.a, self.b, movable, signs)

    @cached_property
    def between_forms(self) -> Element:
        """The element that takes b to a where both are of one orbit."""
        forms = [canonical_element(self.symmetry, weights)[0] for weights in (self.a, self.b)]
        return forms[0].inverse() @ forms[1]

    @cached_property
    def paired(self) -> Element:
        """The element that pairing units by lengths and distances gives."""
        return pair_units(self.symmetry, self.a, self.b)


def permutations_of(element: Element, *kept: str) -> Element:
    """The permutations of an element and the other parts that are kept ("sign"), without the rest."""
    moves = {}
    for i, move in element.moves.items():
        parts = {name: part for name, part in move.items() if name in ("permutation", *kept)}
        moves[i] = replace(identity_move(element.wire_specs, i), **parts)
    return replace(element, moves=moves)


def scales_of(pair: MatchingState, scales: Mapping[int, Tensor]) -> Element:
    """The element of some scales on strands."""
    identity = pair.symmetry.identity()
    return replace(identity, moves={i: replace(m, scale=scales.get(i, m.scale)) for i, m in identity.moves.items()})


# ----------------------------------------------------------------------------------------------------
# Task: one alignment to be solved, and how solvers are known to `align`.
#
# A solver is a function of a task and its own options that gives an element and the steps it took. Add one by writing
# that function and naming it in `align.SOLVERS`; `intertwine.testing.check_aligner` says whether it keeps its promises.


Solution = tuple[Element, list[AlignmentStep]]
#: Kinds of options that are checked, in words; others (a loss function) are the solver's own affair.
KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a word", NoneType: "None"}


@dataclass(frozen=True)
class AlignmentTask:
    """Two networks of one architecture, and what the user asked for.

    `problem`: their weights and the wires that may move. `pair`: the same weights on the way to each other. `data`:
    batches of (inputs, targets), for the solvers that look at features or losses.
    """

    a: nn.Module
    b: nn.Module
    problem: AlignmentProblem
    pair: MatchingState
    data: Any = None
    seed: int = 0
    starts: int = 3
    sweeps: int = 100


@dataclass(frozen=True)
class NoOptions:
    """For solvers without settings of their own."""


@dataclass(frozen=True)
class Solver:
    """A way to align. `options` is a dataclass of its settings; `needs_data` says whether it cannot do without data.

    `moves`: which parts of an element it may use, of "permutation", "sign", "scale" and "matrix".
    """

    solve: Callable[[AlignmentTask, Any], Solution]
    moves: frozenset[str]
    needs_data: bool = False
    options: type = NoOptions

    def settings(self, name: str, given: Mapping[str, Any] | None) -> Any:
        """The options of the solver with the user's entries."""
        known = [f.name for f in fields(self.options)]
        for key in given or {}:
            if key not in known:
                raise InputError(
                    f"The method {name!r} has no option {key!r}. {did_you_mean(key, known)}"
                    f"Its options: {', '.join(known) or 'none'}."
                )
        self._check_kinds(name, given or {})
        return self.options(**(given or {}))

    def _check_kinds(self, name: str, given: Mapping[str, Any]) -> None:
        """Exact types: True would pass for a whole number, and "false" for True."""
        hints = get_type_hints(self.options)
        for key, value in given.items():
            allowed = get_args(hints[key]) or (hints[key],)
            kinds = [kind for kind in KINDS if kind in allowed]
            others = any(kind not in KINDS for kind in allowed)  # such as a function
            if kinds and type(value) not in kinds and (type(value) in KINDS or not others):
                wanted = " or ".join(KINDS[kind] for kind in kinds if not (kind is int and float in kinds))
                raise InputError(
                    f"The option {key} of the method {name!r} was given as {value!r}; it must be {wanted}. Leave it "
                    "out for the default."
                )
