"""Where atoms stand: the geometry of every occurrence of an atom in the axes of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from intertwine.graph.axes import Atom, Axis, Product, Sum, factors_of, resolve
from intertwine.graph.tape import Value, Window


@dataclass(frozen=True)
class Occurrence:
    """An atom in one axis of a tensor: it starts at `offset` and steps by `stride` along that axis.

    `beside` lists the atoms that stand at every one of its positions in the same axis (its siblings in products).
    """

    atom: Atom
    axis: int
    offset: int
    stride: int
    region: tuple[int, int]  # the stretch of the axis it spreads over, which is wider than itself inside a product
    beside: tuple[Atom, ...] = ()

    def meets(self, window: Window) -> bool:
        """Whether it may stand inside a window of its axis."""
        return (
            self.axis == window.axis and self.region[0] < window.start + window.size and window.start < self.region[1]
        )

    def key(self, window: Window) -> tuple[Atom, int, int]:
        """The place it has inside a window; two tensors that read a window alike have the same keys in it."""
        period = self.atom.size * self.stride
        if self.offset < window.start and window.start % period == 0:
            return self.atom, self.offset % period, self.stride  # it repeats along the axis, in step with the window
        return self.atom, self.offset - window.start, self.stride


def occurrences(value: Value) -> list[list[Occurrence]]:
    """The occurrences in each axis of a tensor."""
    return [list(_walk(resolve(a), i, 0, 1, (0, a.size), ())) for i, a in enumerate(value.axes)]


def _walk(
    axis: Axis, index: int, offset: int, stride: int, region: tuple[int, int], beside: tuple[Atom, ...]
) -> Iterator[Occurrence]:
    if isinstance(axis, Atom):
        yield Occurrence(axis, index, offset, stride, region, beside)
    elif isinstance(axis, Product):
        inner = axis.size
        for position, factor in enumerate(axis.factors):
            inner //= factor.size
            siblings = tuple(f for i, f in enumerate(axis.factors) if i != position and isinstance(f, Atom))
            yield from _walk(factor, index, offset, stride * inner, region, beside + siblings)
    elif isinstance(axis, Sum):
        repeats = region[1] - region[0] > axis.size * stride  # the whole sum stands several times in its region
        for term in axis.terms:
            own = region if repeats else (offset, offset + term.size * stride)
            yield from _walk(term, index, offset, stride, own, beside)
            offset += term.size * stride


def constant_atoms(axis: Axis) -> tuple[Atom, ...]:
    """The atoms that stand at every position of an axis (not inside one term of a sum)."""
    return tuple(f for f in factors_of(resolve(axis)) if isinstance(f, Atom))
