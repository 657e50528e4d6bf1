"""Entries: the records of a study, checked and split into tasks and what each task found."""

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
    """A polars frame, as far as the report uses one."""

    def to_dicts(self) -> list[dict[str, Any]]: ...


Records: TypeAlias = DataFrameLike | Iterable[Mapping[str, Any]]
#: What a row says about its task; the other columns are the row's own.
ABOUT_THE_TASK = (
    "study", "key", "verb", "zoo", "a", "b", "options", "repeat",
    "seconds", "peak_mib", "version", "torch", "python", "git", "command", "made_at",
)  # fmt: skip
NEEDED = ("verb", "quantity", "value")
NUMBERS = ("index", "value", "low", "high")


@dataclass(frozen=True, eq=False)
class TaskRecord:
    """One task. `about` holds its columns as they came; `options` is read from its JSON text. `number` counts up."""

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
        """A column in words; empty where it has none."""
        found = self.about[column]
        return "" if found is None else str(found)


@dataclass(frozen=True, eq=False)
class Entry:
    """One number, or in `note` the reason why there is none."""

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
    """Everything a study found."""

    name: str
    tasks: tuple[TaskRecord, ...]
    entries: tuple[Entry, ...]

    def of(self, verb: str, *quantities: str) -> list[Entry]:
        """The entries of a verb, all of them or those of some quantities."""
        return [e for e in self.entries if e.task.verb == verb and (not quantities or e.quantity in quantities)]


def read(records: Records) -> StudyResults:
    """The results in a polars frame or in a list of records.

    >>> found = read([{"verb": "fold", "quantity": "accuracy", "value": 0.9, "command": "intertwine fold net"}])
    >>> found.entries[0].value, found.tasks[0].command
    (0.9, 'intertwine fold net')
    """
    tasks: dict[tuple[Any, ...], TaskRecord] = {}
    entries = [_entry(number, record, tasks) for number, record in enumerate(_rows(records))]
    names = list(dict.fromkeys(text for task in tasks.values() if (text := task.text("study"))))
    return StudyResults(", ".join(names), tuple(tasks.values()), tuple(entries))


def _rows(records: Records) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = [*(records.to_dicts() if isinstance(records, DataFrameLike) else records)]
    for row in rows[:1]:
        missing = [name for name in NEEDED if name not in row]
        if missing:
            raise InputError(
                f"A report was asked for, but the records have no column {', '.join(missing)}; they have "
                f"{', '.join(map(str, row))}. Give the frame of a study's store, with the columns "
                f"{', '.join(COLUMNS)}."
            )
    return rows


def _entry(number: int, record: Mapping[str, Any], tasks: dict[tuple[Any, ...], TaskRecord]) -> Entry:
    about = tuple(record.get(name) for name in ABOUT_THE_TASK)
    task = tasks.get(about)
    if task is None:
        named = dict(zip(ABOUT_THE_TASK, about, strict=True))
        task = tasks[about] = TaskRecord(len(tasks), named, _options(number, named["options"]))
    found = {name: _number(number, name, record.get(name)) for name in NUMBERS}
    note = record.get("note")
    if found["value"] is not None and not math.isfinite(found["value"]):
        note = note or f"the value is {found['value']}"
    plain = {name: x if x is not None and math.isfinite(x) else None for name, x in found.items()}
    return Entry(
        task,
        str(record["quantity"]),
        **plain,
        layer=_words(record.get("layer")),
        other_layer=_words(record.get("other_layer")),
        note=_words(note),
    )


def _words(value: object) -> str | None:
    return None if value is None else str(value)


def _number(row: int, column: str, value: object) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else float(value)
    raise InputError(
        f"Row {row} of the records has {column} = {value!r}, which is no number. Give numbers, or None and a note."
    )


def _options(row: int, text: object) -> dict[str, Any]:
    try:
        found = json.loads(str(text)) if text is not None else {}
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise InputError(
            f"Row {row} of the records has options = {text!r}. "
            'Give the options as the text of a JSON object, such as {"beta": 0.1}.'
        )
    return found
