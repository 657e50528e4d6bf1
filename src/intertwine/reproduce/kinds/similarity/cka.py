"""CKA between all layers of two networks, as printed and corrected: one centred Gram matrix per layer and kernel.

As printed (Definition 5.3, section D.7.2 and the published code): every channel is centred over images and positions
and divided by its length, also for the "orthogonal" CKA, which rotations then change. G_ReLU takes the largest
agreement over channels, and a channel that is zero everywhere is a zero in that maximum. Corrected: dead channels are
left out of the maximum, and the orthogonal one is linear CKA, channels as they are. All use HSIC₁, which is unbiased.

The Gram matrices of a network are found once, whatever the number of its pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from torch import Tensor, nn

from intertwine.features.features import features
from intertwine.measure.hsic import CentredGram, align, centred_gram
from intertwine.measure.relu_cka import relu_cka, unit_channels
from intertwine.measure.representation import Representation, represent
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.kinds.similarity.settings import Settings
from intertwine.zoo.datasets.dataset import Dataset

#: Of Gram matrices, how many bytes are kept for networks that will be met again.
KEPT = 8e9
#: What one network shows: (series, layer) → Gram matrix, and layer → share of channels that are zero on all images.
Shown = tuple[dict[tuple[str, str], CentredGram], dict[str, float]]


def _linear(x: Tensor) -> CentredGram:
    flat = x.flatten(1)
    return centred_gram(flat @ flat.T)


#: Series → what makes the Gram matrix of a layer (images, channels, positions).
KERNELS: dict[str, Callable[[Representation], CentredGram]] = {
    "G_ReLU, as printed": relu_cka(dead="zero").prepare_with,
    "G_ReLU, corrected": relu_cka().prepare_with,
    "orthogonal, as printed": lambda x: _linear(unit_channels(x)[0].transpose(0, 1)),
    "orthogonal, corrected": lambda x: _linear(x.centred),
}


def gram_matrices(model: nn.Module, data: Dataset, asked: Settings) -> Shown:
    """What one network gives to all its pairs."""
    held = features(model, data.batches("test", asked.batch), asked.at.values()).collect("structured")
    grams: dict[tuple[str, str], CentredGram] = {}
    dead = {}
    for at in asked.at.values():
        x = held[at]
        dead[at] = 1 - float((x != 0).any(2).any(0).double().mean())
        seen = represent(x)
        grams |= {(series, at): kernel(seen) for series, kernel in KERNELS.items()}
    return grams, dead


def cka_rows(first: Shown, second: Shown, asked: Settings) -> list[Row]:
    """One row per kernel: its `matrix`, the first network's layers from top to bottom; and one of `dead` channels."""
    (a, dead), (b, others), places = first, second, asked.at.values()
    rows: list[Row] = []
    for series in KERNELS:
        table = [[align(series, a[series, x], b[series, y]).value for y in places] for x in places]
        rows.append({"series": series, "matrix": [[_value(value) for value in line] for line in table]})
    return [*rows, {"series": "dead channels", "dead": [[dead[at], others[at]] for at in places]}]


def _value(found: float) -> float | None:
    """Six digits, which is more than pairs agree in; None where there is no value, as of layers that are constant."""
    return round(found, 6) if isfinite(found) else None


def kept(images: int, layers: int) -> int:
    """For how many networks Gram matrices are kept: two at least.

    >>> kept(2000, 19), kept(10000, 19)
    (6, 2)
    """
    return max(2, int(KEPT // (len(KERNELS) * layers * images**2 * 4)))
