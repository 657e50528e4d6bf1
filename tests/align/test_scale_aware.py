"""Scales by evidence: none for networks trained alike, the true ones for a network that was rescaled."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import intertwine as it
from intertwine.align.scale_aware import evidence_scale_step, shrinkage
from intertwine.align.solver import permutations_of
from intertwine.align.state import MatchingState, counted_weights
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

EXAMPLE = torch.zeros(1, 10)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 200), nn.ReLU(), nn.Linear(200, 150), nn.ReLU(), nn.Linear(150, 5)).double()


def rescaled(sym: Symmetry, model: nn.Module, spread: float) -> tuple[nn.Module, Element]:
    """The same function with scales drawn at random, and nothing else changed."""
    identity, drawn = sym.identity(), sym.random(seed=7, scale_spread=spread)
    g = replace(identity, moves={i: replace(m, scale=drawn.moves[i].scale) for i, m in identity.moves.items()})
    return sym.act(g, model), g


def paired(sym: Symmetry, a: nn.Module, b: nn.Module) -> MatchingState:
    weights = [counted_weights(sym, m, weights_of(sym, m), buffers=False) for m in (a, b)]
    return MatchingState(sym, weights[0], weights[1], range(len(sym.wires)))


def test_the_estimate_is_the_least_squares_one() -> None:
    """Against a regression of the true ln-scales on the mean of both sides, which needs to know them."""
    generator = torch.Generator().manual_seed(0)
    for noise in (0.1, 0.5, 1.0):
        true, *errors = torch.randn(3, 20_000, generator=generator, dtype=torch.float64)
        t, u = (true + noise * e for e in errors)
        mean = (t + u) / 2
        assert shrinkage(t, u) == pytest.approx(float((true * mean).sum() / mean.square().sum()), abs=0.03)


def test_no_evidence_no_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    found = [
        shrinkage(*torch.randn(2, n, generator=generator, dtype=torch.float64)) for n in (8, 64, 512) for _ in range(60)
    ]
    assert sum(x > 0 for x in found) <= 2  # four standard errors
    t = torch.randn(100, generator=generator, dtype=torch.float64)
    assert shrinkage(t, -t) == 0  # units that are weaker on both sides are weaker units, not rescaled ones
    assert shrinkage(t, t) == 1
    assert shrinkage(t[:3], t[:3]) == 1
    assert shrinkage(t[:3], -t[:3]) == 0
    assert shrinkage(t[:0], t[:0]) == 0


def test_unrelated_networks_keep_their_scales() -> None:
    a, b = network(0), network(1)
    sym = it.symmetry(a, EXAMPLE)
    pair = paired(sym, a, b)
    assert not any(evidence_scale_step(pair, s) for s in range(len(sym.wires)))
    found = it.align(a, b, EXAMPLE, method="scale-aware", symmetry=sym)
    assert all(bool((m.scale == 1).all()) for m in found.element.moves.values() if m.scale is not None)
    assert found.after <= it.align(a, b, EXAMPLE, symmetry=sym).after * (1 + 1e-12)


@pytest.mark.parametrize("spread", [0.5, 1.5])
def test_a_rescaled_stranger_gets_its_scales_back(spread: float) -> None:
    """Between two unrelated networks: what b was multiplied by is found, though b's units are none of a's."""
    a, b = network(0), network(1)
    sym = it.symmetry(a, EXAMPLE)
    b = it.align(a, b, EXAMPLE, symmetry=sym).model
    moved, g = rescaled(sym, b, spread)
    pair = paired(sym, a, moved)
    for s in (0, 1, 0, 1):
        evidence_scale_step(pair, s)
    for i, move in g.moves.items():
        found = pair.element.moves[i].scale
        assert move.scale is not None
        assert found is not None
        left = (move.scale * found).log()
        assert float(left.std()) < 0.35 * float(move.scale.log().std())
    near, far = (it.align(a, m, EXAMPLE, symmetry=sym, method="scale-aware").after for m in (b, moved))
    assert far < 1.25 * near
    assert it.align(a, moved, EXAMPLE, symmetry=sym).after > 1.5 * near


def test_one_side_is_judged_by_the_spread_of_lengths() -> None:
    """Before a BatchNorm: a narrower or wider spread is evidence, the same spread is none."""

    def normed(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(10, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4)).double().eval()

    a, b = normed(0), normed(1)
    sym = it.symmetry(a, torch.zeros(2, 10))
    assert not evidence_scale_step(paired(sym, a, b), 0)
    moved, g = rescaled(sym, b, 1.0)
    pair = paired(sym, a, moved)
    assert evidence_scale_step(pair, 0)
    drawn, found = g.moves[0].scale, pair.element.moves[0].scale
    assert drawn is not None
    assert found is not None
    left: Tensor = (drawn * found).log()
    assert float(left.std()) < 0.4 * float(drawn.log().std())


def test_dead_units_are_left_alone() -> None:
    a, b = network(0), network(1)
    sym = it.symmetry(a, EXAMPLE)
    moved, _ = rescaled(sym, b, 1.0)
    with torch.no_grad():
        moved.get_parameter("0.weight")[3] = 0
        moved.get_parameter("0.bias")[3] = 0
    pair = paired(sym, a, moved)
    assert evidence_scale_step(pair, 0)
    scale = pair.element.moves[0].scale
    assert scale is not None
    assert bool(scale.isfinite().all())
    assert float(scale[0, 3]) == 1


def test_permutations_and_scales_together_come_back() -> None:
    a = network(0)
    sym = it.symmetry(a, EXAMPLE)
    g = sym.random(seed=2, scale_spread=1.0)
    found = it.align(a, sym.act(g, a), EXAMPLE, method="scale-aware", symmetry=sym)
    assert (found.element @ g).distance(sym.identity()) < 1e-9
    assert permutations_of(found.element).distance(permutations_of(g.inverse())) == 0
