"""Tables: the rows of a study, held once as compact data, and a table per verb that sorts, filters and saves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from intertwine.report.study.commands import Commands, linked
from intertwine.report.study.curves import grouped
from intertwine.report.study.entries import ABOUT_THE_TASK, Entry
from intertwine.report.study.naming import counted, short, written
from intertwine.report.study.views import Section, scrolled
from intertwine.study.rows import COLUMNS

#: The number comes first: on a phone only the first columns are seen.
SHOWN = (
    "quantity", "value", "low", "high", "index", "layer", "other_layer", "a", "b", "zoo", "options", "repeat", "note",
    "seconds",
)  # fmt: skip
STATIC_ROWS = 100  # of each verb, for readers without script
OWN = ("quantity", "layer", "other_layer", "note", "index", "value", "low", "high")
NUMBERS = {"repeat", "seconds", "peak_mib", "index", "value", "low", "high"}


def tables(entries: Sequence[Entry], total: int, commands: Commands) -> Section:
    """One table per verb, and the data behind them. `entries`: those kept out of `total`."""
    said = ""
    if len(entries) < total:
        said = (
            f'<p class="said">{len(entries):,} of {counted(total, "row")} are in this file, evenly chosen, to keep it '
            "small. The result store has all of them.</p>"
        )
    save = '<p class="js"><button type="button" class="save-all">Download all rows as CSV</button></p>'
    made = "".join(_table(verb, own, commands) for verb, own in grouped(entries, lambda e: e.task.verb).items())
    return Section("tables", "Tables", f"{said}{save}{made}{data(entries, commands)}")


def data(entries: Iterable[Entry], commands: Commands) -> str:
    """The rows for the script: columns of tasks and of rows, each text written once.

    Numbers keep all their digits.
    """
    texts: dict[str, int] = {}

    def encoded(column: str, value: Any) -> Any:
        return value if column in NUMBERS or value is None else texts.setdefault(str(value), len(texts))

    rows = list(entries)
    tasks = list({entry.task.number: entry.task for entry in rows}.values())
    place = {task.number: i for i, task in enumerate(tasks)}
    about: dict[str, list[Any]] = {
        name: [encoded(name, task.about[name]) for task in tasks] for name in ABOUT_THE_TASK if name != "command"
    }
    about["command"] = [commands.number(task.command) for task in tasks]
    own: dict[str, list[Any]] = {name: [encoded(name, getattr(entry, name)) for entry in rows] for name in OWN}
    own["task"] = [place[entry.task.number] for entry in rows]
    text = json.dumps(
        {"columns": COLUMNS, "texts": list(texts), "tasks": about, "rows": own},
        separators=(",", ":"),
        ensure_ascii=False,
    )
    # inside a script element nothing but "</" could end it early
    return f'<script type="application/json" id="rows">{text.replace("<", chr(92) + "u003c")}</script>'


def _table(verb: str, entries: list[Entry], commands: Commands) -> str:
    columns = [name for name in SHOWN if any(_plain(entry, name) not in (None, "", "{}") for entry in entries)]
    head = "".join(
        f'<th scope="col" data-column="{name}"{_side(name)}>{name.replace("_", " ")}</th>' for name in columns
    )
    body = "".join(
        f"<tr>{''.join(_cell(entry, name, commands) for name in columns)}</tr>" for entry in entries[:STATIC_ROWS]
    )
    shown = f"The first {STATIC_ROWS} of" if len(entries) > STATIC_ROWS else "All"
    caption = f"{escape(verb)} <small>{shown} {counted(len(entries), 'row')}</small>"
    tools = (
        '<div class="tools js"><label>filter <input type="search" placeholder="words in a row"></label>'
        '<button type="button" class="back">Previous</button><button type="button" class="on">Next</button>'
        '<button type="button" class="save">Download CSV</button></div>'
    )
    table = f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    named = escape(verb, quote=True)
    return f'<div class="rows" data-verb="{named}">{tools}{scrolled(table, f"Rows of {verb}")}</div>\n'


def _side(column: str) -> str:
    """Numbers stand on the right of their column, so that their digits are below each other."""
    return ' class="number"' if column in NUMBERS else ""


def _plain(entry: Entry, column: str) -> Any:
    return getattr(entry, column) if column in OWN else entry.task.about[column]


def _cell(entry: Entry, column: str, commands: Commands) -> str:
    found = _plain(entry, column)
    if column == "value":
        return f"<td{_side(column)}>{linked(entry.value, commands.of([entry]), entry.note)}</td>"
    if column == "options":
        return f"<td>{escape(', '.join(f'{k}={written(v)}' for k, v in entry.task.options.items()))}</td>"
    if column in NUMBERS and isinstance(found, int | float):
        return f"<td{_side(column)}>{short(found)}</td>"
    return f"<td>{'' if found is None else escape(str(found))}</td>"
