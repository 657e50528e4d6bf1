"""Where every wire stands in every tensor: slots of axis variables, layouts of tensors and the action on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Protocol, Union, runtime_checkable

import torch
from torch import Tensor, nn

from intertwine.errors import MismatchError
from intertwine.graph.axes import Axis, AxisVariable, Product, Sum, factors_of, resolve
from intertwine.graph.constraints import Value, Window

Repeat = tuple[int, int]  # how often, and how far apart
Key = tuple[AxisVariable, int, int, tuple[Repeat, ...]]  # variable, offset, stride, repetitions


@dataclass(frozen=True)
class VariableSlot:
    """An axis variable in one axis of a tensor: it starts at `offset` and steps by `stride` along that axis.

    `beside` lists the variables that stand at every one of its positions in the same axis (its siblings in products).
    """

    variable: AxisVariable
    axis: int
    offset: int
    stride: int
    region: tuple[int, int]  # the stretch of the axis it spreads over, which is wider than itself inside a product
    repeats: tuple[Repeat, ...]  # it stands once for each index of the other factors around it
    beside: tuple[AxisVariable, ...] = ()

    def meets(self, window: Window) -> bool:
        """Whether it may stand inside a window of its axis."""
        start, stop = self.region
        return self.axis == window.axis and start < window.start + window.size and window.start < stop

    def key(self, window: Window) -> Key:
        """Its place inside a window; two tensors that read a window alike have the same keys in it."""
        inside = [(min(count, window.size // stride), stride) for count, stride in self.repeats]
        repeats = _merged([(count, stride) for count, stride in inside if count > 1])
        period = self.variable.size * self.stride
        if self.offset < window.start and window.start % period == 0:
            offset = self.offset % period  # it repeats along the axis, in step with it
        else:
            offset = self.offset - window.start
        return self.variable, offset, self.stride, repeats

    def flat_key(self, shape: tuple[int, ...]) -> Key:
        """The same among all entries of a tensor, in order: what a reshape keeps."""
        step = prod(shape[self.axis + 1 :])
        others = [(n, prod(shape[i + 1 :])) for i, n in enumerate(shape) if i != self.axis and n > 1]
        own = [(count, stride * step) for count, stride in self.repeats]
        return self.variable, self.offset * step, self.stride * step, _merged([*own, *others])


def _merged(repeats: list[Repeat]) -> tuple[Repeat, ...]:
    """Repetitions, widest first; those that continue each other are one."""
    merged: list[Repeat] = []
    for count, stride in sorted(repeats, key=lambda r: -r[1]):
        if merged and merged[-1][1] == count * stride:
            merged[-1] = (merged[-1][0] * count, stride)
        else:
            merged.append((count, stride))
    return tuple(merged)


def variable_slots(value: Value) -> list[list[VariableSlot]]:
    """The slots in each axis of a tensor."""
    return [list(_walk(resolve(a), i, 0, 1, (0, a.size), (), ())) for i, a in enumerate(value.axes)]


def _walk(
    axis: Axis, index: int, offset: int, stride: int, region: tuple[int, int], repeats: tuple[Repeat, ...],
    beside: tuple[AxisVariable, ...],
) -> Iterator[VariableSlot]:  # fmt: skip
    if isinstance(axis, AxisVariable):
        yield VariableSlot(axis, index, offset, stride, region, repeats, beside)
    elif isinstance(axis, Product):
        strides = [stride * prod(f.size for f in axis.factors[i + 1 :]) for i in range(len(axis.factors))]
        for position, factor in enumerate(axis.factors):
            rest = [i for i in range(len(strides)) if i != position]
            around = tuple((axis.factors[i].size, strides[i]) for i in rest)
            siblings = tuple(f for f in (axis.factors[i] for i in rest) if isinstance(f, AxisVariable))
            yield from _walk(factor, index, offset, strides[position], region, repeats + around, beside + siblings)
    elif isinstance(axis, Sum):
        stands_often = region[1] - region[0] > axis.size * stride
        for term in axis.terms:
            own = region if stands_often else (offset, offset + term.size * stride)
            yield from _walk(term, index, offset, stride, own, repeats, beside)
            offset += term.size * stride


def constant_variables(axis: Axis) -> tuple[AxisVariable, ...]:
    """The variables that stand at every position of an axis (not inside one term of a sum)."""
    return tuple(f for f in factors_of(resolve(axis)) if isinstance(f, AxisVariable))


# -- Layouts: the axis algebra with everything solved, on which a group element can act --------------------------------


@dataclass(frozen=True)
class WireAxis:
    """An axis, or a part of one, on which a wire acts."""

    wire: int
    size: int
    powers: tuple[Fraction, ...] = ()
    flips: tuple[int, ...] = ()

    @cached_property
    def power(self) -> tuple[float, ...]:
        """The exponents of the scales, as plain numbers."""
        return tuple(map(float, self.powers))

    @cached_property
    def flip(self) -> tuple[float, ...]:
        """The exponents of the signs, as plain numbers."""
        return tuple(map(float, self.flips))


@dataclass(frozen=True)
class FixedAxis:
    """Positions on which nothing acts."""

    size: int


@dataclass(frozen=True)
class ProductAxis:
    """Factors flattened into one axis, the last one fastest."""

    parts: tuple[LayoutAxis, ...]

    @property
    def size(self) -> int:
        return prod(p.size for p in self.parts)


@dataclass(frozen=True)
class SumAxis:
    """Blocks laid one after the other."""

    parts: tuple[LayoutAxis, ...]

    @property
    def size(self) -> int:
        return sum(p.size for p in self.parts)


LayoutAxis = Union[WireAxis, FixedAxis, ProductAxis, SumAxis]  # noqa: UP007  (the names are defined through each other)


@dataclass(frozen=True)
class Layout:
    """The axes of one tensor. `shift` is the eps of a running variance, which scales as (v + eps)."""

    axes: tuple[LayoutAxis, ...]
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def moves(self) -> bool:
        """Whether any wire acts on the tensor."""
        return any(True for _ in self.wire_axes())

    @property
    def wires(self) -> set[int]:
        """The wires that act on the tensor."""
        return {axis.wire for axis in self.wire_axes()}

    def wire_axes(self) -> Iterator[WireAxis]:
        """Every part of an axis on which a wire acts."""
        return (part for axis in self.axes for part in wire_axes(axis))


def wire_axes(tree: LayoutAxis) -> Iterator[WireAxis]:
    """Every part of an axis on which a wire acts."""
    if isinstance(tree, WireAxis):
        yield tree
    elif isinstance(tree, (ProductAxis, SumAxis)):
        for part in tree.parts:
            yield from wire_axes(part)


@dataclass(frozen=True)
class Dim:
    """One exposed dimension of a tensor under action: its tree and the axis of the tensor it came from."""

    tree: LayoutAxis
    axis: int


@runtime_checkable
class Actor(Protocol):
    """What acts on tensors: an element of the group, or a relaxation of one."""

    def act_on_axis(self, x: Tensor, dim: int, dims: Sequence[Dim], degree: int) -> Tensor: ...

    def depth(self, wire: int) -> int: ...


def act(layout: Layout, x: Tensor, actor: Actor, degree: int = 1) -> Tensor:
    """The tensor `x` moved by an element.

    `degree` 1 moves a parameter or a feature, −1 a gradient (contragredient), −2 a squared gradient.
    """
    if not layout.moves:
        return x
    dims = [Dim(axis, i) for i, axis in enumerate(layout.axes)]
    moved = _act(x, dims, actor, degree)
    if not layout.shift:
        return moved
    # (v + eps)·f − eps, written so that f = 1 changes no bit
    return moved + layout.shift * (_act(torch.ones_like(x), dims, actor, degree) - 1)


def _act(x: Tensor, dims: list[Dim], actor: Actor, degree: int) -> Tensor:
    for i, dim in enumerate(dims):
        if isinstance(dim.tree, ProductAxis):
            inner = [Dim(part, dim.axis) for part in dim.tree.parts]
            shape = (*x.shape[:i], *(p.tree.size for p in inner), *x.shape[i + 1 :])
            return _act(x.reshape(shape), [*dims[:i], *inner, *dims[i + 1 :]], actor, degree).reshape(x.shape)
    for i, dim in enumerate(dims):
        if isinstance(dim.tree, SumAxis):
            sizes = [p.size for p in dim.tree.parts]
            blocks = x.split(sizes, i)
            parts = [[*dims[:i], Dim(p, dim.axis), *dims[i + 1 :]] for p in dim.tree.parts]
            return torch.cat([_act(b, d, actor, degree) for b, d in zip(blocks, parts, strict=True)], i)
    exposed = [i for i, dim in enumerate(dims) if isinstance(dim.tree, WireAxis)]
    # a dependent axis is read in the coordinates its base still has, so it goes before its bases
    for i in sorted(exposed, key=lambda i: -actor.depth(dims[i].tree.wire)):  # type: ignore[union-attr]
        x = actor.act_on_axis(x, i, dims, degree)
    return x


def base_dims(dims: Sequence[Dim], dim: int, bases: Sequence[int]) -> list[int]:
    """Where the bases of a wire stand among the exposed dimensions: in the axis of `dim` first, else anywhere."""
    found = []
    for base in bases:
        places = [i for i, d in enumerate(dims) if isinstance(d.tree, WireAxis) and d.tree.wire == base]
        own = [i for i in places if dims[i].axis == dims[dim].axis]
        found.append((own or places)[0])
    return found


def spread(array: Tensor, places: Sequence[int], ndim: int) -> Tensor:
    """View an array with one axis per entry of `places` as a tensor of `ndim` axes that broadcasts there."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    shape = [1] * ndim
    for i in order:
        shape[places[i]] = array.shape[i]
    return array.permute(*order).reshape(shape)


