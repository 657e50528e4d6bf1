"""Alignment, where changed code went unnoticed: lengths of features, what nothing moves, defaults, pictures."""

import pytest
import torch
import torch.nn.functional as F
from networks import Net
from torch import Tensor, nn

import intertwine as it
from intertwine.align.correlations import matched_correlations
from intertwine.align.objective import squared_distance, unmoved_part
from intertwine.align.products import Products
from intertwine.align.straight_through import StraightThroughOptions


def test_lengths_and_inner_products_are_those_of_the_features_as_they_are() -> None:
    """Around means far from zero, in uneven batches of two tensors."""
    a, b = 3 + torch.randn(4, 60).double(), -2 + torch.randn(5, 60).double()
    products = Products()
    for name, start, end in (("x", 0, 7), ("y", 7, 20), ("x", 20, 60)):
        products.add(name, a[:, start:end], b[:, start:end])
    assert torch.allclose(products.inner(), a @ b.T, atol=1e-9)
    first, second = products.lengths()
    assert torch.allclose(first, a.square().sum(1), atol=1e-9)
    assert torch.allclose(second, b.square().sum(1), atol=1e-9)


def beside(seed: int) -> Net:
    """The input stands beside the hidden units: the head has columns that nothing moves, and others that move."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.cat([x, m.body(x).relu()], -1))

    torch.manual_seed(seed)
    return Net(forward, body=nn.Linear(3, 4, bias=False), head=nn.Linear(7, 2, bias=False))


def test_nothing_is_added_where_everything_moves() -> None:
    a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
    symmetry = it.symmetry(a, torch.randn(1, 3))
    assert unmoved_part(symmetry, dict(a.state_dict()), dict(b.state_dict())) == 0.0


def test_columns_that_nothing_moves_count_as_they_are() -> None:
    a, b = beside(0), beside(1)
    weights = [dict(model.state_dict()) for model in (a, b)]
    still = squared_distance(weights[0]["head.weight"][:, :3], weights[1]["head.weight"][:, :3])
    assert still > 0.1
    assert abs(unmoved_part(it.symmetry(a, torch.randn(2, 3)), *weights) - still) < 1e-6


def test_the_distance_counts_what_nothing_moves() -> None:
    a, b = beside(0), beside(1)
    found = it.align(a, b, torch.randn(2, 3))
    moved = dict(found.model.state_dict())
    apart = sum(squared_distance(tensor, moved[name]) for name, tensor in a.state_dict().items())
    assert abs(found.after - apart) < 1e-5 * apart


def test_the_rate_is_small_where_nothing_is_said() -> None:
    assert 0.001 < StraightThroughOptions().rate < 0.1


@pytest.mark.parametrize("method", ["straight-through", "sinkhorn"])
def test_a_search_begins_with_the_best_of_two_starts(method: str) -> None:
    a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
    data = [(torch.randn(20, 3), torch.randint(2, (20,)))]
    plain = it.align(a, b, torch.zeros(1, 3))
    found = it.align(a, b, torch.zeros(1, 3), method=method, data=data)
    first, second = found.history[:2]
    assert (first.start, second.start) == ("identity", "weights")
    losses = [middle_loss(a, model, data[0]) for model in (b, plain.model, found.model)]
    assert [first.own, second.own] == pytest.approx(losses[:2], rel=1e-5)
    assert losses[2] <= min(losses[:2]) * (1 + 1e-5)


def middle_loss(a: nn.Module, b: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """The loss halfway between two networks."""
    return float(F.cross_entropy(it.interpolate(a, b, 0.5)(batch[0]), batch[1]).detach())


def test_pictures_of_matches_name_the_mean_correlation() -> None:
    a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
    found = matched_correlations(a, b, [(torch.randn(50, 3), torch.zeros(50))], torch.zeros(1, 3))
    titles = " ".join(axes.get_title() for axes in found.plot().axes)
    (wire,) = found.wires
    assert wire.mean is not None
    assert f"mean {wire.mean:.2f}" in titles
