"""What a rule is written with: the registry of rules, one per op, and the builder whose methods record constraints.

A rule has the signature of its op, with a `GraphBuilder` in front. Axes meet where they have the same label:

    @rule("aten.linear.default")
    def linear(t, x, weight, bias=None):
        lead = t.labels(x, 1)
        return t.multilinear([[(x, [*lead, "in"]), (weight, ["out", "in"])], [(bias, ["out"])]], [*lead, "out"])

The builder unifies such axes at once (permutations) and keeps a constraint, from which scales, signs, dependent axes
and matrices are solved for later. A rule for an op of your own is kept for the whole process; `certify` proves it right
or names the op at which it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from intertwine.errors import RuleError
from intertwine.graph import axes as ax
from intertwine.graph.axes import Axis, AxisVariable, Fixed
from intertwine.graph.constraints import (
    AxisSlice,
    ConcatView,
    Constraint,
    Label,
    Length,
    Operand,
    PermutedView,
    PointwiseRule,
    ReshapeConstraint,
    ReshapedView,
    ScaleRule,
    Shape,
    Value,
    Window,
)
from intertwine.graph.program import Call

Rule = Callable[..., Any]
_RULES: dict[str, Rule] = {}


def rule(*ops: str, replace: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for one or more ops, written `aten.relu` (all overloads), `aten.add.Tensor` or `library::op`.

    Args:
        ops: names of the ops. replace: whether the rule may take the place of an existing one.

    Returns:
        A decorator. The rule takes a `GraphBuilder` and then the op's own arguments, with a `Value` for each tensor.

    Example:
        >>> from intertwine.graph.builder import rule, find_rule
        >>> @rule("demo::double")
        ... def double(t, x):
        ...     return t.pointwise(lambda v: 2 * v, x, key="demo::double")
        >>> find_rule("demo.double.default") is double
        True
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            name = op.replace("::", ".")
            if name in _RULES and not replace:
                raise RuleError(
                    f"A rule for {op} exists already ({_RULES[name].__module__}). Pass replace=True to replace it."
                )
            _RULES[name] = function
        return function

    return register


def find_rule(op: str) -> Rule | None:
    """The rule for `library.op.overload`: of this overload, of all of them, or of the op that is not in place."""
    name = op.rpartition(".")[0]
    functional = name if name.endswith("__") else name.removesuffix("_")
    return _RULES.get(op) or _RULES.get(name) or _RULES.get(functional)


class _Pinned:
    """The label of an axis along which positions matter: it is frozen, and no scale acts on it."""

    def __repr__(self) -> str:
        return "PINNED"


PINNED = _Pinned()


Factor = tuple["Value | None", Sequence[Label | None]]


@dataclass
class GraphBuilder:
    """The values and constraints that the rules have made so far, and the methods that make them."""

    constraints: list[Constraint | ReshapeConstraint] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    variances: dict[str, float] = field(default_factory=dict)  # running variances: value name → eps
    unsupported: list[tuple[str, str]] = field(default_factory=list)
    call: Call | None = None
    unread: frozenset[int] = frozenset()  # results of the current op that nothing reads
    of_weights: bool = False  # whether the current op looks at nothing but weights
    slices: list[AxisSlice] = field(default_factory=list)  # slices, of weights and of what is computed

    # -- the current op --------------------------------------------------------------------------------------------

    @property
    def op(self) -> str:
        """Full name of the current op."""
        assert self.call is not None
        return self.call.op

    @property
    def shapes(self) -> tuple[Shape | None, ...]:
        """Shapes of the current op's results; None for a result that is not a tensor."""
        assert self.call is not None
        return self.call.shapes

    @property
    def shape(self) -> Shape:
        """Shape of the current op's (first) result."""
        shape = self.shapes[0]
        assert shape is not None
        return shape

    @property
    def here(self) -> str:
        """The current op and source line, for reasons."""
        if self.call is None:
            return "the model's boundary"
        return f"{self.call.op.removeprefix('aten.').split('.')[0]} at {self.call.place}"

    # -- labels ----------------------------------------------------------------------------------------------------

    @property
    def out(self) -> list[Label]:
        """Fresh labels for all axes of the current op's result."""
        return [("lead", i) for i in range(len(self.shape))]

    @staticmethod
    def labels(x: Value, drop: int = 0) -> list[Label]:
        """Fresh labels for the leading axes of `x`, all but the last `drop`."""
        return [("lead", i) for i in range(x.ndim - drop)]

    @staticmethod
    def pinned(x: Value, dims: Iterable[int]) -> list[Label]:
        """Labels for all axes of `x`; along `dims` positions matter."""
        pinned = {d % x.ndim for d in dims} if x.ndim else ()
        return [PINNED if d in pinned else ("lead", d) for d in range(x.ndim)]

    def spread(self, x: Value | None, shape: Shape | None = None) -> list[Label | None]:
        """Labels of `x` broadcast against the result (or `shape`): none where one entry is spread over many."""
        return [] if x is None else [*spread_labels(x.shape, self.shape if shape is None else shape)]

    # -- making values ---------------------------------------------------------------------------------------------

    def value(
        self, shape: Shape, axes: Sequence[Axis] | None, floating: bool | None = None, name: str | None = None
    ) -> Value:
        """A new tensor; without axes it is lazy."""
        if floating is None:
            floating = self.call is None or self.call.dtype is None or self.call.dtype.is_floating_point
        result = Value(name or f"%{len(self.values)}", shape, axes, floating, self.materialise)
        self.values.append(result)
        return result

    def fixed(self, shape: Shape, why: str = "", floating: bool | None = None) -> Value:
        """A tensor on which nothing acts."""
        return self.value(shape, [Fixed(n, why) for n in shape], floating)

    def uniform(self, shape: Shape, zero: bool = False) -> Value:
        """A tensor that is constant along every axis: any permutation acts on it, and any scale if it is zero."""
        result = self.value(shape, [AxisVariable(n) for n in shape])
        result.zero = zero
        if not zero:
            self._meet([(result, self.labels(result))], dict.fromkeys(self.labels(result), _ZERO))
        return result

    def freeze(self, x: Value, dims: Iterable[int], why: str) -> None:
        """Permit only the identity permutation on some axes of `x`."""
        for dim in dims:
            ax.freeze(x.axes[dim], why)

    def variance(self, x: Value | None, eps: float) -> Value | None:
        """Register a running variance, which moves as (v + eps); None for one that cannot: a slice, a second eps."""
        if x is None or x.computed or self.variances.setdefault(x.name, eps) != eps:
            return None
        return x

    # -- the primitive ops -----------------------------------------------------------------------------------------

    def multilinear(
        self,
        terms: Sequence[Sequence[Factor | tuple[Value, Sequence[Label | None], int]]],
        out: Sequence[Label],
        shape: Shape | None = None,
    ) -> Value:
        """A sum of terms, each a product of tensors, summed over the labels that are not in `out`.

        Linear layers, convolutions, einsum, sums, products and broadcasts are all of this form. A third entry in a
        factor is its power (−1 for a divisor). Factors whose value is None, and terms of nothing else, are left out.
        """
        shape = self.shape if shape is None else shape
        kept = [[(f[0], f[1], f[2] if len(f) > 2 else 1) for f in term if f[0] is not None] for term in terms]
        kept = [term for term, original in zip(kept, terms, strict=True) if term or not original]
        factors = [factor for term in kept for factor in term]
        operands = [(v, labels) for v, labels, _ in factors]
        if self._rounds(operands):
            summed = {label for _, labels in operands for label in labels if _is_label(label)} - set(out)
            return self.joint(operands, out, shape, mixes=summed)
        result = self._joined(operands, out, shape)
        numbered, position = [], 0
        for term in kept:
            numbered.append([(position + i, power) for i, (_, _, power) in enumerate(term)])
            position += len(term)
        labels = [labels for _, labels in operands]
        every = [*operands, (result, out)]
        self._meet(every, {x: _multilinear_rule(x, numbered, labels, x in out, position) for x in _labels_of(every)})
        return result

    def linear(
        self, x: Value, labels: Sequence[Label | None], out: Sequence[Label], shape: Shape | None = None
    ) -> Value:
        """A linear op on one tensor: its entries summed over the labels that are not in `out`, or copied."""
        return self.multilinear([[(x, labels)]], out, shape)

    def pointwise(self, fn: Callable[[torch.Tensor], torch.Tensor], x: Value, key: str) -> Value:
        """An elementwise function of one tensor; its intertwiner group decides what passes."""
        labels = self.labels(x)
        result = self.value(x.shape, list(x.axes))
        self._meet([(x, labels), (result, labels)], dict.fromkeys(labels, PointwiseRule(fn, key)))
        return result

    def joint(
        self,
        operands: Sequence[Factor],
        out: Sequence[Label],
        shape: Shape | None = None,
        mixes: Iterable[Label] = (),
        rules: Mapping[Any, ScaleRule] | ScaleRule | None = None,
        length: Length | None = None,
        variance: Value | None = None,
    ) -> Value:
        """An op that treats the positions of each label alike.

        Args:
            operands: tensors and the labels of their axes. out, shape: labels and shape of the result.
            mixes: labels along which the op is a symmetric but non-linear reduction.
            rules: how scales and signs pass, per label or along all of them; none passes along other labels.
            length: the Euclidean length that is taken, if one is. variance: the operand read as a running variance.
        """
        shape = self.shape if shape is None else shape
        present = [(v, labels) for v, labels in operands if v is not None]
        result = self._joined(present, out, shape)
        every = [*present, (result, out)]
        default = rules if isinstance(rules, ScaleRule) else ScaleRule(*(tuple({i: 1} for i in range(len(every))),) * 2)
        given = {} if rules is None or isinstance(rules, ScaleRule) else rules
        found = {label: given.get(label, default) for label in _labels_of(every)}
        self._meet(every, found, frozenset(mixes), length, variance)
        return result

    def opaque(self, inputs: Iterable[Value], shapes: Iterable[Shape | None], why: str) -> tuple[Value | None, ...]:
        """An op nothing is known of: every axis it touches is frozen and unscaled."""
        touched = [v for v in inputs if any(True for axis in v.axes for _ in ax.variables_of(axis))]
        for v in touched:
            self.boundary(v, why)
        return tuple(None if shape is None else self.fixed(shape, why if touched else "") for shape in shapes)

    def permute(self, x: Value, order: Sequence[int]) -> Value:
        """A lazy view with the axes in another order."""
        order = tuple(d % x.ndim for d in order)
        result = self.value(tuple(x.shape[d] for d in order), None, x.floating)
        result.view = PermutedView(x, order)
        return result

    def reshape(self, x: Value, shape: Shape) -> Value:
        """A lazy view of another shape."""
        if tuple(shape) == x.shape:
            return x
        if isinstance(x.view, ReshapedView) and x.view.source.shape == tuple(shape):
            return x.view.source  # there and back; an axis of size 1 that was dropped on the way may carry a scale
        result = self.value(tuple(shape), None, x.floating)
        result.view = ReshapedView(x)
        return result

    def narrow(self, x: Value, dim: int, start: int, length: int) -> Value:
        """The slice `start … start + length` of one axis, read through lazy views where that keeps blocks apart."""
        if start < 0 or start + length > x.shape[dim]:
            raise ValueError(f"entries {start} … {start + length} of an axis of {x.shape[dim]} in {self.here}")
        if x.shape[dim] == length:
            return x
        pulled = self._narrow_view(x, dim, start, length) if x.lazy else None
        if pulled is not None:
            return pulled
        shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
        parts = list(x.axes)
        parts[dim] = ax.block(parts[dim], start, length, f"sliced inside a larger unit ({self.here})")
        if isinstance(ax.resolve(parts[dim]), Fixed):
            self.unscale(x, dim)
        result = self.value(shape, parts, x.floating)
        labels = self.labels(x)
        windows = tuple(Window(d, labels[d], start if d == dim else 0, shape[d]) for d in range(x.ndim))
        whole = tuple(Window(d, labels[d], 0, shape[d]) for d in range(x.ndim))
        operands = (Operand(x, windows), Operand(result, whole))
        self.constraints.append(Constraint(self.call, operands, dict.fromkeys(labels, _SAME)))
        if self.call is not None:
            self.slices.append(AxisSlice(self.call, x, result, dim, self.of_weights))
        return result

    def concat(self, xs: Sequence[Value], dim: int) -> Value:
        """Tensors laid one after the other along `dim`; all other axes meet."""
        xs = [x for x in xs if x.shape != (0,)]
        dim %= xs[0].ndim
        if len(xs) == 1:
            return xs[0]
        size = sum(x.shape[dim] for x in xs)
        floating = any(x.floating for x in xs)
        result = self.value((*xs[0].shape[:dim], size, *xs[0].shape[dim + 1 :]), None, floating)
        result.view = ConcatView(tuple(xs), dim)
        return result

    def _materialise_concat(self, result: Value, xs: Sequence[Value], dim: int) -> None:
        shape = result.shape
        labels = self.labels(xs[0])
        for other in xs[1:]:
            for d in (d for d in range(len(shape)) if d != dim):
                ax.unify(xs[0].axes[d], other.axes[d], f"joined in {self.here}")
        result._axes = [ax.concat([x.axes[dim] for x in xs]) if d == dim else xs[0].axes[d] for d in range(xs[0].ndim)]
        operands, blocks, offset = [], [], 0
        for i, x in enumerate(xs):
            own = tuple(Window(d, ("block", i) if d == dim else labels[d], 0, x.shape[d]) for d in range(x.ndim))
            operands.append(Operand(x, own))
            blocks.append(Window(dim, ("block", i), offset, x.shape[dim]))
            offset += x.shape[dim]
        rest = [Window(d, labels[d], 0, shape[d]) for d in range(len(shape)) if d != dim]
        operands.append(Operand(result, (*rest, *blocks)))
        last = len(xs)
        rules: dict[Label, ScaleRule | PointwiseRule] = {("block", i): _equal(i, last) for i in range(last)}
        all_equal = tuple({i: 1, last: -1} for i in range(last))
        rules |= {labels[d]: ScaleRule(all_equal, all_equal, linear=True) for d in range(len(shape)) if d != dim}
        self.constraints.append(Constraint(self.call, tuple(operands), rules))

    def boundary(self, x: Value, why: str) -> None:
        """Nothing may act on this tensor: it is an input or an output of the model."""
        self.freeze(x, range(x.ndim), why)
        self._meet([(x, [None] * x.ndim)], {})

    def boundary_along(self, x: Value, dim: int, why: str) -> None:
        """Nothing may act on this tensor along one of its axes."""
        self.freeze(x, [dim], why)
        self.unscale(x, dim)

    def unscale(self, x: Value, dim: int) -> None:
        """No scale and no sign may act on this tensor along one of its axes."""
        self._meet([(x, [None if d == dim else ("lead", d) for d in range(x.ndim)])], {})

    def _rounds(self, operands: Sequence[tuple[Value, Sequence[Label | None]]]) -> bool:
        """Whether the current op rounds to integers, which no scale survives."""
        dtype = self.call.dtype if self.call is not None else None
        integer = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
        return integer and any(v.floating for v, _ in operands)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _joined(
        self, operands: Sequence[tuple[Value, Sequence[Label | None]]], out: Sequence[Label], shape: Shape
    ) -> Value:
        """Unify the axes that share a label and make the result tensor."""
        axis_of: dict[Label, Axis] = {}
        positions = f"positions along it matter to {self.here}"
        for value, labels in operands:
            if len(labels) != value.ndim:
                raise ValueError(f"{len(labels)} labels for a tensor of shape {value.shape} in {self.here}")
            for axis, label in zip(value.axes, labels, strict=True):
                if label is PINNED:
                    ax.freeze(axis, positions)
                elif label is not None and label in axis_of:
                    if axis_of[label].size != axis.size:
                        raise ValueError(f"axes of sizes {axis_of[label].size} and {axis.size} have one label")
                    ax.unify(axis_of[label], axis, f"meets an axis that cannot move in {self.here}")
                    if isinstance(ax.resolve(axis_of[label]), Fixed):
                        axis_of[label] = axis  # a frozen variable still tells which index is which
                elif label is not None:
                    axis_of[label] = axis
        pairs = zip(out, shape, strict=True)
        return self.value(
            shape, [Fixed(n, positions) if x is PINNED else axis_of.get(x, AxisVariable(n)) for x, n in pairs]
        )

    def _meet(
        self,
        operands: Sequence[tuple[Value, Sequence[Label | None]]],
        rules: dict[Label, Any],
        mixes: frozenset[Label] = frozenset(),
        length: Length | None = None,
        variance: Value | None = None,
    ) -> None:
        made = tuple(
            Operand(v, tuple(Window(d, label, 0, v.shape[d]) for d, label in enumerate(labels) if _is_label(label)))
            for v, labels in operands
        )
        self.constraints.append(Constraint(self.call, made, rules, mixes, length, variance))

    def materialise(self, x: Value) -> None:
        """Work out the axes of a lazy view."""
        assert x.view is not None
        if isinstance(x.view, ConcatView):
            self._materialise_concat(x, x.view.sources, x.view.dim)
            return
        source = x.view.source
        if isinstance(x.view, PermutedView):
            x._axes = [source.axes[d] for d in x.view.order]
            labels = self.labels(source)
            self._meet([(source, labels), (x, [labels[d] for d in x.view.order])], dict.fromkeys(labels, _SAME))
            return
        regrouped = _regroup(source.axes, x.shape)
        if regrouped is None:
            why = f"reshaped from {source.shape} to {x.shape}, which cuts through its units ({self.here})"
            x._axes = [Fixed(n, why) for n in x.shape]
            self.boundary(source, why)
            return
        x._axes = regrouped
        self.constraints.append(ReshapeConstraint(source, x))

    def _narrow_view(self, x: Value, dim: int, start: int, length: int) -> Value | None:
        """Slice the source of a lazy view instead of the view; None when the slice is not one block of the source."""
        assert x.view is not None
        if isinstance(x.view, ConcatView):
            return self._narrow_concat(x.view, dim, start, length)
        source = x.view.source
        shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
        if isinstance(x.view, PermutedView):
            return self.permute(self.narrow(source, x.view.order[dim], start, length), x.view.order)
        found = _source_dim(source.shape, x.shape, dim)
        if found is None:
            return None
        source_dim, outer, inner = found
        if outer > 1:
            if inner == 1:
                return None
            before, size, after = source.shape[:source_dim], source.shape[source_dim], source.shape[source_dim + 1 :]
            inside = self.reshape(source, (*before, outer, size // outer, *after))
            if inside.lazy:
                self.materialise(inside)  # the outer factor is a unit of its own from here on
            source, source_dim = inside, source_dim + 1
        return self.reshape(self.narrow(source, source_dim, start * inner, length * inner), shape)

    def _narrow_concat(self, view: ConcatView, dim: int, start: int, length: int) -> Value | None:
        """A slice that lies inside one of the joined tensors is a slice of that tensor."""
        if dim != view.dim:
            return None
        for source in view.sources:
            n = source.shape[dim]
            if start >= 0 and start + length <= n:
                return self.narrow(source, dim, start, length)
            start -= n
        return None


def _equal(a: int, b: int) -> ScaleRule:
    return ScaleRule(({a: 1, b: -1},), ({a: 1, b: 1},), linear=True)


_SAME = _equal(0, 1)
_ZERO = ScaleRule(({0: 1},), ({0: 1},))


def _is_label(label: Label | None) -> bool:
    return label is not None and label is not PINNED


def _labels_of(operands: Sequence[tuple[Value, Sequence[Label | None]]]) -> set[Label]:
    return {label for _, labels in operands for label in labels if _is_label(label)}


def spread_labels(shape: Sequence[int], onto: Sequence[int]) -> list[Label]:
    """Labels of a shape broadcast onto another: None where a single entry is spread over many."""
    shift = len(onto) - len(shape)
    return [None if n == 1 and onto[shift + i] != 1 else ("lead", shift + i) for i, n in enumerate(shape)]


def _multilinear_rule(
    label: Label, terms: list[list[tuple[int, int]]], labels: list[Sequence[Label | None]], in_out: bool, out: int
) -> ScaleRule:
    """The equations of one label in a sum of products (see `GraphBuilder.multilinear`)."""
    equations: list[dict[int, int]] = []
    linear = True
    for term in terms:
        holders = [(i, power) for i, power in term if label in labels[i]]
        equation = dict(holders)
        if in_out:
            equation[out] = -1
            linear &= len(holders) == 1 and holders[0][1] == 1
        elif holders:
            linear &= len(holders) == 2 and all(power == 1 for _, power in holders)
        if equation:
            equations.append(equation)
    return ScaleRule(tuple(equations), tuple(equations), linear)


def _regroup(axes: Sequence[Axis], shape: Shape) -> list[Axis] | None:
    """Regroup the factors of some axes, in order, into axes of the given sizes; None where they do not allow it."""
    queue = [f for axis in axes for f in ax.factors_of(ax.resolve(axis)) if f.size != 1]
    if 0 in shape or any(f.size == 0 for f in queue):
        return [Fixed(n) for n in shape]
    result: list[Axis] = []
    for size in shape:
        factors: list[Axis] = []
        while size > 1:
            factor = ax.resolve(queue.pop(0))
            if isinstance(factor, ax.Product):  # a factor split a moment ago
                queue[:0] = factor.factors
                continue
            if size % factor.size == 0:
                factors.append(factor)
                size //= factor.size
                continue
            parts = ax.split(factor, size) if factor.size % size == 0 else None
            if parts is None:
                return None
            factors.append(parts[0])
            queue.insert(0, parts[1])
            size = 1
        result.append(ax.product(factors) if factors else Fixed(1))
    return result


def _source_dim(source: Shape, shape: Shape, dim: int) -> tuple[int, int, int] | None:
    """Which axis of `source` the axis `dim` of its reshape lies in, and the sizes before and after it in that axis."""
    before, after = prod(shape[:dim]), prod(shape[dim + 1 :])
    left = 1
    for d, n in enumerate(source):
        right = prod(source[d + 1 :])
        if n > 1 and before % left == 0 and after % right == 0 and n % (before // left) == 0:
            outer, inner = before // left, after // right
            if outer * shape[dim] * inner == n:
                return d, outer, inner
        left *= n
    return None
