"""Kind "folding": the measurements of Chen et al. 2024 by name, and seconds per sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intertwine.figures import legend_below, new_figure
from intertwine.fold.merging import MergeState
from intertwine.fold.options import PAPER_CODE, Options
from intertwine.fold.prepare import prepare
from intertwine.lab.papers.folding_curves import (
    FoldingSettings,
    curve_numbers,
    curve_rows,
    draw_curves,
    draw_swaps,
    swap_numbers,
    swap_rows,
)
from intertwine.lab.papers.folding_features import (
    complexity_numbers,
    complexity_rows,
    distance_numbers,
    distance_rows,
    draw_complexity,
    draw_distances,
    draw_groups,
    group_numbers,
    group_rows,
    shown_layers,
)
from intertwine.lab.papers.plan import ExperimentKind, Numbers, Row, gathered
from intertwine.lab.papers.work import NetworkPair, Work, networks_of
from intertwine.lab.zoo.networks.registry import build
from intertwine.stitch.result import summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SIZE = 32  # of CIFAR images
#: The paper's code measures all distances anew in every sweep; here they are updated. Both are timed.
WAYS = ("kept up to date", "measured anew")


def seconds_rows(work: Work) -> list[Row]:
    """One row per architecture, way and sweep. Merging runs on the CPU."""
    settings = work.plan.settings
    return [
        {"network": name, "way": way, "sweep": i, "seconds": took}
        for name in settings.architectures
        for way in WAYS
        for i, took in enumerate(sweeps(prepared_merging(name, settings), way, settings.sweeps))
    ]


def prepared_merging(name: str, settings: FoldingSettings) -> MergeState:
    """The merging of a network at initialisation, with the rule of the paper's code."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(name, **settings.options).eval()
    prepared = prepare(model, ((torch.zeros(1, 3, SIZE, SIZE),), {}), PAPER_CODE["norm"])
    return MergeState(prepared.wires, Options(**PAPER_CODE))


def sweeps(merging: MergeState, way: str, count: int) -> Iterator[float]:
    """Merge the nearest pair of every layer `count` times; yields the seconds of every sweep."""
    for _ in range(count):
        start = time.perf_counter()
        for w in range(len(merging.wires)):
            if way == "measured anew":
                merging.drop(w)
            if int(merging.alive[w].sum()) > 1:
                merging.merge(w, *merging.distances(w).pair())
        yield time.perf_counter() - start


def seconds_numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series of the way → architecture → seconds of every sweep."""
    return gathered((row["way"], row["network"], [row["seconds"]]) for row in rows)


def draw_seconds(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Bars: ours beside the printed ones."""
    found, labels = seconds_numbers(plan, rows), list(dict.fromkeys(row["network"] for row in rows))
    bars = {way: [summary(found[way][name])[0] for name in labels] for way in found}
    if plan["printed"]:
        bars["printed, RTX 2080 Ti"] = list(plan["printed"][WAYS[1]])
    figure = new_figure(6, 3.4)
    axes = figure.subplots()
    for i, (name, heights) in enumerate(bars.items()):
        axes.bar([x + 0.27 * i for x in range(len(heights))], heights, 0.25, label=name)
    axes.set_xticks([x + 0.27 for x in range(len(labels))], labels)
    axes.set(ylabel="seconds per sweep", yscale="log")
    legend_below(figure)
    return figure


@dataclass(frozen=True)
class FoldingMeasure:
    """One measurement of a network: its rows, their numbers, and the figure."""

    find: Callable[[Work, nn.Module, FoldingSettings], Iterable[Row]]
    numbers: Callable[[Mapping[str, Any], Sequence[Row]], Numbers]
    draw: Callable[[Mapping[str, Any], Sequence[Row]], Figure]


MEASURES = {
    "curves": FoldingMeasure(curve_rows, curve_numbers, draw_curves),
    "distances": FoldingMeasure(distance_rows, distance_numbers, draw_distances),
    "swaps": FoldingMeasure(swap_rows, swap_numbers, draw_swaps),
    "complexity": FoldingMeasure(complexity_rows, complexity_numbers, draw_complexity),
    "groups": FoldingMeasure(group_rows, group_numbers, draw_groups),
}


def run_folding(work: Work) -> list[Row]:
    """The rows of every network; "seconds" needs no trained ones."""
    settings = work.plan.settings
    if settings.measure == "seconds":
        return seconds_rows(work)
    names = settings.architectures or [networks_of(work.plan).architecture]
    rows = [{"network": name} | row for name in names for row in _architecture(work, name)]
    return shown_layers(rows, settings.form) if settings.measure == "distances" else rows


def _architecture(work: Work, name: str) -> list[Row]:
    """The rows of the networks of one architecture; their folder is shared with other plans."""
    networks, settings = networks_of(work.plan), replace(work.plan.settings, architectures=[])
    own = replace(networks, name=f"{networks.name}-{name}", architecture=name)
    part = replace(work, plan=replace(work.plan, networks=own, settings=settings))
    measure = MEASURES[settings.measure]

    def find(pair: NetworkPair, _: Any) -> Iterable[Row]:
        place, seed = pair.front
        return measure.find(part, part.sources[place].seed(seed), settings)

    return part.per_pair(find)


def folding_numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series and labels as the measure names them."""
    name = plan["settings"]["measure"]
    return seconds_numbers(plan, rows) if name == "seconds" else MEASURES[name].numbers(plan, rows)


def draw_folding(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """The figure of the measure."""
    name = plan["settings"]["measure"]
    return draw_seconds(plan, rows) if name == "seconds" else MEASURES[name].draw(plan, rows)


FOLDING = ExperimentKind(FoldingSettings, run_folding, folding_numbers, draw_folding)
