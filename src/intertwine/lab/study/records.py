"""Results of tasks, and their two forms on disk: JSON lines of an append-only journal, and Parquet shards."""

from __future__ import annotations

import io
import json
import os
import struct
import uuid
import weakref
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from intertwine.errors import InputError
from intertwine.files import atomic_replace

try:
    import fcntl
except ImportError:  # Windows has no file locks of this kind
    fcntl = None

#: The columns of a table of results, in their order.
COLUMNS = (
    "study", "key", "verb", "zoo", "a", "b", "layer", "other_layer", "options", "repeat", "quantity", "index", "value",
    "low", "high", "note", "seconds", "peak_mib", "version", "torch", "python", "git", "command", "made_at",
)  # fmt: skip
NUMBERS = frozenset({"index", "value", "low", "high", "seconds", "peak_mib"})


@dataclass(frozen=True)
class ResultRow:
    """One number that a verb computed, or the reason why there is none.

    Attributes:
        quantity: its name, such as "linear_cka".
        value: None if `note` gives a reason.
        low, high: an interval around it.
        index: its position on a curve, such as α, or the share of parameters left.
        layer, other_layer: of the first and of the second network.
    """

    quantity: str
    value: float | None
    low: float | None = None
    high: float | None = None
    index: float | None = None
    layer: str | None = None
    other_layer: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class FinishedTask:
    """A task that ran: its rows, its cost and its provenance; `error` if it failed."""

    key: str
    task: Mapping[str, Any]
    rows: tuple[ResultRow, ...]
    seconds: float
    peak_mib: float | None = None
    made: Mapping[str, str | None] = field(default_factory=dict)
    error: str | None = None


# -- Journals ----------------------------------------------------------------------------------------------------------


ROW_COLUMNS = tuple(field.name for field in fields(ResultRow))
TASK_TEXTS = ("verb", "zoo", "a", "b", "layer")
MADE = ("version", "torch", "python", "git", "command", "made_at")
START, DONE, FAILED = b'{"crc":"', b'"ok":true,"key":"', b'"ok":false,"key":"'
HEAD = len(START) + 8 + len(b'",')  # the checksum has eight hexadecimal digits
PACKED_FROM = 8  # columns with fewer numbers stay readable

_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class Journal:
    """An open journal file, locked by this process so that others see that its writer is alive."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle
        self._torn = False
        self.close = weakref.finalize(self, os.close, handle)  # also unlocks the file

    @classmethod
    def new(cls, folder: Path) -> Journal:
        """Create a journal in a folder."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        while True:
            # Names sort by time, and are unique across machines.
            path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex}.jsonl"
            journal = cls(path, os.open(path, flags, 0o666))
            if journal._lock() is not False:
                return journal
            journal.close()  # another process compacted the file before it was locked

    @classmethod
    def abandoned(cls, path: Path) -> Journal | None:
        """A journal whose writer has ended; None if the writer is alive, or if that is unknown."""
        try:
            journal = cls(path, os.open(path, os.O_RDWR))
        except FileNotFoundError:
            return None
        if journal._lock():
            return journal
        journal.close()
        return None

    def _lock(self) -> bool | None:
        """False if another process holds the file or it is gone; None if the system has no locks."""
        if fcntl is None:
            return None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return os.fstat(self._handle).st_nlink > 0

    def add(self, line: bytes) -> None:
        """Append a line. When this returns, the operating system has it: killing the process cannot undo it."""
        rest = memoryview(b"\n" + line if self._torn else line)
        self._torn = True  # until all of it is written; after a partial write, the next line starts on a new line
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        self._torn = False


