"""Tables of the report: what ran and what failed, all result rows, plan and versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from textwrap import shorten
from typing import Any, TypeAlias

from intertwine.lab.report.charts import grouped
from intertwine.lab.report.entries import ABOUT_THE_TASK, Entry, StudyResults, TaskRecord
from intertwine.lab.report.naming import Commands, counted, duration, linked, short, written
from intertwine.lab.report.views import PageSection, scrolled
from intertwine.lab.study.records import COLUMNS

# ----------------------------------------------------------------------------------------------------
# Overview: what ran, how long it took and what failed; and at the end of the page the plan and the versions.


#: What a result store says of a task that ended in an error: the columns of the task, and `error`.
Failure: TypeAlias = Mapping[str, Any]
MOST_FAILURES = 50
VERSIONS = ("version", "torch", "python", "git")


def summary(results: StudyResults, failures: Sequence[Failure]) -> str:
    """The study in one sentence, as plain text."""
    time = duration(sum(task.seconds for task in results.tasks) + sum(f.get("seconds") or 0.0 for f in failures))
    empty = sum(entry.value is None for entry in results.entries)
    said = [
        f"{counted(len(results.tasks), 'task')} gave {counted(len(results.entries), 'row')} in {time} of computing.",
        f"{counted(len(failures), 'task')} failed." if failures else "No task failed.",
        f"{counted(empty, 'row has', 'rows have')} no value, with the reason beside it." if empty else "",
    ]
    return " ".join(part for part in said if part)


def overview(results: StudyResults, failures: Sequence[Failure], anchors: Mapping[str, str]) -> PageSection:
    """Tasks, rows and time per verb, then the failures. `anchors`: the section of each verb that has one."""
    verbs = list(dict.fromkeys([t.verb for t in results.tasks] + [str(f.get("verb")) for f in failures]))
    rows = "".join(f"<tr>{''.join(_verb(verb, results, failures, anchors))}</tr>" for verb in verbs)
    names = ("verb", "tasks", "failed", "rows", "without value", "time", "most memory")
    head = "".join(f'<th scope="col"{" class=number" if i else ""}>{name}</th>' for i, name in enumerate(names))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    made = scrolled(table, "What ran") if verbs else "<p>Nothing has run.</p>"
    return PageSection("overview", "What ran", made + _failures(failures))


def _verb(verb: str, results: StudyResults, failures: Sequence[Failure], anchors: Mapping[str, str]) -> Iterable[str]:
    tasks = [task for task in results.tasks if task.verb == verb]
    failed = [f for f in failures if f.get("verb") == verb]
    entries = results.of(verb)
    name = f'<a href="#{anchors.get(verb, "tables")}">{escape(verb)}</a>'
    seconds = sum(task.seconds for task in tasks) + sum(f.get("seconds") or 0.0 for f in failed)
    memory = max((float(m) for task in tasks if (m := task.about["peak_mib"]) is not None), default=None)
    yield f'<th scope="row">{name}</th>'
    for count in (len(tasks), len(failed), len(entries), sum(e.value is None for e in entries)):
        yield f'<td class="number">{count:,}</td>'
    yield f'<td class="number">{duration(seconds)}</td>'
    yield f'<td class="number">{"" if memory is None else f"{short(memory)} MiB"}</td>'


def _failures(failures: Sequence[Failure]) -> str:
    made = "".join(
        f"<details><summary>{escape(_task(f))}</summary><pre>{escape(f.get('error') or '')}</pre></details>"
        for f in failures[:MOST_FAILURES]
    )
    left = len(failures) - MOST_FAILURES
    said = f'<p class="said">And {counted(left, "more task")} that failed.</p>' if left > 0 else ""
    return f"<h3>Tasks that failed</h3>{made}{said}" if failures else ""


def _task(found: Failure) -> str:
    """`stitch cnn-0 cnn-1 at conv3: the last line of the error`."""
    about = [str(found[name]) for name in ("verb", "zoo", "a", "b", "layer") if found.get(name) is not None]
    last = (found.get("error") or "no reason given").strip().splitlines()[-1]
    reason = re.sub(r"^intertwine\.errors\.\w+: ", "", last)
    return f"{' '.join(about)}: {shorten(reason, 160, placeholder=' …')}"


def provenance(tasks: Sequence[TaskRecord], plan: Mapping[str, Any]) -> PageSection:
    """The plan as it ran, and which versions made how many tasks."""
    groups: dict[tuple[str, ...], list[TaskRecord]] = {}
    for task in tasks:
        groups.setdefault(tuple(task.text(name) for name in VERSIONS), []).append(task)
    head = "".join(f'<th scope="col">{n}</th>' for n in ("intertwine", *VERSIONS[1:], "tasks", "time", "first", "last"))
    rows = "".join(f"<tr>{''.join(_version(found, own))}</tr>" for found, own in groups.items())
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    written = escape(json.dumps(plan, indent=2, ensure_ascii=False, default=str))
    return PageSection(
        "plan",
        "Plan, versions and time",
        f"<h3>Versions and time</h3>{scrolled(table, 'Versions and time')}"
        f"<details><summary>the plan as it ran</summary>{scrolled(f'<pre>{written}</pre>', 'Plan')}</details>",
    )


def _version(found: tuple[str, ...], tasks: list[TaskRecord]) -> Iterable[str]:
    yield from (f"<td>{escape(text or '–')}</td>" for text in found)
    yield f'<td class="number">{len(tasks):,}</td><td>{duration(sum(t.seconds for t in tasks))}</td>'
    dates = sorted(t.text("made_at") for t in tasks)
    yield from (f"<td>{escape(date or '–')}</td>" for date in (dates[0], dates[-1]))


# ----------------------------------------------------------------------------------------------------
# Tables: the rows of a study, held once as compact data, and a table per verb that sorts, filters and saves.


#: The number comes first: on a phone only the first columns are seen.
SHOWN = (
    "quantity", "value", "low", "high", "index", "layer", "other_layer", "a", "b", "zoo", "options", "repeat", "note",
    "seconds",
)  # fmt: skip
STATIC_ROWS = 100  # of each verb, for readers without script
OWN = ("quantity", "layer", "other_layer", "note", "index", "value", "low", "high")
NUMBERS = {"repeat", "seconds", "peak_mib", "index", "value", "low", "high"}


def tables(entries: Sequence[Entry], total: int, commands: Commands) -> PageSection:
    """One table per verb, and the data behind them. `entries`: those kept out of `total`."""
    said = ""
    if len(entries) < total:
        said = (
            f'<p class="said">{len(entries):,} of {counted(total, "row")} are in this file, evenly chosen, to keep it '
            "small. The result store has all of them.</p>"
        )
    save = '<p class="js"><button type="button" class="save-all">Download all rows as CSV</button></p>'
    made = "".join(_table(verb, own, commands) for verb, own in grouped(entries, lambda e: e.task.verb).items())
    return PageSection("tables", "Tables", f"{said}{save}{made}{data(entries, commands)}")


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
