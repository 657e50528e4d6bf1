"""Facts: a table with one row per network and one column per quantity, every number with its command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from intertwine.report.study.commands import Commands, linked
from intertwine.report.study.curves import dot_of, grouped
from intertwine.report.study.entries import Entry
from intertwine.report.study.naming import Names
from intertwine.report.study.views import scrolled

MOST_ROWS = 100


def facts(entries: Sequence[Entry], columns: Mapping[str, str], commands: Commands, title: str) -> str:
    """The table. `columns`: quantity → what stands above it."""
    groups = grouped(entries, Names.of(entries).in_full)
    shown = [quantity for quantity in columns if any(e.quantity == quantity for e in entries)]
    head = "".join(f'<th scope="col" class="number">{escape(columns[quantity])}</th>' for quantity in shown)
    body = []
    for name, own in list(groups.items())[:MOST_ROWS]:
        of = grouped(own, lambda e: e.quantity)
        dots = [dot_of(0.0, of[quantity], commands) if quantity in of else None for quantity in shown]
        cells = "".join(
            f'<td class="number">{linked(dot.value, dot.commands, dot.note) if dot else ""}</td>' for dot in dots
        )
        body.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    table = f'<table><thead><tr><th scope="col">network</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    left_out = f'<p class="said">{MOST_ROWS} of {len(groups):,} rows.</p>' if len(groups) > MOST_ROWS else ""
    return scrolled(table, title) + left_out


def verdict(good: bool, words: str) -> str:
    """A sentence that begins with a tick or a cross. `words` is HTML."""
    return f"<p><strong>{'✓' if good else '✗'}</strong> {words}</p>"
