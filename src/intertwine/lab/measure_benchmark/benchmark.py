"""`benchmark_measure` scores a similarity measure on tests with known answers.

Sensitivity and specificity follow Ding et al. 2021, layer monotonicity and label randomisation ReSi (Klabunde et al.
2024). The networks are small, so that scores compare measures; they are not those of the papers.

Scores take distances (smaller is closer; only their order counts). Comparisons with NaN are left out. A tie counts one
half, so that a constant measure scores at chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from intertwine.errors import InputError, unknown_name
from intertwine.lab.measure_benchmark.networks import DEPTH, BenchmarkFeatures, BenchmarkNetworks, benchmark_networks
from intertwine.measure.measure import Measure, PreparedRepresentation, find


@dataclass(frozen=True)
class BenchmarkScore:
    """One number of one test.

    Attributes:
        test, statistic: names of the test and of its score. value: NaN if nothing could be compared.
        chance: the expected value of a random measure; 1 is the best value.
        used: the number of comparisons (pairs, triples).
        p: for correlations, the p-value, see `rank_agreement`; None otherwise.
    """

    test: str
    statistic: str
    value: float
    chance: float
    used: int
    p: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data; None instead of NaN, which JSON lacks."""
        return asdict(self) | {"value": None if isnan(self.value) else self.value}


def rank_agreement(
    test: str, distances: Sequence[np.ndarray], gaps: Sequence[np.ndarray]
) -> tuple[BenchmarkScore, BenchmarkScore]:
    """Do larger distances go with larger gaps? Spearman's rho and Kendall's tau, averaged over references.

    The p-value is one-sided: twice the mean over the references, which is valid however they depend on each other. It
    takes the things compared with one reference as independent.

    Args:
        test: its name. distances: per reference, from it to everything else. gaps: likewise, what should order them.

    Example:
        >>> import numpy as np
        >>> rho, tau = rank_agreement("demo", [np.array([1.0, 2.0, 3.0, 5.0])], [np.array([0.1, 0.2, 0.4, 0.3])])
        >>> round(rho.value, 2), round(tau.value, 2)
        (0.8, 0.67)
    """
    rows = [(d, g) for d, g in (_known(d, g) for d, g in zip(distances, gaps, strict=True)) if len(d) > 2]
    used = sum(len(d) for d, _ in rows)
    scores = []
    for name, statistic in (("spearman", stats.spearmanr), ("kendall", stats.kendalltau)):
        found = [_correlation(statistic, d, g) for d, g in rows]
        value, p = (float(np.mean(column)) for column in zip(*found, strict=True)) if found else (nan, 1.0)
        scores.append(BenchmarkScore(test, name, value, 0.0, used, min(1.0, 2 * p)))
    return scores[0], scores[1]


