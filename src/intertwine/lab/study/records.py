"""Result rows and their two forms on disk: lines of an append-only journal, and Parquet shards."""

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

# ----------------------------------------------------------------------------------------------------
# Rows: what a task of a study finds, and what is kept of the task beside it.


#: The columns of a table of results, in their order.
COLUMNS = (
    "study", "key", "verb", "zoo", "a", "b", "layer", "other_layer", "options", "repeat", "quantity", "index", "value",
    "low", "high", "note", "seconds", "peak_mib", "version", "torch", "python", "git", "command", "made_at",
)  # fmt: skip


@dataclass(frozen=True)
class ResultRow:
    """One number that a verb found, or the reason why there is none.

    Attributes:
        quantity: what it is, such as "linear_cka". value: None where `note` says why.
        low, high: an interval around it. index: its place along a curve, such as α, or the share of parameters left.
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
    """A task that has run: its rows, what it cost, and what made it. `error`: why it has none."""

    key: str
    task: Mapping[str, Any]
    rows: tuple[ResultRow, ...]
    seconds: float
    peak_mib: float | None = None
    made: Mapping[str, str | None] = field(default_factory=dict)
    error: str | None = None


# ----------------------------------------------------------------------------------------------------
# Journal: the finished tasks of one writer, a line of JSON each, on record from the moment `add` returns.
#
# A line opens with a checksum of the rest, whether the task went well, and its key, so that what is done is known without
# reading the rest. Rows lie column by column. Columns that are all empty are left out, a text that all rows share stands
# there once, and long columns of numbers are packed: writing them out in digits would take most of the time.


try:
    import fcntl
except ImportError:  # Windows, where a journal is not held
    fcntl = None

ROW = tuple(field.name for field in fields(ResultRow))
TASK_TEXT = ("verb", "zoo", "a", "b", "layer")
MADE = ("version", "torch", "python", "git", "command", "made_at")
NUMBERS = frozenset({"index", "value", "low", "high", "seconds", "peak_mib"})
START, DONE, FAILED = b'{"crc":"', b'"ok":true,"key":"', b'"ok":false,"key":"'
PACKED_FROM = 8  # numbers in a column; shorter ones stay readable
HEAD = len(START) + 8 + len(b'",')  # the checksum is eight hexadecimal digits

_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class Journal:
    """An open journal file, locked by this process: others see that its writer still runs."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle
        self._torn = False
        self._close = weakref.finalize(self, os.close, handle)

    @classmethod
    def new(cls, folder: Path) -> Journal:
        """A journal of one's own."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        while True:
            # The time makes names sort by age, the rest makes them unique on any number of machines.
            path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex}.jsonl"
            found = cls(path, os.open(path, flags, 0o666))
            if found._hold() is not False:
                return found
            found.close()  # someone who gathers journals was quicker than our lock

    @classmethod
    def left_behind(cls, path: Path) -> Journal | None:
        """A journal whose writer has ended; None where it still runs, or where that cannot be known."""
        try:
            found = cls(path, os.open(path, os.O_RDWR))
        except FileNotFoundError:
            return None
        if found._hold():
            return found
        found.close()
        return None

    def _hold(self) -> bool | None:
        """False where another process holds the file or it is gone, None where this disk or system knows no locks."""
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
        """Append a line. It is the system's when this returns: killing the process does not undo it."""
        rest = memoryview(b"\n" + line if self._torn else line)
        self._torn = True  # until all of it is written: what follows a broken piece begins on a line of its own
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        self._torn = False

    def close(self) -> None:
        """Let the file go."""
        self._close()


def encode(finished: FinishedTask) -> bytes:
    """The line of a task.

    >>> encode(FinishedTask("k1", {"verb": "fold"}, (ResultRow("penalty", 0.5),), 1.0))
    b'{"crc":"...","ok":true,"key":"k1",...'
    """
    key, failed = finished.key, finished.error is not None
    if not key or not key.isascii() or not key.isprintable() or set(key) & {'"', "\\"}:
        raise InputError(f"A task has the key {key!r}; a key is plain ASCII text without quotes or backslashes.")
    if failed and finished.rows:
        raise InputError(
            f"The task {key} was to be stored with an error and {len(finished.rows)} rows. Give either: a failed task "
            "is run again, and its rows would then be there twice."
        )
    try:
        body = _json({"about": _about(finished), "count": len(finished.rows), "rows": _columns(finished.rows)})
    except (TypeError, ValueError) as error:
        raise InputError(
            f"The task {key} was to be stored, but what it found is not plain data ({error}). Give numbers as float or "
            "int, everything else as text, None, or lists and dictionaries of these."
        ) from error
    # Broken characters, as in the name of a file inside an error, are no reason to lose a task: they become "?".
    rest = (FAILED if failed else DONE) + key.encode() + b'",' + body[1:].encode("utf-8", "replace")
    return b'%s%08x",%s\n' % (START, crc32(rest), rest)


