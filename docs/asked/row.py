"""A number that was asked for, and how it is read from a file of bench/results. Part of docs/benchmarks.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches import BENCHES, Bench

RESULTS = Path(__file__).parents[2] / "bench" / "results"
Read = Callable[[Any], Any]  # takes what a file of results holds


@dataclass(frozen=True)
class Asked:
    """One line of the tables.

    Attributes:
        what: what is measured. asked: the number that was asked for, as text; `bar` is the same number and `at` says
            whether it is the "most" or the "least", or the two ends of what it may be "within"; infinity is no bar.
        bench: the benchmark that measures it (bench/benches.py); its file is what the readers are given.
        value: reads the number that is held against the bar; None where no file keeps it. shown: how that number is
            written, or a reader of more words. beside: reads the peer or the floor of the same run.
        why: the reason, told only where the bar is missed, or where nothing is kept.
    """

    what: str
    asked: str
    bench: str
    value: Read | None
    bar: float | tuple[float, float]
    at: str = "most"
    shown: str | Read = "{:.2f}"
    beside: Read | None = None
    why: str = ""

    def __post_init__(self) -> None:
        if self.at not in ("most", "least", "within"):
            raise ValueError(f"{self.what}: at must be most, least or within, not {self.at!r}")

    @property
    def source(self) -> Bench:
        return BENCHES[self.bench]


@dataclass(frozen=True)
class Held:
    """A number that the tests hold on every run, and no benchmark keeps."""

    what: str
    asked: str
    test: str


@dataclass(frozen=True)
class Line:
    """An `Asked` with what was read: texts of the table, and whether the bar was reached (None: nothing was kept)."""

    row: Asked
    measured: str
    beside: str
    reached: bool | None


def read(row: Asked, folder: Path = RESULTS) -> Line:
    """Look a row up in its file. A number that should be there and is not stops everything, by name."""
    file = folder / row.source.file
    if row.value is None:
        return Line(row, "not kept", "", None)
    if not file.exists():
        return Line(row, "not measured yet", "", None)
    results = json.loads(file.read_text(encoding="utf-8"))
    try:
        value = row.value(results)
        measured = row.shown.format(value) if isinstance(row.shown, str) else row.shown(results)
        beside = row.beside(results) if row.beside else ""
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SystemExit(
            f"{row.what!r} should be in bench/results/{row.source.file}, which does not hold it: {error!r}. "
            f"Run `{row.source.command}`, or mend how the row reads the file."
        ) from error
    return Line(row, measured, beside, _reached(value, row))


def _reached(value: float, row: Asked) -> bool:
    if isinstance(row.bar, tuple):
        return row.bar[0] <= value <= row.bar[1]
    return value >= row.bar if row.at == "least" else value <= row.bar


# -- what readers are made of ------------------------------------------------------------------------------------------


def pick(rows: Iterable[dict[str, Any]], **entries: Any) -> list[dict[str, Any]]:
    """The rows that agree in the named entries; at least one.

    >>> pick([{"who": "ours", "s": 1}, {"who": "theirs", "s": 2}], who="ours")
    [{'who': 'ours', 's': 1}]
    """
    found = [row for row in rows if all(row.get(key) == value for key, value in entries.items())]
    if not found:
        raise LookupError(f"no row with {entries}")
    return found


def only(rows: Iterable[dict[str, Any]], **entries: Any) -> dict[str, Any]:
    """The one row that agrees in the named entries."""
    found = pick(rows, **entries)
    if len(found) > 1:
        raise LookupError(f"{len(found)} rows with {entries}, where one was looked for")
    return found[0]


def mean(rows: Iterable[dict[str, Any]], key: str) -> float:
    """Over rows."""
    return statistics.mean(row[key] for row in rows)


def spread(values: Iterable[float], digits: int = 1) -> str:
    """Mean ± deviation.

    >>> spread([1.0, 2.0])
    '1.5 ± 0.7'
    """
    found = list(values)
    more = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.{digits}f}{more}"
