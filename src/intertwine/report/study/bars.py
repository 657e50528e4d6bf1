"""Bars: counts by name, the largest first, drawn as a table whose bars grow with the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from intertwine.report.study.commands import linked
from intertwine.report.study.curves import Dot

MOST_BARS = 30


def bar_chart(heading: str, unit: str, bars: Sequence[tuple[str, Dot]]) -> str:
    """One row per name: a bar and its number. Names beyond the largest are folded away."""
    ordered = sorted(bars, key=lambda bar: -(bar[1].value or 0.0))
    longest = max((dot.value or 0.0 for _, dot in ordered), default=0.0) or 1.0
    shown = _table(heading, unit, ordered[:MOST_BARS], longest)
    rest = ordered[MOST_BARS:]
    if not rest:
        return shown
    return f"{shown}<details><summary>{len(rest)} more</summary>{_table(heading, unit, rest, longest)}</details>"


def _table(heading: str, unit: str, bars: Sequence[tuple[str, Dot]], longest: float) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{linked(dot.value, dot.commands, dot.note)}</td>'
        f'<td class="bar"><span style="width:{max(0.0, dot.value or 0.0) / longest:.1%}"></span></td></tr>'
        for name, dot in bars
    )
    head = f'<th scope="col">{escape(heading)}</th><th scope="col">{escape(unit)}</th><td></td>'
    return f'<table class="bars"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
