"""Similarity: for every measure and pair of networks, a heat map of layers against layers."""

from __future__ import annotations

from collections.abc import Iterator

from intertwine.report.study.commands import Commands
from intertwine.report.study.curves import Dot, dot_of, grouped
from intertwine.report.study.entries import Entry, Results
from intertwine.report.study.heat import heat_map, thinned
from intertwine.report.study.naming import Names, short
from intertwine.report.study.scales import around
from intertwine.report.study.views import Section, View, family

SWITCHES = ("measure", "networks", "options")


def similarity(results: Results, commands: Commands, most: int) -> Section | None:
    """The section; None where no layers were compared."""
    entries = [e for e in results.of("compare") if e.layer is not None and e.other_layer is not None]
    if not entries:
        return None
    names = Names.of(entries, besides=("measure",))  # the quantity names it already
    groups = grouped(entries, lambda e: (e.quantity, names.pair(e, "×"), names.settings(e)))
    by_measure = grouped(entries, lambda e: e.quantity)
    # one scale per measure: pictures of different pairs can be compared by eye
    ends = {name: around([e.value for e in own if e.value is not None], count=20) for name, own in by_measure.items()}

    def views() -> Iterator[View]:
        for choice, own in groups.items():
            yield _view(choice, own, ends[choice[0]], commands)

    return Section("similarity", "Similarity of layers", family(SWITCHES, views(), len(groups), most))


def _view(choice: tuple[str, str, str], entries: list[Entry], ends: tuple[float, float], commands: Commands) -> View:
    measure, pair, settings = choice
    rows, left_out = thinned(list(dict.fromkeys(e.layer or "" for e in entries)))
    columns, _ = thinned(list(dict.fromkeys(e.other_layer or "" for e in entries)))
    wanted = [e for e in entries if e.layer in set(rows) and e.other_layer in set(columns)]
    places = grouped(wanted, lambda e: (e.layer or "", e.other_layer or ""))
    cells = {place: dot_of(0.0, own, commands) for place, own in places.items()}
    title = f"{measure} between the layers of {pair}" + (f" ({settings})" if settings else "")
    return View(choice, f"{title}. {_told(cells)}{left_out}", heat_map(title, rows, columns, cells, ends), len(cells))


def _told(cells: dict[tuple[str, str], Dot]) -> str:
    """The extremes, and how many cells are empty."""
    known = {place: dot.value for place, dot in cells.items() if dot.value is not None}
    empty = len(cells) - len(known)
    reasons = f" {empty} of {len(cells)} have no value; point at them for the reason." if empty else ""
    if not known:
        return f"No pair of layers has a value.{reasons}"
    (top, most), (bottom, least) = max(known.items(), key=lambda i: i[1]), min(known.items(), key=lambda i: i[1])
    return f"Highest {short(most)} at {' × '.join(top)}, lowest {short(least)} at {' × '.join(bottom)}.{reasons}"
