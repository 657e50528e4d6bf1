"""Values: the tensors of a graph, with one axis expression per dimension, some of them lazy views of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from intertwine.graph import axes as ax
from intertwine.graph.axes import Axis

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Permuted:
    """A lazy view: the axes of a tensor in another order."""

    source: Value
    order: tuple[int, ...]

    @property
    def sources(self) -> tuple[Value, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Reread:
    """A lazy view: the entries of a tensor, in order, in another shape."""

    source: Value

    @property
    def sources(self) -> tuple[Value, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Joined:
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
        self.view: Permuted | Reread | Joined | None = None
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
        """Whether any atom stands in its axes; without working out the axes of a lazy view."""
        if self._axes is None and self.view is not None:
            return any(source.live for source in self.view.sources)
        return any(True for axis in self.axes for _ in ax.atoms(axis))

    def __repr__(self) -> str:
        return f"Value({self.name}, {self.shape})"
