"""Classes of equal features, and swaps of two features that leave a network unchanged (Chen, Zhou and Yan 2024).

Definition 3.4 orders the features of a layer by "can be replaced by" and calls the width of that order the feature
complexity. Comparable features are equal, so the order is an equivalence relation whose width counts its classes.
Trained features are never exactly equal, so the number depends on a tolerance.

Theorem 3.3 is about a network cut at one module, x → Z → y, with τ = (1, swap, 1). As printed, naturality is required
of the arrows behind Z alone, and the theorem fails: a readout that adds two different features is unchanged by their
swap. With the arrow from the input, τ Z = Z is required as well, and the theorem holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError, unknown_name
from intertwine.graph.model import check_model, copy_module, empty_caches
from intertwine.graph.runner import float64_forward, to_float64
from intertwine.lab.papers.naturality import Inputs, batches
from intertwine.symmetry.certify import relative_error

GRAM_ROUNDING = 1e-12  # error of squared distances from a Gram matrix, relative to squared norms
PAIRS_AT_ONCE = 1 << 22  # entries in memory at once when candidate pairs are measured exactly


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
        >>> from intertwine.lab.papers.feature_duality import feature_classes
        >>> z = torch.tensor([[1.0, 2.0, 1.0], [3.0, 0.0, 3.0]])
        >>> feature_classes(z).groups
        ((0, 2), (1,))

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Definition 3.4.
    """
    if features.ndim != 2 or not bool(features.isfinite().all()):
        found = f"of shape {tuple(features.shape)}" if features.ndim != 2 else "with infinite entries or NaN"
        raise InputError(
            f"The features are a tensor {found}. Pass a matrix of finite numbers, samples × features: flatten images "
            "and tokens into the samples (channels last), and leave out broken samples."
        )
    if not tolerance >= 0:
        raise InputError(f"tolerance must be 0 or more, but is {tolerance}.")
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


MOST_SWAPS = 2048  # each swap runs the network once

IndexPair = tuple[int, int]
TensorMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SelfTransformations:
    """Swaps of two features at a module. See `self_transformations`.

    `swaps`: the pairs whose swap is natural. `equal`: the pairs of features that are equal on the data.
    """

    at: str
    width: int
    swaps: tuple[IndexPair, ...]
    equal: tuple[IndexPair, ...]
    input_arrow: bool
    tolerance: float

    @property
    def multiple(self) -> bool:
        """Whether there are natural self-transformations besides the identity."""
        return bool(self.swaps)

    @property
    def dual(self) -> bool:
        """Whether the theorem holds here: the natural swaps are those of equal features."""
        return self.swaps == self.equal

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"multiple": self.multiple, "dual": self.dual}

    def __repr__(self) -> str:
        arrow = "with" if self.input_arrow else "without"
        counts = f"{len(self.swaps)} natural swaps {arrow} the input arrow, {len(self.equal)} pairs of equal features"
        return f"SelfTransformations({self.width} features at {self.at!r}: {counts})"


def self_transformations(
    model: nn.Module,
    at: str,
    data: Any,
    *,
    input_arrow: bool = True,
    axis: int | None = None,
    tolerance: float = 1e-9,
) -> SelfTransformations:
    """Which swaps of two features at a module are natural transformations of a network to itself, on given data.

    Args:
        model: the network; a float64 copy of it runs. at: a module path whose output is meant; it must run once.
        data: as for `naturality`: a tensor, a tuple of arguments, or an iterable of (inputs, targets) batches.
        input_arrow: ask that the features themselves stay as they are (the arrow from the input, τ_x = 1). False asks
            only that the output stays, which is how the theorem is printed and why it fails.
        axis: the axis of the features; by default 1, or the last one of a three-dimensional tensor (tokens).
        tolerance: relative, in float64.

    Returns:
        A `SelfTransformations`.

    Raises:
        InputError: no such module, one that runs several times, or more than 2,048 swaps to try.

    Example:
        >>> import torch
        >>> from intertwine.lab.papers.linear_equivalence import sum_of_two_features
        >>> from intertwine.lab.papers.feature_duality import self_transformations
        >>> model, x = sum_of_two_features()
        >>> self_transformations(model, "1", x, input_arrow=False).swaps  # different features, and yet
        ((0, 1),)
        >>> self_transformations(model, "1", x).swaps
        ()

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Theorem 3.3.
    """
    cut = _Cut(model, at, axis)
    calls = list(batches(data))
    runs = [cut.run(inputs) for inputs in calls]
    features = torch.cat([z for z, _ in runs])
    width = features.shape[1]
    equal = tuple((i, j) for i, j in equal_pairs(features, tolerance).tolist())
    tried = equal if input_arrow else tuple(combinations(range(width), 2))
    if len(tried) > MOST_SWAPS:
        raise InputError(
            f"The {width} features at {at!r} have {len(tried)} swaps, each with a forward pass; the maximum is "
            f"{MOST_SWAPS}. Take a narrower layer, or count equal features with feature_classes."
        )
    outputs = [y for _, y in runs]
    swaps = tuple(pair for pair in tried if cut.unseen(pair, calls, outputs, tolerance))
    return SelfTransformations(at, width, swaps, equal, input_arrow, tolerance)


class _Cut:
    """A network cut at the output of one module."""

    def __init__(self, model: nn.Module, at: str, axis: int | None) -> None:
        check_model(model)
        self.model = copy_module(model).to(torch.float64)
        empty_caches(self.model)
        self.at, self.axis = at, axis
        if at not in (names := [name for name, _ in self.model.named_modules() if name]):
            raise InputError(unknown_name("module", at, names))
        self.module = self.model.get_submodule(at)

    def run(self, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
        """The features, one column each, and the outputs."""
        kept: list[Tensor] = []

        def keep(z: Tensor) -> Tensor:
            kept.append(z.movedim(self._axis(z), -1).flatten(0, -2).clone())
            return z

        outputs = self._forward(inputs, keep)
        if len(kept) != 1:
            raise InputError(
                f"The module {self.at!r} runs {len(kept)} times in one forward pass, but must run once. Name a module "
                "inside or around it."
            )
        return kept[0], outputs

    def unseen(self, pair: IndexPair, calls: list[Inputs], outputs: list[list[Tensor]], tolerance: float) -> bool:
        """Whether a swap of two features leaves the outputs of all batches unchanged."""

        def swap(z: Tensor) -> Tensor:
            axis = self._axis(z)
            order = torch.arange(z.shape[axis], device=z.device)
            order[list(pair)] = order[list(reversed(pair))]
            return z.index_select(axis, order)

        return all(
            relative_error(a, b) <= tolerance
            for inputs, own in zip(calls, outputs, strict=True)
            for a, b in zip(own, self._forward(inputs, swap), strict=True)
        )

    def _forward(self, inputs: Inputs, change: TensorMap) -> list[Tensor]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            leaves, structure = tree_flatten(output)
            first = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
            leaves[first] = change(leaves[first])
            return tree_unflatten(leaves, structure)

        handle = self.module.register_forward_hook(hook)
        args, kwargs = to_float64(inputs)
        try:
            with float64_forward():
                return [v.clone() for v in tree_leaves(self.model(*args, **kwargs)) if isinstance(v, Tensor)]
        finally:
            handle.remove()

    def _axis(self, z: Tensor) -> int:
        axis = self.axis if self.axis is not None else 2 if z.ndim == 3 else 1
        if not -z.ndim <= axis < z.ndim:
            raise InputError(
                f"The module {self.at!r} returns features of shape {tuple(z.shape)}, which have no axis {axis}. Pass "
                "the axis of the features as axis=."
            )
        return axis % z.ndim
