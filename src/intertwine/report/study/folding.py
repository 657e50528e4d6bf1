"""Folding: accuracy of a network made smaller, over the share of its parameters that is left."""

from __future__ import annotations

from collections.abc import Iterator

from intertwine.report.study.commands import Commands
from intertwine.report.study.curves import Series, beyond, gather, grouped, spread, told
from intertwine.report.study.entries import Entry, Results
from intertwine.report.study.lines import Axes, line_chart
from intertwine.report.study.naming import Names, short
from intertwine.report.study.views import Section, View, family

HOW_FAR = ("beta", "budget", "max_ratio", "share")


def folding(results: Results, commands: Commands, most: int) -> Section | None:
    """The section; None where nothing was folded."""
    entries = [e for e in results.of("fold", "accuracy") if e.index is not None]
    if not entries:
        return None
    # an option that sets how far to fold gives points of one curve, not curves of its own
    names = Names.of(entries, besides=_along(entries))
    groups = grouped(entries, names.network)

    def views() -> Iterator[View]:
        for label, own in groups.items():
            yield _view(label, own, names, commands)

    return Section("fold", "Folding", family(("network",), views(), len(groups), most))


def _along(entries: list[Entry]) -> tuple[str, ...]:
    """The options that say how far to fold, where each task gives one point; none where a task gives a whole curve."""
    tasks = grouped(entries, lambda e: e.task.number)
    return HOW_FAR if all(len(own) == 1 for own in tasks.values()) else ()


def _view(label: str, entries: list[Entry], names: Names, commands: Commands) -> View:
    series = gather(entries, names.settings, lambda e: e.index or 0.0, commands)
    title = f"Accuracy of {label} over the share of its parameters that is left"
    smallest = told(_smallest(series))
    said = f" Where least is left: {smallest}." if smallest else " No point has a value."
    body = line_chart(Axes(title, "share of parameters", "accuracy"), series)
    caption = f"{title}.{said}{spread(series)}{beyond(entries, names.settings)}"
    return View((label,), caption, body, sum(len(one.dots) for one in series))


def _smallest(series: list[Series]) -> Iterator[tuple[Series, float, str]]:
    """Of each series the value at the smallest share, and that share."""
    for one in series:
        least = min(((dot.x, dot.value) for dot in one.known if dot.value is not None), default=None)
        if least is not None:
            yield one, least[1], f" at {short(least[0])}"
