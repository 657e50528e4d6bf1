"""What is put to the test: a symmetry, a float64 copy of a model, and inputs to run it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.graph.copies import copied
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.element import Element
from intertwine.symmetry.exact import float64_forward, generic_copy, to_float64
from intertwine.symmetry.layout import Layout
from intertwine.symmetry.symmetry import Symmetry


@dataclass(frozen=True)
class Subject:
    """A symmetry and a model of its architecture, ready for float64.

    The model is a copy whose constant tensors are drawn at random, so that nothing hides behind zeros and ones; norm
    weights that a matrix must be folded through are folded already.
    """

    symmetry: Symmetry
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def of(symmetry: Symmetry, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Subject:
        args, kwargs = to_float64((args, dict(kwargs)))
        return Subject(symmetry, symmetry.folded(generic_copy(model, seed=0)), args, kwargs)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters and buffers of a model of this architecture, tied ones once, under their first name."""
        return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}

    def layout(self, name: str) -> Layout | None:
        """How a parameter or buffer moves; None if nothing moves it."""
        return self.symmetry.layout_of(name)

    def wires(self, name: str) -> tuple[str, ...]:
        """The wires that act on a parameter or buffer."""
        layout = self.layout(name)
        names = [s.name for s in self.symmetry.strands]
        return tuple(names[i] for i in sorted(strands_of(layout))) if layout is not None else ()

    def run(self, model: nn.Module) -> list[Tensor]:
        """Every tensor a model returns; a copy runs, because a forward may write to the model's buffers."""
        return self.forward(copied(model))

    def forward(self, model: nn.Module) -> list[Tensor]:
        """Every tensor a model returns, run as it is."""
        args, kwargs = to_float64((self.args, dict(self.kwargs)))
        with float64_forward():
            return [v for v in tree_leaves(model(*args, **kwargs)) if isinstance(v, Tensor)]

    def change(self, g: Element) -> float:
        """Largest relative change of an output under an element."""
        before, after = self.run(self.model), self.run(self.symmetry.act(g, self.model))
        return max((relative_error(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def strands_of(layout: Layout) -> set[int]:
    """The strands that stand in a layout."""
    return {leaf.strand for leaf in layout.leaves()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, NaN for NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
