"""Kind "ordering": points as networks, sorted (Sorensen 2020, figure 2).

A point is a network of one hidden layer: its coordinates are the outgoing weights of the hidden units, which NodeSort
orders by. The thesis draws three points and says that sorting brings them into one octant; random points tell whether
it does so in general, or only into the region x₁ ≤ x₂ ≤ … that every order has.
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


#: What the shares of the random points are called.
OCTANT, REGION = "random points: in the octant of the sorted ones", "random points: in the region of the order"
ALL = "all"
#: The deviation of the random points: about that of the paper's.
SPREAD = 3.0


@dataclass(frozen=True)
class OrderingSettings:
    """What [ordering] may say. `points`: name → three coordinates. `random`: how many normal points are sorted too."""

    points: Mapping[str, list[float]]
    random: int = 1000

    def check(self, plan: ExperimentPlan, file: str) -> None:
        """Raise an `InputError` where a point has not three coordinates."""
        for name, point in self.points.items():
            if len(point) != 3:
                raise InputError(f"{file}: the point {name!r} has {len(point)} coordinates; the figure has three axes.")


def run(work: Work) -> list[Row]:
    """One row per point, named or random, with its coordinates before and after."""
    asked: OrderingSettings = work.plan.settings
    chance = torch.Generator().manual_seed(0)
    drawn = (SPREAD * torch.randn(asked.random, 3, generator=chance, dtype=torch.float64)).tolist()
    names, points = [*asked.points, *([""] * asked.random)], [*asked.points.values(), *drawn]
    work.tell(f"ordering, {len(points)} points")
    triples = zip(names, points, ordered(points), strict=True)
    return [{"point": name, "before": list(before), "after": after} for name, before, after in triples]


def ordered(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """The outgoing weights of the hidden units of each sorted network.

    >>> ordered([[1.4, -3.0, 5.6]])
    [[-3.0, 1.4, 5.6]]
    """
    hidden = len(points[0])
    network = nn.Sequential(nn.Linear(1, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, 1, bias=False)).double()
    shared = symmetry(network, torch.zeros(1, 1, dtype=torch.float64))  # of all of them: weights do not matter to it
    state = network.state_dict()
    found = []
    for point in points:
        weights = state | {"2.weight": torch.tensor([list(point)], dtype=torch.float64)}
        element, _ = canonical_element(shared, weights, "nodesort-printed")  # which sorts, and leaves signs alone
        found.append(shared.act_on_state(element, weights)["2.weight"][0].tolist())
    return found


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """The coordinates of each sorted point, and where random points end, in per cent."""
    found: Numbers = {row["point"]: _labelled(row["after"]) for row in rows if row["point"]}
    octants = {octant(row["after"]) for row in rows if row["point"]}
    others = [row["after"] for row in rows if not row["point"]]
    found[OCTANT] = {ALL: [100.0 * (octant(point) in octants) for point in others]}
    found[REGION] = {ALL: [100.0 * all(a <= b for a, b in pairwise(point)) for point in others]}
    found["octants of the sorted points"] = {ALL: [float(len(octants))]}
    return found


def _labelled(point: Sequence[float]) -> dict[str, list[float]]:
    return {f"x{i}": [value] for i, value in enumerate(point, start=1)}


def octant(point: Sequence[float]) -> tuple[bool, ...]:
    """Which coordinates are above zero.

    >>> octant([-3.0, 1.4, 5.6])
    (False, True, True)
    """
    return tuple(value > 0 for value in point)


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Left the points as they are, right sorted; grey the random ones. Points named r, g and b have these colours."""
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
        axes.set_box_aspect(None, zoom=0.85)  # or the name of the third axis is cut off
    axes.legend(fontsize=8)
    return figure


ORDERING = ExperimentKind(OrderingSettings, run, numbers, draw)
