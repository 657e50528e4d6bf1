"""The algebra of axes: what one axis of a tensor is made of, and how ops make two axes the same.

An axis is an expression over *axis variables*: index sets on which, in the end, a group acts.

    axis := AxisVariable | Fixed(n) | Product(axis, ...) | Sum(axis, ...)

`Fixed` is an index set on which nothing ever acts (a batch, a pixel row). `Product` is a flattened pair of axes in
row-major order (channels × height × width), `Sum` is a concatenation. Ops relate axes through three verbs:

    unify(a, b)     the two axes carry the same group element from now on
    split(axis, k)  read the axis as a product (k, n / k)
    cut(axis, k)    read the axis as a sum (k, n - k)

A variable that is split, cut or unified is *bound* to what it turned out to be, once; everything that mentions it sees
the new expression through `resolve`. This is union-find with substitution, so a whole network costs time linear in its
number of edges. When two readings of an axis do not fit together, the variables involved are *frozen*: they keep the
identity permutation, and remember why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Union


class AxisVariable:
    """An index set of `size` elements. `bound` is what it turned out to be, `frozen` why it cannot move."""

    __slots__ = ("size", "bound", "frozen")

    def __init__(self, size: int, frozen: str | None = None) -> None:
        self.size = size
        self.bound: Axis | None = None
        self.frozen = frozen

    def __repr__(self) -> str:
        return f"AxisVariable({self.size}{', frozen' if self.frozen else ''})"


@dataclass(frozen=True, slots=True)
class Fixed:
    """An index set on which nothing acts, and why (an input of the model, a position of a kernel)."""

    size: int
    why: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Product:
    """Axes flattened into one, row-major: the last factor runs fastest."""

    factors: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return prod(f.size for f in self.factors)


@dataclass(frozen=True, slots=True)
class Sum:
    """Axes laid one after the other."""

    terms: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return sum(t.size for t in self.terms)


Axis = Union[AxisVariable, Fixed, Product, Sum]  # noqa: UP007  (the names are defined through each other)


def resolve(axis: Axis) -> Axis:
    """The axis over unbound variables, flattened: no product in a product, no sum in a sum, no factor of size 1."""
    if isinstance(axis, Fixed):
        return axis
    if isinstance(axis, AxisVariable):
        if axis.bound is None:
            return axis
        axis.bound = resolve(axis.bound)  # path compression
        return axis.bound
    if isinstance(axis, Product):
        return product(axis.factors)
    return concat(axis.terms)


def product(factors: Sequence[Axis]) -> Axis:
    """The normal form of a product of axes."""
    flat: list[Axis] = []
    for factor in factors:
        for f in factors_of(resolve(factor)):
            if f.size == 1:
                continue
            if flat and isinstance(f, Fixed) and isinstance(flat[-1], Fixed):
                flat[-1] = Fixed(flat[-1].size * f.size, flat[-1].why or f.why)
            else:
                flat.append(f)
    if not flat:
        # a width-1 axis keeps its variable (it may carry a scale) as long as it stands alone
        return resolve(factors[0]) if len(factors) == 1 else Fixed(1)
    return flat[0] if len(flat) == 1 else Product(tuple(flat))


def concat(terms: Sequence[Axis]) -> Axis:
    """The normal form of a sum of axes."""
    flat: list[Axis] = []
    for term in terms:
        for t in terms_of(resolve(term)):
            if t.size == 0:
                continue
            if flat and isinstance(t, Fixed) and isinstance(flat[-1], Fixed):
                flat[-1] = Fixed(flat[-1].size + t.size, flat[-1].why or t.why)
            else:
                flat.append(t)
    if not flat:
        return Fixed(0)
    return flat[0] if len(flat) == 1 else Sum(tuple(flat))


def factors_of(axis: Axis) -> tuple[Axis, ...]:
    """The factors of a resolved axis (itself alone unless it is a product)."""
    return axis.factors if isinstance(axis, Product) else (axis,)


def terms_of(axis: Axis) -> tuple[Axis, ...]:
    """The terms of a resolved axis (itself alone unless it is a sum)."""
    return axis.terms if isinstance(axis, Sum) else (axis,)


def variables_of(axis: Axis) -> Iterator[AxisVariable]:
    """Every unbound variable in the axis, in order, repeated as often as it occurs."""
    axis = resolve(axis)
    if isinstance(axis, AxisVariable):
        yield axis
    elif isinstance(axis, (Product, Sum)):
        for part in axis.factors if isinstance(axis, Product) else axis.terms:
            yield from variables_of(part)


def freeze(axis: Axis, reason: str) -> None:
    """Only the identity permutation acts on this axis from now on; the first reason given is the one remembered."""
    for variable in variables_of(axis):
        variable.frozen = variable.frozen or reason


def split(axis: Axis, k: int) -> tuple[Axis, Axis] | None:
    """Read the axis as a product of an axis of size `k` and the rest; None when its structure does not allow it."""
    axis = resolve(axis)
    if k == 1:
        return Fixed(1), axis
    if k == axis.size:
        return axis, Fixed(1)
    if axis.size % k:
        return None
    if isinstance(axis, Fixed):
        return Fixed(k, axis.why), Fixed(axis.size // k, axis.why)
    if isinstance(axis, AxisVariable):
        outer, inner = AxisVariable(k, axis.frozen), AxisVariable(axis.size // k, axis.frozen)
        axis.bound = Product((outer, inner))
        return outer, inner
    if isinstance(axis, Product):
        return _split_product(axis, k)
    return _split_sum(axis, k)


def _split_product(axis: Product, k: int) -> tuple[Axis, Axis] | None:
    outer: list[Axis] = []
    have = 1
    for position, factor in enumerate(axis.factors):
        if have == k:
            return product(outer), product(axis.factors[position:])
        need = k // have
        if need % factor.size == 0:
            outer.append(factor)
            have *= factor.size
            continue
        parts = split(factor, need) if k % have == 0 else None
        if parts is None:
            return None
        return product([*outer, parts[0]]), product([parts[1], *axis.factors[position + 1 :]])
    return product(outer), Fixed(1)


def _split_sum(axis: Sum, k: int) -> tuple[Axis, Axis] | None:
    """A concatenation of stacks with one common inner axis is a stack of the concatenated outer axes."""
    inner_size = axis.size // k
    if any(term.size % inner_size for term in axis.terms):
        return None
    outers: list[Axis] = []
    inner: Axis | None = None
    for term in axis.terms:
        parts = split(term, term.size // inner_size)
        if parts is None:
            return None
        outers.append(parts[0])
        if inner is None:
            inner = parts[1]
        else:
            unify(inner, parts[1], "blocks of one axis are read as a stack, so they share their inner axis")
    assert inner is not None
    return concat(outers), resolve(inner)


def cut(axis: Axis, k: int) -> tuple[Axis, Axis] | None:
    """Read the axis as a concatenation of an axis of size `k` and the rest; None when its structure forbids it."""
    axis = resolve(axis)
    n = axis.size
    if k == 0:
        return Fixed(0), axis
    if k == n:
        return axis, Fixed(0)
    if isinstance(axis, Fixed):
        return Fixed(k, axis.why), Fixed(n - k, axis.why)
    if isinstance(axis, AxisVariable):
        left, right = AxisVariable(k, axis.frozen), AxisVariable(n - k, axis.frozen)
        axis.bound = Sum((left, right))
        return left, right
    if isinstance(axis, Product):
        inner = axis.factors[1:]
        step = prod(f.size for f in inner)
        parts = cut(axis.factors[0], k // step) if k % step == 0 else None
        return None if parts is None else (product([parts[0], *inner]), product([parts[1], *inner]))
    return _cut_sum(axis, k)


def _cut_sum(axis: Sum, k: int) -> tuple[Axis, Axis] | None:
    have = 0
    for position, term in enumerate(axis.terms):
        if have == k:
            return concat(axis.terms[:position]), concat(axis.terms[position:])
        if have + term.size > k:
            parts = cut(term, k - have)
            if parts is None:
                return None
            return concat([*axis.terms[:position], parts[0]]), concat([parts[1], *axis.terms[position + 1 :]])
        have += term.size
    raise AssertionError("a cut lies inside the axis")


def block(axis: Axis, start: int, length: int, reason: str) -> Axis:
    """The part `start … start + length` of an axis; an axis that cannot be cut there is frozen."""
    parts = cut(axis, start)
    parts = cut(parts[1], length) if parts is not None else None
    if parts is None:
        freeze(axis, reason)
        return Fixed(length)
    return parts[0]


def part(axis: Axis, start: int, length: int) -> Axis:
    """The terms of an axis that reach into `start … start + length`; nothing is cut for it."""
    axis, offset, found = resolve(axis), 0, []
    for term in terms_of(axis):
        if offset < start + length and start < offset + term.size:
            found.append(term)
        offset += term.size
    return concat(found)


def unify(a: Axis, b: Axis, reason: str) -> None:
    """Make two axes of one size the same axis. What cannot be reconciled is frozen, with `reason`."""
    a, b = resolve(a), resolve(b)
    if a is b or a == b:
        return
    if isinstance(a, Fixed) or isinstance(b, Fixed):
        fixed, other = (a, b) if isinstance(a, Fixed) else (b, a)
        freeze(other, (fixed.why if isinstance(fixed, Fixed) else "") or reason)
    elif isinstance(a, AxisVariable) or isinstance(b, AxisVariable):
        _bind(a, b) if isinstance(a, AxisVariable) else _bind(b, a)
    elif isinstance(a, Product) and isinstance(b, Product):
        _unify_products(list(a.factors), list(b.factors), reason)
    else:
        _unify_sums(a, b, reason)


def _bind(variable: Axis, other: Axis) -> None:
    """Let an axis variable be another axis from now on; whichever of the two is frozen freezes the other."""
    assert isinstance(variable, AxisVariable)
    if variable.frozen:
        freeze(other, variable.frozen)
    elif isinstance(other, AxisVariable) and other.frozen:
        variable.frozen = other.frozen
    variable.bound = other


def _unify_products(left: list[Axis], right: list[Axis], reason: str) -> None:
    """Refine two factorisations of one index set to their common refinement."""
    while left and right:
        f, g = resolve(left.pop(0)), resolve(right.pop(0))
        if f.size == g.size:
            unify(f, g, reason)
            continue
        k = gcd(f.size, g.size)
        parts_f, parts_g = (split(f, k), split(g, k)) if k > 1 else (None, None)
        if parts_f is None or parts_g is None:
            for axis in (f, g, *left, *right):
                freeze(axis, f"{reason}; its two readings {f.size}×… and {g.size}×… have no common refinement")
            return
        unify(parts_f[0], parts_g[0], reason)
        left[:0] = [parts_f[1]] if parts_f[1].size > 1 else []
        right[:0] = [parts_g[1]] if parts_g[1].size > 1 else []
        left[:] = [x for axis in left for x in factors_of(resolve(axis))]
        right[:] = [x for axis in right for x in factors_of(resolve(axis))]


def _unify_sums(a: Axis, b: Axis, reason: str) -> None:
    """Walk two concatenations (at least one of them a `Sum`) and unify the blocks between all their cuts."""
    while True:
        a, b = resolve(a), resolve(b)
        if not (isinstance(a, Sum) or isinstance(b, Sum)):
            unify(a, b, reason)
            return
        step = min(terms_of(a)[0].size, terms_of(b)[0].size)
        parts_a = cut(a, step)
        parts_b = cut(b, step)
        if parts_a is None or parts_b is None:
            for axis in (a, b):
                freeze(axis, f"{reason}; a block boundary at {step} falls inside a larger unit")
            return
        unify(parts_a[0], parts_b[0], reason)
        a, b = parts_a[1], parts_b[1]
        if a.size == 0:
            return
