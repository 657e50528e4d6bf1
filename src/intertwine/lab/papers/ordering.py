"""Kind "ordering": points as networks, sorted (Sorensen 2020, figure 2).

A point is a network of one hidden layer: its coordinates are the outgoing weights of the hidden units, which NodeSort
sorts by. The thesis draws three points and says that sorting brings them into one octant. Random points show whether
this holds in general, or whether sorting only brings points into the region x₁ ≤ x₂ ≤ ….
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intertwine.canonical.form import canonical_element
from intertwine.errors import InputError
from intertwine.figures import new_figure
from intertwine.lab.papers.plan import ExperimentKind, ExperimentPlan, Numbers, Row
from intertwine.lab.papers.work import Work
from intertwine.symmetry.symmetry import symmetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Names of the shares of the random points.
OCTANT, REGION = "random points: in the octant of the sorted ones", "random points: in the region of the order"
ALL = "all"
#: Standard deviation of the random points, about that of the paper's.
SPREAD = 3.0


@dataclass(frozen=True)
class OrderingSettings:
    """The table [ordering]. `points`: name → three coordinates. `random`: the number of normal points."""

    points: Mapping[str, list[float]]
    random: int = 1000

    def check(self, plan: ExperimentPlan, file: str) -> None:
        """Refuse points without three coordinates."""
        for name, point in self.points.items():
            if len(point) != 3:
                raise InputError(
                    f"{file}: the point {name!r} has {len(point)} coordinates, but the figure has three axes."
                )


def run(work: Work) -> list[Row]:
    """One row per point, named or random, with its coordinates before and after."""
    settings: OrderingSettings = work.plan.settings
    chance = torch.Generator().manual_seed(0)
    drawn = (SPREAD * torch.randn(settings.random, 3, generator=chance, dtype=torch.float64)).tolist()
    names, points = [*settings.points, *([""] * settings.random)], [*settings.points.values(), *drawn]
    work.progress(f"ordering, {len(points)} points")
    triples = zip(names, points, ordered(points), strict=True)
    return [{"point": name, "before": list(before), "after": after} for name, before, after in triples]


def ordered(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """The outgoing weights of the hidden units of each sorted network.

    >>> ordered([[1.4, -3.0, 5.6]])
    [[-3.0, 1.4, 5.6]]
    """
    hidden = len(points[0])
    network = nn.Sequential(nn.Linear(1, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, 1, bias=False)).double()
    shared = symmetry(network, torch.zeros(1, 1, dtype=torch.float64))  # the same for all weights
    state = network.state_dict()
    found = []
    for point in points:
        weights = state | {"2.weight": torch.tensor([list(point)], dtype=torch.float64)}
        element, _ = canonical_element(shared, weights, "nodesort-printed")  # sorts without changing signs
        found.append(shared.act_on_state(element, weights)["2.weight"][0].tolist())
    return found


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """The coordinates of each sorted point, and the share of random points in its octant and region, in percent."""
    named = {row["point"]: row["after"] for row in rows if row["point"]}
    found: Numbers = {name: {f"x{i}": [v] for i, v in enumerate(p, start=1)} for name, p in named.items()}
    octants = {octant(point) for point in named.values()}
    others = [row["after"] for row in rows if not row["point"]]
    found[OCTANT] = {ALL: [100.0 * (octant(point) in octants) for point in others]}
    found[REGION] = {ALL: [100.0 * all(a <= b for a, b in pairwise(point)) for point in others]}
    found["octants of the sorted points"] = {ALL: [float(len(octants))]}
    return found


def octant(point: Sequence[float]) -> tuple[bool, ...]:
    """Which coordinates are positive.

    >>> octant([-3.0, 1.4, 5.6])
    (False, True, True)
    """
    return tuple(value > 0 for value in point)


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Left the points before sorting, right after; random points are grey. The names r, g and b are colours."""
    from matplotlib.colors import is_color_like

    figure = new_figure(9, 4.4)
    for i, (key, title) in enumerate((("before", "as they are"), ("after", "sorted")), start=1):
        axes: Any = figure.add_subplot(1, 2, i, projection="3d")
        axes.scatter(*zip(*(row[key] for row in rows if not row["point"]), strict=True), s=2, color="0.8")
        for row in rows:
            if row["point"]:
                name = row["point"]
                color = name if is_color_like(name) else None
                axes.scatter(*([value] for value in row[key]), s=40, label=name, color=color)
        axes.set(xlabel="x₁", ylabel="x₂", zlabel="x₃", title=title)
        axes.locator_params(nbins=5)
        axes.set_box_aspect(None, zoom=0.85)  # keeps the label of the third axis inside
    axes.legend(fontsize=8)
    return figure


ORDERING = ExperimentKind(OrderingSettings, run, numbers, draw)
