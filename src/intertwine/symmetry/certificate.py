"""Certificates: what the measurement of a symmetry found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Broken:
    """An op at which the certificate failed: what, where, the wires it touches and the error there."""

    op: str
    place: str
    wires: tuple[str, ...]
    error: float


@dataclass(frozen=True)
class Certificate:
    """The proof that a symmetry holds on a model.

    `max_error`: largest relative change of an output under random elements, in float64. `per_wire`: the same for the
    hidden features each wire moves. `broken`: ops at which the symmetry as found was wrong; `symmetry` is the one that
    holds (with those ops' axes frozen), the same object as before when nothing was broken. `vacuous` says that the
    outputs do not depend on the weights at all, so that nothing was proved.
    """

    ok: bool
    max_error: float
    trials: int
    per_wire: Mapping[str, float]
    broken: tuple[Broken, ...]
    vacuous: bool
    symmetry: Any = field(repr=False)  # a Symmetry; that class is built on this one

    def __repr__(self) -> str:
        verdict = "holds" if self.ok else "does not hold"
        extra = f"; {len(self.broken)} op(s) frozen after failing" if self.broken else ""
        extra += "; vacuous: the outputs do not depend on the weights" if self.vacuous else ""
        worst = max(self.per_wire.values(), default=0.0)
        measured = f"outputs change by {self.max_error:.1e}, hidden features by {worst:.1e} from prediction"
        return f"Certificate({verdict}: {measured} over {self.trials} random elements{extra})"

    def to_dict(self) -> dict[str, Any]:
        broken = [vars(b) for b in self.broken]
        return {
            "ok": self.ok,
            "max_error": self.max_error,
            "trials": self.trials,
            "vacuous": self.vacuous,
            "per_wire": dict(self.per_wire),
            "broken": broken,
        }
