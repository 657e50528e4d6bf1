"""What the rows of a dissection say: interpretable units in per cent against α, and how much they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from intertwine.reproduce.kinds.registry import Numbers, Row

#: What the networks are called.
WITH, WITHOUT = "with residual ReLU", "without"
#: Series of the change from the first α to the last, in points; its places are the two kinds of network.
CHANGE = "change"


def curves(rows: Sequence[Row]) -> dict[str, dict[float, list[float]]]:
    """Kind of network → α → fractions, one per network and rotation.

    >>> curves([{"kind": "without", "alpha": 0.5, "fraction": 0.25}])
    {'without': {0.5: [0.25]}}
    """
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        found.setdefault(row["kind"], {}).setdefault(row["alpha"], []).append(row["fraction"])
    return found


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Kind of network → α → interpretable units in per cent, one value per network, the mean over rotations."""
    found: Numbers = {kind: {} for kind in (WITH, WITHOUT)} | {CHANGE: {}}
    for kind, network in dict.fromkeys((row["kind"], row["network"]) for row in rows):
        curve = curves([row for row in rows if (row["kind"], row["network"]) == (kind, network)])[kind]
        means = {alpha: 100 * fmean(curve[alpha]) for alpha in sorted(curve)}
        for alpha, mean in means.items():
            found[kind].setdefault(f"α = {alpha:g}", []).append(mean)
        found[CHANGE].setdefault(kind, []).append(means[max(means)] - means[min(means)])
    return found
