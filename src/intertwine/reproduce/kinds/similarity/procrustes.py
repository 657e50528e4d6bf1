"""Procrustes similarities of the same layer of two networks, as printed and corrected, in one pass over the images.

As printed (Definition 5.2, section D.7.1 and the published code): features are not centred; channels that are zero on
all images stay in the divisor of G_ReLU-Procrustes and raise it; the orthogonal one divides by one number where the
other divides every channel by its length, so that the two are not on one scale. Corrected: centred, without dead
channels, and both with channels of length 1, so that the orthogonal value is the larger one, as the paper says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor, nn

from intertwine.features.features import features
from intertwine.features.policy import arrange
from intertwine.measure.measure import Measure
from intertwine.measure.moments import StreamingMoments
from intertwine.measure.procrustes import columns, orthogonal_procrustes, relu_procrustes
from intertwine.measure.representation import Representation
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.kinds.similarity.settings import Settings
from intertwine.zoo.datasets.dataset import Dataset


def unit_orthogonal() -> Measure:
    """Orthogonal Procrustes similarity of centred channels of length 1; those that do not vary are left out.

    Example:
        >>> x = torch.randn(50, 3).relu()
        >>> scaled = x * torch.tensor([1.0, 10.0, 100.0])
        >>> round(unit_orthogonal()(x, scaled).value, 5), orthogonal_procrustes()(x, scaled).value < 0.9
        (1.0, True)
    """
    plain = orthogonal_procrustes(center=False)

    def prepare(x: Representation) -> object:
        unit = columns(x, center=True, each=True)
        live = unit.x[:, unit.live] if len(unit.live) else unit.x
        return plain.prepare_with(Representation(live, x.eps))

    return replace(plain, prepare_with=prepare)


#: Series → the measure behind it.
MEASURES: dict[str, Callable[[], Measure]] = {
    "G_ReLU, as printed": lambda: relu_procrustes(center=False, dead="paper"),
    "G_ReLU, without dead channels": lambda: relu_procrustes(center=False),
    "G_ReLU, corrected": relu_procrustes,
    "orthogonal, as printed": lambda: orthogonal_procrustes(center=False),
    "orthogonal, corrected": unit_orthogonal,
}


def procrustes_rows(front: nn.Module, back: nn.Module, data: Dataset, asked: Settings) -> list[Row]:
    """One row per layer: `values` and `unrelated` by series, and the share of `dead` channels in each network.

    `unrelated` is what the same features score when every row of one meets another row of the other.
    """
    streams = {at: StreamingMoments([(at, at)], baseline=True) for at in asked.at.values()}
    ends = [features(model, data.batches("test", asked.batch), asked.at.values()) for model in (front, back)]
    alive: list[dict[str, Tensor]] = [{}, {}]
    for batch in zip(*ends, strict=True):
        for layer in ends[0].layers:
            x, y = (arrange(side[layer.name], "channels", layer.layout) for side in batch)
            streams[layer.name].update({layer.name: x}, {layer.name: y})
            for known, rows in zip(alive, (x, y), strict=True):
                known[layer.name] = (rows != 0).any(0) | known.get(layer.name, torch.tensor(False))
    return [
        {"label": label, "dead": [1 - float(side[at].double().mean()) for side in alive], **_values(streams[at], at)}
        for label, at in asked.at.items()
    ]


def _values(stream: StreamingMoments, at: str) -> Row:
    found = dict(zip(MEASURES, stream.results([make() for make in MEASURES.values()], at, at), strict=True))
    values = {series: _known(result.value) for series, result in found.items()}
    return {"values": values, "unrelated": {series: _known(result.baseline) for series, result in found.items()}}


def _known(value: float | None) -> float | None:
    """None where there is no value, as of layers that are zero everywhere."""
    return value if value is not None and isfinite(value) else None
