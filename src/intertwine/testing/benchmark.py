"""benchmark_measure: does a similarity measure see what matters, and nothing else?

Four tests with a known answer, rebuilt small: sensitivity and specificity after Ding et al. 2021, layer monotonicity
and label randomisation after ReSi (Klabunde et al. 2024). The networks are small, so scores tell measures apart; they
are not those of the papers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from intertwine.errors import InputError, did_you_mean
from intertwine.measure.measure import Measure, Prepared, find
from intertwine.testing.benchmark_zoo import DEPTH, Layer, Subjects, subjects
from intertwine.testing.validity import Score, group_separation, layer_monotonicity, rank_agreement

#: Test → what a good measure does there.
TESTS = {
    "sensitivity": "the distance grows as principal components are deleted and the classes become harder to read off",
    "specificity": "the distance follows how well classes can be read off a layer, not the seed of the network",
    "layers within": "layers of one network are further apart the more layers lie between them",
    "layers across": "the same holds for a layer of one network and the layers of another seed",
    "random labels": "networks that learned the same labels, true or random, are closer than those that did not",
}


@dataclass(frozen=True)
class MeasureBenchmark:
    """What `benchmark_measure` found.

    Attributes:
        scores: all numbers, test by test. comparisons: how often the measure was asked.
        degenerate: reason → how often it gave no value for it; these comparisons are left out of the scores.
        folder: where the networks are.
    """

    measure: str
    networks: int
    scores: tuple[Score, ...]
    comparisons: int
    degenerate: dict[str, int]
    folder: Path = field(repr=False)

    def score(self, test: str, statistic: str) -> Score:
        """One score, such as `score("sensitivity", "spearman")`."""
        for score in self.scores:
            if (score.test, score.statistic) == (test, statistic):
                return score
        known = [f"{s.test}, {s.statistic}" for s in self.scores]
        asked = f"{test}, {statistic}"
        raise InputError(
            f"The score {asked!r} was asked for. {did_you_mean(asked, known)}There are: {'; '.join(known)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        plain = {"measure": self.measure, "networks": self.networks, "comparisons": self.comparisons}
        return plain | {"degenerate": self.degenerate, "scores": [score.to_dict() for score in self.scores]}

    def describe(self) -> str:
        """What was asked and how it went, in words."""
        lines = [f"{self.measure}, on {self.networks} networks and {self.comparisons:,} comparisons."]
        for test, meaning in TESTS.items():
            own = [score for score in self.scores if score.test == test]
            numbers = ", ".join(f"{s.statistic} {_number(s.value)} (chance {s.chance:.2f})" for s in own)
            lines.append(f"{test}: {meaning}. {_verdict(own[0])}: {numbers}.")
        lost = [f"No value {count:,} times: {reason}." for reason, count in self.degenerate.items()]
        return "\n".join([*lines, *lost])

    def __repr__(self) -> str:
        missing = f", {sum(self.degenerate.values()):,} without a value" if self.degenerate else ""
        head = f"MeasureBenchmark({self.measure}: {self.networks} networks, {self.comparisons:,} comparisons{missing})"
        rows = [
            f"  {s.test:14} {s.statistic:11} {_number(s.value):>6}  chance {s.chance:.2f}"
            + (f"  p {s.p:.1g}" if s.p is not None else "")
            for s in self.scores
        ]
        return "\n".join([head, *rows])


def benchmark_measure(
    measure: str | Measure,
    folder: str | Path | None = None,
    networks: int = 10,
    epochs: int | None = None,
    **options: Any,
) -> MeasureBenchmark:
    """Score a measure on small networks where the right answer is known.

    The first call trains the networks, perceptrons on scikit-learn's digits (`pip install 'intertwine[data]'`); later
    calls find them in the folder, and train only what is missing.

    Args:
        measure: a name with `options`, or a `Measure` of your own.
        folder: where the networks are kept; None for the user's cache folder (`~/.cache/intertwine`).
        networks: from so many seeds, 3 or more; half as many for each share of random labels.
        epochs: of the training; None for the usual 60. Each length has networks of its own.

    Returns:
        A `MeasureBenchmark`: print it, or `.describe()` for words, `.score(test, statistic)`, `.to_dict()`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = benchmark_measure("linear_cka", folder, networks=3, epochs=5)
        >>> found.score("layers within", "conformity").value > 0.8
        True
    """
    own = find(measure, **options) if isinstance(measure, str) else measure
    if options and not isinstance(measure, str):
        raise InputError(f"The options {options} were given beside a measure that is made already; give it with them.")
    return score_measure(own, subjects(folder, networks, epochs))


def score_measure(measure: Measure, on: Subjects) -> MeasureBenchmark:
    """Score a measure on networks that are trained already."""
    asked = Asked(measure)
    scores = [*_sensitivity(asked, on), *_specificity_and_layers(asked, on), *_random_labels(asked, on)]
    return MeasureBenchmark(
        measure.name, len(on.trained), tuple(scores), asked.comparisons, dict(asked.degenerate), on.folder
    )


class Asked:
    """A measure as a distance, which counts what it is asked."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.sign = -1.0 if measure.kind == "similarity" else 1.0
        self.comparisons = 0
        self.degenerate: Counter[str] = Counter()

    def prepare(self, layers: Sequence[Layer]) -> list[Prepared]:
        return [self.measure.prepare(layer.samples) for layer in layers]

    def distance(self, a: Prepared, b: Prepared) -> float:
        """Only its order means something; not a number where the measure has no value."""
        self.comparisons += 1
        found = self.measure.compare(a, b)
        if found.degenerate or isnan(found.value):
            self.degenerate[found.degenerate or "the value is not a number, and no reason is given"] += 1
            return nan
        return self.sign * found.value


