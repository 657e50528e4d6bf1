"""Table 1: what the rows say in the form of the printed numbers, and the rows of one measurement by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from intertwine.reproduce.kinds.distances.stacked_order import LEXICOGRAPHIC
from intertwine.reproduce.kinds.registry import Kept, Numbers, Row

LAYERS = {"w1": "W₁", "w2": "W₂"}
COINCIDING = "pairs that coincide"


def by_method(rows: Sequence[Row], measured: str, **where: Any) -> dict[str, Row]:
    """Method → its row of one measurement; `where` picks among several, such as `networks=2`.

    >>> rows = [{"measured": "accuracy", "networks": n, "method": "unsorted", "mean": n / 10} for n in (1, 2)]
    >>> by_method(rows, "accuracy", networks=2)["unsorted"]["mean"]
    0.2
    """
    wanted = {"measured": measured} | where
    return {row["method"]: row for row in rows if all(row.get(name) == value for name, value in wanted.items())}


def series(method: str) -> str:
    """What a method is called among the printed numbers.

    >>> series("nodesort 1.1"), series("weight matching")
    ('sorted, p = 1.1', 'weight matching')
    """
    return "sorted, lexicographic" if method == LEXICOGRAPHIC else method.replace("nodesort ", "sorted, p = ")


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Method → distances of both layers over pairs, pairs that coincide, and accuracies of averages in per cent.

    All pairs where a method needs no second network, else those that were matched.
    """
    found: Numbers = {}
    for method, row in (by_method(rows, "some_pairs") | by_method(rows, "all_pairs")).items():
        own = found.setdefault(series(method), {})
        for layer, name in LAYERS.items():
            own |= {f"{name} {what}": _kept(row[layer], what) for what in ("min", "max", "mean")}
        if "coinciding_pairs" in row:
            own[COINCIDING] = [float(row["coinciding_pairs"])]
    for row in rows:
        if row["measured"] == "accuracy":
            label = f"average of {row['networks']}, %"
            found.setdefault(series(row["method"]), {})[label] = _kept(row, "mean", 100.0)
    return found


def _kept(summary: Mapping[str, Any], what: str, unit: float = 1.0) -> list[float]:
    """A number of a summary, with the deviation of one pair."""
    return Kept(unit * summary[what], unit * deviation(summary), summary["count"])


def deviation(summary: Mapping[str, Any]) -> float:
    """As it was kept; of results of before it was, from the extremes, as if the values were normal (Blom 1958).

    >>> round(deviation({"min": -1.87, "max": 1.87, "count": 20}), 3)
    1.0
    """
    count = summary["count"]
    if summary.get("deviation") is not None or count < 2:
        return summary.get("deviation") or 0.0
    return (summary["max"] - summary["min"]) / (2 * NormalDist().inv_cdf((count - 0.375) / (count + 0.25)))
