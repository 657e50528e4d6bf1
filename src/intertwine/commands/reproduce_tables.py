"""Results of experiments in the terminal: printed numbers beside ours, what the paper says in words, and the list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from intertwine.commands.show import duration
from intertwine.reproduce.claims import Line, count, summary
from intertwine.reproduce.experiments import Result

COLOURS = {"agrees": "green", "differs": "yellow", "no value": "dim", "no interval": "dim"}


def told(result: Result) -> Group:
    """One experiment: what it is, its numbers, its claims."""
    plan, manifest = result.plan, result.manifest
    head = Text.assemble((plan["title"], "bold"), f" · scale {plan['scale']}")
    how = Text(f"{manifest['device']}, {duration(manifest['seconds'])}", style="dim")
    lines = result.lines()
    parts = [head, how, beside(lines, plan["unit"]) if lines else ours(result)]
    return Group(*parts, *_claims(result), *_notes(plan, lines))


def beside(lines: Sequence[Line], unit: str) -> Table:
    """Every printed number, ours and the verdict."""
    table = _table("series", "place", *(f"{name}, {unit}" if unit else name for name in ("printed", "ours")))
    for head in ("difference", "n"):
        table.add_column(head, justify="right")
    table.add_column("verdict")
    for line in lines:
        difference = "" if line.difference is None else f"{line.difference:+.3g}"
        cells = (number(line.printed, line.printed_spread), number(line.mean, line.spread), difference, str(line.count))
        table.add_row(line.series, line.label, *cells, Text(line.verdict, style=COLOURS[line.verdict]))
    return table


def ours(result: Result) -> Table:
    """Our numbers alone, where nothing was printed that they could be compared with."""
    unit = result.plan["unit"]
    table = _table("series", "place", f"ours, {unit}" if unit else "ours", "n")
    for series, places in result.numbers.items():
        for label, values in places.items():
            table.add_row(series, label, number(*summary(values)), str(count(values)))
    return table


def number(mean: float | None, spread: float | None) -> str:
    """A number and its deviation, as they are written.

    >>> number(82.7224, 0.2938), number(0.5, None), number(None, None)
    ('82.72 ± 0.29', '0.5', '')
    """
    if mean is None:
        return ""
    return f"{mean:.4g}" if spread is None else f"{mean:.4g} ± {spread:.2g}"


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(head, justify="left" if head in ("series", "place") else "right")
    return table


def _claims(result: Result) -> list[Text]:
    marks = {True: ("✓ ", "green"), False: ("✗ ", "yellow"), None: ("· ", "dim")}
    return [Text.assemble(marks[claim.holds], f"{claim.says}: {claim.seen}") for claim in result.claims()]


def _notes(plan: Mapping[str, Any], lines: Sequence[Line]) -> list[Text]:
    """The explanations of series that differ, each once."""
    series = dict.fromkeys(line.series for line in lines if line.verdict in ("differs", "no interval"))
    notes = dict.fromkeys(plan["notes"].get(name) or plan["notes"].get("all") for name in series)
    return [Text(note, style="dim") for note in notes if note]


def listing(entries: Sequence[Mapping[str, Any]]) -> Table:
    """All experiments: what they are, what each scale needs and costs, and which results came with the project."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("name", "what", "scale", "needs", "cost", "result"):
        table.add_column(head, overflow="fold")
    for entry in entries:
        for place, (scale, needs) in enumerate(entry["needs"].items()):
            what = (entry["title"], f"rows {', '.join(entry['rows'])}", "")[place]
            there = "yes" if scale in entry["results"] else ""
            cells = (", ".join(needs) or "nothing", entry["cost"].get(scale, ""), there)
            table.add_row("" if place else entry["name"], what, scale, *cells)
    return table