def _sensitivity(asked: Asked, on: Subjects) -> tuple[Score, ...]:
    """Every network's first layer against the first layers of all, whole and with components deleted."""
    whole = [cut for cut in on.cuts if cut.rank is None]
    references = [asked.measure.prepare(cut.samples) for cut in whole]
    distances: list[list[float]] = [[] for _ in whole]
    gaps: list[list[float]] = [[] for _ in whole]
    for cut in on.cuts:
        prepared = asked.measure.prepare(cut.samples)
        for i, reference in enumerate(references):
            if cut is not whole[i]:
                distances[i].append(asked.distance(reference, prepared))
                gaps[i].append(abs(whole[i].accuracy - cut.accuracy))
    return rank_agreement("sensitivity", _arrays(distances), _arrays(gaps))


def _specificity_and_layers(asked: Asked, on: Subjects) -> tuple[Score, ...]:
    """All layers of all networks against each other, used twice."""
    prepared = [asked.prepare(layers) for layers in on.trained]
    count = len(prepared)
    table = np.array(
        [
            [[[asked.distance(x, y) for y in prepared[b]] for x in prepared[a]] for b in range(count)]
            for a in range(count)
        ]
    )  # network, network, layer, layer
    accuracy = on.accuracies.numpy()
    distances, gaps = [], []
    for a in range(count):
        best = int(accuracy[a].argmax())
        others = np.ones((count, DEPTH), dtype=bool)
        others[a, best] = False
        distances.append(table[a, :, best, :][others])
        gaps.append(np.abs(accuracy - accuracy[a, best])[others])
    own = [table[a, a] for a in range(count)]
    across = [table[a, b] for a in range(count) for b in range(count) if a != b]
    return (
        *rank_agreement("specificity", distances, gaps),
        *layer_monotonicity("layers within", own, [True] * len(own)),
        *layer_monotonicity("layers across", across, [False] * len(across)),
    )


def _random_labels(asked: Asked, on: Subjects) -> tuple[Score, ...]:
    """The last layers of networks that learned labels of which a share is random."""
    prepared = [(share, p) for share, layers in on.randomised.items() for p in asked.prepare(layers)]
    size = len(prepared)
    table = np.zeros((size, size))
    for i in range(size):
        for j in range(i):
            # a measure need not be symmetric; a pair has one distance all the same
            both = asked.distance(prepared[i][1], prepared[j][1]), asked.distance(prepared[j][1], prepared[i][1])
            table[i, j] = table[j, i] = sum(both) / 2
    return group_separation("random labels", table, [share for share, _ in prepared])


def _arrays(rows: list[list[float]]) -> list[np.ndarray]:
    return [np.array(row) for row in rows]


def _number(value: float) -> str:
    return "none" if isnan(value) else f"{value:.2f}"


def _verdict(score: Score) -> str:
    """How far it gets from chance (0) towards the best (1)."""
    if isnan(score.value):
        return "No comparison has a value"
    way = (score.value - score.chance) / (1 - score.chance)
    bounds = ((0.8, "It does"), (0.4, "It mostly does"), (0.15, "It does a little"), (-0.15, "No better than chance"))
    return next((words for bound, words in bounds if way >= bound), "It does the opposite")
