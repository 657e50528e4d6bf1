"""Meetings: which axes of which tensors come together in an op, and how scales and signs pass it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from intertwine.graph.program import Call
from intertwine.graph.value import Value

Label = Hashable


@dataclass(frozen=True)
class Window:
    """The stretch `start … start + size` of an axis of a value, under the label it has in a meeting."""

    axis: int
    label: Label
    start: int
    size: int


@dataclass(frozen=True)
class Operand:
    """One tensor in a meeting, with the windows of its axes that take part. Axes without a window may not be scaled."""

    value: Value
    windows: tuple[Window, ...]


@dataclass(frozen=True)
class Law:
    """How scales and signs pass a meeting along one label: equations Σ coefficient · exponent(operand) = 0.

    `real` is for positive scales, `sign` for ±1 (modulo 2). An operand in none of the equations is not constrained.
    `linear`: an arbitrary invertible matrix along this axis passes too (contragredient where the coefficient says so).
    """

    real: tuple[dict[int, int], ...] = ()
    sign: tuple[dict[int, int], ...] = ()
    linear: bool = False


@dataclass(frozen=True)
class Pointwise:
    """The law of an elementwise function: what passes is decided by its intertwiner group (operands 0 → 1)."""

    fn: Callable[[torch.Tensor], torch.Tensor]
    key: str


@dataclass(frozen=True)
class Meeting:
    """Axes that meet in one op. `mixes`: labels along which the op is a symmetric but non-linear reduction.

    `variance`: the operand that is read as a running variance, if one is.
    """

    call: Call | None
    operands: tuple[Operand, ...]
    laws: dict[Label, Law | Pointwise]
    mixes: frozenset[Label] = frozenset()
    length: Length | None = None
    variance: Value | None = None


@dataclass(frozen=True)
class Length:
    """A Euclidean length is taken along `label`, which every orthogonal map keeps; `weight` then scales each entry."""

    label: Label
    weight: Value | None = None


@dataclass(frozen=True)
class Reshaped:
    """A meeting of a tensor with its own reshape: the same numbers in the same order."""

    source: Value
    result: Value


@dataclass(frozen=True)
class Cut:
    """A slice along one axis of a tensor, which may be made of weights alone."""

    call: Call
    source: Value
    result: Value
    dim: int
    of_weights: bool
