"""The tensors of a graph (values and lazy views of them) and the constraints of ops on their axes, scales and signs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from intertwine.graph import axes as ax
from intertwine.graph.axes import Axis
from intertwine.graph.program import Call

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PermutedView:
    """A lazy view: the axes of a tensor in another order."""

    source: Value
    order: tuple[int, ...]


@dataclass(frozen=True)
class ReshapedView:
    """A lazy view: the entries of a tensor, in order, in another shape."""

    source: Value


@dataclass(frozen=True)
class ConcatView:
    """A lazy concatenation of tensors along one axis."""

    sources: tuple[Value, ...]
    dim: int


class Value:
    """A tensor of the graph: its name, shape and one axis expression per dimension.

    Reshapes, permutes and concatenations are lazy: their axes are worked out when something other than another view
    looks at them, so that a slice of a reshaped tensor can be read as a slice of the tensor itself (a fused qkv).
    """

    __slots__ = ("name", "shape", "floating", "zero", "_axes", "view", "_work_out")

    def __init__(
        self, name: str, shape: Shape, axes: Sequence[Axis] | None, floating: bool, work_out: Callable[[Value], None]
    ) -> None:
        self.name = name
        self.shape = shape
        self.floating = floating
        self.zero = False  # known to hold zeros alone
        self._axes = None if axes is None else list(axes)
        self.view: PermutedView | ReshapedView | ConcatView | None = None
        self._work_out = work_out

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def computed(self) -> bool:
        """Whether a call made it; parameters and buffers themselves have names of their own."""
        return self.name.startswith("%")

    @property
    def lazy(self) -> bool:
        return self._axes is None

    @property
    def axes(self) -> list[Axis]:
        if self._axes is None:
            self._work_out(self)
        assert self._axes is not None
        return self._axes

    @property
    def live(self) -> bool:
        """Whether any axis variable stands in its axes; the axes of a lazy view are not worked out for it."""
        if self._axes is None and self.view is not None:
            sources = self.view.sources if isinstance(self.view, ConcatView) else (self.view.source,)
            return any(source.live for source in sources)
        return any(True for axis in self.axes for _ in ax.variables_of(axis))

    def __repr__(self) -> str:
        return f"Value({self.name}, {self.shape})"


def values_in(tree: Any) -> list[Value]:
    """The values among the arguments of a call, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Value)]


Label = Hashable


@dataclass(frozen=True)
class Window:
    """The stretch `start … start + size` of an axis of a value, under the label it has in a constraint."""

    axis: int
    label: Label
    start: int
    size: int


@dataclass(frozen=True)
class Operand:
    """A tensor in a constraint, with the windows of its axes that take part. Other axes may not be scaled."""

    value: Value
    windows: tuple[Window, ...]


@dataclass(frozen=True)
class ScaleRule:
    """How scales and signs pass a constraint along one label: equations Σ coefficient · exponent(operand) = 0.

    `real` is for positive scales, `sign` for ±1 (modulo 2). An operand in none of the equations is not constrained.
    `linear`: an arbitrary invertible matrix along this axis passes too (contragredient where the coefficient says so).
    """

    real: tuple[dict[int, int], ...] = ()
    sign: tuple[dict[int, int], ...] = ()
    linear: bool = False


@dataclass(frozen=True)
class PointwiseRule:
    """An elementwise function: its intertwiner group decides what passes (operands 0 → 1). `key` names the function."""

    fn: Callable[[torch.Tensor], torch.Tensor]
    key: str


@dataclass(frozen=True)
class Constraint:
    """Axes of several tensors that meet in one op, and how scales and signs pass it, label by label.

    `mixes`: labels along which the op is a symmetric but non-linear reduction. `variance`: the operand that is read as
    a running variance, if one is.
    """

    call: Call | None
    operands: tuple[Operand, ...]
    rules: dict[Label, ScaleRule | PointwiseRule]
    mixes: frozenset[Label] = frozenset()
    length: Length | None = None
    variance: Value | None = None


@dataclass(frozen=True)
class Length:
    """A Euclidean length is taken along `label`, which every orthogonal map keeps; `weight` then scales each entry."""

    label: Label
    weight: Value | None = None


@dataclass(frozen=True)
class ReshapeConstraint:
    """A tensor and its reshape: the same numbers in the same order."""

    source: Value
    result: Value


@dataclass(frozen=True)
class AxisSlice:
    """A slice along one axis of a tensor. `of_weights`: the tensor is computed from weights alone."""

    call: Call
    source: Value
    result: Value
    dim: int
    of_weights: bool