def encode(finished: FinishedTask) -> bytes:
    """The journal line of a task: a checksum of the rest, the outcome, the key, then rows column by column.

    The fixed start makes `done` fast. Empty columns are left out, a text that all rows share is written once, and long
    columns of numbers are packed in base64.

    >>> encode(FinishedTask("k1", {"verb": "fold"}, (ResultRow("penalty", 0.5),), 1.0))
    b'{"crc":"...","ok":true,"key":"k1",...'
    """
    key, task, failed = finished.key, finished.task, finished.error is not None
    if not key or not key.isascii() or not key.isprintable() or set(key) & {'"', "\\"}:
        raise InputError(f"A task key must be printable ASCII text without quotes or backslashes, but is {key!r}.")
    if failed and finished.rows:
        raise InputError(
            f"The task {key} has both an error and {len(finished.rows)} rows. Give one of them: a failed task runs "
            "again, and its rows would then be stored twice."
        )
    try:
        about: dict[str, Any] = {name: _as_text(task.get(name)) for name in TASK_TEXTS}
        about |= {name: _as_text(finished.made.get(name)) for name in MADE}
        about["options"] = json.dumps(task.get("options") or {}, sort_keys=True)
        about["repeat"] = None if task.get("repeat") is None else int(task["repeat"])
        about["seconds"] = float(finished.seconds)
        about["peak_mib"] = None if finished.peak_mib is None else float(finished.peak_mib)
        about["error"] = finished.error
        columns = {name: _encode_column(name, list(map(attrgetter(name), finished.rows))) for name in ROW_COLUMNS}
        body = _json({"about": _without_none(about), "count": len(finished.rows), "rows": _without_none(columns)})
    except (TypeError, ValueError) as error:
        raise InputError(
            f"The result of task {key} is not plain data ({error}). Use float or int for numbers, and text, None, "
            "lists or dictionaries for everything else."
        ) from error
    # Invalid characters, such as those of a file name in an error message, become "?" instead of losing the task.
    rest = (FAILED if failed else DONE) + key.encode() + b'",' + body[1:].encode("utf-8", "replace")
    return b'%s%08x",%s\n' % (START, crc32(rest), rest)


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, sort_keys=True)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _encode_column(name: str, column: list[Any]) -> list[Any] | str | None:
    """A column of one type, because one odd value would change the type of the column in the whole table."""
    kinds = set(map(type, column))
    if kinds <= {type(None)}:
        return None
    if name in NUMBERS:
        if not kinds <= {float, type(None)}:
            column = [None if value is None else float(value) for value in column]
        if len(column) < PACKED_FROM or None in column:
            return column
        return b2a_base64(struct.pack(f"<{len(column)}d", *column), newline=False).decode()
    if not kinds <= ({str} if name == "quantity" else {str, type(None)}):
        raise TypeError(f"{name} is {', '.join(sorted(kind.__name__ for kind in kinds))}, not text")
    return column[0] if column.count(column[0]) == len(column) else column


