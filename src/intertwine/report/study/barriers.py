"""Barriers: loss and error along the line between two networks, with a slider, and the barrier of every pair."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

from intertwine.report.study.commands import Commands, linked
from intertwine.report.study.curves import Series, beyond, dot_of, gather, grouped, spread, told
from intertwine.report.study.entries import Entry, Results
from intertwine.report.study.lines import HEIGHT, TOP, Axes, frame_of, line_chart
from intertwine.report.study.naming import Names, short
from intertwine.report.study.views import Section, View, family, scrolled
from intertwine.report.svg import element

SWITCHES = ("quantity", "networks")
MOST_BARRIERS = 100  # rows of their table


def barriers(results: Results, commands: Commands, most: int) -> Section | None:
    """The section; None where no barrier was measured."""
    entries = results.of("barrier")
    curves = [e for e in entries if e.index is not None]
    heights = [e for e in entries if e.index is None and e.quantity.endswith("_barrier")]
    if not curves and not heights:
        return None
    names = Names.of(entries)
    groups = grouped(curves, lambda e: (_kind(e), names.pair(e)))

    def views() -> Iterator[View]:
        for choice, own in groups.items():
            yield _view(choice, own, names, commands)

    drawn = family(SWITCHES, views(), len(groups), most) if curves else ""
    return Section("barrier", "Barriers", drawn + (_heights(heights, names, commands) if heights else ""))


def _kind(entry: Entry) -> str:
    """`error` for `error_reset`: what is measured, without how."""
    return entry.quantity.partition("_")[0]


def _way(entry: Entry, names: Names) -> str:
    """How the networks between were made: the options, and what the quantity adds to its kind."""
    added = entry.quantity.partition("_")[2].removesuffix("barrier").strip("_").replace("_", " ")
    return ", ".join(part for part in (names.settings(entry), added) if part)


def _view(choice: tuple[str, str], entries: list[Entry], names: Names, commands: Commands) -> View:
    kind, pair = choice
    series = gather(entries, lambda e: _way(e, names), lambda e: e.index or 0.0, commands)
    first, _, second = pair.partition(" → ")
    title = f"The {kind} of the networks between {first} (t = 0) and {second} (t = 1)"
    axes = Axes(title, "t", kind)
    worst = told(_highest(series))
    said = f" Highest: {worst}." if worst else " No point has a value."
    body = line_chart(axes, series, '<g class="marker js"></g>', _slider(axes, series))
    caption = f"{title}.{said}{spread(series)}{beyond(entries, lambda e: _way(e, names))}"
    return View(choice, caption, body, sum(len(one.dots) for one in series))


def _highest(series: list[Series]) -> Iterator[tuple[Series, float, str]]:
    """Of each series its highest value, and where."""
    for one in series:
        top = max(((dot.value, dot.x) for dot in one.known if dot.value is not None), default=None)
        if top is not None:
            yield one, top[0], f" at t = {short(top[1])}"


def _slider(axes: Axes, series: Sequence[Series]) -> str:
    """A slider over t with what the script needs to move the marker: places in the picture and the numbers there."""
    frame = frame_of(axes, series)
    alphas = sorted({dot.x for one in series for dot in one.dots})
    found = [{dot.x: dot for dot in one.known} for one in series]
    at = [[dots.get(alpha) for alpha in alphas] for dots in found]
    data = {
        "alpha": alphas,
        "x": [round(frame.across(alpha), 1) for alpha in alphas],
        "top": TOP,
        "bottom": HEIGHT,
        "value": [[dot and dot.value for dot in line] for line in at],
        "y": [[dot and dot.value is not None and round(frame.up(dot.value), 1) for dot in line] for line in at],
        "command": [[list(dot.commands) if dot else [] for dot in line] for line in at],
    }
    slide = element("input", type="range", min=0, max=len(alphas) - 1, step=1, value=str((len(alphas) - 1) // 2))
    held = escape(json.dumps(data, separators=(",", ":")), quote=True)
    return f'<div class="slider js" data-curves="{held}"><label>t {slide}</label> <output></output></div>'


def _heights(entries: list[Entry], names: Names, commands: Commands) -> str:
    """One row per pair and way of mixing, one column per quantity."""
    kinds = list(grouped(entries, _kind))
    rows = grouped(entries, lambda e: (names.pair(e), _way(e, names)))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("networks", "mixed", *kinds))
    body = []
    for (pair, way), own in list(rows.items())[:MOST_BARRIERS]:
        found = {kind: dot_of(0.0, those, commands) for kind, those in grouped(own, _kind).items()}
        dots = [found.get(kind) for kind in kinds]
        cells = "".join(f"<td>{linked(dot.value, dot.commands, dot.note) if dot else ''}</td>" for dot in dots)
        body.append(f'<tr><th scope="row">{escape(pair)}</th><td>{escape(way)}</td>{cells}</tr>')
    said = f'<p class="said">{MOST_BARRIERS} of {len(rows):,} rows.</p>' if len(rows) > MOST_BARRIERS else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    told = "Barriers: how far the worst network between two networks lies above the line between the two."
    return f"<p>{told}</p>{scrolled(table, 'Barriers')}{said}"
