"""Planted alignments: a network moved by an element of its symmetry is brought back, on every kind of network."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from orbits import KINDS, distance, made, noisy, symmetry_of
from torch import Tensor, nn
from zoo_networks import ZOO, network

import intertwine as it
from intertwine.align.align import align
from intertwine.align.solver import permutations_of
from intertwine.align.state import without_denormals
from intertwine.canonical.pairing import pair_units
from intertwine.symmetry.blocks import weights_of

# -- Planted alignments --


@pytest.mark.parametrize("name", ZOO)
def test_permutations_come_back_to_the_last_bit(name: str) -> None:
    model, sym = network(name)
    for seed in (1, 2):
        g = permutations_of(sym.random(seed))
        found = align(model, sym.act(g, model), symmetry=sym)
        assert found.after == 0
        assert distance(sym, model, found.model) == 0
        assert (found.element @ g).distance(sym.identity()) == 0


@pytest.mark.parametrize("name", ZOO)
def test_scales_and_signs_come_back(name: str) -> None:
    model, sym = network(name)
    g = sym.random(3)
    twin = sym.act(g, model)
    found = align(model, twin, symmetry=sym, method="scale-aware")
    assert found.after <= 1e-11 * found.before
    assert distance(sym, model, found.model) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network(kind: str) -> None:
    model, _ = made(kind, torch.float64)
    sym = symmetry_of(kind)
    if not sym.wires:
        pytest.skip("nothing acts on it")
    if any(w.group.permutes for w in sym.wires):
        found = align(model, sym.act(permutations_of(sym.random(5)), model), symmetry=sym)
        assert distance(sym, model, found.model) == 0
    found = align(model, sym.act(sym.random(5), model), symmetry=sym, method="scale-aware")
    assert distance(sym, model, found.model) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_through_noise(kind: str) -> None:
    """002-S09: approximate equivalence. Noise is not undone, but units find their partners through it."""
    model, _ = made(kind, torch.float64)
    sym = symmetry_of(kind)
    if not sym.wires:
        pytest.skip("nothing acts on it")
    twin = noisy(sym.act(sym.random(5), model), 1e-3)
    found = align(model, twin, symmetry=sym, method="scale-aware")
    assert distance(sym, model, found.model) < 5e-3


# -- Units that weight decay has shrunk to 1e-38, as every network trained with Adam and BatchNorm has --


EXAMPLE = torch.zeros(2, 3, 8, 8)


def decayed(seed: int, dead: int) -> nn.Sequential:
    """Convolutions with BatchNorm, some of whose filters are nearly zero, with running statistics of such."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    with torch.no_grad():
        for i in (0, 3):
            conv, norm = model[i], model[i + 1]
            assert isinstance(conv, nn.Conv2d)
            assert isinstance(norm, nn.BatchNorm2d)
            assert conv.bias is not None
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_var.uniform_(0.5, 2)
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
            conv.weight[:dead] *= 1e-38
            conv.bias[:dead] = 0
            norm.running_mean[:dead] = 0
            norm.running_var[:dead] = 0
    return model.eval()


def function_gap(a: nn.Module, b: nn.Module) -> float:
    x = torch.randn(4, *EXAMPLE.shape[1:], generator=torch.Generator().manual_seed(9))
    return float((a(x) - b(x)).detach().abs().max())


@pytest.mark.parametrize("method", ["weights", "scale-aware"])
def test_networks_with_decayed_units_are_aligned(method: str) -> None:
    a, b = decayed(0, 1), decayed(1, 2)
    found = it.align(a, b, EXAMPLE, method=method)
    assert found.after < found.before
    assert all(bool(t.isfinite().all()) for t in found.model.state_dict().values())
    assert function_gap(found.model, b) < 1e-5


def test_pairing_units_and_normal_forms_stay_finite() -> None:
    a, b = decayed(0, 1), decayed(1, 2)
    sym = it.symmetry(a, EXAMPLE)
    element = pair_units(sym, weights_of(sym, a), weights_of(sym, b))
    assert all(bool(part.isfinite().all()) for move in element.moves.values() for _, part in move.items())
    canon = it.canonicalize(a, EXAMPLE)
    assert all(bool(t.isfinite().all()) for t in canon.model.state_dict().values())
    assert function_gap(canon.model, a) < 1e-5


def test_a_moved_copy_with_decayed_units_comes_back() -> None:
    a = decayed(0, 2)
    sym = it.symmetry(a, EXAMPLE)
    moved = sym.act(sym.random(seed=3), a)
    assert it.fingerprint(a, EXAMPLE) == it.fingerprint(moved, EXAMPLE)
    found = it.align(a, moved, EXAMPLE, method="scale-aware")
    assert found.after < 1e-9 * found.before


def test_traces_are_zeros_and_nothing_else_changes() -> None:
    x = torch.tensor([1e-38, -1e-35, 0.0, 1e-20, -2.0])
    (found,) = without_denormals({"x": x}).values()
    assert torch.equal(found, torch.tensor([0.0, 0.0, 0.0, 1e-20, -2.0]))
    whole: Tensor = torch.randn(5)
    assert without_denormals({"x": whole})["x"] is whole
    exact = torch.tensor([1e-38], dtype=torch.float64)
    assert without_denormals({"x": exact})["x"] is exact


# -- Rows 004-L03 to L05 --


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_004_L05_copies_of_residual_networks_come_back_every_time() -> None:
    torch.manual_seed(0)
    model = Residual()
    sym = it.symmetry(model, torch.zeros(1, 20))
    for seed in range(30):
        moved = sym.act(permutations_of(sym.random(seed)), model)
        assert it.align(model, moved, torch.zeros(1, 20), symmetry=sym).after == 0
