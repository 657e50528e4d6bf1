"""Complexity: how many different features every layer has, for several β, as the paper does not print its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import spearmanr
from torch import nn

from intertwine.features.pictures import key_below, panels_in_rows
from intertwine.fold.complexity import complexity
from intertwine.reproduce.kinds.folding.curves import answers
from intertwine.reproduce.kinds.folding.settings import RULES, Settings, network_of
from intertwine.reproduce.kinds.registry import Numbers, Row
from intertwine.reproduce.work import Work
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Networks of one kind from which a correlation is taken.
ENOUGH = 3


def find(work: Work, model: nn.Module, settings: Settings) -> Iterator[Row]:
    """One row per rule, β and layer; each has the accuracy of the network."""
    accuracy = 100 * float(answers(model.to(work.device), work.placed).mean())
    example = torch.zeros(1, *work.data.shape)
    for rule in settings.rules:
        for beta in settings.betas:
            found = complexity(model.cpu(), example, beta=beta, **RULES[rule])
            for number, layer in enumerate(found.layers):
                yield {
                    "rule": rule, "beta": beta, "layer": layer.name, "number": number + 1, "width": layer.width,
                    "classes": layer.classes, "dead": layer.dead, "left": layer.left, "accuracy": accuracy,
                }  # fmt: skip


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series "network: rule, β = 0.1" → number of the layer → features left, and "all layers, %"; then what follows.

    "place of the largest": 0 is the first layer and 1 the last. "features left against accuracy": rank correlation over
    networks that differ in their seed alone.
    """
    found: Numbers = {}
    lefts: dict[str, list[float]] = {}
    accuracies: dict[str, list[float]] = {}
    for series, lines in _lines(rows).items():
        for line in lines:
            for row in line:
                found.setdefault(series, {}).setdefault(str(row["number"]), []).append(float(row["left"]))
            left = [row["left"] for row in line]
            whole = 100 * sum(left) / sum(row["width"] for row in line)
            found[series].setdefault("all layers, %", []).append(whole)
            place = left.index(max(left)) / max(1, len(left) - 1)
            found.setdefault("place of the largest", {}).setdefault(series, []).append(place)
            lefts.setdefault(series, []).append(whole)
            accuracies.setdefault(series, []).append(line[0]["accuracy"])
    for series, values in lefts.items():
        if len(set(values)) >= ENOUGH and len(set(accuracies[series])) >= ENOUGH:
            value = float(spearmanr(values, accuracies[series])[0])
            found.setdefault("features left against accuracy", {})[series] = [value]
    return found


def _lines(rows: Sequence[Row]) -> dict[str, list[list[Row]]]:
    """Series → the layers of each network."""
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        series = f"{network_of(row)}: {row['rule']}, β = {row['beta']:g}"
        lines.setdefault((series, row["pair"]), []).append(row)
    found: dict[str, list[list[Row]]] = {}
    for (series, _), line in lines.items():
        found.setdefault(series, []).append(line)
    return found


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Features left per layer, means over networks: a panel per rule and β, a line per network."""
    from matplotlib.ticker import MaxNLocator

    rules, betas = (list(dict.fromkeys(row[key] for row in rows)) for key in ("rule", "beta"))
    figure, panels = panels_in_rows(len(rules) * len(betas), 2.6, 2.0, min(3, len(betas)))
    for series, lines in _lines(rows).items():
        row = lines[0][0]
        axes = panels[len(betas) * rules.index(row["rule"]) + betas.index(row["beta"])]
        means = [summary([float(line[i]["left"]) for line in lines])[0] for i in range(len(lines[0]))]
        axes.plot(range(1, len(means) + 1), means, "o-", markersize=3, label=series.partition(":")[0])
        axes.set_title(series.partition(": ")[2], fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for i, axes in enumerate(panels):
        axes.set_ylabel("" if i % min(3, len(betas)) else "features left")
        axes.set_xlabel("layer")
    key_below(figure)
    return figure
