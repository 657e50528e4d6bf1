"""`complexity_curves`: the complexity of several networks, layer by layer, in one picture: sizes, epochs or betas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from intertwine.errors import InputError
from intertwine.features.pictures import key_below, new_figure
from intertwine.fold.complexity import Complexity

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def complexity_curves(found: Mapping[str, Complexity], relative: bool = False) -> Figure:
    """Draw how many different features every layer has, a line per network from its first layer to its last.

    Args:
        found: what to call each line → a `Complexity`: networks of several sizes, one network after several epochs, or
            one under several betas. relative: shares of the width instead of numbers.

    Raises:
        InputError: there is nothing to draw.

    Example:
        >>> import torch
        >>> from intertwine.fold.complexity import complexity
        >>> from intertwine.fold.curves import complexity_curves
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> found = {f"β = {b}": complexity(model, torch.zeros(1, 3), beta=b) for b in (0.1, 0.3)}
        >>> len(complexity_curves(found).axes[0].get_lines())
        2

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Figure 5a.
    """
    empty = [name for name, one in found.items() if not one.layers]
    if empty or not found:
        what = f"{empty[0]!r} has no layer that can be measured" if empty else "no complexity was given"
        raise InputError(f"Curves of complexity were asked for, but {what}. Pass name → complexity(model, …).")
    figure = new_figure(5.6, 3.5)
    axes = figure.add_subplot()
    deepest = max(found.values(), key=lambda one: len(one.layers))
    for i, (name, one) in enumerate(found.items()):
        heights = [layer.share if relative else layer.classes for layer in one.layers]
        axes.plot(range(len(heights)), heights, "o-", markersize=4, label=name, color=_colour(i, len(found)))
    axes.set_xticks(range(len(deepest.layers)), _names(found))
    axes.tick_params(axis="x", rotation=90 if max(map(len, _names(found))) > 3 else 0)
    axes.set_xlabel("layer")
    axes.set_ylabel("different features / width" if relative else "different features")
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)
    betas = [one.beta for one in found.values()]
    if isinstance(betas[0], float | int) and all(beta == betas[0] for beta in betas):
        axes.set_title(f"β = {betas[0]:g}", fontsize=9)
    key_below(figure)
    return figure


def _names(found: Mapping[str, Complexity]) -> list[str]:
    """The names of the layers where all networks agree on them, else their numbers."""
    names = {tuple(layer.name for layer in one.layers) for one in found.values()}
    if len(names) == 1:
        return list(names.pop())
    return [str(i + 1) for i in range(max(map(len, names)))]


def _colour(i: int, n: int) -> tuple[float, float, float]:
    """From light to dark, in the order in which the lines are given."""
    depth = i / max(n - 1, 1)
    return (0.62 - 0.5 * depth, 0.78 - 0.5 * depth, 0.92 - 0.45 * depth)
