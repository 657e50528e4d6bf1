"""Overview: what ran, how long it took and what failed; and at the end of the page the plan and the versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from textwrap import shorten
from typing import Any, TypeAlias

from intertwine.report.study.entries import Results, Task
from intertwine.report.study.naming import counted, duration, short
from intertwine.report.study.views import Section, scrolled

#: What a result store says of a task that ended in an error: the columns of the task, and `error`.
Failure: TypeAlias = Mapping[str, Any]
MOST_FAILURES = 50
VERSIONS = ("version", "torch", "python", "git")


def summary(results: Results, failures: Sequence[Failure]) -> str:
    """The study in one sentence, as plain text."""
    time = duration(sum(task.seconds for task in results.tasks) + sum(f.get("seconds") or 0.0 for f in failures))
    empty = sum(entry.value is None for entry in results.entries)
    said = [
        f"{counted(len(results.tasks), 'task')} gave {counted(len(results.entries), 'row')} in {time} of computing.",
        f"{counted(len(failures), 'task')} failed." if failures else "No task failed.",
        f"{counted(empty, 'row has', 'rows have')} no value, with the reason beside it." if empty else "",
    ]
    return " ".join(part for part in said if part)


def overview(results: Results, failures: Sequence[Failure], anchors: Mapping[str, str]) -> Section:
    """Tasks, rows and time per verb, then the failures. `anchors`: the section of each verb that has one."""
    verbs = list(dict.fromkeys([t.verb for t in results.tasks] + [str(f.get("verb")) for f in failures]))
    rows = "".join(f"<tr>{''.join(_verb(verb, results, failures, anchors))}</tr>" for verb in verbs)
    names = ("verb", "tasks", "failed", "rows", "without value", "time", "most memory")
    head = "".join(f'<th scope="col"{" class=number" if i else ""}>{name}</th>' for i, name in enumerate(names))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    made = scrolled(table, "What ran") if verbs else "<p>Nothing has run.</p>"
    return Section("overview", "What ran", made + _failures(failures))


def _verb(verb: str, results: Results, failures: Sequence[Failure], anchors: Mapping[str, str]) -> Iterable[str]:
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


def provenance(tasks: Sequence[Task], plan: Mapping[str, Any]) -> Section:
    """The plan as it ran, and which versions made how many tasks."""
    groups: dict[tuple[str, ...], list[Task]] = {}
    for task in tasks:
        groups.setdefault(tuple(task.text(name) for name in VERSIONS), []).append(task)
    head = "".join(f'<th scope="col">{n}</th>' for n in ("intertwine", *VERSIONS[1:], "tasks", "time", "first", "last"))
    rows = "".join(f"<tr>{''.join(_version(found, own))}</tr>" for found, own in groups.items())
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    written = escape(json.dumps(plan, indent=2, ensure_ascii=False, default=str))
    return Section(
        "plan",
        "Plan, versions and time",
        f"<h3>Versions and time</h3>{scrolled(table, 'Versions and time')}"
        f"<details><summary>the plan as it ran</summary>{scrolled(f'<pre>{written}</pre>', 'Plan')}</details>",
    )


def _version(found: tuple[str, ...], tasks: list[Task]) -> Iterable[str]:
    yield from (f"<td>{escape(text or '–')}</td>" for text in found)
    yield f'<td class="number">{len(tasks):,}</td><td>{duration(sum(t.seconds for t in tasks))}</td>'
    dates = sorted(t.text("made_at") for t in tasks)
    yield from (f"<td>{escape(date or '–')}</td>" for date in (dates[0], dates[-1]))
