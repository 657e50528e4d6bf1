"""Folding: equivalent features found, merged, counted, swapped, timed and looked at (Chen et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from intertwine.reproduce.kinds.folding import complexity, curves, distances, groups, seconds, swaps
from intertwine.reproduce.kinds.folding.settings import Settings
from intertwine.reproduce.kinds.registry import Kind, Numbers, Row
from intertwine.reproduce.networks import Pair, networks_of
from intertwine.reproduce.work import Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Measure:
    """One thing to measure of a network: its rows, their numbers, and the picture."""

    find: Callable[[Work, nn.Module, Settings], Iterable[Row]]
    numbers: Callable[[Mapping[str, Any], Sequence[Row]], Numbers]
    draw: Callable[[Mapping[str, Any], Sequence[Row]], Figure]


MEASURES = {
    name: Measure(home.find, home.numbers, home.draw)
    for name, home in {
        "curves": curves, "distances": distances, "swaps": swaps, "complexity": complexity, "groups": groups,
    }.items()
}  # fmt: skip


def run(work: Work) -> list[Row]:
    """The rows of every network; those of "seconds" need none that are trained."""
    settings = work.plan.settings
    if settings.measure == "seconds":
        return seconds.run(work)
    names = settings.architectures or [networks_of(work.plan).architecture]
    rows = [{"network": name} | row for name in names for row in _architecture(work, name)]
    return distances.shown(rows, settings.form) if settings.measure == "distances" else rows


def _architecture(work: Work, name: str) -> list[Row]:
    """The rows of the networks of one architecture, in a folder of their own, which other plans share."""
    networks, settings = networks_of(work.plan), replace(work.plan.settings, architectures=[])
    own = replace(networks, name=f"{networks.name}-{name}", architecture=name)
    part = replace(work, plan=replace(work.plan, networks=own, settings=settings))
    measure = MEASURES[settings.measure]

    def find(pair: Pair, _: Any) -> Iterable[Row]:
        place, seed = pair.front
        return measure.find(part, part.sources[place].seed(seed), settings)

    return part.per_pair(find)


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series and labels as the measure names them."""
    name = plan["settings"]["measure"]
    return seconds.numbers(plan, rows) if name == "seconds" else MEASURES[name].numbers(plan, rows)


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """The figure of the measure."""
    name = plan["settings"]["measure"]
    return seconds.draw(plan, rows) if name == "seconds" else MEASURES[name].draw(plan, rows)


KIND = Kind(Settings, run, numbers, draw)
