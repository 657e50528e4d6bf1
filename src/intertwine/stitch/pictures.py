"""Pictures of stitches: a matrix sorted for the eye, what was recorded while training, and penalties per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from intertwine.features.pictures import key_below, new_figure, panels_in_rows
from intertwine.shapes import Float
from intertwine.stitch.closeness import sorted_for_the_eye

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What a record is placed by, the first of these that it has.
CLOCKS = ("step", "epoch")
#: Lines of a panel, each seen below those that are drawn later.
LINES = (("-", 3.0), ("--", 1.5), (":", 1.5), ("-.", 1.5))
#: Lines that share a panel, by the words in their names.
PANELS = {"accuracy": ("accuracy",), "loss": ("loss", "cross_entropy"), "similarity": ("cka", "r2", "cca")}


def draw_stitch(
    matrix: Float[Tensor, "out in"], title: str, history: Sequence[Mapping[str, Any]] = ()
) -> Figure:  # fmt: skip
    """A heat map of a matrix, and one panel for each kind of number that the history has more than once.

    >>> import torch
    >>> figure = draw_stitch(torch.eye(3), "identity", [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.4}])
    >>> [axes.get_title() for axes in figure.axes[:2]]
    ['identity', 'loss']
    """
    panels = {
        key: lines for key, lines in curves(history).items() if any(len(times) > 1 for times, _ in lines.values())
    }
    figure, (first, *others) = panels_in_rows(1 + len(panels), 4.1, 3.2, 2)
    _heat_map(first, matrix, title)
    for axes, ((name, clock), lines) in zip(others, panels.items(), strict=True):
        for (label, (times, values)), (style, width) in zip(lines.items(), cycle(LINES), strict=False):
            dot = "." if len(times) < 30 else None
            axes.plot(times, values, style, label=label, linewidth=width if len(lines) > 1 else 1.5, marker=dot)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(clock, fontsize=8)
        if list(lines) != [name]:
            axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _heat_map(axes: Axes, matrix: Tensor, title: str) -> None:
    values = matrix.detach().double().cpu()
    if bool(values.isfinite().all()):
        rows, columns = sorted_for_the_eye(values)
        values = values[rows][:, columns]
    edge, most = _edge(values)
    picture = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-edge, vmax=edge, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("front channels, in the order of their partners", fontsize=8)
    axes.set_ylabel("back channels, strongest first", fontsize=8)
    bar = axes.get_figure()
    assert bar is not None
    bar.colorbar(picture, ax=axes, shrink=0.8, extend="both" if most > edge else "neither")


def _edge(values: Tensor) -> tuple[float, float]:
    """The value of the full colour, the strongest of a middle row, as outliers would pale the rest; and the largest.

    >>> _edge(torch.tensor([[0.0, 1.0], [-2.0, 0.0], [0.0, 9.0]]))
    (2.0, 9.0)
    """
    if not values.numel():
        return 1.0, 0.0
    strongest = values.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)
    most = float(strongest.max())
    return float(strongest.median()) or most or 1.0, most


def curves(history: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, tuple[list[float], list[float]]]]:
    """(Panel, clock) → line → (times, values) of a history whose records need not all have the same names.

    >>> curves([{"step": 0, "r2": 0.1}, {"epoch": 1, "loss": 2.0}, {"step": 9, "r2": 0.3}])["similarity", "step"]
    {'r2': ([0.0, 9.0], [0.1, 0.3])}
    """
    found: dict[tuple[str, str], dict[str, tuple[list[float], list[float]]]] = {}
    for i, record in enumerate(history):
        clock = next((name for name in CLOCKS if name in record), None)
        for name, value in record.items():
            panel = next((panel for panel, words in PANELS.items() if any(word in name for word in words)), None)
            if panel is None or isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
                continue
            times, values = found.setdefault((panel, clock or "record"), {}).setdefault(name, ([], []))
            times.append(float(i if clock is None else record[clock]))
            values.append(float(value))
    return dict(sorted(found.items(), key=lambda item: list(PANELS).index(item[0][0])))


def draw_penalties(table: Mapping[tuple[str, str], Sequence[float]], what: str) -> Figure:
    """One line per family over the places of the cuts; whiskers are one standard deviation to each side.

    Args:
        table: (place, family) → one value per stitch. what: is on the vertical axis.

    >>> figure = draw_penalties({("layer1", "relu"): [0.1, 0.2], ("layer2", "relu"): [0.3]}, "penalty")
    >>> figure.axes[0].get_ylabel()
    'penalty'
    """
    places, families = (list(dict.fromkeys(key[i] for key in table)) for i in (0, 1))
    figure = new_figure(3.6 + 0.9 * max(3, len(places)), 3.6)
    axes = figure.subplots()
    for i, family in enumerate(families):
        held = [(x, summary(table[place, family])) for x, place in enumerate(places) if table.get((place, family))]
        beside = 0.06 * (i - (len(families) - 1) / 2)  # whiskers of two families would lie on each other
        axes.errorbar(
            [x + beside for x, _ in held], [mean for _, (mean, _) in held], [spread for _, (_, spread) in held],
            label=family, marker="o", markersize=4, capsize=3, linewidth=1.2,
        )  # fmt: skip
    axes.set_xticks(range(len(places)), places, rotation=30 if max(map(len, places), default=0) > 8 else 0, fontsize=8)
    several = any(len(values) > 1 for values in table.values())
    axes.set_xlabel("cut at" + ("; whiskers: one standard deviation" if several else ""), fontsize=9)
    axes.set_ylabel(what, fontsize=9)
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    key_below(figure)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def summary(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of a sample: n − 1); 0 for a single value.

    >>> summary([1.0, 3.0])
    (2.0, 1.414...)
    """
    numbers = torch.tensor(list(values), dtype=torch.float64)
    return float(numbers.mean()), float(numbers.std()) if len(numbers) > 1 else 0.0
