"""Distances between the features of every layer (figures 1a and 6), and how many of them hardly act.

The paper's smallest distance of 2e-15 may be that of two features which do nothing, so near-dead ones are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from intertwine.features.pictures import ACROSS, new_figure
from intertwine.fold.complexity import dead_features
from intertwine.fold.heatmaps import distance_maps
from intertwine.fold.prepared import prepare
from intertwine.reproduce.kinds.folding.packed import coarse, pack, unpack
from intertwine.reproduce.kinds.folding.settings import Settings, network_of
from intertwine.reproduce.kinds.registry import Numbers, Row
from intertwine.reproduce.work import Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Name → options of `distance_maps`: Eq. 6 as printed and as in the paper's code; here: rows alone, with BatchNorm.
DISTANCES: Mapping[str, Mapping[str, Any]] = {
    "as printed": {"terms": "in+out", "bias": False, "norm": "sum"},
    "corrected": {},
}
#: A feature is near-dead if its rows or columns are shorter than this share of the longest.
NEAR_DEAD = (0.001, 0.01, 0.1)
SHOWN = 12


def find(work: Work, model: nn.Module, settings: Settings) -> Iterator[Row]:
    """One row per way to measure and layer."""
    example = torch.zeros(1, *work.data.shape)
    wires = prepare(model.cpu(), ((example,), {})).wires
    near = {w.name: {f"dead_{x:g}": float(dead_features(w, x).double().mean()) for x in NEAR_DEAD} for w in wires}
    for rule, options in DISTANCES.items():
        maps = distance_maps(model, example, **options).wires
        for number, wire in enumerate(maps):
            table = wire.table[np.ix_(wire.order, wire.order)] / (wire.largest or 1.0)
            yield {
                "rule": rule, "layer": wire.name, "number": number + 1, "last": number + 1 == len(maps),
                "features": len(table), "smallest": wire.smallest / (wire.largest or 1.0), "below": wire.below(0.1),
                "picture": pack(coarse(table)),
            } | near[wire.name]  # fmt: skip


def shown(rows: Sequence[Row], form: str) -> list[Row]:
    """The last layer (figure 1a) or the first twelve (figure 6)."""
    return [row for row in rows if (row["last"] if form == "last" else row["number"] <= SHOWN)]


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series "network: rule" → "smallest distance" …; with several layers, each has its own labels."""
    found: Numbers = {}
    for row in rows:
        series = found.setdefault(f"{network_of(row)}: {row['rule']}", {})
        layer = "" if plan["settings"]["form"] == "last" else f", layer {row['number']}"
        values = {"smallest distance": row["smallest"], "pairs below 0.1, %": 100 * row["below"]}
        values |= {f"features shorter than {x:g} of the longest, %": 100 * row[f"dead_{x:g}"] for x in NEAR_DEAD}
        for label, value in values.items():
            series.setdefault(label + layer, []).append(value)
    return found


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """A heat map per layer of the first network, one block of rows per way to measure."""
    own = [row for row in rows if (row["network"], row["pair"]) == (rows[0]["network"], rows[0]["pair"])]
    rules = list(dict.fromkeys(row["rule"] for row in own))
    most = max(sum(row["rule"] == rule for row in own) for rule in rules)
    columns = min(ACROSS, most)
    lines = ceil(most / columns)
    figure = new_figure(1.85 * columns + 1, 2 * lines * len(rules) + 0.4)
    grid = figure.subplots(lines * len(rules), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for i, rule in enumerate(rules):
        for k, row in enumerate([row for row in own if row["rule"] == rule]):
            axes = grid[i * lines + k // columns, k % columns]
            axes.imshow(unpack(row["picture"]), vmin=0, vmax=1, cmap="viridis", interpolation="none")
            axes.set_title(f"{row['layer']}, {rule}", fontsize=8)
    figure.colorbar(grid[0, 0].images[0], ax=grid.ravel().tolist(), shrink=0.8, label="distance / the largest")
    return figure
