"""Alignment: what `align` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from intertwine.align.descent import Step
from intertwine.frames import frame
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry


@dataclass(frozen=True)
class WirePart:
    """What the tensors of one wire add to the objective, before and after; a tensor of two wires is part of both."""

    wire: str
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class Alignment:
    """One network moved onto another.

    `model`: b moved by `element`, the same function as b. `reference`: what it lies near to, which is a itself; under a
    symmetry that folds norm weights away, a so folded. `before`, `after`: the objective Σ ‖A − B‖², lower is nearer.
    `history`: the objective at every start and after every step that was kept. `per_wire`: the part of every wire.
    """

    model: nn.Module = field(repr=False)
    reference: nn.Module = field(repr=False)
    element: Element
    method: str
    before: float
    after: float
    history: tuple[Step, ...] = field(repr=False)
    per_wire: tuple[WirePart, ...] = field(repr=False)
    symmetry: Symmetry = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """All but the model and the element, as plain values."""
        return {
            "method": self.method,
            "before": self.before,
            "after": self.after,
            "history": [asdict(step) for step in self.history],
            "per_wire": [asdict(part) for part in self.per_wire],
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per step of the history, as plain data."""
        return [asdict(step) for step in self.history]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return frame(self.to_rows())

    def __repr__(self) -> str:
        share = f", {self.after / self.before:.1%} left" if self.before > 0 else ""
        steps = sum(1 for step in self.history if step.sweep)
        return (
            f"Alignment({self.method}: squared distance {self.before:.4g} → {self.after:.4g}{share}, {steps} steps, "
            f"{self.element})"
        )