def _about(finished: FinishedTask) -> dict[str, Any]:
    """What holds for the whole task, under the names of the table's columns; empty ones are left out."""
    task, made = finished.task, finished.made
    about: dict[str, Any] = {name: _text(task.get(name)) for name in TASK_TEXT}
    about |= {name: _text(made.get(name)) for name in MADE}
    about["options"] = json.dumps(task.get("options") or {}, sort_keys=True)
    about["repeat"] = None if task.get("repeat") is None else int(task["repeat"])
    about["seconds"] = float(finished.seconds)
    about["peak_mib"] = None if finished.peak_mib is None else float(finished.peak_mib)
    about["error"] = finished.error
    return {name: value for name, value in about.items() if value is not None}


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, sort_keys=True)


def _columns(rows: Sequence[ResultRow]) -> dict[str, list[Any] | str]:
    found = {name: list(map(attrgetter(name), rows)) for name in ROW}
    return {
        name: _packed(name, _checked(name, column))
        for name, column in found.items()
        if column.count(None) < len(column)
    }


def _checked(name: str, column: list[Any]) -> list[Any]:
    """A column that holds one kind of value only, for a single odd one would spoil the table of the whole study."""
    kinds = set(map(type, column))
    if name in NUMBERS:
        plain = kinds <= {float, type(None)}
        return column if plain else [None if value is None else float(value) for value in column]
    if not kinds <= ({str} if name == "quantity" else {str, type(None)}):
        raise TypeError(f"{name} is {', '.join(sorted(kind.__name__ for kind in kinds))}, not text")
    return column


def _packed(name: str, column: list[Any]) -> list[Any] | str:
    if name not in NUMBERS:
        return column[0] if column.count(column[0]) == len(column) else column
    if len(column) < PACKED_FROM or None in column:
        return column
    return b2a_base64(struct.pack(f"<{len(column)}d", *column), newline=False).decode()


def _unpacked(name: str, column: list[Any] | str, count: int) -> Sequence[Any]:
    if isinstance(column, list):
        return column
    return struct.unpack(f"<{count}d", a2b_base64(column)) if name in NUMBERS else [column] * count


def entries(path: Path, problems: list[str]) -> Iterator[bytes]:
    """The sound lines of a journal, from behind their checksums; the others are told in `problems`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            rest = line[HEAD:-1]
            if line.startswith(START) and line.endswith(b"\n") and line[len(START) : HEAD - 2] == b"%08x" % crc32(rest):
                yield rest
            elif line.strip():
                problems.append(
                    f"{path}, line {number}: cut short or damaged, or being written just now. It was left out; its "
                    "task counts as not done."
                )


def head(entry: bytes) -> tuple[str, bool]:
    """The key of a sound line, and whether its task went well."""
    done = entry.startswith(DONE)
    start = len(DONE if done else FAILED)
    return entry[start : entry.index(b'"', start)].decode(), done


def once_each(entries: Iterable[bytes]) -> list[bytes]:
    """One sound line per task: the first that went well, else the last."""
    found: dict[str, tuple[bytes, bool]] = {}
    for entry in entries:
        key, done = head(entry)
        if key not in found or not found[key][1]:
            found[key] = entry, done
    return [entry for entry, _ in found.values()]


def decode(entry: bytes) -> dict[str, Any]:
    """A sound line as data: ok, key, about, count, rows (columns under their names)."""
    task = json.loads(b"{" + entry)
    task["rows"] = {name: _unpacked(name, column, task["count"]) for name, column in task["rows"].items()}
    return task


# ----------------------------------------------------------------------------------------------------
# Shards: the tables of a study as Parquet files, and how lines of a journal become such a table.


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
    with atomic_replace(path) as part:
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
