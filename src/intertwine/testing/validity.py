"""How well distances order what they should: the scores of validity tests, as plain functions on arrays.

Each takes distances (smaller is closer; only their order counts) and gives a `Score`. A comparison without a value, not
a number, is left out. A tie is worth one half, so that a measure that is the same for everything scores at chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from typing import Any

import numpy as np
from scipy import stats

from intertwine.errors import InputError


@dataclass(frozen=True)
class Score:
    """One number of one test.

    Attributes:
        test, statistic: what was asked and how it was scored. value: not a number where nothing could be compared.
        chance: what a measure that knows nothing gets on average; 1 is the best there is.
        used: how many comparisons (pairs, triples) the value stands on.
        p: for correlations, how likely chance alone gives as much; see `rank_agreement`. None elsewhere.
    """

    test: str
    statistic: str
    value: float
    chance: float
    used: int
    p: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data; None where there is no value, since JSON has no other word for it."""
        return asdict(self) | {"value": None if isnan(self.value) else self.value}


def rank_agreement(test: str, distances: Sequence[np.ndarray], gaps: Sequence[np.ndarray]) -> tuple[Score, Score]:
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
        scores.append(Score(test, name, value, 0.0, used, min(1.0, 2 * p)))
    return scores[0], scores[1]


def _known(d: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = ~np.isnan(d)
    return d[kept], g[kept]


def _correlation(statistic: Any, d: np.ndarray, g: np.ndarray) -> tuple[float, float]:
    """The correlation and its p-value; what is constant orders nothing, and its correlation counts as zero."""
    if np.ptp(d) == 0 or np.ptp(g) == 0:
        return 0.0, 1.0
    found = statistic(d, g, alternative="greater")
    return float(found.statistic), float(found.pvalue)


def layer_monotonicity(test: str, tables: Sequence[np.ndarray], same_network: Sequence[bool]) -> tuple[Score, Score]:
    """Are layers further apart the further they lie from each other? A share of triples, and Spearman's rho.

    A triple is a layer i of one network and two layers j, k of another that lie on the same side of i, j nearer than k;
    it conforms where the distance to j is the smaller one. Within one network i itself is not asked for.

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


def group_separation(test: str, table: np.ndarray, groups: Sequence[object]) -> tuple[Score, Score]:
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
            f"Distances of shape {table.shape} were given for {size} members of groups. Give one row and one column "
            "for each member."
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
    return _share(test, outcomes), Score(test, "AUPRC", precision, chance, len(close))


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
    """1 where the nearer one is the closer one, ½ for a tie, not a number where one of them has no value."""
    return nan if isnan(near) or isnan(far) else float(near < far) + 0.5 * float(near == far)


def _share(test: str, outcomes: Sequence[float]) -> Score:
    known = [outcome for outcome in outcomes if not isnan(outcome)]
    return Score(test, "conformity", float(np.mean(known)) if known else nan, 0.5, len(known))
