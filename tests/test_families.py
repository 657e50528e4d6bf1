"""Families: which of many networks are one up to a symmetry."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from orbits import check_canonical, distance, mlp, noisy
from torch import nn

import intertwine as it
from intertwine.canonical.blocks import weights_of
from intertwine.canonical.families import families
from intertwine.canonical.form import Form, make_form
from intertwine.reproduce.published import Published
from intertwine.symmetry.symmetry import Symmetry
from intertwine.zoo.networks.registry import architecture

TRAINED = Published("tiny10")


def forms(sym: Symmetry, models: dict[str, nn.Module]) -> Iterator[tuple[str, Form]]:
    for name, model in models.items():
        yield name, make_form(sym, weights_of(sym, model))


@pytest.mark.parametrize("activation", [F.gelu, torch.tanh, F.relu])
def test_copies_are_found(activation: object) -> None:
    assert callable(activation)
    torch.manual_seed(0)
    first, other = (mlp(activation, (3, 6, 5, 2)) for _ in range(2))
    sym = it.symmetry(first, torch.zeros(1, 3))
    moved = sym.act(sym.random(1), first)
    models = {"first": first, "other": other, "again": first, "moved": moved, "noisy": noisy(moved, 1e-6)}
    models |= {"far": noisy(moved, 1e-2), "other moved": sym.act(sym.random(2), other)}
    found = families(forms(sym, models))
    assert {f.first: [(c.name, c.how) for c in f.copies] for f in found} == {
        "first": [("again", "identical"), ("moved", "moved"), ("noisy", "moved, with noise")],
        "other": [("other moved", "moved")],
        "far": [],
    }
    for family in found:
        assert family.fingerprint == it.fingerprint(models[family.first], symmetry=sym)
        for copy in family.copies:
            back = sym.act(copy.element, models[copy.name])
            assert distance(sym, models[family.first], back) <= copy.difference < 3e-6
    assert found[0].to_dict()["copies"][0] == {"name": "again", "how": "identical", "difference": 0.0}


def test_no_networks() -> None:
    assert families([]) == ()


def test_the_tolerance() -> None:
    torch.manual_seed(0)
    net = mlp(F.gelu, (3, 6, 2))
    sym = it.symmetry(net, torch.zeros(1, 3))
    models = {"first": net, "noisy": noisy(sym.act(sym.random(1), net), 1e-3)}
    assert len(families(forms(sym, models))) == 2
    assert len(families(forms(sym, models), tol=1e-2)) == 1


@pytest.mark.skipif(not TRAINED.files, reason="INTERTWINE_DATA names no folder that holds tiny10/seed*.safetensors")
def test_trained_networks() -> None:
    models = {f"seed{seed}": TRAINED.seed(seed) for seed in (0, 1)}
    x = architecture("tiny10").example()
    a, b = models
    sym = it.symmetry(models[a], x)
    check_canonical(sym, models[a], x)
    models["moved"] = sym.act(sym.random(1), models[b])
    models["noisy"] = noisy(sym.act(sym.random(2), models[a]), 1e-7)
    found = families(forms(sym, models))
    assert [(f.first, [c.name for c in f.copies]) for f in found] == [(a, ["noisy"]), (b, ["moved"])]
