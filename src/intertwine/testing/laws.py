"""The laws that `check_group` tests, the report and the error, and the model under test in double precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.errors import IntertwineError
from intertwine.graph.model import copy_module
from intertwine.graph.runner import float64_forward, generic_copy, to_float64
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.element import Element
from intertwine.symmetry.geometry import Layout
from intertwine.symmetry.symmetry import Symmetry

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
        "untouched": ("the given model is unchanged", "code that writes to the model instead of a copy"),
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
    """The result of `check_group`: every law with the largest error, and the checks that were skipped and why."""

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
    """Records the largest error of every law and stops at the first that is too large."""

    tolerance: float
    laws: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def record(
        self, law: str, error: float, what: str, wires: tuple[str, ...] = (), tolerance: float | None = None
    ) -> None:
        """Record an error; `tolerance` 0 requires the same bits."""
        allowed = self.tolerance if tolerance is None else tolerance
        if not error <= allowed:  # a NaN fails too
            raise ConformanceError(law, what, wires, error, allowed)
        self.laws[law] = max(self.laws.get(law, 0.0), error)

    def skip(self, law: str, why: str) -> None:
        self.skipped[law] = why


@dataclass(frozen=True)
class Subject:
    """A symmetry and a model of its architecture, ready for float64.

    The model is a copy whose constant tensors are randomised, so that zeros and ones cannot hide errors; norm weights
    that a matrix must be folded through are folded already.
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
        names = [s.name for s in self.symmetry.wire_specs]
        return tuple(names[i] for i in sorted(strands_of(layout))) if layout is not None else ()

    def run(self, model: nn.Module) -> list[Tensor]:
        """Every tensor a model returns; a copy runs, because a forward may write to the model's buffers."""
        return self.forward(copy_module(model))

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
    return layout.wires


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, NaN for NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
