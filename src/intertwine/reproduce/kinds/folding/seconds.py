"""Seconds: how long one sweep over all layers takes, one merge in each (table 2), on networks as they start.

The paper's code measures all distances anew in every sweep. Here they are kept up to date; both are timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from intertwine.features.pictures import key_below, new_figure
from intertwine.fold.merging import Merging
from intertwine.fold.options import PAPER_CODE, Options
from intertwine.fold.prepared import prepare
from intertwine.reproduce.kinds.folding.settings import Settings
from intertwine.reproduce.kinds.registry import Numbers, Row
from intertwine.reproduce.work import Work
from intertwine.stitch.pictures import summary
from intertwine.zoo.networks.registry import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 32  # of CIFAR images
#: How distances are had in every sweep.
WAYS = ("kept up to date", "measured anew")


def run(work: Work) -> list[Row]:
    """One row per architecture, way and sweep. Merging runs on the CPU."""
    settings = work.plan.settings
    return [
        {"network": name, "way": way, "sweep": i, "seconds": took}
        for name in settings.architectures
        for way in WAYS
        for i, took in enumerate(sweeps(prepared_merging(name, settings), way, settings.sweeps))
    ]


def prepared_merging(name: str, settings: Settings) -> Merging:
    """The merging of a network as it starts, with the rule of the paper's code."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(name, **settings.options).eval()
    prepared = prepare(model, ((torch.zeros(1, 3, SIZE, SIZE),), {}), PAPER_CODE["norm"])
    return Merging(prepared.wires, Options(**PAPER_CODE))


def sweeps(merging: Merging, way: str, count: int) -> Iterator[float]:
    """Merge the nearest pair of every layer, so many times; the seconds of every sweep."""
    for _ in range(count):
        start = time.perf_counter()
        for w in range(len(merging.wires)):
            if way == "measured anew":
                merging.drop(w)
            if int(merging.alive[w].sum()) > 1:
                merging.merge(w, *merging.distances(w).pair())
        yield time.perf_counter() - start


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series of the way → architecture → seconds of every sweep."""
    found: Numbers = {}
    for row in rows:
        found.setdefault(row["way"], {}).setdefault(row["network"], []).append(row["seconds"])
    return found


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Bars: ours beside what is printed."""
    found, labels = numbers(plan, rows), list(dict.fromkeys(row["network"] for row in rows))
    bars = {way: [summary(found[way][name])[0] for name in labels] for way in found}
    if plan["printed"]:
        bars["printed, RTX 2080 Ti"] = list(plan["printed"][WAYS[1]])
    figure = new_figure(6, 3.4)
    axes = figure.subplots()
    for i, (name, heights) in enumerate(bars.items()):
        axes.bar([x + 0.27 * i for x in range(len(heights))], heights, 0.25, label=name)
    axes.set_xticks([x + 0.27 for x in range(len(labels))], labels)
    axes.set(ylabel="seconds per sweep", yscale="log")
    key_below(figure)
    return figure
