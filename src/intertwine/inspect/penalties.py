"""Rotation penalties as results: one trial, all trials of a run, and their picture (Figure 4 of paper 0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import key_below, new_figure
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Trial:
    """One transform of one layer. All accuracies are shares of the test answers.

    Attributes:
        at, kind, seed: the layer, the kind of transform, and what it was drawn with.
        before: accuracy of the network as it was given. inserted: with the transform, before any training.
        history: after every epoch of fine-tuning. loss: mean over the last epoch; None where it was not finite.
    """

    at: str
    kind: str
    seed: int
    before: float
    inserted: float
    history: tuple[float, ...]
    loss: float | None

    @property
    def after(self) -> float:
        """Accuracy after the last epoch."""
        return self.history[-1] if self.history else self.inserted

    @property
    def best(self) -> float:
        """Accuracy of the best epoch on the test data. Paper 0 reports it; it is chosen by what it reports."""
        return max(self.history, default=self.inserted)

    @property
    def penalty(self) -> float:
        """Accuracy before minus accuracy after fine-tuning."""
        return self.before - self.after

    @property
    def best_penalty(self) -> float:
        """The penalty of the best epoch."""
        return self.before - self.best

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        derived = {name: getattr(self, name) for name in ("after", "best", "penalty", "best_penalty")}
        return asdict(self) | {"history": list(self.history)} | derived


@dataclass(frozen=True)
class RotationPenalty:
    """What transforms of layers cost, one trial each.

    Attributes:
        trials: in the order layers, kinds, seeds. settings: what all trials share.
    """

    trials: tuple[Trial, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def values(self, what: str = "penalty") -> dict[tuple[str, str], list[float]]:
        """(layer, kind) → one number per trial: "penalty", "best_penalty", "before", "inserted", "after", "best"."""
        found: dict[tuple[str, str], list[float]] = {}
        for trial in self.trials:
            found.setdefault((trial.at, trial.kind), []).append(getattr(trial, what))
        return found

    def mean(self, at: str, kind: str, what: str = "penalty") -> float:
        """The mean over the trials of one layer and kind."""
        return summary(self.values(what)[at, kind])[0]

    def to_dict(self) -> dict[str, Any]:
        """As plain data: the settings, every trial, and mean and standard deviation per layer and kind."""
        means = []
        for (at, kind), values in self.values().items():
            mean, std = summary(values)
            means.append({"at": at, "kind": kind, "trials": len(values), "penalty": mean, "std": std})
        return {"settings": dict(self.settings), "means": means, "trials": [trial.to_dict() for trial in self.trials]}

    def plot(self, what: str = "penalty") -> Figure:
        """Bars per layer, one per kind; whiskers are one standard deviation to each side."""
        figure = draw_bars(self.values(what), f"{what.replace('_', ' ')}, percentage points", 100)
        figure.axes[0].set_xlabel("layer; whiskers: one standard deviation over trials", fontsize=9)
        return figure

    def __repr__(self) -> str:
        lines = []
        for at, kind in self.values():
            parts = [f"{what} {_spread(self.values(what)[at, kind])}" for what in ("inserted", "after", "penalty")]
            count = len(self.values()[at, kind])
            lines.append(f"{at}, {kind}: {', '.join(parts)} ({count} trial{'s' * (count > 1)})")
        before = f"before {self.trials[0].before:.4f}; " if self.trials else ""
        bad = sum(trial.loss is None and bool(trial.history) for trial in self.trials)
        diverged = f"; {bad} trials diverged" if bad else ""
        return f"RotationPenalty({before}{'; '.join(lines)}{diverged})"


def _spread(values: Sequence[float]) -> str:
    mean, std = summary(values)
    return f"{mean:.4f} ± {std:.4f}" if len(values) > 1 else f"{mean:.4f}"


def draw_bars(
    table: Mapping[tuple[str, str], Sequence[float]], what: str, factor: float | int = 1, *,
    crosses: Mapping[tuple[str, str], float] | None = None, told: str = "told by others",
) -> Figure:  # fmt: skip
    """Groups of bars: one group per first key, one bar per second, with whiskers where there are several values.

    `crosses`: numbers to set beside the bars, and what they are called.

    >>> figure = draw_bars({("conv1", "relu"): [0.0, 0.1], ("conv1", "orthogonal"): [0.3]}, "penalty")
    >>> len(figure.axes[0].patches), figure.axes[0].get_ylabel()
    (2, 'penalty')
    """
    groups, kinds = (list(dict.fromkeys(key[i] for key in table)) for i in (0, 1))
    figure = new_figure(2.4 + 0.9 * max(2, len(groups)), 3.4)
    axes = figure.subplots()
    width = 0.8 / max(1, len(kinds))
    for i, kind in enumerate(kinds):
        held = [(x, summary(table[group, kind])) for x, group in enumerate(groups) if table.get((group, kind))]
        places = [x + width * (i - (len(kinds) - 1) / 2) for x, _ in held]
        whiskers = [factor * spread for _, (_, spread) in held]
        axes.bar(places, [factor * mean for _, (mean, _) in held], width, yerr=whiskers, label=kind, capsize=3)
        known = [(place, (crosses or {}).get((groups[x], kind))) for place, (x, _) in zip(places, held, strict=True)]
        beside = [(place, factor * value) for place, value in known if value is not None]
        axes.plot(*zip(*beside, strict=True), "kx", label=told) if beside else None
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel(what, fontsize=9)
    axes.axhline(0, color="0.6", linewidth=0.8)
    key_below(figure)
    return figure