# -- One tensor under several names ------------------------------------------------------------------------------------


def check_ties(held: Iterable[tuple[Hashable, str]], layout_of: Callable[[str], Layout | None], whose: str) -> None:
    """Raise `MismatchError` for a tensor whose names are moved differently.

    Args:
        held: (which tensor, one of its names). layout_of: name → its layout. whose: the owner, for the message.
    """
    first: dict[Hashable, str] = {}
    for tensor, name in held:
        other = first.setdefault(tensor, name)
        if not _alike(layout_of(other), layout_of(name)):
            raise MismatchError(
                f"This symmetry moves {other!r} and {name!r} differently, and {whose} holds one tensor under both "
                "names. Call intertwine.symmetry on a model that ties them, or give each of them a tensor of its own."
            )


def names_in_model(model: nn.Module) -> Iterator[tuple[Hashable, str]]:
    """(which tensor, name) of all parameters and buffers."""
    yield from ((id(p), name) for name, p in model.named_parameters(remove_duplicate=False))
    yield from ((id(b), name) for name, b in model.named_buffers(remove_duplicate=False))


def names_in_state(state: Mapping[str, Tensor]) -> Iterator[tuple[Hashable, str]]:
    """(which tensor, name) of the entries of a state dict, where tensors of one memory and shape are one."""
    for name, t in state.items():
        if isinstance(t, Tensor) and t.layout == torch.strided and not t.is_meta and t.numel():
            yield (t.data_ptr(), t.dtype, t.shape, t.stride()), name


def _alike(a: Layout | None, b: Layout | None) -> bool:
    """Whether two layouts move a tensor in one way; None moves nothing."""
    return a == b or not any(layout is not None and layout.moves for layout in (a, b))
