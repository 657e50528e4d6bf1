"""Planted alignments at full size: a network is moved by an element of its symmetry, and aligned to itself.

Permutations must be recovered exactly, permutations with scales to a relative distance of 1e-5.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import intertwine as it
from intertwine.align.solver import permutations_of
from intertwine.checkpoints.libraries import declare_missing_ops
from intertwine.lab.papers.work import PublishedNetworks
from intertwine.lab.zoo.networks.registry import architecture, build

ZOO = ("mlp", "myrtle", "resnet20", "resnet18", "vgg16", "vit", "gpt", "tiny10")


def subjects() -> Iterator[tuple[str, nn.Module, Any]]:
    """Untrained networks, an untrained GPT-2 small, and the published Tiny-10 checkpoints."""
    for name in ZOO:
        torch.manual_seed(0)
        yield name, build(name).eval(), architecture(name).example()
    declare_missing_ops()  # transformers imports torchvision where it is installed
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    yield "GPT-2 small", GPT2LMHeadModel(GPT2Config(use_cache=False)).eval(), torch.zeros(1, 8, dtype=torch.long)
    published = PublishedNetworks("tiny10")
    for seed in published.files:
        yield f"tiny10 seed{seed}", published.seed(seed), architecture("tiny10").example()


def measure_planted(seeds: int) -> Iterator[dict[str, Any]]:
    """One row per network: the number of recovered elements, and the longest time."""
    for name, model, example in subjects():
        symmetry = it.symmetry(model, example)
        row: dict[str, Any] = {"network": name, "seeds": seeds}
        for kind, method in (("permutations", "weights"), ("scales", "scale-aware")):
            back, longest = 0, 0.0
            for seed in range(seeds):
                g = symmetry.random(seed=100 + seed)
                moved = symmetry.act(permutations_of(g) if kind == "permutations" else g, model)
                start = time.perf_counter()
                found = it.align(model, moved, example, method=method, symmetry=symmetry)
                longest = max(longest, time.perf_counter() - start)
                back += _exact(model, found.model) if kind == "permutations" else _near(model, found.model)
            row |= {kind: back, f"{kind}_seconds": longest}
        yield row


def _exact(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def _near(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    with torch.no_grad():
        return all(float((x - y).norm()) <= 1e-5 * max(float(x.norm()), 1e-30) for x, y in pairs)
