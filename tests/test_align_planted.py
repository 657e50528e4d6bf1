"""Planted alignments: a network moved by an element of its symmetry is brought back, on every kind of network."""

from functools import cache

import pytest
import torch
from orbits import KINDS, distance, made, noisy, symmetry_of
from torch import nn

import intertwine as it
from intertwine.align.align import align
from intertwine.align.starts import permutations_of
from intertwine.symmetry.symmetry import Symmetry
from intertwine.zoo.networks import build
from intertwine.zoo.networks.registry import architecture

ZOO = {
    "mlp": {"widths": (784, 40, 30, 10)},
    "myrtle": {"width": 16},
    "resnet20": {},
    "resnet18": {"width": 0.125},
    "vgg16": {"width": 0.125},
    "vgg16_bn": {"width": 0.125},
    "vit": {"dim": 24, "depth": 2},
    "gpt": {"dim": 24, "depth": 2},
    "tiny10": {},
}


@cache
def network(name: str) -> tuple[nn.Module, Symmetry]:
    torch.manual_seed(0)
    model = build(name, **ZOO[name]).eval()
    return model, it.symmetry(model, architecture(name).example())


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
