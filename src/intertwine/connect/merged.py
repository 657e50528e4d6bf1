"""Merged: what `merge` returns, how its parts did on data, and what the user should know before trusting it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from intertwine.align.many import CommonFrame
from intertwine.connect.evaluation import evaluate
from intertwine.connect.interpolation import path_between
from intertwine.connect.statistics import batch_norms
from intertwine.features.scoring import Loss
from intertwine.frames import frame
from intertwine.symmetry.element import Element

#: What the mean of the networks as they were given is called, and the same mean after the repair that was asked for.
PLAIN_MEAN, MENDED_MEAN = "plain mean", "plain mean, mended alike"


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
        scores: on the data, where given: the merged network ("merged"), the mean of the networks as given ("plain
            mean"), that mean after the same repair where one was asked for ("plain mean, mended alike"), and every
            given network ("network 0", …).
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

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per network that was scored, as plain data."""
        return [asdict(score) for score in self.scores]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return frame(self.to_rows())

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


def score_notes(scores: Sequence[Score]) -> list[str]:
    """Where the loss of the first, the merged network, is larger than that of the fair plain mean, or of all given.

    >>> found = [Score("merged", 0.19, 0.06), Score("network 0", 0.14, 0.06), Score("network 1", 0.18, 0.06)]
    >>> print(*score_notes(found)[0].split(". "), sep=".\\n")
    The loss of the merged network is larger than that of every given one: 0.19 against 0.14 to 0.18.
    Its error is 0.0600, against 0.0600.
    """
    if not scores:
        return []
    notes, (merged, *others) = [], scores
    plain = {score.name: score for score in others if score.name in (PLAIN_MEAN, MENDED_MEAN)}
    given = [score for score in others if score.name not in plain]
    if plain:
        fair = plain.get(MENDED_MEAN) or plain[PLAIN_MEAN]
        if merged.loss > fair.loss:
            notes.append(_larger(merged, f"the {fair.name}", [fair]))
    if given and merged.loss > max(score.loss for score in given):
        notes.append(_larger(merged, "every given one", given))
    return notes


def _larger(merged: Score, what: str, others: Sequence[Score]) -> str:
    losses, errors = [score.loss for score in others], [score.error for score in others if score.error is not None]
    text = f"The loss of the merged network is larger than that of {what}: {merged.loss:.4g} against "
    text += f"{_span(losses, '.4g')}."
    if merged.error is None or not errors:
        return text
    return f"{text} Its error is {merged.error:.4f}, against {_span(errors, '.4f')}."


def _span(values: Sequence[float], form: str) -> str:
    """`0.14 to 0.18`, or one number where both ends read the same."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))
