"""Shards: the tables of a study as Parquet files, and how lines of a journal become such a table."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from intertwine.errors import InputError
from intertwine.files import whole
from intertwine.study.journal import NUMBERS, ROW
from intertwine.study.rows import COLUMNS

#: A shard has these: a task that found nothing is one row without a quantity, and `error` says why if it failed.
SHARD_COLUMNS = (*COLUMNS, "error")
TASK_COLUMNS = tuple(name for name in SHARD_COLUMNS if name not in ROW or name == "layer")


def polars() -> Any:
    """The package, for those who have the extra `frames`."""
    try:
        return import_module("polars")
    except ImportError as error:
        raise InputError(
            "Tables of a study are read and written by polars, which is not installed: pip install "
            "'intertwine[frames]'. Tasks run and are stored without it; nothing is lost."
        ) from error


def schema(names: Iterable[str]) -> dict[str, Any]:
    """The type of each column, whatever is in it.

    >>> schema(["key", "value", "repeat"])
    {'key': String, 'value': Float64, 'repeat': Int64}
    """
    pl = polars()
    return {name: pl.Float64 if name in NUMBERS else pl.Int64 if name == "repeat" else pl.String for name in names}


def table(tasks: Iterable[dict[str, Any]], study: str) -> Any:
    """Decoded lines of journals as one table with the columns of a shard.

    >>> line = {"key": "k", "about": {"verb": "fold", "layer": "1"}, "count": 1, "rows": {"quantity": ["penalty"]}}
    >>> table([line], "mine").select("study", "key", "verb", "layer", "quantity").row(0)
    ('mine', 'k', 'fold', '1', 'penalty')
    """
    pl = polars()
    counts: list[int] = []
    of_task: dict[str, list[Any]] = {name: [] for name in TASK_COLUMNS}
    of_row: dict[str, list[Any]] = {name: [] for name in ROW}
    for task in tasks:  # taken one by one: keeping all of them makes Python's collector of garbage the slowest part
        about, rows, count = task["about"] | {"study": study, "key": task["key"]}, task["rows"], max(task["count"], 1)
        counts.append(count)
        for name, column in of_task.items():
            column.append(about.get(name))
        for name, column in of_row.items():
            column += rows.get(name) or [None] * count
    each = pl.DataFrame(of_row, schema=schema(ROW))
    whole = pl.DataFrame(of_task, schema=schema(TASK_COLUMNS))[np.repeat(np.arange(len(counts)), counts)]
    each = each.with_columns(layer=pl.coalesce(each["layer"], whole["layer"]))
    return whole.drop("layer").hstack(each).select(SHARD_COLUMNS)


def write_shard(path: Path, rows: Any) -> None:
    """Write a table as a Parquet file that is whole or not there, also after a power cut."""
    memory = io.BytesIO()
    rows.write_parquet(memory, compression="zstd")
    with whole(path) as part:
        part.write_bytes(memory.getbuffer())


def read_shard(path: Path, columns: Sequence[str]) -> Any:
    """Some columns of a shard."""
    pl = polars()
    try:
        found = pl.read_parquet(path, columns=list(columns), glob=False).select(columns)  # a name may hold brackets
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _no_shard(path, str(error).splitlines()[0]) from error
    for name, kind in schema(columns).items():
        if found.schema[name] != kind:
            raise _no_shard(path, f"its column {name} holds {found.schema[name]} instead of {kind}")
    return found


def _no_shard(path: Path, why: str) -> InputError:
    return InputError(
        f"{path} was to be read, but it is damaged or no shard of a study ({why}). Copy it again from where the folder "
        "came from; or delete it and run the plan again: only its tasks are repeated."
    )


def with_options(rows: Any) -> Any:
    """The same table with a column `option_NAME` for every option that some task has.

    Numbers stay numbers where all values of an option are; true and false likewise. Mixed ones and lists become text.
    """
    pl = polars()
    texts = rows["options"].unique().sort()
    parsed = [json.loads(text) for text in texts]
    names = sorted({name for options in parsed for name in options})
    columns = {f"option_{name}": _column([options.get(name) for options in parsed]) for name in names}
    if not names:
        return rows
    known = pl.DataFrame({"options": texts, **columns})
    return rows.join(known, on="options", how="left", maintain_order="left")


def _column(values: list[Any]) -> Any:
    pl = polars()
    kinds = {type(value) for value in values if value is not None}
    for plain, kind in (({bool}, pl.Boolean), ({int}, pl.Int64), ({int, float}, pl.Float64), ({str}, pl.String)):
        if kinds and kinds <= plain:
            return pl.Series(values, dtype=kind)
    as_text = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pl.Series(as_text, dtype=pl.String)
