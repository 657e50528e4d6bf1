"""Tables of the report: what ran and what failed, all result rows, the plan and the versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from textwrap import shorten
from typing import Any, TypeAlias

from intertwine.lab.report.charts import grouped
from intertwine.lab.report.entries import TASK_COLUMNS, Entry, StudyResults, TaskRecord
from intertwine.lab.report.naming import Commands, counted, duration, linked, short, written
from intertwine.lab.report.views import PageSection, heads, html_table, scrolled
from intertwine.lab.study.records import COLUMNS

#: A task that failed, from `Store.errors`: its columns, and `error`.
Failure: TypeAlias = Mapping[str, Any]
MAX_FAILURES = 50
VERSIONS = ("version", "torch", "python", "git")
#: The number comes early, because a phone shows only the first columns.
SHOWN = (
    "quantity", "value", "low", "high", "index", "layer", "other_layer", "a", "b", "zoo", "options", "repeat", "note",
    "seconds",
)  # fmt: skip
STATIC_ROWS = 100  # of each verb, for readers without JavaScript
ROW_COLUMNS = ("quantity", "layer", "other_layer", "note", "index", "value", "low", "high")
NUMBERS = {"repeat", "seconds", "peak_mib", "index", "value", "low", "high"}


# -- Overview ----------------------------------------------------------------------------------------------------------


def summary(results: StudyResults, failures: Sequence[Failure]) -> str:
    """The study in a few sentences of plain text."""
    time = duration(sum(task.seconds for task in results.tasks) + sum(f.get("seconds") or 0.0 for f in failures))
    empty = sum(entry.value is None for entry in results.entries)
    ran = f"{counted(len(results.tasks), 'task')} gave {counted(len(results.entries), 'row')} in {time} of computing."
    failed = f" {counted(len(failures), 'task')} failed." if failures else " No task failed."
    return (
        ran + failed + (f" {counted(empty, 'row has', 'rows have')} no value; a note has the reason." if empty else "")
    )


def overview(results: StudyResults, failures: Sequence[Failure], anchors: Mapping[str, str]) -> PageSection:
    """Tasks, rows and time per verb, then the failures. `anchors`: verb → its section."""
    verbs = list(dict.fromkeys([t.verb for t in results.tasks] + [str(f.get("verb")) for f in failures]))
    names = ("verb", "tasks", "failed", "rows", "without value", "time", "most memory")
    head = "".join(f'<th scope="col"{" class=number" if i else ""}>{name}</th>' for i, name in enumerate(names))
    table = html_table(head, ("".join(_verb_row(verb, results, failures, anchors)) for verb in verbs))
    body = scrolled(table, "What ran") if verbs else "<p>Nothing has run.</p>"
    if failures:
        body += "<h3>Tasks that failed</h3>"
    for failure in failures[:MAX_FAILURES]:
        error = escape(failure.get("error") or "")
        body += f"<details><summary>{escape(failure_title(failure))}</summary><pre>{error}</pre></details>"
    if len(failures) > MAX_FAILURES:
        body += f'<p class="said">And {counted(len(failures) - MAX_FAILURES, "more task")} that failed.</p>'
    return PageSection("overview", "What ran", body)


def _verb_row(
    verb: str, results: StudyResults, failures: Sequence[Failure], anchors: Mapping[str, str]
) -> Iterator[str]:
    tasks = [task for task in results.tasks if task.verb == verb]
    failed = [f for f in failures if f.get("verb") == verb]
    entries = results.of(verb)
    seconds = sum(task.seconds for task in tasks) + sum(f.get("seconds") or 0.0 for f in failed)
    memory = max((float(m) for task in tasks if (m := task.about["peak_mib"]) is not None), default=None)
    yield f'<th scope="row"><a href="#{anchors.get(verb, "tables")}">{escape(verb)}</a></th>'
    for count in (len(tasks), len(failed), len(entries), sum(e.value is None for e in entries)):
        yield f'<td class="number">{count:,}</td>'
    yield f'<td class="number">{duration(seconds)}</td>'
    yield f'<td class="number">{"" if memory is None else f"{short(memory)} MiB"}</td>'


def failure_title(failure: Failure) -> str:
    """`stitch cnn-0 cnn-1 at conv3: the last line of the error`."""
    about = [str(failure[name]) for name in ("verb", "zoo", "a", "b", "layer") if failure.get(name) is not None]
    last = (failure.get("error") or "no reason given").strip().splitlines()[-1]
    reason = re.sub(r"^intertwine\.errors\.\w+: ", "", last)
    return f"{' '.join(about)}: {shorten(reason, 160, placeholder=' …')}"


def provenance(tasks: Sequence[TaskRecord], plan: Mapping[str, Any]) -> PageSection:
    """The plan, and the number of tasks by version."""
    groups: dict[tuple[str, ...], list[TaskRecord]] = {}
    for task in tasks:
        groups.setdefault(tuple(task.text(name) for name in VERSIONS), []).append(task)

    def cells(texts: Iterable[str]) -> str:
        return "".join(f"<td>{escape(text or '–')}</td>" for text in texts)

    rows = []
    for found, own in groups.items():
        dates = sorted(task.text("made_at") for task in own)
        count, time = f"{len(own):,}", duration(sum(task.seconds for task in own))
        ends = cells((dates[0], dates[-1]))
        rows.append(f'{cells(found)}<td class="number">{count}</td><td>{time}</td>{ends}')
    table = html_table(heads(("intertwine", *VERSIONS[1:], "tasks", "time", "first", "last")), rows)
    text = escape(json.dumps(plan, indent=2, ensure_ascii=False, default=str))
    return PageSection(
        "plan",
        "Plan, versions and time",
        f"<h3>Versions and time</h3>{scrolled(table, 'Versions and time')}"
        f"<details><summary>the plan as it ran</summary>{scrolled(f'<pre>{text}</pre>', 'Plan')}</details>",
    )


# -- Rows --------------------------------------------------------------------------------------------------------------


def tables(entries: Sequence[Entry], total: int, commands: Commands) -> PageSection:
    """One table per verb, and the data for the script. `entries`: those on the page, of `total`."""
    note = (
        f'<p class="said">{len(entries):,} of {counted(total, "row")} are in this file, evenly chosen, to keep it '
        "small. The result store has all of them.</p>"
    )
    save = '<p class="js"><button type="button" class="save-all">Download all rows as CSV</button></p>'
    made = "".join(_verb_table(verb, own, commands) for verb, own in grouped(entries, lambda e: e.task.verb).items())
    body = f"{note if len(entries) < total else ''}{save}{made}{data(entries, commands)}"
    return PageSection("tables", "Tables", body)


def data(entries: Iterable[Entry], commands: Commands) -> str:
    """The rows as JSON for the script: columns of tasks and of rows, each text once, numbers with all digits."""
    texts: dict[str, int] = {}

    def encoded(column: str, value: Any) -> Any:
        return value if column in NUMBERS or value is None else texts.setdefault(str(value), len(texts))

    rows = list(entries)
    tasks = list({entry.task.number: entry.task for entry in rows}.values())
    position = {task.number: i for i, task in enumerate(tasks)}
    about: dict[str, list[Any]] = {
        name: [encoded(name, task.about[name]) for task in tasks] for name in TASK_COLUMNS if name != "command"
    }
    about["command"] = [commands.number(task.command) for task in tasks]
    own: dict[str, list[Any]] = {name: [encoded(name, getattr(entry, name)) for entry in rows] for name in ROW_COLUMNS}
    own["task"] = [position[entry.task.number] for entry in rows]
    content = {"columns": COLUMNS, "texts": list(texts), "tasks": about, "rows": own}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    # only "</" can end a script element early
    return f'<script type="application/json" id="rows">{text.replace("<", chr(92) + "u003c")}</script>'


def _verb_table(verb: str, entries: list[Entry], commands: Commands) -> str:
    columns = [name for name in SHOWN if any(_value(entry, name) not in (None, "", "{}") for entry in entries)]
    head = "".join(
        f'<th scope="col" data-column="{name}"{_alignment(name)}>{name.replace("_", " ")}</th>' for name in columns
    )
    rows = ("".join(_cell(entry, name, commands) for name in columns) for entry in entries[:STATIC_ROWS])
    shown = f"The first {STATIC_ROWS} of" if len(entries) > STATIC_ROWS else "All"
    caption = f"<caption>{escape(verb)} <small>{shown} {counted(len(entries), 'row')}</small></caption>"
    tools = (
        '<div class="tools js"><label>filter <input type="search" placeholder="words in a row"></label>'
        '<button type="button" class="back">Previous</button><button type="button" class="on">Next</button>'
        '<button type="button" class="save">Download CSV</button></div>'
    )
    table = html_table(head, rows).replace("<table>", f"<table>{caption}", 1)
    name = escape(verb, quote=True)
    return f'<div class="rows" data-verb="{name}">{tools}{scrolled(table, f"Rows of {verb}")}</div>\n'


def _alignment(column: str) -> str:
    return ' class="number"' if column in NUMBERS else ""


def _value(entry: Entry, column: str) -> Any:
    return getattr(entry, column) if column in ROW_COLUMNS else entry.task.about[column]


def _cell(entry: Entry, column: str, commands: Commands) -> str:
    value = _value(entry, column)
    if column == "value":
        return f"<td{_alignment(column)}>{linked(entry.value, commands.of([entry]), entry.note)}</td>"
    if column == "options":
        return f"<td>{escape(', '.join(f'{k}={written(v)}' for k, v in entry.task.options.items()))}</td>"
    if column in NUMBERS and isinstance(value, int | float):
        return f"<td{_alignment(column)}>{short(value)}</td>"
    return f"<td>{'' if value is None else escape(str(value))}</td>"