def _known(d: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = ~np.isnan(d)
    return d[kept], g[kept]


def _correlation(statistic: Any, d: np.ndarray, g: np.ndarray) -> tuple[float, float]:
    """The correlation and its p-value; the correlation of a constant counts as zero."""
    if np.ptp(d) == 0 or np.ptp(g) == 0:
        return 0.0, 1.0
    found = statistic(d, g, alternative="greater")
    return float(found.statistic), float(found.pvalue)


def layer_monotonicity(
    test: str, tables: Sequence[np.ndarray], same_network: Sequence[bool]
) -> tuple[BenchmarkScore, BenchmarkScore]:
    """Are layers further apart the further they lie from each other? A share of triples, and Spearman's rho.

    A triple is a layer i of one network and two layers j, k of another that lie on the same side of i, j nearer than k;
    it conforms where the distance to j is the smaller one. Within one network i itself is not counted for.

    Args:
        test: its name. tables: distances, layers × layers, one for each pair of networks.
        same_network: for each table, whether both networks are one and the same.

    Example:
        >>> import numpy as np
        >>> steps = np.abs(np.subtract.outer(np.arange(4.0), np.arange(4.0)))
        >>> [score.value for score in layer_monotonicity("demo", [steps], [True])]
        [1.0, 1.0]
    """
    outcomes: list[float] = []
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for table, same in zip(tables, same_network, strict=True):
        depth = len(table)
        for i in range(depth):
            for side in (range(i, depth), range(i, -1, -1)):
                near_first = [table[i, j] for j in side][1 if same else 0 :]
                outcomes += [_won(near_first[j], d) for k, d in enumerate(near_first) for j in range(k)]
        i, j = np.nonzero(~np.eye(depth, dtype=bool) if same else np.ones((depth, depth), dtype=bool))
        rows.append((table[i, j], np.abs(i - j).astype(float)))
    rho, _ = rank_agreement(test, [d for d, _ in rows], [steps for _, steps in rows])
    return _share(test, outcomes), rho


def group_separation(test: str, table: np.ndarray, groups: Sequence[object]) -> tuple[BenchmarkScore, BenchmarkScore]:
    """Are members of one group closer to each other than to others? A share of triples, and the AUPRC.

    A triple is a member, another of its group, and one of another group; it conforms where its own is the closer. The
    AUPRC (as average precision) is how well a small distance tells the pairs within groups from all pairs.

    Args:
        test: its name. table: symmetric distances, members × members. groups: the group of each member.

    Example:
        >>> import numpy as np
        >>> places = np.array([0.0, 0.1, 5.0, 5.2])
        >>> table = np.abs(np.subtract.outer(places, places))
        >>> [score.value for score in group_separation("demo", table, ["a", "a", "b", "b"])]
        [1.0, 1.0]
    """
    size = len(groups)
    if table.shape != (size, size):
        raise InputError(
            f"The distances have shape {table.shape}, but there are {size} members of groups. Pass one row and one "
            "column for each member."
        )
    own = np.array([[a == b for b in groups] for a in groups])
    outcomes = [
        _won(table[i, j], table[i, k])
        for i in range(size)
        for j in range(size)
        for k in range(size)
        if i != j and own[i, j] and not own[i, k]
    ]
    first, second = np.triu_indices(size, 1)
    close, within = _known(table[first, second], own[first, second])
    precision = average_precision(close, within.astype(bool))
    chance = float(own[first, second].mean()) if len(first) else nan
    return _share(test, outcomes), BenchmarkScore(test, "AUPRC", precision, chance, len(close))


def average_precision(distances: np.ndarray, wanted: np.ndarray) -> float:
    """The area under precision against recall when the closest are taken first, all of one distance at once.

    Example:
        >>> import numpy as np
        >>> average_precision(np.array([1.0, 2.0, 3.0]), np.array([True, False, True])) == 0.5 * 1 + 0.5 * 2 / 3
        True
    """
    if not wanted.any():
        return nan
    order = np.argsort(distances, kind="stable")
    ends = np.append(np.nonzero(np.diff(distances[order]))[0], len(order) - 1)
    found = np.cumsum(wanted[order])[ends]
    return float(np.sum(np.diff(found, prepend=0) / wanted.sum() * found / (ends + 1)))


def _won(near: float, far: float) -> float:
    """1 if the nearer one is closer, ½ for a tie, NaN if one of them has no value."""
    return nan if isnan(near) or isnan(far) else float(near < far) + 0.5 * float(near == far)


def _share(test: str, outcomes: Sequence[float]) -> BenchmarkScore:
    known = [outcome for outcome in outcomes if not isnan(outcome)]
    return BenchmarkScore(test, "conformity", float(np.mean(known)) if known else nan, 0.5, len(known))


# -- benchmark_measure --


#: Test → the behaviour of a good measure.
TESTS = {
    "sensitivity": "the distance grows as principal components are deleted and the classes become harder to read off",
    "specificity": "the distance follows how well classes can be read off a layer, not the seed of the network",
    "layers within": "layers of one network are further apart the more layers lie between them",
    "layers across": "the same holds for a layer of one network and the layers of another seed",
    "random labels": "networks that learned the same labels, true or random, are closer than those that did not",
}


@dataclass(frozen=True)
class MeasureBenchmark:
    """The result of `benchmark_measure`.

    Attributes:
        scores: all numbers, test by test. comparisons: the number of calls of the measure.
        degenerate: reason → the number of comparisons without a value, which are left out of the scores.
        folder: of the networks.
    """

    measure: str
    networks: int
    scores: tuple[BenchmarkScore, ...]
    comparisons: int
    degenerate: dict[str, int]
    folder: Path = field(repr=False)

    def score(self, test: str, statistic: str) -> BenchmarkScore:
        """One score, such as `score("sensitivity", "spearman")`."""
        for score in self.scores:
            if (score.test, score.statistic) == (test, statistic):
                return score
        known = [f"{s.test}, {s.statistic}" for s in self.scores]
        raise InputError(unknown_name("score", f"{test}, {statistic}", known))

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        plain = {"measure": self.measure, "networks": self.networks, "comparisons": self.comparisons}
        return plain | {"degenerate": self.degenerate, "scores": [score.to_dict() for score in self.scores]}

    def describe(self) -> str:
        """The tests and their results in words."""
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
        raise InputError(f"The options {options} do not apply to a measure that is already built. Build it with them.")
    return score_measure(own, benchmark_networks(folder, networks, epochs))


def score_measure(measure: Measure, on: BenchmarkNetworks) -> MeasureBenchmark:
    """Score a measure on trained networks."""
    counted = CountedMeasure(measure)
    scores = [*_sensitivity(counted, on), *_specificity_and_layers(counted, on), *_random_labels(counted, on)]
    return MeasureBenchmark(
        measure.name, len(on.trained), tuple(scores), counted.comparisons, dict(counted.degenerate), on.folder
    )


class CountedMeasure:
    """A measure as a distance, which counts its calls."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.sign = -1.0 if measure.kind == "similarity" else 1.0
        self.comparisons = 0
        self.degenerate: Counter[str] = Counter()

    def prepare(self, layers: Sequence[BenchmarkFeatures]) -> list[PreparedRepresentation]:
        return [self.measure.prepare(layer.samples) for layer in layers]

    def distance(self, a: PreparedRepresentation, b: PreparedRepresentation) -> float:
        """A number of which only the order matters; NaN if the measure has no value."""
        self.comparisons += 1
        found = self.measure.compare(a, b)
        if found.degenerate or isnan(found.value):
            self.degenerate[found.degenerate or "the value is NaN without a reason"] += 1
            return nan
        return self.sign * found.value


def _sensitivity(counted: CountedMeasure, on: BenchmarkNetworks) -> tuple[BenchmarkScore, ...]:
    """Every network's first layer against the first layers of all, whole and with components deleted."""
    whole = [cut for cut in on.cuts if cut.rank is None]
    references = [counted.measure.prepare(cut.samples) for cut in whole]
    distances: list[list[float]] = [[] for _ in whole]
    gaps: list[list[float]] = [[] for _ in whole]
    for cut in on.cuts:
        prepared = counted.measure.prepare(cut.samples)
        for i, reference in enumerate(references):
            if cut is not whole[i]:
                distances[i].append(counted.distance(reference, prepared))
                gaps[i].append(abs(whole[i].accuracy - cut.accuracy))
    return rank_agreement("sensitivity", [np.array(row) for row in distances], [np.array(row) for row in gaps])


def _specificity_and_layers(counted: CountedMeasure, on: BenchmarkNetworks) -> tuple[BenchmarkScore, ...]:
    """All layers of all networks against each other, used twice."""
    prepared = [counted.prepare(layers) for layers in on.trained]
    count = len(prepared)
    rows = [[[[counted.distance(x, y) for y in b] for x in a] for b in prepared] for a in prepared]
    table = np.array(rows)  # network, network, layer, layer
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


def _random_labels(counted: CountedMeasure, on: BenchmarkNetworks) -> tuple[BenchmarkScore, ...]:
    """The last layers of networks trained on labels of which a share is random."""
    prepared = [(share, p) for share, layers in on.randomised.items() for p in counted.prepare(layers)]
    size = len(prepared)
    table = np.zeros((size, size))
    for i in range(size):
        for j in range(i):
            # measures may be asymmetric, but a pair has one distance
            both = counted.distance(prepared[i][1], prepared[j][1]), counted.distance(prepared[j][1], prepared[i][1])
            table[i, j] = table[j, i] = sum(both) / 2
    return group_separation("random labels", table, [share for share, _ in prepared])


def _number(value: float) -> str:
    return "none" if isnan(value) else f"{value:.2f}"


def _verdict(score: BenchmarkScore) -> str:
    """The position of a score between chance (0) and the best (1), in words."""
    if isnan(score.value):
        return "No comparison has a value"
    way = (score.value - score.chance) / (1 - score.chance)
    bounds = ((0.8, "It does"), (0.4, "It mostly does"), (0.15, "It does a little"), (-0.15, "No better than chance"))
    return next((words for bound, words in bounds if way >= bound), "It does the opposite")
