"""Error and loss barriers between pairs of trained networks, before and after alignment.

Every pair of a zoo (seeds 0 and 1, 2 and 3, …) is aligned by every method. The barrier is measured at 25 points on the
test set, with mixed BatchNorm statistics and with statistics re-estimated on training images.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import intertwine as it
from intertwine.align.align import SOLVERS
from intertwine.canonical.scales import ScaleNormaliser
from intertwine.data.batchnorm import batch_norms
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.symmetry.blocks import block_weights, weights_of
from intertwine.symmetry.symmetry import Symmetry

#: Training images for methods with data and for re-estimated statistics.
SEEN = 10_000
METHODS = ("none", "weights", "scale-aware", "activations")


@dataclass(frozen=True)
class Setting:
    """The settings of the measurement."""

    methods: Sequence[str] = METHODS
    points: int = 25
    test: int = 10_000
    seen: int = SEEN
    device: str = "cpu"
    llfc: int = 0  # test images for the comparison of features by layer; 0: none
    options: Mapping[str, Mapping[str, Any]] | None = None  # of methods, by name


def pairs_of(count: int, most: int) -> list[tuple[int, int]]:
    """Disjoint pairs of networks: (0, 1), (2, 3), …; at most `most`."""
    return [(i, i + 1) for i in range(0, count - 1, 2)][:most]


def batches_on(data: Dataset, split: str, device: str, size: int = 500) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A split of a data set as batches on a device, read once for all measurements."""
    return [(x.to(device), y.to(device)) for x, y in data.batches(split, size)]


def measure_pair(
    a: nn.Module, b: nn.Module, data: Dataset, example: tuple[Any, ...], symmetry: Symmetry, setting: Setting
) -> Iterator[dict[str, Any]]:
    """One row per method: the barrier with and without reset, the distance, and the seconds of the alignment."""
    cut = data.subset(min(setting.seen, len(data.labels)), min(setting.test, len(data.test_labels)))
    test, train = (batches_on(cut, split, setting.device) for split in ("test", "train"))
    for method in setting.methods:
        # coordinate descent is many small steps, faster on a CPU; methods with data run on the device of the networks
        place = setting.device if method != "none" and SOLVERS[method].needs_data else "cpu"
        start = time.perf_counter()
        near, moved, distance = aligned(
            a.to(place), b.to(place), method, train, example, symmetry, (setting.options or {}).get(method)
        )
        seconds = time.perf_counter() - start
        near, moved = near.to(setting.device), moved.to(setting.device)
        reset = train if batch_norms(a) else None
        found = it.barrier(near, moved, test, points=setting.points, reset_statistics=reset, scales=True)
        plain = found.without_reset or found
        features = layers_of(near, moved, cut, setting) if setting.llfc else {}
        yield features | {
            "method": method, "seconds": seconds, "squared_distance": distance, "error": plain.error,
            "error_barrier": plain.error_barrier, "loss_barrier": plain.loss_barrier,
            "error_barrier_reset": found.error_barrier if reset else None,
            "loss_barrier_reset": found.loss_barrier if reset else None,
            "error_reset": found.error if reset else None,
            "error_barrier_scales": found.with_scales.error_barrier if found.with_scales else None,
            "loss_barrier_scales": found.with_scales.loss_barrier if found.with_scales else None,
        }  # fmt: skip


def layers_of(a: nn.Module, b: nn.Module, data: Dataset, setting: Setting) -> dict[str, float]:
    """1 − cos of the mixed features, worst layer and logits, and between the two networks (Zhou et al. 2023)."""
    batches = batches_on(data.subset(test=setting.llfc), "test", setting.device)
    reset = batches_on(data, "train", setting.device) if batch_norms(a) else None
    found = it.connectivity(a, b, batches, alphas=(0.5,), reset_statistics=reset)
    mixed = [layer.llfc[0].distance or 0.0 for layer in found.layers]
    apart = [layer.baseline or 0.0 for layer in found.layers]
    return {
        "llfc_worst": max(mixed), "llfc_logits": mixed[-1], "baseline_worst": max(apart), "baseline_logits": apart[-1],
    }  # fmt: skip


def with_unit_lengths(symmetry: Symmetry, model: nn.Module) -> nn.Module:
    """The same function with the weights of every unit scaled to length one."""
    cut = block_weights(symmetry, weights_of(symmetry, model), copy=True)
    scales = ScaleNormaliser(cut).run()
    identity = symmetry.identity()
    moves = {i: replace(m, scale=scales[i]) if i in scales else m for i, m in identity.moves.items()}
    return symmetry.act(replace(identity, moves=moves), model)


def aligned(
    a: nn.Module,
    b: nn.Module,
    method: str,
    data: Any,
    example: tuple[Any, ...],
    symmetry: Symmetry,
    options: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, nn.Module, float | None]:
    """The pair after a method, and its squared distance; "none" leaves b unchanged."""
    if method == "none":
        return a, b, None
    found = it.align(a, b, *example, method=method, data=data, symmetry=symmetry, options=options)
    return found.reference, found.model, found.after
