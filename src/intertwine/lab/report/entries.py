"""The result rows of a study, checked and split into tasks and entries."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from intertwine.errors import InputError
from intertwine.lab.study.records import COLUMNS


@runtime_checkable
class DataFrameLike(Protocol):
    """A polars data frame, as far as the report uses it."""

    def to_dicts(self) -> list[dict[str, Any]]: ...


Records: TypeAlias = DataFrameLike | Iterable[Mapping[str, Any]]
#: The columns of a task; the others are of the row.
TASK_COLUMNS = (
    "study", "key", "verb", "zoo", "a", "b", "options", "repeat",
    "seconds", "peak_mib", "version", "torch", "python", "git", "command", "made_at",
)  # fmt: skip
REQUIRED = ("verb", "quantity", "value")
NUMBERS = ("index", "value", "low", "high")


@dataclass(frozen=True, eq=False)
class TaskRecord:
    """One task: its number, its columns, and its options parsed from JSON."""

    number: int
    about: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def verb(self) -> str:
        return str(self.about["verb"])

    @property
    def seconds(self) -> float:
        return float(self.about["seconds"] or 0.0)

    @property
    def command(self) -> str | None:
        return self.about["command"]

    def text(self, column: str) -> str:
        """A column as text; empty if it has no value."""
        value = self.about[column]
        return "" if value is None else str(value)


@dataclass(frozen=True, eq=False)
class Entry:
    """One number, or the reason in `note` why there is none."""

    task: TaskRecord
    quantity: str
    value: float | None
    low: float | None
    high: float | None
    index: float | None
    layer: str | None
    other_layer: str | None
    note: str | None


@dataclass(frozen=True, eq=False)
class StudyResults:
    """The results of a study."""

    name: str
    tasks: tuple[TaskRecord, ...]
    entries: tuple[Entry, ...]

    def of(self, verb: str, *quantities: str) -> list[Entry]:
        """The entries of a verb, all of them or those of some quantities."""
        return [e for e in self.entries if e.task.verb == verb and (not quantities or e.quantity in quantities)]


def read(records: Records) -> StudyResults:
    """The results in a polars data frame or in a list of records.

    >>> found = read([{"verb": "fold", "quantity": "accuracy", "value": 0.9, "command": "intertwine fold net"}])
    >>> found.entries[0].value, found.tasks[0].command
    (0.9, 'intertwine fold net')
    """
    rows: list[Mapping[str, Any]] = [*(records.to_dicts() if isinstance(records, DataFrameLike) else records)]
    missing = [name for name in REQUIRED if rows and name not in rows[0]]
    if missing:
        raise InputError(
            f"The records have no column {', '.join(missing)}, only {', '.join(map(str, rows[0]))}. Give the data "
            f"frame of a study's store, with the columns {', '.join(COLUMNS)}."
        )
    tasks: dict[tuple[Any, ...], TaskRecord] = {}
    entries = tuple(_entry(number, row, tasks) for number, row in enumerate(rows))
    names = dict.fromkeys(text for task in tasks.values() if (text := task.text("study")))
    return StudyResults(", ".join(names), tuple(tasks.values()), entries)


def _entry(number: int, record: Mapping[str, Any], tasks: dict[tuple[Any, ...], TaskRecord]) -> Entry:
    values = tuple(record.get(name) for name in TASK_COLUMNS)
    task = tasks.get(values)
    if task is None:
        about = dict(zip(TASK_COLUMNS, values, strict=True))
        task = tasks[values] = TaskRecord(len(tasks), about, _options(number, about["options"]))
    index, value, low, high = (_number(number, name, record.get(name)) for name in NUMBERS)
    layer, other_layer, note = (
        None if (text := record.get(name)) is None else str(text) for name in ("layer", "other_layer", "note")
    )
    if value is not None and not math.isfinite(value):
        note = note or f"the value is {value}"
    value, low, high, index = (x if x is not None and math.isfinite(x) else None for x in (value, low, high, index))
    return Entry(task, str(record["quantity"]), value, low, high, index, layer, other_layer, note)


def _number(row: int, column: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise InputError(f"{column} must be a number, or None with a note, but is {value!r} in row {row} of the records.")


def _options(row: int, text: object) -> dict[str, Any]:
    try:
        options = json.loads(str(text)) if text is not None else {}
    except json.JSONDecodeError:
        options = None
    if not isinstance(options, dict):
        raise InputError(
            f'options must be the text of a JSON object, such as {{"beta": 0.1}}, but is {text!r} in row {row} of the '
            "records."
        )
    return options
