"""Layouts: what each axis of one tensor is made of, compiled so that a group element can act on the tensor.

A layout is the axis algebra with everything solved: leaves name the strand they belong to (a strand is an atom that
survived) and carry the exponents of its scales and signs. Acting exposes every leaf as a dimension of its own and does
one gather, one scaling or one small matrix product per leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Protocol, Union, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """An occurrence of a strand."""

    strand: int
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
class Still:
    """Positions on which nothing acts."""

    size: int


@dataclass(frozen=True)
class Times:
    """Factors flattened into one axis, the last one fastest."""

    parts: tuple[Tree, ...]

    @property
    def size(self) -> int:
        return prod(p.size for p in self.parts)


@dataclass(frozen=True)
class Plus:
    """Blocks laid one after the other."""

    parts: tuple[Tree, ...]

    @property
    def size(self) -> int:
        return sum(p.size for p in self.parts)


Tree = Union[Leaf, Still, Times, Plus]  # noqa: UP007  (the names are defined through each other)


@dataclass(frozen=True)
class Layout:
    """The axes of one tensor. `shift` is the eps of a running variance, which scales as (v + eps)."""

    axes: tuple[Tree, ...]
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    def leaves(self) -> Iterator[Leaf]:
        """Every occurrence of a strand; none where nothing moves the tensor."""
        return (leaf for axis in self.axes for leaf in leaves(axis))


def leaves(tree: Tree) -> Iterator[Leaf]:
    """The occurrences of strands in one axis."""
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, (Times, Plus)):
        for part in tree.parts:
            yield from leaves(part)


@dataclass(frozen=True)
class Dim:
    """One exposed dimension of a tensor under action: its tree and the axis of the tensor it came from."""

    tree: Tree
    axis: int


@runtime_checkable
class Actor(Protocol):
    """What acts on exposed tensors: an element of the group."""

    def act_on_leaf(self, x: Tensor, dim: int, dims: Sequence[Dim], degree: int) -> Tensor: ...

    def depth(self, strand: int) -> int: ...


def act(layout: Layout, x: Tensor, actor: Actor, degree: int = 1) -> Tensor:
    """The tensor `x` moved by an element.

    `degree` 1 moves a parameter or a feature, −1 a gradient (contragredient), −2 a squared gradient.
    """
    if not any(True for _ in layout.leaves()):
        return x
    dims = [Dim(axis, i) for i, axis in enumerate(layout.axes)]
    moved = _act(x, dims, actor, degree)
    if not layout.shift:
        return moved
    # (v + eps)·f − eps, written so that f = 1 changes no bit
    return moved + layout.shift * (_act(torch.ones_like(x), dims, actor, degree) - 1)


def _act(x: Tensor, dims: list[Dim], actor: Actor, degree: int) -> Tensor:
    for i, dim in enumerate(dims):
        if isinstance(dim.tree, Times):
            inner = [Dim(part, dim.axis) for part in dim.tree.parts]
            shape = (*x.shape[:i], *(p.tree.size for p in inner), *x.shape[i + 1 :])
            return _act(x.reshape(shape), [*dims[:i], *inner, *dims[i + 1 :]], actor, degree).reshape(x.shape)
    for i, dim in enumerate(dims):
        if isinstance(dim.tree, Plus):
            sizes = [p.size for p in dim.tree.parts]
            blocks = x.split(sizes, i)
            parts = [[*dims[:i], Dim(p, dim.axis), *dims[i + 1 :]] for p in dim.tree.parts]
            return torch.cat([_act(b, d, actor, degree) for b, d in zip(blocks, parts, strict=True)], i)
    exposed = [i for i, dim in enumerate(dims) if isinstance(dim.tree, Leaf)]
    # a fibre is read in the coordinates its base still has, so fibres go before their bases
    for i in sorted(exposed, key=lambda i: -actor.depth(dims[i].tree.strand)):  # type: ignore[union-attr]
        x = actor.act_on_leaf(x, i, dims, degree)
    return x


def base_dims(dims: Sequence[Dim], dim: int, bases: Sequence[int]) -> list[int]:
    """Where the bases of a leaf stand among the exposed dimensions: in its own axis first, else wherever they are."""
    found = []
    for base in bases:
        places = [i for i, d in enumerate(dims) if isinstance(d.tree, Leaf) and d.tree.strand == base]
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
