"""Real third-party networks: certified, covered, and with the groups their architecture has."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import intertwine as it
from intertwine.symmetry.symmetry import Symmetry

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from catalogue import entries

pytestmark = pytest.mark.models

#: One model per way of being difficult: caches of weights, shuffles, windows, gates, shared layers, state spaces.
QUICK = {
    "transformers": ["albert", "bloom", "clip", "gpt2", "llama", "mamba", "mistral", "qwen3", "swin", "t5"],
    "timm": ["levit_128s", "test_byobnet", "test_convnext", "test_efficientnet", "test_resnet", "test_vit"],
    "torchvision": ["shufflenet_v2_x0_5", "squeezenet1_1"],
}


def built(source: str, name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    return next(e for e in entries(source) if e.name == name).build()


@cache
def read(source: str, name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Symmetry]:
    """A model and its symmetry, found once for all tests that leave the model as it is."""
    model, args, kwargs = built(source, name)
    return model, args, kwargs, it.symmetry(model, *args, **kwargs)


@pytest.mark.parametrize(("source", "name"), [(s, n) for s, names in QUICK.items() for n in names])
def test_certified_and_covered(source: str, name: str) -> None:
    model, args, kwargs, sym = read(source, name)
    certificate = sym.certify(model, *args, trials=1, **kwargs)
    assert certificate.ok, certificate
    assert certificate.max_error <= 1e-9
    assert certificate.broken == ()
    assert not certificate.vacuous
    assert sym.unsupported == () or name in {"mamba"}
    assert sym.coverage(model) >= 0.75


#: Signs and scales that can be read only through each other.
TANGLED = {"transformers": ["mistral", "qwen3", "t5"], "timm": ["test_byobnet"]}
#: Half a minute each; of what is special about GoogLeNet, helpers that are read in training alone, a small network
#: follows below.
LONG = [pytest.param(*n, marks=pytest.mark.slow) for n in (("torchvision", "googlenet"), ("timm", "efficientvit_b0"))]


@pytest.mark.parametrize(("source", "name"), [*((s, n) for s, names in TANGLED.items() for n in names), *LONG])
def test_a_planted_element_is_found_again(source: str, name: str) -> None:
    model, *_, sym = read(source, name)
    moved = sym.act(sym.random(seed=1, scale_spread=0.5), model)
    assert it.canonicalize(model, symmetry=sym).unique
    assert it.fingerprint(model, symmetry=sym) == it.fingerprint(moved, symmetry=sym)
    element = it.equivalent(model, moved, symmetry=sym)
    assert element is not None
    back, own = sym.act(element, moved).state_dict(), model.state_dict()
    used = {n for n in sym.layouts if n in own and "aux" not in n}
    assert all(torch.allclose(back[n], own[n], rtol=1e-4, atol=1e-5) for n in used)


class Helped(nn.Module):
    """A second head that is read in training alone, as those of GoogLeNet are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.aux = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return self.head(hidden) + self.aux(hidden) if self.training else self.head(hidden)


def test_weights_that_nothing_reads_have_no_part() -> None:
    model, x = Helped().eval(), torch.randn(2, 4)
    sym = it.symmetry(model, x)
    moved = sym.act(sym.random(seed=1, scale_spread=0.5), model)
    with torch.no_grad():
        moved.get_parameter("aux.weight").fill_(torch.nan)
    assert it.canonicalize(model, symmetry=sym).unique
    assert it.fingerprint(model, symmetry=sym) == it.fingerprint(moved, symmetry=sym)
    element = it.equivalent(model, moved, symmetry=sym)
    assert element is not None
    assert torch.allclose(sym.act(element, moved)(x), model(x), atol=1e-5)


def groups(sym: Any) -> dict[str, str]:
    return {wire.name: str(wire.group) for wire in sym.wires}


def test_llama_with_matrices() -> None:
    model, args, kwargs = built("transformers", "llama")
    sym = it.symmetry(model, *args, continuous=True, **kwargs)
    found = groups(sym)
    assert found["model.layers.0.self_attn.o_proj"] == "O(48)"  # the residual stream, read through RMS norms alone
    assert found["model.layers.0.self_attn.v_proj/inner"] == "(GL(12))⁴"  # values and outputs, a matrix per head
    assert found["model.layers.0.self_attn.q_proj/inner"] == "((R*)^6)⁴"  # RoPE leaves scales of each frequency
    certificate = sym.certify(model, *args, **kwargs)
    assert certificate.ok
    assert certificate.broken == ()


def test_folding_norm_weights_keeps_the_function_and_leaves_ones() -> None:
    model, args, kwargs = built("transformers", "llama")
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    sym = it.symmetry(model, *args, continuous=True, **kwargs)
    folded = sym.folded(model)
    norms = [p for name, p in folded.named_parameters() if "norm" in name]
    assert all(torch.allclose(p, torch.ones_like(p)) for p in norms)
    with torch.no_grad():
        before, after = model(*args, **kwargs).logits, folded(*args, **kwargs).logits
    assert float((before - after).abs().max() / before.abs().max()) < 1e-6  # the model computes in float32 inside


def test_gpt2_has_a_matrix_per_head_and_permutations_under_layer_norm() -> None:
    model, args, kwargs = built("transformers", "gpt2")
    found = groups(it.symmetry(model, *args, continuous=True, **kwargs))
    assert sorted(set(found.values())) == ["(GL(12))⁴", "S_4", "S_48 ⋉ (R*)^4·48", "S_80"]


def test_heads_of_grouped_queries_form_a_wreath_product() -> None:
    *_, sym = read("transformers", "mistral")
    found = groups(sym)
    assert found["model.layers.0.self_attn.q_proj/outer"] == "S_2"  # key heads
    assert found["model.layers.0.self_attn.q_proj/middle"] == "(S_3)²"  # queries within each key head's group


def test_moving_all_but_one_parameter_changes_the_function() -> None:
    model, args, kwargs, sym = read("timm", "test_resnet")
    moved = sym.act(sym.random(0), model)
    with torch.no_grad():
        reference = model(*args, **kwargs)
        assert torch.allclose(moved(*args, **kwargs), reference, atol=1e-4)
        name = sym.wires[0].slots[0].parameter
        moved.get_parameter(name).copy_(model.get_parameter(name))
        assert not torch.allclose(moved(*args, **kwargs), reference, atol=1e-4)
