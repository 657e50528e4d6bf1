"""Where atoms stand: the geometry of every occurrence of an atom in the axes of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from intertwine.graph.axes import Atom, Axis, Product, Sum, factors_of, resolve
from intertwine.graph.tape import Value, Window

Repeat = tuple[int, int]  # how often, and how far apart
Key = tuple[Atom, int, int, tuple[Repeat, ...]]  # atom, offset, stride, repetitions


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
    repeats: tuple[Repeat, ...]  # it stands once for each index of the other factors around it
    beside: tuple[Atom, ...] = ()

    def meets(self, window: Window) -> bool:
        """Whether it may stand inside a window of its axis."""
        return (
            self.axis == window.axis and self.region[0] < window.start + window.size and window.start < self.region[1]
        )

    def key(self, window: Window) -> Key:
        """The place it has inside a window; two tensors that read a window alike have the same keys in it."""
        inside = [(min(count, window.size // stride), stride) for count, stride in self.repeats]
        repeats = _merged([(count, stride) for count, stride in inside if count > 1])
        period = self.atom.size * self.stride
        if self.offset < window.start and window.start % period == 0:
            return self.atom, self.offset % period, self.stride, repeats  # it repeats along the axis, in step with it
        return self.atom, self.offset - window.start, self.stride, repeats

    def flat_key(self, shape: tuple[int, ...]) -> Key:
        """The same among all entries of a tensor, in order: what a reshape keeps."""
        step = prod(shape[self.axis + 1 :])
        others = [(n, prod(shape[i + 1 :])) for i, n in enumerate(shape) if i != self.axis and n > 1]
        own = [(count, stride * step) for count, stride in self.repeats]
        return self.atom, self.offset * step, self.stride * step, _merged([*own, *others])


def _merged(repeats: list[Repeat]) -> tuple[Repeat, ...]:
    """Repetitions, widest first, with those that continue each other made one."""
    merged: list[Repeat] = []
    for count, stride in sorted(repeats, key=lambda r: -r[1]):
        if merged and merged[-1][1] == count * stride:
            merged[-1] = (merged[-1][0] * count, stride)
        else:
            merged.append((count, stride))
    return tuple(merged)


def occurrences(value: Value) -> list[list[Occurrence]]:
    """The occurrences in each axis of a tensor."""
    return [list(_walk(resolve(a), i, 0, 1, (0, a.size), (), ())) for i, a in enumerate(value.axes)]


def _walk(
    axis: Axis, index: int, offset: int, stride: int, region: tuple[int, int], repeats: tuple[Repeat, ...],
    beside: tuple[Atom, ...],
) -> Iterator[Occurrence]:  # fmt: skip
    if isinstance(axis, Atom):
        yield Occurrence(axis, index, offset, stride, region, repeats, beside)
    elif isinstance(axis, Product):
        strides = [stride * prod(f.size for f in axis.factors[i + 1 :]) for i in range(len(axis.factors))]
        for position, factor in enumerate(axis.factors):
            rest = [i for i in range(len(strides)) if i != position]
            around = tuple((axis.factors[i].size, strides[i]) for i in rest)
            siblings = tuple(f for f in (axis.factors[i] for i in rest) if isinstance(f, Atom))
            yield from _walk(factor, index, offset, strides[position], region, repeats + around, beside + siblings)
    elif isinstance(axis, Sum):
        stands_often = region[1] - region[0] > axis.size * stride
        for term in axis.terms:
            own = region if stands_often else (offset, offset + term.size * stride)
            yield from _walk(term, index, offset, stride, own, repeats, beside)
            offset += term.size * stride


def constant_atoms(axis: Axis) -> tuple[Atom, ...]:
    """The atoms that stand at every position of an axis (not inside one term of a sum)."""
    return tuple(f for f in factors_of(resolve(axis)) if isinstance(f, Atom))
