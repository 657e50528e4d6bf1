"""Starts: elements from which descent begins.

Descent over wires ends in the nearest place where no single wire can do better, which depends on where it began.
Networks of one orbit have one canonical form, so the element between two forms is the answer for them, and a
start for others; pairing units by lengths and distances does the same through noise. Where matrices act there is no
canonical form, and the way from the embeddings inwards takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from intertwine.align.embeddings import from_embeddings
from intertwine.align.pair import Pair
from intertwine.canonical.canonicalize import canonical_element
from intertwine.canonical.matching import match
from intertwine.symmetry.element import Element, identity_move
from intertwine.symmetry.symmetry import Symmetry


@dataclass(frozen=True)
class Problem:
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
        return any(s.matrix for s in self.symmetry.strands)

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
        return match(self.symmetry, self.a, self.b)


def permutations_of(element: Element, *kept: str) -> Element:
    """The permutations of an element and the other parts that are kept ("sign"), without the rest."""
    moves = {}
    for i, move in element.moves.items():
        parts = {name: part for name, part in move.items() if name in ("permutation", *kept)}
        moves[i] = replace(identity_move(element.strands, i), **parts)
    return replace(element, moves=moves)


def scales_of(pair: Pair, scales: Mapping[int, Tensor]) -> Element:
    """The element of some scales on strands."""
    identity = pair.symmetry.identity()
    return replace(identity, moves={i: replace(m, scale=scales.get(i, m.scale)) for i, m in identity.moves.items()})
