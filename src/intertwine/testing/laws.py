"""The laws a symmetry must obey, the ledger in which they are ticked off, and the error that names a broken one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from intertwine.errors import IntertwineError

#: Every law of `check_group`: its name, what it says, and where to look when it fails.
LAWS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "identity": ("g @ e = g = e @ g", "how elements are composed"),
        "inverse": ("g @ g⁻¹ = e = g⁻¹ @ g, (g⁻¹)⁻¹ = g and (g @ h)⁻¹ = h⁻¹ @ g⁻¹", "how elements are inverted"),
        "associativity": ("(f @ g) @ h = f @ (g @ h)", "how elements are composed"),
        "only": ("g is the product of what it does on each wire alone", "Element.only, and how elements are composed"),
        "storage": ("an element that is saved and loaded is the same bit for bit", "Element.save and Element.load"),
        "action: identity": ("act(e) changes no bit", "how elements act on tensors"),
        "action: composition": ("act(g @ h) = act(g) ∘ act(h)", "the order of gather and factor where elements act"),
        "action: inverse": ("act(g⁻¹) undoes act(g)", "how elements act, and how they are inverted"),
        "action: state": ("a state dict moves as the model does", "Symmetry.act_on_state"),
        "action: slots": ("a wire moves the tensors of its slots and no others", "the slots and layouts found"),
        "dense": ("the action is the matrix that the layout spells out", "how elements act on tensors"),
        "function": ("the moved model computes the same outputs", "the rules of the ops that the wire passes"),
        "features": ("features of the moved model are the moved features", "the rules of the ops before that module"),
        "features: composition": ("act_on_features is an action", "how elements act on tensors"),
        "pairing": ("⟨gradient, step⟩ is the same before and after", "the action at degree −1"),
        "gradient": ("gradients of the moved model are the moved gradients", "the action at degree −1"),
        "optimizer": ("moments of the moved model are the moved moments", "Symmetry.act_on_optimizer"),
        "untouched": ("the model given is as it was", "what writes to the model instead of a copy"),
    }
)


class ConformanceError(IntertwineError, AssertionError):
    """A law does not hold. `law` is its name, `wires` where it fails, `error` the size of the failure."""

    def __init__(self, law: str, what: str, wires: tuple[str, ...], error: float, tolerance: float) -> None:
        self.law, self.wires, self.error = law, wires, error
        says, look = LAWS[law]
        where = f"on wire {', '.join(map(repr, wires))}" if wires else "on no single wire"
        super().__init__(
            f"The law {law!r} ({says}) was checked and fails {where}: {what} is off by {error:.1e}, "
            f"allowed is {tolerance:.1e}. Look at {look}."
        )


@dataclass(frozen=True)
class GroupReport:
    """What `check_group` found: every law it checked with the largest error, and what it could not check and why."""

    laws: Mapping[str, float]
    skipped: Mapping[str, str]
    wires: int
    elements: int
    tolerance: float

    @property
    def max(self) -> float:
        """The largest error of all laws."""
        return max(self.laws.values(), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"laws": dict(self.laws), "skipped": dict(self.skipped), "max": self.max}

    def __repr__(self) -> str:
        worst = max(self.laws, key=lambda law: self.laws[law], default="none")
        skipped = f"; not checked: {', '.join(self.skipped)}" if self.skipped else ""
        return (
            f"GroupReport({len(self.laws)} laws hold on {self.wires} wires and {self.elements} random elements, "
            f"largest error {self.max:.1e} in {worst!r}{skipped})"
        )


@dataclass
class Ledger:
    """Keeps the largest error of every law and stops at the first that is too large."""

    tolerance: float
    laws: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def note(
        self, law: str, error: float, what: str, wires: tuple[str, ...] = (), tolerance: float | None = None
    ) -> None:
        """Write down an error; `tolerance` 0 asks for the same bits."""
        allowed = self.tolerance if tolerance is None else tolerance
        if not error <= allowed:  # a NaN fails too
            raise ConformanceError(law, what, wires, error, allowed)
        self.laws[law] = max(self.laws.get(law, 0.0), error)

    def skip(self, law: str, why: str) -> None:
        self.skipped[law] = why
