"""Stitch: what fitting one stitch gave, with everything that is said of it, and `repr`, plain data and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from intertwine.shapes import Float
from intertwine.stitch.closeness import SPARSE, Closeness, closeness, rank, sparsity
from intertwine.stitch.cut import Cut
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.pictures import draw_stitch
from intertwine.stitch.scores import Scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Stitch:
    """The front of one network joined to the back of another.

    Attributes:
        model: the stitched network. cut: where the two were cut. family: of the map, as it was asked for.
        fit: "direct", or "task" where the map was trained. map: what stands between them.
        scores: of the stitched network, at the last epoch where it was trained.
        front_accuracy, back_accuracy: of the two networks on the same data; None where the targets are no classes, or
            not the classes of the front network.
        history: one mapping per epoch or traced step. settings: every option the fit was made with.
        best: scores of the best epoch on the same data. Paper 0 reports those; they are chosen by what they report.
        diverged: what went wrong and what was kept; None where nothing did.
    """

    model: nn.Module
    cut: Cut
    family: str
    fit: str
    map: LinearMap
    scores: Scores
    front_accuracy: float | None
    back_accuracy: float | None
    history: tuple[dict[str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    best: Scores | None = None
    diverged: str | None = None

    # -- how well it does ----------------------------------------------------------------------------------------------

    @property
    def accuracy(self) -> float | None:
        """Share of right answers of the stitched network, at the last epoch."""
        return self.scores.accuracy

    @property
    def penalty(self) -> float | None:
        """Mean accuracy of the two networks minus that of the stitched one: (Acc f + Acc f̃)/2 − Acc S."""
        return self._penalty(self.scores)

    @property
    def best_accuracy(self) -> float | None:
        """Of the best epoch; None where epochs were not scored."""
        return None if self.best is None else self.best.accuracy

    @property
    def best_penalty(self) -> float | None:
        """Of the best epoch; None where epochs were not scored."""
        return None if self.best is None else self._penalty(self.best)

    @property
    def relative_accuracy(self) -> float | None:
        """Accuracy as a multiple of the back network's; None where that has none right."""
        return self.accuracy / self.back_accuracy if self.accuracy is not None and self.back_accuracy else None

    @property
    def cross_entropy(self) -> float | None:
        """From the answers of the back network to those of the stitched one, per sample."""
        return self.scores.cross_entropy

    @property
    def agreement(self) -> dict[str, float] | None:
        """Shares of answers: "rw" is the back network right and the stitched one wrong."""
        return self.scores.agreement

    # -- what kind of map it is ----------------------------------------------------------------------------------------

    @property
    def matrix(self) -> Float[Tensor, "out in"]:
        """The map's matrix: back channels × front channels."""
        return self.map.matrix

    @cached_property
    def rank(self) -> int:
        """Singular values above `closeness.RANK_TOLERANCE` of the largest."""
        return rank(self.matrix)

    @property
    def sparsity(self) -> float:
        """Share of entries no larger than the setting "threshold", 1e-3 where there is none."""
        return sparsity(self.matrix, self.settings.get("threshold", SPARSE))

    @cached_property
    def closeness(self) -> Closeness:
        """How far the matrix is from permutations with positive scales, permutations and rotations."""
        return closeness(self.matrix)

    @property
    def place(self) -> str:
        """Where the networks were cut: one path where both have the same.

        Two paths read "layer1 into layer2".
        """
        return self.cut.front if self.cut.front == self.cut.back else f"{self.cut.front} into {self.cut.back}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the map's numbers; what is not finite becomes None."""
        finite = bool(self.matrix.isfinite().all())
        found = {
            "front": self.cut.front,
            "back": self.cut.back,
            "skip": self.cut.skip,
            "inputs": self.cut.inputs,
            "outputs": self.cut.outputs,
            "family": self.family,
            "fit": self.fit,
            "accuracy": self.accuracy,
            "penalty": self.penalty,
            "relative_accuracy": self.relative_accuracy,
            "loss": self.scores.loss,
            "cross_entropy": self.cross_entropy,
            "agreement": self.agreement,
            "best_accuracy": self.best_accuracy,
            "best_penalty": self.best_penalty,
            "front_accuracy": self.front_accuracy,
            "back_accuracy": self.back_accuracy,
            "samples": self.scores.samples,
            "unscored": self.scores.unscored,
            "rank": self.rank if finite else None,
            "sparsity": self.sparsity,
            "closeness": self.closeness.to_dict() if finite else None,
            "diverged": self.diverged,
            "settings": dict(self.settings),
            "history": list(self.history),
        }
        return plain(found)

    def plot(self) -> Figure:
        """The matrix, sorted so that structure shows, and the history where there is one."""
        return draw_stitch(self.matrix, f"{self.family} at {self.place}", self.history)

    def __repr__(self) -> str:
        parts = [f"{self.place} by {self.family}, {self.fit}", self._scored()]
        if self.fit == "task" and self.best_accuracy is not None:
            penalty = "" if self.best_penalty is None else f", penalty {self.best_penalty:.4f}"
            parts.append(f"best epoch {self.best_accuracy:.4f}{penalty}")
        parts.append(f"{self.cut.inputs} → {self.cut.outputs} channels")
        if self.diverged is not None:
            parts.append(f"diverged: {self.diverged}")
        return f"Stitch({'; '.join(parts)})"

    def _scored(self) -> str:
        if self.scores.unscored is not None:
            return f"not scored: {self.scores.unscored}"
        if self.accuracy is None:
            return f"loss {self.scores.loss:.4g}"
        relative = "" if self.relative_accuracy is None else f" ({self.relative_accuracy:.1%} of the back network's)"
        penalty = "" if self.penalty is None else f", penalty {self.penalty:.4f}"
        return f"accuracy {self.accuracy:.4f}{relative}{penalty}"

    def _penalty(self, scores: Scores) -> float | None:
        if self.front_accuracy is None or self.back_accuracy is None or scores.accuracy is None:
            return None
        return (self.front_accuracy + self.back_accuracy) / 2 - scores.accuracy


def plain(value: Any) -> Any:
    """The same as lists, dictionaries, numbers and words; numbers that are not finite become None.

    >>> plain({"loss": float("nan"), "steps": (1, 2.5)})
    {'loss': None, 'steps': [1, 2.5]}
    """
    match value:
        case Mapping():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case Tensor():
            return plain(value.tolist())
        case float():
            return value if isfinite(value) else None
        case bool() | int() | str() | None:
            return value
        case _:
            return str(value)
