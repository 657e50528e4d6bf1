"""Least-squares compensation: costs, order and coefficients against least squares on the samples themselves."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from intertwine.fold.compensation import (
    ReaderMoments,
    ReaderStatistics,
    readers_of,
    reconstruction,
    record_readers,
    removal_order,
    variance_cost,
)
from intertwine.fold.prepare import prepare

pytestmark = pytest.mark.usefixtures("one_thread")


def samples(seed: int, features: int = 6, rows: int = 400) -> Tensor:
    """Features that go together: six of them span four directions and some noise."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    mixed = base @ torch.randn(4, features, generator=generator, dtype=torch.float64)
    return mixed + 0.3 * torch.randn(rows, features, generator=generator, dtype=torch.float64) + 1.5


def known(x: Tensor, columns: Tensor, shift: bool = True) -> ReaderStatistics:
    moments = ReaderMoments(x.shape[1])
    moments.add(x)
    return ReaderStatistics(moments.mean(), columns @ columns.T, shift)


def error_of(x: Tensor, columns: Tensor, kept: list[int], shift: bool) -> float:
    """The least squared error, relative, of what a layer gives when it reads only some features; by numpy."""
    wanted = (x @ columns).numpy()
    basis = x[:, kept].numpy()
    if shift:
        basis = np.concatenate([basis, np.ones((len(x), 1))], 1)
        energy = ((wanted - wanted.mean(0)) ** 2).mean(0).sum()
    else:
        energy = (wanted**2).mean(0).sum()
    left = wanted - basis @ np.linalg.lstsq(basis, wanted, rcond=None)[0]
    return float((left**2).mean(0).sum() / energy)


@pytest.mark.parametrize("shift", [True, False])
def test_costs_are_those_of_least_squares_at_every_width(shift: bool) -> None:
    for seed in range(3):
        x = samples(seed)
        columns = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed + 9), dtype=torch.float64)
        trace = removal_order([known(x, columns, shift)])
        assert sorted(trace.order) == list(range(6))
        assert trace.costs[0] == 0
        for width in range(1, 6):
            expected = error_of(x, columns, trace.kept(width), shift)
            assert trace.costs[6 - width] == pytest.approx(variance_cost(expected), rel=2e-2, abs=2e-4)
        # the first to go is the best of all single ones
        alone = [error_of(x, columns, [j for j in range(6) if j != i], shift) for i in range(6)]
        assert trace.order[0] == int(np.argmin(alone))


def test_all_readers_of_a_wire_count() -> None:
    """A feature that one reader can do without, and another cannot, stays."""
    x = torch.randn(500, 3, dtype=torch.float64)
    one = torch.tensor([[1.0], [1.0], [1e-3]], dtype=torch.float64)
    other = torch.tensor([[1e-3], [1.0], [1.0]], dtype=torch.float64)
    assert removal_order([known(x, one)]).order[0] == 2
    assert removal_order([known(x, other)]).order[0] == 0
    both = removal_order([known(x, one), known(x, other)])
    assert both.kept(1) == [1]


def test_coefficients_are_those_of_least_squares() -> None:
    x = samples(5)
    read = known(x, torch.eye(6, dtype=torch.float64))
    for kept in itertools.combinations(range(6), 4):
        shares, constants = reconstruction(read, kept)
        basis = np.concatenate([x[:, list(kept)].numpy(), np.ones((len(x), 1))], 1)
        expected = np.linalg.lstsq(basis, x.numpy(), rcond=None)[0]
        assert np.allclose(shares.numpy(), expected[:-1].T, atol=5e-3)
        assert np.allclose(constants.numpy(), expected[-1], atol=1e-2)
        assert torch.equal(shares[list(kept)], torch.eye(4, dtype=torch.float64))  # one that stays is itself


def test_copies_and_constants_go_at_no_cost() -> None:
    x = samples(1)
    x = torch.cat([x, x[:, 2:3], torch.full((len(x), 1), 3.0, dtype=torch.float64)], 1)
    columns = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trace = removal_order([known(x, columns)])
    assert set(trace.order[:2]) in ({2, 7}, {6, 7})
    assert trace.costs[2] < 1e-3 < trace.costs[3]


def test_a_wire_that_gives_only_zeros_has_no_cost() -> None:
    found = removal_order([known(torch.zeros(20, 4, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64))])
    assert sorted(found.order) == [0, 1, 2, 3]
    assert found.costs == (0.0,) * 4


class Flat(nn.Module):
    """A convolution, its features flattened and beside others, read by one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.side, self.out = nn.Conv2d(2, 3, 3), nn.Linear(4, 5), nn.Linear(5 + 3 * 4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.cat([self.side(y).relu(), self.conv(x).relu().flatten(1)], 1))


def test_moments_are_those_of_what_is_read() -> None:
    torch.manual_seed(0)
    model = Flat().double()
    x, y = torch.randn(7, 2, 4, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    prepared = prepare(model, ((x, y), {}))
    readers: dict[str, Any] = {w.name: readers_of(w, prepared.symmetry) for w in prepared.wires}
    assert {name: [(r.weight, r.axis) for r in of] for name, of in readers.items()} == {
        "conv": [("out.weight", 1)],
        "side": [("out.weight", 1)],
    }
    assert readers["conv"][0].positions.tolist() == [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    flat = [readers["conv"][0], readers["side"][0]]
    heard = record_readers(model, flat, [((x[:4], y[:4]), {}), ((x[4:], y[4:]), {})])
    with torch.no_grad():
        conv, side = model.conv(x).relu().movedim(1, -1).reshape(-1, 3), model.side(y).relu()
    for moments, values in zip(heard.moments, (conv, side), strict=True):
        ones = torch.cat([values, torch.ones(len(values), 1, dtype=torch.float64)], 1)
        assert torch.allclose(moments.mean(), ones.T @ ones / len(values))
    assert heard.bias_of("out.weight") == "out.bias"
