"""The options of `fold` and `complexity`, and their values in the paper and in its code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from intertwine.errors import InputError, did_you_mean, unknown_name

#: Option → its choices; the first is the default.
CHOICES = {
    "schedule": ("layerwise", "round-robin"),
    "terms": ("in", "in+out"),
    "rows": ("effect", "ward", "mean", "sum"),
    "maximum": ("typical", "fixed", "recompute"),
    "norm": ("fold", "sum"),
}
#: Algorithm 1 of Chen, Zhou and Yan (2024) as printed, except that counts are kept: without them nothing is exact.
PRINTED: Mapping[str, Any] = {"terms": "in+out", "bias": False, "rows": "sum", "maximum": "recompute"}
#: The code published with that paper: one merge per layer and sweep, BatchNorm vectors summed.
PAPER_CODE: Mapping[str, Any] = {**PRINTED, "schedule": "round-robin", "norm": "sum"}

#: Whether BatchNorm statistics are re-estimated where a folding uses data.
STATISTICS = ("keep", "reset")

Beta = float | Mapping[str, float]


def check_word(name: str, value: Any, known: Collection[str]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in known:
        raise InputError(unknown_name(name, value, known))


def check_wire(what: str, name: str, known: Collection[str]) -> None:
    """Refuse a number for a wire that cannot be folded."""
    if name not in known:
        raise InputError(
            f"A {what} is given for {name!r}, which is no wire that can be folded. {did_you_mean(name, known)}Choose "
            f"one of: {', '.join(list(known)[:8]) or 'none'}{' …' if len(known) > 8 else ''}."
        )


@dataclass(frozen=True)
class Options:
    """The options of `fold`; its docstring explains them."""

    beta: Beta = 0.1
    schedule: str = "layerwise"
    terms: str = "in"
    bias: bool = True
    rows: str = "effect"
    maximum: str = "typical"
    norm: str = "fold"
    max_ratio: float | int | None = None

    def __post_init__(self) -> None:
        from intertwine.argument_types import finite_float  # jaxtyping is slow to import, and --help reads CHOICES

        for name, known in CHOICES.items():
            check_word(name, getattr(self, name), known)
        for where, beta in self.beta.items() if isinstance(self.beta, Mapping) else [("", self.beta)]:
            if not 0 < (finite_float(beta) or 0.0) < 1:
                of = f" for {where!r}" if where else ""
                raise InputError(
                    f"beta{of} must be above 0 and below 1, but is {beta!r}. It is a share of a distance: near 0 only "
                    "features that are almost the same are merged, near 1 many that are not. Try 0.1."
                )
        if not isinstance(self.bias, bool):
            raise InputError(f"bias must be True (biases are part of rows) or False, but is {self.bias!r}.")
        if self.max_ratio is not None and not 0 < (finite_float(self.max_ratio) or 0.0) <= 1:
            raise InputError(
                f"max_ratio must be above 0 and at most 1, or None, but is {self.max_ratio!r}. It is the largest share "
                "of a layer's features that may be merged away."
            )

    def beta_of(self, wire: str) -> float | None:
        """The share for one wire; None where it is not to be folded."""
        return self.beta.get(wire) if isinstance(self.beta, Mapping) else self.beta

    def most(self, size: int) -> int:
        """How many features of a wire may be merged away: one always stays."""
        return min(size - 1, int((1.0 if self.max_ratio is None else self.max_ratio) * size))

    def check_wires(self, known: Collection[str]) -> None:
        """Refuse a beta for a wire that cannot be folded."""
        for name in self.beta if isinstance(self.beta, Mapping) else ():
            check_wire("beta", name, known)
