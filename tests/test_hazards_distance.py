"""Distances and angles between rows: features may change places on both sides at once, and be scaled on none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from networks import Net, edited, gap, parameter, permutation, prove
from torch import Tensor, nn

PLACES = "body.weight[0], body.bias[0], points[1]"


def rows() -> Tensor:
    return torch.randn(4, 3)


def near(distance: Callable[[Tensor, Tensor], Tensor]) -> Net:
    """Rows of five features beside six learned points; what comes out is weighed by a head."""
    parts = {"body": nn.Linear(3, 5), "points": parameter(6, 5), "head": nn.Linear(6, 2)}
    return Net(lambda m, x: m.head(distance(m.body(x), m.points)), **parts)


def each(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Every row with every point, for functions that take them one by one."""
    return lambda h, points: fn(h.unsqueeze(-2), points)


@pytest.mark.parametrize(
    "distance",
    [
        torch.cdist,
        lambda h, points: torch.cdist(h, points, p=1.0),
        lambda h, points: torch.cdist(h.unsqueeze(0), points)[0],
        each(lambda h, points: F.cosine_similarity(h, points, dim=-1)),
        each(lambda h, points: F.pairwise_distance(h, points, eps=0.0)),
    ],
    ids=["cdist", "cdist p=1", "cdist broadcast", "cosine", "pairwise without eps"],
)
def test_features_move_on_both_sides_with_their_signs(distance: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = near(distance)
    points = "S_6 on points[0], head.weight[1]"
    prove(net, rows(), wires=[f"S_5 ⋉ {{±1}}^5 on {PLACES}", points])


def test_the_eps_of_pairwise_distance_takes_the_signs_away() -> None:
    net = near(each(F.pairwise_distance))
    prove(net, rows(), wires=[f"S_5 on {PLACES}", "S_6 on points[0], head.weight[1]"])


def test_a_scaled_feature_is_another_function() -> None:
    """The hazard: what passes a matrix product does not pass a distance."""
    net, x = near(torch.cdist).double(), rows().double()
    scale = torch.tensor([2.0, 1, 1, 1, 1], dtype=torch.float64)
    scaled = {"body__weight": lambda w: w * scale[:, None], "body__bias": lambda b: b * scale}
    assert gap(net, edited(net, **scaled, points=lambda p: p / scale), x) > 1e-3
    order = permutation(5)
    moved = {"body__weight": lambda w: w[order], "body__bias": lambda b: b[order]}
    assert gap(net, edited(net, **moved, points=lambda p: p[:, order]), x) < 1e-12
    assert gap(net, edited(net, **moved), x) > 1e-3