def entries(path: Path, problems: list[str]) -> Iterator[bytes]:
    """The intact lines of a journal, without their checksums; damaged lines are added to `problems`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            rest = line[HEAD:-1]
            if line.startswith(START) and line.endswith(b"\n") and line[len(START) : HEAD - 2] == b"%08x" % crc32(rest):
                yield rest
            elif line.strip():
                problems.append(
                    f"{path}, line {number} is damaged, incomplete, or still being written. It is skipped; its task "
                    "counts as not done."
                )


def head(entry: bytes) -> tuple[str, bool]:
    """The key of an entry, and whether its task succeeded."""
    done = entry.startswith(DONE)
    start = len(DONE if done else FAILED)
    return entry[start : entry.index(b'"', start)].decode(), done


def once_each(entries: Iterable[bytes]) -> list[bytes]:
    """One entry per task: the first that succeeded, else the last."""
    kept: dict[str, tuple[bytes, bool]] = {}
    for entry in entries:
        key, done = head(entry)
        if key not in kept or not kept[key][1]:
            kept[key] = entry, done
    return [entry for entry, _ in kept.values()]


def decode(entry: bytes) -> dict[str, Any]:
    """An entry as data: ok, key, about, count, rows (name → column)."""
    task = json.loads(b"{" + entry)
    rows, count = task["rows"], task["count"]
    for name, column in rows.items():
        if isinstance(column, str):
            rows[name] = struct.unpack(f"<{count}d", a2b_base64(column)) if name in NUMBERS else [column] * count
    return task


# -- Shards ------------------------------------------------------------------------------------------------------------


#: A task without results is one row without a quantity; `error` says why if it failed.
SHARD_COLUMNS = (*COLUMNS, "error")
TASK_COLUMNS = tuple(name for name in SHARD_COLUMNS if name not in ROW_COLUMNS or name == "layer")


def polars() -> Any:
    """The package polars, from the extra `frames`."""
    try:
        return import_module("polars")
    except ImportError as error:
        raise InputError(
            "Tables of a study need polars, which is not installed: pip install 'intertwine[frames]'. Tasks run and "
            "are stored without it; nothing is lost."
        ) from error


def schema(names: Iterable[str]) -> dict[str, Any]:
    """The type of each column.

    >>> schema(["key", "value", "repeat"])
    {'key': String, 'value': Float64, 'repeat': Int64}
    """
    pl = polars()
    return {name: pl.Float64 if name in NUMBERS else pl.Int64 if name == "repeat" else pl.String for name in names}


def table(tasks: Iterable[dict[str, Any]], study: str) -> Any:
    """Decoded journal entries as one table with the columns of a shard.

    >>> line = {"key": "k", "about": {"verb": "fold", "layer": "1"}, "count": 1, "rows": {"quantity": ["penalty"]}}
    >>> table([line], "mine").select("study", "key", "verb", "layer", "quantity").row(0)
    ('mine', 'k', 'fold', '1', 'penalty')
    """
    pl = polars()
    counts: list[int] = []
    of_task: dict[str, list[Any]] = {name: [] for name in TASK_COLUMNS}
    of_row: dict[str, list[Any]] = {name: [] for name in ROW_COLUMNS}
    for task in tasks:  # one by one: with all of them in memory, Python's garbage collection takes most of the time
        about, count = task["about"] | {"study": study, "key": task["key"]}, max(task["count"], 1)
        counts.append(count)
        for name, column in of_task.items():
            column.append(about.get(name))
        for name, column in of_row.items():
            column += task["rows"].get(name) or [None] * count
    rows = pl.DataFrame(of_row, schema=schema(ROW_COLUMNS))
    repeated = pl.DataFrame(of_task, schema=schema(TASK_COLUMNS))[np.repeat(np.arange(len(counts)), counts)]
    rows = rows.with_columns(layer=pl.coalesce(rows["layer"], repeated["layer"]))
    return repeated.drop("layer").hstack(rows).select(SHARD_COLUMNS)


def write_shard(path: Path, rows: Any) -> None:
    """Write a table as a Parquet file, atomically."""
    memory = io.BytesIO()
    rows.write_parquet(memory, compression="zstd")
    with atomic_replace(path) as part:
        part.write_bytes(memory.getbuffer())


def read_shard(path: Path, columns: Sequence[str]) -> Any:
    """Some columns of a shard."""
    pl = polars()
    try:
        rows = pl.read_parquet(path, columns=list(columns), glob=False).select(columns)  # a path may hold brackets
        for name, kind in schema(columns).items():
            if rows.schema[name] != kind:
                raise ValueError(f"its column {name} holds {rows.schema[name]} instead of {kind}")
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        raise InputError(
            f"{path} is damaged or not a shard of a study ({str(error).splitlines()[0]}). Copy it again from its "
            "source, or delete it and run the plan again: only its tasks are repeated."
        ) from error
    return rows


def with_options(rows: Any) -> Any:
    """The table with a column `option_NAME` for every option of the tasks.

    A column keeps its type if all values are numbers, or all are booleans; mixed values and lists become text.
    """
    texts = rows["options"].unique().sort()
    parsed = [json.loads(text) for text in texts]
    names = sorted({name for options in parsed for name in options})
    if not names:
        return rows
    columns = {f"option_{name}": _option_column([options.get(name) for options in parsed]) for name in names}
    known = polars().DataFrame({"options": texts, **columns})
    return rows.join(known, on="options", how="left", maintain_order="left")


def _option_column(values: list[Any]) -> Any:
    pl = polars()
    kinds = {type(value) for value in values if value is not None}
    for plain, kind in (({bool}, pl.Boolean), ({int}, pl.Int64), ({int, float}, pl.Float64), ({str}, pl.String)):
        if kinds and kinds <= plain:
            return pl.Series(values, dtype=kind)
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pl.Series(texts, dtype=pl.String)
