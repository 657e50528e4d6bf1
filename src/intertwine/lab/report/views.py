"""Views: pictures of one kind, with a switch for each thing they differ in. Without script all of them are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from intertwine.lab.report.naming import counted


@dataclass(frozen=True)
class View:
    """A picture and what belongs to it.

    Attributes:
        choice: the setting of each switch under which it is seen. caption: plain text that says what is seen.
        body: HTML. marks: how many numbers it draws.
    """

    choice: tuple[str, ...]
    caption: str
    body: str
    marks: int


@dataclass(frozen=True)
class PageSection:
    """A part of the page. `body` is HTML."""

    anchor: str
    heading: str
    body: str


def family(switches: Sequence[str], views: Iterable[View], total: int, most: int) -> str:
    """Pictures behind switches, until `most` marks are drawn; what is left out is said.

    `views` is asked for one picture at a time, so that those left out cost nothing.
    """
    drawn: list[View] = []
    for view in views:
        drawn.append(view)
        if sum(v.marks for v in drawn) >= most:
            break
    labels = [list(dict.fromkeys(view.choice[i] for view in drawn)) for i in range(len(switches))]
    made = "".join(_figure(view, labels) for view in drawn)
    return f'<div class="family">{_left_out(len(drawn), total)}{_switches(switches, labels)}{made}</div>'


def numbers(
    caption: str, corner: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], word: str = "Numbers"
) -> str:
    """The numbers of a picture as a folded table. Cells are HTML, names are plain text."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in (corner, *columns))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    return (
        f"<details><summary>{escape(word)}</summary>"
        f"{scrolled(f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>', caption)}</details>"
    )


def scrolled(html: str, label: str, kind: str = "") -> str:
    """Something wide in a frame that scrolls by itself, by keyboard too."""
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">{html}</div>'
    )


def _figure(view: View, labels: list[list[str]]) -> str:
    choice = ",".join(str(labels[i].index(label)) for i, label in enumerate(view.choice))
    return f'<figure data-choice="{choice}"><figcaption>{escape(view.caption)}</figcaption>{view.body}</figure>\n'


def _switches(switches: Sequence[str], labels: list[list[str]]) -> str:
    """One list of choices per switch. A switch with one choice stays, hidden: the places of the others count on it."""
    made = []
    for name, found in zip(switches, labels, strict=True):
        options = "".join(f'<option value="{i}">{escape(label)}</option>' for i, label in enumerate(found))
        hidden = " hidden" if len(found) < 2 else ""
        made.append(f"<label{hidden}>{escape(name)} <select>{options}</select></label>")
    return f'<div class="switches js">{"".join(made)}</div>' if any(len(found) > 1 for found in labels) else ""


def _left_out(drawn: int, total: int) -> str:
    if drawn == total:
        return ""
    return f'<p class="said">{drawn:,} of {counted(total, "picture")} are drawn, to keep this file small.</p>'
