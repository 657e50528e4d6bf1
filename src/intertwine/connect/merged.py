"""Merged: what `merge` returns, how its parts did on data, and what the user should know before trusting it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from intertwine.align.many import CommonFrame
from intertwine.connect.evaluation import evaluate
from intertwine.connect.interpolation import path_between
from intertwine.connect.statistics import batch_norms
from intertwine.features.scoring import Loss
from intertwine.symmetry.element import Element


@dataclass(frozen=True)
class Score:
    """How one network does on the data; error is None where the targets are no classes."""

    name: str
    loss: float
    error: float | None


@dataclass(frozen=True, eq=False)
class Merged:
    """One network made of several.

    Attributes:
        model: the merged network, an ordinary module that trains and saves.
        elements: what moved each network before the mean was taken; empty for method "none".
        before, after: Σᵢ ‖θᵢ − mean‖² over all parameters, of the networks as given and as moved.
        frame: what `align_many` found, for the methods that align.
        scores: on the data, where given: the merged network, the plain mean mended alike, and every given network.
        notes: what the user should know before trusting the result.
    """

    model: nn.Module = field(repr=False)
    method: str
    repair: str | None
    weights: tuple[float, ...]
    elements: tuple[Element, ...] = field(repr=False)
    before: float
    after: float
    frame: CommonFrame | None = field(repr=False)
    scores: tuple[Score, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All but the network and the elements, as plain values."""
        return {
            "method": self.method,
            "repair": self.repair,
            "weights": list(self.weights),
            "before": self.before,
            "after": self.after,
            "frame": None if self.frame is None else self.frame.to_dict(),
            "scores": [asdict(score) for score in self.scores],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        mended = f", repair {self.repair}" if self.repair else ""
        head = f"Merged({len(self.weights)} networks, {self.method}{mended}: squared distances to the mean "
        lines = [f"{head}{self.before:.4g} → {self.after:.4g})", *(f"note: {note}" for note in self.notes)]
        return "\n  ".join(lines)


def scored(networks: Mapping[str, nn.Module], data: Any, loss: Loss | None) -> tuple[Score, ...]:
    found = evaluate([path_between(m, m, [0.0]) for m in networks.values()], data, loss)
    return tuple(
        Score(name, s.loss[0], None if s.error is None else s.error[0]) for name, s in zip(networks, found, strict=True)
    )


def batch_norm_notes(model: nn.Module, repair: str | None) -> list[str]:
    if not batch_norms(model) or repair in ("reset", "repair"):
        return []
    if repair == "scales":
        return ["The BatchNorm variances are estimated from weights, not on data; repair='reset' with data is better."]
    return [
        "The running statistics of BatchNorm are the mean of the given ones, not those of the merged network, so it "
        "may do far worse than its weights can. Pass data= with repair='reset', or repair='scales' without data."
    ]


def score_notes(scores: Sequence[Score]) -> Iterator[str]:
    if not scores:
        return
    merged, plain, *given = scores
    if merged.loss > plain.loss:
        yield f"The merged network is worse than the plain mean: {_words(merged)} against {_words(plain)}."
    best, worst = min(given, key=lambda s: s.loss), max(given, key=lambda s: s.loss)
    if merged.loss > worst.loss:
        yield (
            f"The merged network is worse than every given one: {_words(merged)} against {_words(best)} to "
            f"{_words(worst)}."
        )


def _words(score: Score) -> str:
    return f"loss {score.loss:.4g}" + ("" if score.error is None else f", error {score.error:.4f}")
