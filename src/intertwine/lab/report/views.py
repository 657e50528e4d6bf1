"""HTML parts of the report: sections, tables, scrollable frames, and pictures behind switches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from intertwine.lab.report.naming import counted


@dataclass(frozen=True)
class View:
    """A picture.

    Attributes:
        choice: the value of each switch that shows it.
        caption: plain text.
        body: HTML.
        marks: how many numbers it draws.
    """

    choice: tuple[str, ...]
    caption: str
    body: str
    marks: int


@dataclass(frozen=True)
class PageSection:
    """A section of the page; `body` is HTML."""

    anchor: str
    heading: str
    body: str


def family(switches: Sequence[str], views: Iterable[View], total: int, most: int) -> str:
    """Pictures with one switch per property, as many as it takes to draw `most` marks.

    Without JavaScript, all of them are shown. `views` is read one by one, so that pictures that are left out cost
    nothing.
    """
    drawn: list[View] = []
    for view in views:
        drawn.append(view)
        if sum(v.marks for v in drawn) >= most:
            break
    labels = [list(dict.fromkeys(view.choice[i] for view in drawn)) for i in range(len(switches))]
    left_out = f"{len(drawn):,} of {counted(total, 'picture')} are drawn, to keep this file small."
    note = f'<p class="said">{left_out}</p>' if len(drawn) < total else ""
    figures = ""
    for view in drawn:
        choice = ",".join(str(labels[i].index(label)) for i, label in enumerate(view.choice))
        figures += (
            f'<figure data-choice="{choice}"><figcaption>{escape(view.caption)}</figcaption>{view.body}</figure>\n'
        )
    return f'<div class="family">{note}{_switches(switches, labels)}{figures}</div>'


def _switches(switches: Sequence[str], labels: list[list[str]]) -> str:
    """A select element per switch. Those with one option are hidden, because the script counts on their positions."""
    made = []
    for name, values in zip(switches, labels, strict=True):
        options = "".join(f'<option value="{i}">{escape(label)}</option>' for i, label in enumerate(values))
        hidden = " hidden" if len(values) < 2 else ""
        made.append(f"<label{hidden}>{escape(name)} <select>{options}</select></label>")
    return f'<div class="switches js">{"".join(made)}</div>' if any(len(values) > 1 for values in labels) else ""


def heads(names: Iterable[str]) -> str:
    """Header cells with these plain-text names."""
    return "".join(f'<th scope="col">{escape(name)}</th>' for name in names)


def html_table(head: str, rows: Iterable[str]) -> str:
    """A table; `head` and `rows` are the HTML of its cells."""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def numbers(caption: str, corner: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """The numbers of a picture as a folded table. Cells are HTML, names are plain text."""
    body = (
        f'<th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}' for name, cells in rows
    )
    table = scrolled(html_table(heads((corner, *columns)), body), caption)
    return f"<details><summary>Numbers</summary>{table}</details>"


def scrolled(html: str, label: str, kind: str = "") -> str:
    """A wide element in a frame that scrolls, also by keyboard."""
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">{html}</div>'
    )
