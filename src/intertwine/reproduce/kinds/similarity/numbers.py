"""What the rows of similarities come to, in the form of the printed numbers.

Procrustes: series → layer → one value per pair, and "…, unrelated" beside each. CKA: "SERIES, ROW" → column → values;
"SERIES, diagonal" and "SERIES, other layers" (the mean of a row without its diagonal); and "SERIES, whole matrix" with
the "largest" and the "smallest" of the mean over pairs, which is what one reads off a heat map.
"…, around" is, at a layer inside a residual block, the mean of the layers before and behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from intertwine.reproduce.kinds.registry import Numbers, Row
from intertwine.reproduce.kinds.similarity.procrustes import MEASURES

Matrix = list[list[float | None]]
DEAD = "dead channels"


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series → label → one value per pair."""
    procrustes = plan["settings"]["family"] == "procrustes"
    found = _procrustes(rows) if procrustes else _cka(plan, rows)
    along = [series for series in found if (series in MEASURES if procrustes else series.endswith(", diagonal"))]
    around = {f"{series}, around": _around(found[series], list(plan["settings"]["at"])) for series in along}
    return found | {series: values for series, values in around.items() if values}


def _around(values: Mapping[str, Sequence[float]], labels: Sequence[str]) -> dict[str, list[float]]:
    """At each layer with a star, the mean of its neighbours, pair by pair."""
    inside = [(i, label) for i, label in enumerate(labels) if label.endswith("*") and 0 < i < len(labels) - 1]
    return {
        label: [fmean(two) for two in zip(values.get(labels[i - 1], []), values.get(labels[i + 1], []), strict=False)]
        for i, label in inside
    }


def _procrustes(rows: Sequence[Row]) -> Numbers:
    found: Numbers = {}
    for row in rows:
        values = row["values"] | {f"{series}, unrelated": value for series, value in row["unrelated"].items()}
        for series, value in (values | {DEAD: fmean(row["dead"])}).items():
            _add(found, series, row["label"], value)
    return found


def _cka(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    labels, found = list(plan["settings"]["at"]), Numbers()
    for row in rows:
        if "matrix" not in row:
            for label, shares in zip(labels, row["dead"], strict=True):
                _add(found, DEAD, label, fmean(shares))
            continue
        for i, (label, line) in enumerate(zip(labels, row["matrix"], strict=True)):
            for column, value in zip(labels, line, strict=True):
                _add(found, f"{row['series']}, {label}", column, value)
            _add(found, f"{row['series']}, diagonal", label, line[i])
            others = [value for j, value in enumerate(line) if j != i and value is not None]
            _add(found, f"{row['series']}, other layers", label, fmean(others) if others else None)
    for series, mean in means(rows).items():
        known = [value for line in mean for value in line if value is not None]
        for label, value in (("largest", max(known, default=None)), ("smallest", min(known, default=None))):
            _add(found, f"{series}, whole matrix", label, value)
    return found


def _add(found: Numbers, series: str, label: str, value: float | None) -> None:
    if value is not None:
        found.setdefault(series, {}).setdefault(label, []).append(value)


def means(rows: Sequence[Row]) -> dict[str, Matrix]:
    """Series → its matrix, the mean over pairs; None where no pair has a value.

    >>> means([{"series": "a", "matrix": [[1.0, None]]}, {"series": "a", "matrix": [[2.0, None]]}])
    {'a': [[1.5, None]]}
    """
    held: dict[str, list[Matrix]] = {}
    for row in rows:
        if "matrix" in row:
            held.setdefault(row["series"], []).append(row["matrix"])
    return {
        series: [[_mean(cell) for cell in zip(*lines, strict=True)] for lines in zip(*some, strict=True)]
        for series, some in held.items()
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
