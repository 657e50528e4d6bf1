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
from intertwine.symmetry.element import Element, identity_move
from intertwine.symmetry.symmetry import Symmetry

CoordinateStep = Callable[[MatchingState, int], bool]  # optimises one wire while all others stay; whether it moved
Solution = tuple[Element, list[AlignmentStep]]
WireGroup = tuple[int, ...]  # a wire and the wires over it, which are matched together
#: Types of options that are checked, in words; other types (a loss function) are checked by the solver.
TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "a word", NoneType: "None"}


def coordinate_step(state: MatchingState, w: int, signs: bool = False) -> bool:
    """Give a wire its best matrix, or its best order (with `signs`: order and signs); whether anything moved."""
    if state.wire_specs[w].matrix:
        return matrix_step(state, w)
    matched = head_step(state, w)
    return permutation_step(state, w, signs) or matched


def coordinate_descent(
    state: MatchingState, step: CoordinateStep, start: str, generator: torch.Generator, sweeps: int, least: float = 0.0
) -> list[AlignmentStep]:
    """Lower the objective until no wire moves, or a whole sweep gains less than a share `least` of the objective.

    The order of wires in a sweep is random. A wire is revisited only after a neighbouring wire has moved.
    """
    wires = sorted(w for w in state.movable if state.slots[w])
    waiting = set(wires)
    history = [AlignmentStep(start, 0, "", state.objective)]
    for sweep in range(1, sweeps + 1):
        before = state.objective
        for w in [wires[i] for i in torch.randperm(len(wires), generator=generator).tolist()]:
            if w not in waiting:
                continue
            waiting.discard(w)
            if step(state, w):
                waiting.update(t for t in state.neighbours[w] if t in state.movable)
                history.append(AlignmentStep(start, sweep, state.wire_specs[w].name, state.objective))
        if not waiting or before - state.objective <= least * before:
            break
    return history


def from_embeddings(
    symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], movable: Collection[int], signs: bool = False
) -> Element:
    """The element of permutations and matrices (with `signs`: and signs) found from the outside in, without data.

    A tensor in which a single wire is unknown determines how that wire must move. Token and position embeddings
    determine the residual stream; with it, the weights of a layer determine its hidden units and heads. The wire with
    the largest share of its weights determined goes next, matched on those weights alone.
    """
    element = symmetry.identity()
    wires_in = {
        name: layout.wires & {*movable}
        for name, layout in symmetry.layouts.items()
        if name in a and a[name].is_floating_point()
    }
    groups: dict[int, list[int]] = {}  # by the outermost base, bases before the wires over them
    for w in sorted(movable, key=lambda w: len(symmetry.wire_specs[w].bases)):
        groups.setdefault(symmetry.wire_specs[w].bases[0] if symmetry.wire_specs[w].bases else w, []).append(w)
    waiting: list[WireGroup] = list(map(tuple, groups.values()))
    while waiting:
        unknown = {w for group in waiting for w in group}

        def readable(group: WireGroup, unknown: set[int] = unknown) -> list[str]:
            return [n for n, wires in wires_in.items() if wires & {*group} and not (wires & unknown) - {*group}]

        def share(group: WireGroup) -> tuple[float, int]:
            whole = sum(a[n].numel() for n, wires in wires_in.items() if wires & {*group})
            part = sum(a[n].numel() for n in readable(group))
            return part / max(whole, 1), part

        group = max(waiting, key=share)
        waiting.remove(group)
        names = readable(group)
        state = MatchingState(symmetry, {n: a[n] for n in names}, {n: b[n] for n in names}, group)
        state.start_at(element)
        for w in group:
            if state.slots[w]:
                coordinate_step(state, w, signs)
        element = state.element
    return element


@dataclass(frozen=True)
class AlignmentProblem:
    """All weights of two networks that the functions read, and the names of the wires that may move."""

    symmetry: Symmetry
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    wires: tuple[str, ...]

    def starts(self, count: int, seed: int, signs: bool = False) -> Iterator[tuple[str, Element]]:
        """(name, element) of elements from which descent begins; it ends in a local minimum near its start.

        Networks of one orbit have the same canonical form, so the element between two forms is the answer for them and
        a start for others; pairing units by lengths and distances does the same under noise. Where matrices act there
        is no canonical form, and the start from the embeddings replaces it. Random elements follow.
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
        """Whether the symmetry contains matrices."""
        return any(s.matrix for s in self.symmetry.wire_specs)

    def from_embeddings(self, signs: bool = False) -> Element:
        """The element found from the outside in."""
        movable = [i for i, wire in enumerate(self.symmetry.wires) if wire.name in self.wires]
        return from_embeddings(self.symmetry, self.a, self.b, movable, signs)

    @cached_property
    def between_forms(self) -> Element:
        """The element between the canonical forms: it takes b to a if both are of one orbit."""
        forms = [canonical_element(self.symmetry, weights)[0] for weights in (self.a, self.b)]
        return forms[0].inverse() @ forms[1]

    @cached_property
    def paired(self) -> Element:
        """The element that pairs units by lengths and distances."""
        return pair_units(self.symmetry, self.a, self.b)


def permutations_of(element: Element, *kept: str) -> Element:
    """The permutations of an element and the other parts named ("sign", "scale", "matrix"), without the rest."""
    moves = {}
    for i, move in element.moves.items():
        parts = {name: part for name, part in move.items() if name in ("permutation", *kept)}
        moves[i] = replace(identity_move(element.wire_specs, i), **parts)
    return replace(element, moves=moves)


@dataclass(frozen=True)
class AlignmentTask:
    """Two networks of one architecture, and the arguments of `align`.

    `problem`: their weights and the wires that may move. `state`: the same weights during matching. `data`: batches of
    (inputs, targets), for the solvers that use features or losses.
    """

    a: nn.Module
    b: nn.Module
    problem: AlignmentProblem
    state: MatchingState
    data: Any = None
    seed: int = 0
    starts: int = 3
    sweeps: int = 100


@dataclass(frozen=True)
class NoOptions:
    """For solvers without options."""


@dataclass(frozen=True)
class Solver:
    """A way to align: a function of a task and the solver's options that returns an element and the steps it made.

    To add one, write that function and put it into `align.SOLVERS`; `intertwine.testing.check_aligner` checks it.
    `moves`: which parts of an element it may use, of "permutation", "sign", "scale" and "matrix". `needs_data`: whether
    it requires data. `options`: a dataclass of its options.
    """

    solve: Callable[[AlignmentTask, Any], Solution]
    moves: frozenset[str]
    needs_data: bool = False
    options: type = NoOptions

    def settings(self, name: str, given: Mapping[str, Any] | None) -> Any:
        """The options of the solver with the user's entries. Types are exact: True is not a whole number."""
        known, hints = [f.name for f in fields(self.options)], get_type_hints(self.options)
        for key, value in (given or {}).items():
            if key not in known:
                raise InputError(
                    f"The method {name!r} has no option {key!r}. {did_you_mean(key, known)}"
                    f"Its options: {', '.join(known) or 'none'}."
                )
            allowed = get_args(hints[key]) or (hints[key],)
            types = [one for one in TYPES if one in allowed]
            others = any(one not in TYPES for one in allowed)  # such as a function
            if types and type(value) not in types and (type(value) in TYPES or not others):
                wanted = " or ".join(TYPES[one] for one in types if not (one is int and float in types))
                raise InputError(
                    f"The option {key} of the method {name!r} must be {wanted}, but is {value!r}. Leave it out for the "
                    "default."
                )
        return self.options(**(given or {}))
