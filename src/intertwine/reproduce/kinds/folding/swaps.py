"""Swaps: a network on its way to itself with equivalent features swapped, and with as many random ones (figure 1b)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.features.pictures import key_below, panels_in_rows
from intertwine.fold.complexity import DEAD
from intertwine.fold.fold import fold
from intertwine.fold.swaps import KINDS, swap_barrier
from intertwine.reproduce.kinds.folding.settings import RULES, Settings, network_of
from intertwine.reproduce.kinds.registry import Numbers, Row
from intertwine.reproduce.work import Work
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Which features may be swapped: all, as in the paper, or those that act; swapping what does nothing proves nothing.
FEATURES: Mapping[str, float | None] = {"all": None, "live": DEAD}


def find(work: Work, model: nn.Module, settings: Settings) -> Iterator[Row]:
    """One row per rule, β, choice of features, kind of swap, seed and point."""
    placed, test = model.to(work.device), list(work.placed.batches("test"))
    example = torch.zeros(1, *work.data.shape, device=work.device)
    for rule in settings.rules:
        for beta in settings.betas:
            folded = fold(placed, example, beta=beta, **RULES[rule])
            for features, dead in FEATURES.items():
                about = {"rule": rule, "beta": beta, "features": features}
                try:
                    found = swap_barrier(folded, test, settings.points, seeds=range(settings.seeds), dead=dead)
                except InputError:  # no two features are near enough: there is nothing to swap
                    yield about | {"pairs": 0}
                    continue
                about["pairs"] = sum(found.pairs.values())
                for kind in KINDS:
                    for seed, line in zip(found.seeds, getattr(found, kind), strict=True):
                        for t, error in zip(line.ts, line.error or (), strict=True):
                            yield about | {"kind": kind, "seed": seed, "t": t, "accuracy": 100 * (1 - error)}


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series "network: equivalent, rule, all features" → β → points of accuracy lost at most on the way."""
    lines: dict[tuple[str, str, int, int], list[Row]] = {}
    for row in rows:
        if "kind" in row:
            series = f"{network_of(row)}: {row['kind']}, {row['rule']}, {row['features']} features"
            lines.setdefault((series, f"β = {row['beta']:g}", row["pair"], row["seed"]), []).append(row)
    lost: dict[tuple[str, str, int], list[float]] = {}
    for (series, label, pair, _), line in lines.items():
        drop = line[0]["accuracy"] - min(row["accuracy"] for row in line)
        lost.setdefault((series, label, pair), []).append(drop)
    found: Numbers = {}
    for (series, label, _), drops in lost.items():
        found.setdefault(series, {}).setdefault(label, []).append(sum(drops) / len(drops))
    return found


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Accuracy along the way, one panel per rule and choice of features: solid equivalent, dashed random swaps."""
    kept = [row for row in rows if "kind" in row]
    panels = list(dict.fromkeys((row["rule"], row["features"]) for row in rows))
    betas = sorted({row["beta"] for row in kept})
    figure, grid = panels_in_rows(len(panels), 2.6, 2.6, 3)
    for axes, (rule, features) in zip(grid, panels, strict=True):
        own = [row for row in kept if (row["rule"], row["features"]) == (rule, features)]
        for kind, style in (("equivalent", "-"), ("random", "--")):
            for i, beta in enumerate(betas):
                points: dict[float, list[float]] = {}
                for row in own:
                    if (row["kind"], row["beta"]) == (kind, beta):
                        points.setdefault(row["t"], []).append(row["accuracy"])
                means = [summary(values)[0] for values in points.values()]
                axes.plot(list(points), means, style, color=f"C{i}", label=f"β = {beta:g}, {kind}")
        axes.set(title=f"{rule}, {features} features", xlabel="λ")
        if axes is not grid[0]:
            axes.sharey(grid[0])
    for axes in grid[::3]:
        axes.set_ylabel("right answers, %")
    key_below(figure)
    return figure
