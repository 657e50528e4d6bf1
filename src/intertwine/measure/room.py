"""Room: how much memory a comparison needs at once, asked before anything is collected."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from pathlib import Path

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.features.features import Features
from intertwine.features.layer import Layer
from intertwine.measure.measure import FEATURES, PAIRS, Measure, every

DOUBLE = 8  # bytes: measures work in float64
WORK = 3  # matrices of a pair of layers: its products, their eigenvectors, and rows that stand for the samples
SINGLE = 4  # bytes: Gram matrices of single precision


def room(model: nn.Module, given: int | float | None) -> float:
    """Bytes that may be used on the device of a model: those given, or else those that are free."""
    if given is not None:
        return float(given)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    free = available(device)
    return inf if free is None else float(free)


def available(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def collected(first: Features, second: Features, policy: str, chosen: Sequence[Measure]) -> int | None:
    """Bytes at least that all samples need: as captured, one copy in float64, and what grows with pairs of samples.

    None where the data does not tell how many samples it holds.
    """
    samples = first.source.samples() if first.source is not None else None
    if samples is None:
        return None
    layers = [*first.layers, *second.layers]
    values = sum(samples * _width(layer, policy) * (layer.itemsize + DOUBLE) for layer in layers)
    pairs = [
        sum(_rows(layer, samples, policy, m) ** 2 * SINGLE for layer in layers) for m in chosen if m.memory == PAIRS
    ]
    return values + max(pairs, default=0)


def streamed(first: Features, second: Features, policy: str) -> int:
    """Bytes of the products of features that are summed up batch by batch: each layer with itself, and all pairs."""
    a, b = ([_features(layer, policy) for layer in side.layers] for side in (first, second))
    return DOUBLE * (sum(d * d for d in a + b) + sum(a) * sum(b))


def summarised(first: Features, second: Features, policy: str, baseline: bool) -> int:
    """Bytes of the products that stand for all samples, and of the largest pair while it is compared.

    With a baseline there are products of pairs in another order of samples too.
    """
    a, b = ([_features(layer, policy) for layer in side.layers] for side in (first, second))
    pairs = (1 + int(baseline)) * sum(a) * sum(b)
    return DOUBLE * (sum(d * d for d in a + b) + pairs + WORK * (max(a) + max(b)) ** 2)


def check_room(needed: int, limit: float, what: str, advice: str) -> None:
    """Refuse what does not fit.

    Raises:
        InputError: more is needed than there is.
    """
    if needed > limit:
        raise InputError(
            f"A comparison {what} needs at least {needed / 1e9:.3g} GB at once, and {limit / 1e9:.3g} GB may be used. "
            f"{advice} memory=BYTES sets another limit."
        )


def streaming_names() -> str:
    """The names of the measures that need no samples in memory."""
    return ", ".join(m.name for m in every() if m.memory == FEATURES)


def _channels(layer: Layer) -> int:
    kinds = layer.layout.replace("n", "")
    return prod(size for size, kind in zip(layer.shape, kinds, strict=True) if kind == "c")


def _width(layer: Layer, policy: str) -> int:
    """Numbers that are kept of one sample."""
    return _channels(layer) if policy == "pool" else prod(layer.shape)


def _features(layer: Layer, policy: str) -> int:
    """Features of one row."""
    return prod(layer.shape) if policy == "flatten" else _channels(layer)


def _rows(layer: Layer, samples: int, policy: str, measure: Measure) -> int:
    """Rows that a measure compares with each other; those that tell channels from positions take samples."""
    if policy in ("flatten", "pool") or (measure.positions and not measure.meets):
        return samples
    return samples * prod(layer.shape) // max(1, _channels(layer))
