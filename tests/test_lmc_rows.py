"""Rows 004-L03 to L05: spawned networks are connected, permuted ones are one function, and matching finds the way."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import nn

import intertwine as it
from intertwine.align.starts import permutations_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_004_L03_spawned_networks_are_connected_and_independent_ones_are_not(tmp_path: Path) -> None:
    """The same start and first epochs, then other noise, against networks from two seeds."""
    found = {}
    for name, spawn in {"spawned": 3, "independent": 0}.items():
        zoo = it.zoo.train(
            "mlp", seeds=range(2), data="digits", out=tmp_path / name, options={"widths": (64, 32, 32, 10)}, epochs=15,
            spawn=spawn,
        )  # fmt: skip
        ends = [dict(zoo[i].named_parameters()) for i in range(2)]
        assert any(not torch.equal(ends[0][n], ends[1][n]) for n in ends[0])
        found[name] = it.barrier(zoo[0], zoo[1], list(zoo.dataset().batches("test")), points=11)
    assert (found["spawned"].error_barrier or 0.0) < 0.02
    assert found["spawned"].loss_barrier < 0.02
    assert (found["independent"].error_barrier or 0.0) > 0.1


def test_004_L04_permuted_layers_are_the_same_function_with_the_transpose_and_not_without() -> None:
    """W' = P W, b' = P b, and the next layer W Pᵀ; printed without the transpose, which only holds where P² = 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    sym = it.symmetry(model, x)
    order = torch.tensor([1, 2, 0, 3])  # a cycle of three: not its own inverse
    p = torch.eye(4, dtype=torch.float64)[order]
    first, last = model[0], model[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)

    def through(second: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x @ (p @ first.weight).T + p @ first.bias) @ second.T + last.bias

    assert torch.allclose(through(last.weight @ p.T), model(x), atol=1e-14)
    assert not torch.allclose(through(last.weight @ p), model(x), atol=1e-3)
    identity = sym.identity()
    moved = sym.act(replace(identity, moves={0: replace(identity.moves[0], permutation=order)}), model)
    assert torch.allclose(dict(moved.named_parameters())["0.weight"], p @ first.weight)
    assert torch.allclose(dict(moved.named_parameters())["2.weight"], last.weight @ p.T)


def test_004_L05_matching_finds_the_best_of_all_orders() -> None:
    """Against every pair of orders of two small layers."""
    for seed in range(4):
        torch.manual_seed(seed)
        a, b = (
            nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)) for _ in range(2)
        )
        left, right = ([t.detach().double() for t in m.parameters()] for m in (a, b))
        best = min(
            float(
                (left[0] - right[0][list(p)]).square().sum() + (left[1] - right[1][list(p)]).square().sum()
                + (left[2] - right[2][list(q)][:, list(p)]).square().sum()
                + (left[3] - right[3][list(q)]).square().sum() + (left[4] - right[4][:, list(q)]).square().sum()
            )
            for p in permutations(range(4)) for q in permutations(range(4))
        )  # fmt: skip
        found = it.align(a, b, torch.zeros(1, 3), starts=30, seed=seed)
        assert found.after == pytest.approx(best, rel=1e-5)


class Residual(nn.Module):
    """Two blocks on one stream, of the widths at which coordinate descent alone recovers one copy in ten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(20, 30), nn.Linear(30, 5)
        self.up1, self.down1, self.up2, self.down2 = (
            nn.Linear(30, 50), nn.Linear(50, 30), nn.Linear(30, 50), nn.Linear(50, 30)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.down1(torch.nn.functional.gelu(self.up1(x)))
        return self.head(x + self.down2(torch.nn.functional.gelu(self.up2(x))))


def test_004_L05_copies_of_residual_networks_come_back_every_time() -> None:
    torch.manual_seed(0)
    model = Residual()
    sym = it.symmetry(model, torch.zeros(1, 20))
    for seed in range(30):
        moved = sym.act(permutations_of(sym.random(seed)), model)
        assert it.align(model, moved, torch.zeros(1, 20), symmetry=sym).after == 0
