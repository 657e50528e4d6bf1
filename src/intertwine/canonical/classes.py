"""Classes of equal features: how many different features a layer has on given data.

Chen, Zhou and Yan (2024) order the features of a layer by "can be replaced by" and call the width of that order the
feature complexity. Two features that are comparable are equal, so the order is an equivalence relation and its width
the number of classes. Trained features are never equal to the last bit, so a tolerance belongs to the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from intertwine.errors import InputError
from intertwine.shapes import Float, Int

GRAM_ROUNDING = 1e-12  # squared distances read off a Gram matrix are this good, relative to squared lengths
PAIRS_AT_ONCE = 1 << 22  # entries looked at together when candidate pairs are measured exactly


@dataclass(frozen=True)
class FeatureClasses:
    """The classes of equal features: `labels[i]` is the class of feature i, numbered by first appearance."""

    labels: tuple[int, ...]
    tolerance: float

    @property
    def count(self) -> int:
        """The number of classes: the feature complexity of the layer on this data."""
        return len(set(self.labels))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The members of each class."""
        return tuple(tuple(i for i, label in enumerate(self.labels) if label == k) for k in range(self.count))

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "labels": list(self.labels), "tolerance": self.tolerance}

    def __repr__(self) -> str:
        return f"FeatureClasses({self.count} classes of {len(self.labels)} features, tolerance {self.tolerance:g})"


def feature_classes(features: Float[Tensor, "samples neurons"], tolerance: float = 1e-9) -> FeatureClasses:
    """Sort the features of a layer into classes of equal ones.

    Args:
        features: one row per sample, one column per feature.
        tolerance: features i and j are equal if ‖zᵢ − zⱼ‖ ≤ tolerance · max(‖zᵢ‖, ‖zⱼ‖); 0 asks for the same numbers.
            With a tolerance a chain of near neighbours is one class, though its ends may be further apart.

    Returns:
        A `FeatureClasses`; `.count` is the feature complexity.

    Raises:
        InputError: the features are not a matrix of finite numbers.

    Example:
        >>> import torch
        >>> from intertwine.canonical.classes import feature_classes
        >>> z = torch.tensor([[1.0, 2.0, 1.0], [3.0, 0.0, 3.0]])
        >>> feature_classes(z).groups
        ((0, 2), (1,))

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Definition 3.4.
    """
    if features.ndim != 2 or not bool(features.isfinite().all()):
        found = f"of shape {tuple(features.shape)}" if features.ndim != 2 else "with infinite entries or NaN"
        raise InputError(
            f"Features were expected as a matrix of finite numbers, samples × features; a tensor {found} was given. "
            "Flatten images and tokens into the samples (channels last), and leave out broken samples."
        )
    if not tolerance >= 0:
        raise InputError(f"A tolerance of {tolerance} was asked for; it must be 0 or more.")
    z = features.detach().to("cpu", torch.float64)
    distinct, label = z.unique(dim=1, return_inverse=True)
    pairs = equal_pairs(distinct, tolerance) if tolerance > 0 else torch.empty(0, 2, dtype=torch.int64)
    size = distinct.shape[1]
    edges = coo_array((np.ones(len(pairs)), (pairs[:, 0].numpy(), pairs[:, 1].numpy())), shape=(size, size))
    merged = connected_components(edges, directed=False)[1][label.numpy()]
    order = {old: new for new, old in enumerate(dict.fromkeys(merged.tolist()))}
    return FeatureClasses(tuple(order[k] for k in merged.tolist()), tolerance)


def equal_pairs(z: Float[Tensor, "samples neurons"], tolerance: float) -> Int[Tensor, "pairs two"]:
    """The pairs i < j of equal columns. A Gram matrix finds candidates; their distances are then measured exactly."""
    gram = z.mT @ z
    squares = gram.diagonal()
    larger = torch.maximum(squares[:, None], squares[None, :])
    near = squares[:, None] + squares[None, :] - 2 * gram <= (tolerance**2 + GRAM_ROUNDING) * larger
    candidates = near.triu(1).nonzero()
    lengths = z.norm(dim=0)
    kept = [candidates[:0]]
    for pairs in candidates.split(max(PAIRS_AT_ONCE // max(len(z), 1), 1)):
        i, j = pairs.unbind(1)
        apart = (z[:, i] - z[:, j]).norm(dim=0)
        kept.append(pairs[apart <= tolerance * torch.maximum(lengths[i], lengths[j])])
    return torch.cat(kept)
