"""Pictures of dissections: bars per category and per concept, and interpretable units against the power α."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from intertwine.features.pictures import key_below, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Mapping[float, Sequence[float]]  # α → one value per rotation


def draw_categories(table: Mapping[str, tuple[int, int]], title: str) -> Figure:
    """Two bars per category: units, and the different concepts they stand for.

    >>> figure = draw_categories({"colour": (5, 2), "shape": (1, 1)}, "layer3")
    >>> [int(bar.get_height()) for bar in figure.axes[0].patches]
    [5, 1, 2, 1]
    """
    figure = new_figure(2.0 + 0.9 * max(2, len(table)), 3.2)
    axes = figure.subplots()
    for i, label in enumerate(("units", "different concepts")):
        places = [x + 0.4 * (i - 0.5) for x in range(len(table))]
        axes.bar(places, [found[i] for found in table.values()], 0.38, label=label, color=f"C{i}")
    axes.set_xticks(range(len(table)), list(table), fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    return figure


def draw_concepts(table: Mapping[str, tuple[int, str]], title: str) -> Figure:
    """One bar per concept, as many units high, in the colour of its category.

    >>> figure = draw_concepts({"red": (5, "colour"), "disc": (2, "shape")}, "layer3")
    >>> [int(bar.get_height()) for bar in figure.axes[0].patches]
    [5, 2]
    """
    kinds = list(dict.fromkeys(kind for _, kind in table.values()))
    figure = new_figure(2.0 + 0.26 * max(8, len(table)), 3.2)
    axes = figure.subplots()
    names = list(table)
    for i, kind in enumerate(kinds):
        places = [x for x, name in enumerate(names) if table[name][1] == kind]
        axes.bar(places, [table[names[x]][0] for x in places], label=kind, color=f"C{i}")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_ylabel("units", fontsize=8)
    axes.set_title(title, fontsize=9)
    if kinds:
        axes.legend(fontsize=7)
    return figure


def draw_fractions(curves: Mapping[str, Curve], chance: Mapping[str, float] | None = None) -> Figure:
    """One line per network: the fraction of interpretable units against α, the mean over rotations and its range.

    `chance` gives a dotted line per network: the fraction above the same level by chance.

    >>> figure = draw_fractions({"with ReLU": {0.0: [0.5], 1.0: [0.2, 0.4]}})
    >>> figure.axes[0].lines[0].get_ydata().tolist()
    [0.5, 0.3]
    """
    figure = new_figure(4.8, 3.4)
    axes = figure.subplots()
    for i, (name, curve) in enumerate(curves.items()):
        alphas = sorted(curve)
        means = [torch.tensor(list(curve[a]), dtype=torch.float64).mean().item() for a in alphas]
        axes.plot(alphas, means, marker="o", markersize=4, label=name, color=f"C{i}")
        axes.fill_between(
            alphas, [min(curve[a]) for a in alphas], [max(curve[a]) for a in alphas], alpha=0.2, color=f"C{i}"
        )
        if chance and name in chance:
            axes.axhline(chance[name], color=f"C{i}", linestyle=":", linewidth=1, label=f"{name}, by chance")
    axes.set_xlabel("α, the power of the rotation", fontsize=9)
    axes.set_ylabel("fraction of interpretable units", fontsize=9)
    axes.set_ylim(bottom=0)
    key_below(figure)
    return figure
