"""Networks: how good they are, as bars, and the wires of each architecture as a tree."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from intertwine.report.study.bars import bar_chart
from intertwine.report.study.commands import Commands
from intertwine.report.study.curves import dot_of, grouped
from intertwine.report.study.entries import Results
from intertwine.report.study.naming import Names
from intertwine.report.study.views import Section, scrolled

WIRES = (
    "A wire is a set of hidden units that can be reordered (and often rescaled) together wherever it occurs, without "
    "changing what the network computes. S_n stands for all orders of n units, R₊ for positive scales, {±1} for signs, "
    "R* for both."
)


def networks(results: Results, commands: Commands, outlines: Mapping[str, str]) -> Section | None:
    """The section; None where there is neither an accuracy nor an outline. The outlines are HTML."""
    made = _accuracies(results, commands) + _wires(outlines)
    return Section("networks", "Networks", made) if made else None


def _accuracies(results: Results, commands: Commands) -> str:
    entries = results.of("accuracy", "accuracy")
    if not entries:
        return ""
    groups = grouped(entries, Names.of(entries).in_full)
    bars = [(name, dot_of(0.0, own, commands)) for name, own in groups.items()]
    return f"<p>Share of the test part that each network gets right.</p>{bar_chart('network', 'accuracy', bars)}"


def _wires(outlines: Mapping[str, str]) -> str:
    """The wire tree of each architecture; the first is open."""
    if not outlines:
        return ""
    made = "".join(
        f"<details{' open' if not i else ''}><summary>{escape(name)}</summary>{scrolled(html, name)}</details>"
        for i, (name, html) in enumerate(outlines.items())
    )
    return f"<h3>Their wires</h3><p>{WIRES}</p>{made}"
