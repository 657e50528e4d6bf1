"""Journal: the finished tasks of one writer, a line of JSON each, on record from the moment `add` returns.

A line opens with a checksum of the rest, whether the task went well, and its key, so that what is done is known without
reading the rest. Rows lie column by column. Columns that are all empty are left out, a text that all rows share stands
there once, and long columns of numbers are packed: writing them out in digits would take most of the time.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
import weakref
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any
from zlib import crc32

from intertwine.errors import InputError
from intertwine.study.rows import Finished, Row

try:
    import fcntl
except ImportError:  # Windows, where a journal is not held
    fcntl = None

ROW = tuple(field.name for field in fields(Row))
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


def encode(finished: Finished) -> bytes:
    """The line of a task.

    >>> encode(Finished("k1", {"verb": "fold"}, (Row("penalty", 0.5),), 1.0))
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


def _about(finished: Finished) -> dict[str, Any]:
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


def _columns(rows: Sequence[Row]) -> dict[str, list[Any] | str]:
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
