"""A start from the outside in: wires that embeddings or outputs show alone come first, then what is seen beside them.

A tensor in which a single wire is unknown tells how that wire must move, whatever the others do. Token and position
embeddings show the residual stream so; with it, the weights of a layer show its hidden units and its heads. The wire
of which the largest share of weights can be read this way goes next, on those weights alone. No data is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from intertwine.align.pair import Pair
from intertwine.align.visits import improve
from intertwine.symmetry.element import Element, Strand
from intertwine.symmetry.symmetry import Symmetry

Family = tuple[int, ...]  # a strand and the strands fibred over it; they are read together


def from_embeddings(
    symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], movable: Collection[int], signs: bool = False
) -> Element:
    """The element of permutations and matrices (with `signs`: and signs) found from the outside in."""
    element = symmetry.identity()
    met = {
        name: {leaf.strand for leaf in layout.leaves()} & {*movable}
        for name, layout in symmetry.layouts.items()
        if name in a and a[name].is_floating_point()
    }
    waiting = _families(symmetry.strands, movable)
    while waiting:
        unknown = {s for family in waiting for s in family}

        def read(family: Family, unknown: set[int] = unknown) -> list[str]:
            return [n for n, there in met.items() if there & {*family} and not (there & unknown) - {*family}]

        def share(family: Family) -> tuple[float, int]:
            whole = sum(a[n].numel() for n, there in met.items() if there & {*family})
            part = sum(a[n].numel() for n in read(family))
            return part / max(whole, 1), part

        family = max(waiting, key=share)
        waiting.remove(family)
        names = read(family)
        pair = Pair(symmetry, {n: a[n] for n in names}, {n: b[n] for n in names}, family)
        pair.start_at(element)
        for s in family:
            if pair.places[s]:
                improve(pair, s, signs)
        element = pair.element
    return element


def _families(strands: tuple[Strand, ...], movable: Collection[int]) -> list[Family]:
    """Movable strands by the outermost base they share, bases before fibres."""
    found: dict[int, list[int]] = {}
    for s in sorted(movable, key=lambda s: len(strands[s].bases)):
        found.setdefault(strands[s].bases[0] if strands[s].bases else s, []).append(s)
    return [tuple(family) for family in found.values()]
