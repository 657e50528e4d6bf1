"""Dissection: how many units of a layer answer to each concept, as bars."""

from __future__ import annotations

from collections.abc import Iterator

from intertwine.report.study.bars import bar_chart
from intertwine.report.study.commands import Commands
from intertwine.report.study.curves import dot_of, grouped
from intertwine.report.study.entries import Entry, Results
from intertwine.report.study.naming import Names, counted, short
from intertwine.report.study.views import Section, View, family

SWITCHES = ("network", "layer", "options")


def dissection(results: Results, commands: Commands, most: int) -> Section | None:
    """The section; None where nothing was dissected."""
    entries = results.of("dissect", "units")
    if not entries:
        return None
    names = Names.of(entries, besides=("concept",))
    groups = grouped(entries, lambda e: (names.network(e), e.layer or "", names.settings(e)))

    def views() -> Iterator[View]:
        for choice, own in groups.items():
            yield _view(choice, own, _shares(results, choice, names), commands)

    return Section("dissect", "Dissection", family(SWITCHES, views(), len(groups), most))


def _concept(entry: Entry) -> str:
    """What the units answer to: an option of the task, or the note beside a number."""
    return str(entry.task.options.get("concept") or (entry.note if entry.value is not None else None) or "all concepts")


def _shares(results: Results, choice: tuple[str, str, str], names: Names) -> str:
    """How many of all units that is, and how many would be by chance; empty where that was not measured."""
    own = [e for e in results.of("dissect") if (names.network(e), e.layer or "", names.settings(e)) == choice]
    found = {e.quantity: e.value for e in own}
    real, chance = found.get("fraction"), found.get("fraction_by_chance")
    by_chance = "" if chance is None else f" ({chance:.0%} by chance)"
    return "" if real is None else f" That is {real:.0%} of its units{by_chance}."


def _view(choice: tuple[str, str, str], entries: list[Entry], shares: str, commands: Commands) -> View:
    network, layer, settings = choice
    bars = [(name, dot_of(0.0, own, commands)) for name, own in grouped(entries, _concept).items()]
    total = sum(dot.value or 0.0 for _, dot in bars)
    where = f"layer {layer} of {network}" if layer else network
    title = f"Units of {where} by concept" + (f" ({settings})" if settings else "")
    name, top = max(bars, key=lambda bar: bar[1].value or 0.0)
    said = f"{short(total)} units answer to {counted(len(bars), 'concept')}; most to {name} ({short(top.value)})."
    return View(choice, f"{title}. {said}{shares}", bar_chart("concept", "units", bars), len(bars))
