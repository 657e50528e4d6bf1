"""Distances: how far apart trained networks are before and after sorting their nodes (Sorensen 2020, Table 1).

Trains many small networks at once, measures Table 1 and what the thesis only proposes (averages of sorted networks),
and adds what it lacks: controls, matching, stability under noise.
"""

from __future__ import annotations

from collections.abc import Callable

from intertwine.reproduce.kinds.distances.apart import (
    all_distances,
    control,
    pair_distances,
    stability,
    start_distances,
)
from intertwine.reproduce.kinds.distances.averages import averages, curves
from intertwine.reproduce.kinds.distances.drawing import draw
from intertwine.reproduce.kinds.distances.settings import Distances
from intertwine.reproduce.kinds.distances.store import read_images, trained
from intertwine.reproduce.kinds.distances.table import numbers
from intertwine.reproduce.kinds.registry import Kind, Row
from intertwine.reproduce.work import Work


def run(work: Work) -> list[Row]:
    """Train what is not yet trained and measure everything: one row per measurement and method."""
    plan: Distances = work.plan.settings
    images = read_images(work.data, work.device)
    stack = trained(plan, images, work.folder / "distances", work.tell)
    some = images.train_x[: plan.matching_images]
    measurements: dict[str, Callable[[], list[Row]]] = {
        "start": lambda: start_distances(plan, images),
        "all_pairs": lambda: all_distances(stack, plan, some),
        "some_pairs": lambda: pair_distances(stack, plan, some),
        "control": lambda: control(stack, plan, some),
        "accuracy": lambda: averages(stack, plan, images),
        "curves": lambda: curves(stack, plan, images),
        "stability": lambda: stability(stack, plan, some),
    }
    rows = []
    for name, measure in measurements.items():
        work.tell(f"measuring {name}")
        rows += [{"measured": name} | row for row in measure()]
    return rows


KIND = Kind(Distances, run, numbers, draw)
