"""What a measure returns: a value or the reason why there is none, and the alignment behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from intertwine.shapes import Float, Int


@dataclass(frozen=True, eq=False)
class Alignment:
    """The map that takes the second representation onto the first, in the parts that the measure has; None elsewhere.

    Attributes:
        permutation: feature i of the first meets feature permutation[i] of the second.
        scales: positive factors of the second's features, in the second's order.
        plan: a transport plan between features, first × second.
        write_matrix: makes `matrix`.
    """

    permutation: Int[Tensor, " n"] | None = None
    scales: Float[Tensor, " n"] | None = None
    plan: Float[Tensor, "first second"] | None = None
    write_matrix: Callable[[], Float[Tensor, "second first"]] | None = field(default=None, repr=False)

    @cached_property
    def matrix(self) -> Float[Tensor, "second first"] | None:
        """y @ matrix lies on x (both centred where the measure centres).

        Made when it is first asked for: with more features than samples it is far larger than what was compared.
        """
        return None if self.write_matrix is None else self.write_matrix()


@dataclass(frozen=True, eq=False)
class Result:
    """One comparison.

    Attributes:
        measure: its name. value: not a number exactly where `degenerate` gives the reason in words.
        notes: what a reader should know of this value, such as dead features that were left out.
        baseline: the value of the same features with the samples of y in another order, which makes them unrelated;
            for measures that give unrelated features a value far from the end of their range.
    """

    measure: str
    value: float
    degenerate: str | None = None
    alignment: Alignment | None = None
    notes: tuple[str, ...] = ()
    baseline: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the alignment."""
        plain = {"measure": self.measure, "value": self.value, "degenerate": self.degenerate}
        return plain | {"notes": list(self.notes), "baseline": self.baseline}

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        tail = f", {'; '.join(self.notes)}" if self.notes else ""
        if self.degenerate:
            return f"Result({self.measure}: degenerate, {self.degenerate}{tail})"
        beside = "" if self.baseline is None else f", unrelated {self.baseline:.4f}"
        return f"Result({self.measure}: {self.value:.6f}{beside}{tail})"
