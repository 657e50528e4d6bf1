"""How features are compared and merged: the options of `fold` and `complexity`, checked, and the paper's by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from intertwine.errors import InputError, did_you_mean

#: The choices of every option that is a word; the first is the default.
CHOICES = {
    "schedule": ("layerwise", "round-robin"),
    "terms": ("in", "in+out"),
    "rows": ("effect", "ward", "mean", "sum"),
    "maximum": ("typical", "fixed", "recompute"),
    "norm": ("fold", "sum"),
}
#: Algorithm 1 of Chen, Zhou and Yan (2024) as printed, but that counts are kept: without them nothing is exact.
PRINTED: Mapping[str, Any] = {"terms": "in+out", "bias": False, "rows": "sum", "maximum": "recompute"}
#: What the code published with that paper does: one merge per layer and sweep, BatchNorm vectors summed.
PAPER_CODE: Mapping[str, Any] = {**PRINTED, "schedule": "round-robin", "norm": "sum"}

#: What becomes of BatchNorm statistics where a folding looks at data.
STATISTICS = ("keep", "reset")

Beta = float | Mapping[str, float]


def check_word(name: str, value: Any, known: Sequence[str]) -> None:
    """Refuse a word that an option does not know."""
    if value not in known:
        raise InputError(
            f"{name}={value!r} was asked for. {did_you_mean(str(value), known)}"
            f"{name} is one of {', '.join(map(repr, known))}."
        )


def check_statistics(value: str) -> None:
    """Refuse what cannot become of BatchNorm statistics."""
    check_word("statistics", value, STATISTICS)


@dataclass(frozen=True)
class Options:
    """The options of `fold`, which explains them."""

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
            value = getattr(self, name)
            check_word(name, value, known)
        for where, beta in self.beta.items() if isinstance(self.beta, Mapping) else [("", self.beta)]:
            if not 0 < (finite_float(beta) or 0.0) < 1:
                of = f" for {where!r}" if where else ""
                raise InputError(
                    f"beta={beta!r} was asked for{of}. It is a share of a distance, above 0 and below 1: "
                    "near 0 only features that are almost the same are merged, near 1 many that are not. Try 0.1."
                )
        if not isinstance(self.bias, bool):
            raise InputError(f"bias={self.bias!r} was asked for. True counts biases as part of rows, False does not.")
        if self.max_ratio is not None and not 0 < (finite_float(self.max_ratio) or 0.0) <= 1:
            raise InputError(
                f"max_ratio={self.max_ratio!r} was asked for. It is the largest share of a layer's features that may "
                "be merged away: above 0, at most 1; None for no limit."
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
            if name not in known:
                raise InputError(
                    f"A beta was given for {name!r}, which is no wire that can be folded. {did_you_mean(name, known)}"
                    f"Those are {', '.join(list(known)[:8]) or 'none'}{' …' if len(known) > 8 else ''}."
                )
