"""Speed of the result store of a study: a million rows written, read and aggregated; tasks of one row.

Every row goes through `Store.add`, as in a study. Reading uses another `Store` on the same folder. Rows come in tasks
of 100 (a heat map of 10 × 10 layers) and of 10; tasks of one row show the cost of a task. The floor is polars: the same
table written as one Parquet file, read and aggregated.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from intertwine.lab.study.records import FinishedTask, ResultRow
from intertwine.lab.study.store import Store

ROWS = 1_000_000
BARS = {"total": 10.0, "add_ms": 0.3, "done": 1.0}
PLAN = {"verb": "compare", "zoo": "digits"}
MADE = {
    "version": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.7",
    "git": "0" * 40,
    "command": "intertwine study run plan.toml --only KEY",
    "made_at": "2026-01-01T00:00:00+00:00",
}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of a call."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def tasks(count: int, rows: int) -> Iterator[FinishedTask]:
    """Finished comparisons with a number of rows each, with intervals and different numbers."""
    draw = random.Random(0).random
    for i in range(count):
        found = tuple(
            ResultRow("linear_cka", draw(), draw(), draw(), layer=f"layer{k // 10}", other_layer=f"layer{k % 10}")
            for k in range(rows)
        )
        task = {"verb": "compare", "zoo": "digits", "a": f"{i % 32}", "b": f"{i // 32}", "options": {"width": i % 4}}
        yield FinishedTask(f"{i:032x}", {**task, "repeat": 0}, found, 0.25, 120.0, MADE)


def aggregate(frame: Any) -> Any:
    """Mean, minimum, maximum and number of the values, per pair of layers."""
    import polars as pl

    value = pl.col("value")
    groups = frame.group_by("layer", "other_layer")
    return groups.agg(value.mean(), value.min().alias("least"), value.max().alias("most"), pl.len())


def measure_rows(rows_each: int, rows: int = ROWS, compact: bool = True) -> dict[str, float]:
    """Seconds to add rows in tasks of `rows_each`, to make a shard of them, to read and to aggregate them."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder, "bench", PLAN)

        adding = sum(timed(partial(store.add, task))[0] for task in tasks(rows // rows_each, rows_each))
        found = {"add": adding, "compact": timed(store.compact)[0] if compact else 0.0}
        done_s, done = timed(Store.existing(folder).done)
        found["read"], frame = timed(Store.existing(folder).frame)
        found["aggregate"], summary = timed(lambda: aggregate(frame))
        assert summary["len"].sum() == len(frame) == rows
        assert len(done) == rows // rows_each
        found["total"] = sum(found.values())
        floor = floor_of(frame, Path(folder) / "floor.parquet")
        stored = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    more = {"done": done_s, "mib": stored / 2**20, "add_ms": 1000 * found["add"] / (rows // rows_each)}
    return found | more | {"floor": floor}


def floor_of(frame: Any, file: Path) -> float:
    """Seconds in which polars writes, reads and aggregates a table; the file is deleted."""
    import polars as pl

    seconds, _ = timed(lambda: (frame.write_parquet(file), aggregate(pl.read_parquet(file))))
    file.unlink()
    return seconds


def table(measured: dict[str, dict[str, float]]) -> str:
    """The figures, a line per case."""
    names = ("add", "compact", "read", "aggregate", "total", "done", "add_ms", "mib")
    lines = [f"{'seconds':<34}" + "".join(f"{name:>11}" for name in names)]
    lines += [f"{case:<34}" + "".join(f"{row[name]:11.3f}" for name in names) for case, row in measured.items()]
    lines.append(f"{'bar':<34}" + "".join(f"{BARS.get(name, ''):>11}" for name in names))
    return "\n".join(lines) + "\nadd_ms: milliseconds for one task. mib: on the disk."


def measure(rows: int = ROWS) -> dict[str, dict[str, float]]:
    """All cases."""
    return {
        f"{rows:,} rows, 100 a task": measure_rows(100, rows),
        f"{rows:,} rows, 10 a task": measure_rows(10, rows),
        f"{rows:,} rows, 10 a task, journal": measure_rows(10, rows, compact=False),
        f"{rows // 10:,} rows, 1 a task, journal": measure_rows(1, rows // 10, compact=False),
    }


def rows(measured: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """A row per case."""
    for case, row in measured.items():
        about = {"what": f"{case}: written, read, aggregated", "value": row["total"], "unit": "s"}
        yield about | {"bar": BARS["total"], "at": "most", "ratio": row["total"] / row["floor"], "seconds": row}
