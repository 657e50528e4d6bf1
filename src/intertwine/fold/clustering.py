"""Folding by clustering: k-means on incoming weights, and Ward clustering of activations on data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from intertwine.align.activation_sites import run_side_by_side
from intertwine.align.similarity import PairedActivations
from intertwine.align.state import MovableWires
from intertwine.data.batches import calls, check_batches, check_readable_again, on_device_of
from intertwine.data.batchnorm import batch_norms, reset_statistics
from intertwine.errors import InputError
from intertwine.fold.merging import ROUNDING, Array, FeatureDistances, MergeState, feature_slices
from intertwine.fold.options import STATISTICS, Beta, Options, check_word
from intertwine.fold.prepare import PreparedModel, Widths, check_share, prepare, wanted_widths
from intertwine.fold.result import Fold
from intertwine.fold.variances import GroupMerger, check_repair

Labels = NDArray[np.int64]
#: Rounds of reassignment in one call of scipy, and the largest number of calls for one start.
ROUNDS, CALLS = 10, 20


def fold_kmeans(
    model: nn.Module,
    *example_args: Any,
    widths: Widths,
    seed: int = 0,
    restarts: int = 3,
    repair: str | None = None,
    **example_kwargs: Any,
) -> Fold:
    """Fold a network to given widths: features clustered by k-means, every cluster merged into one feature.

    Features are compared by their incoming rows with bias, with BatchNorm as part of the layer before it. Wires are
    merged in order, each after those before it. Equal features are always merged, so a wire with few different features
    may end up narrower than its width.

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs it can be called with.
        widths: the share of its features that every wire keeps, in (0, 1); or wire → number of features to keep; other
            wires stay as they are.
        seed: of the starts; the same seed gives the same network. restarts: starts of k-means; the best is kept.
        repair: "variances" gives merged features the mean variance of their members; see `repair_variances`.

    Returns:
        A `Fold`, as `fold` gives it.

    Raises:
        InputError: a share outside (0, 1), or widths that the wires of the network cannot have.

    Example:
        >>> import torch
        >>> from intertwine.fold.clustering import fold_kmeans
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> fold_kmeans(model, torch.zeros(1, 3), widths=0.5).model[0].out_features
        4
    """
    check_share(widths)
    check_repair(repair)
    if restarts < 1:
        raise InputError(f"restarts must be at least 1, but is {restarts}.")
    prepared = prepare(model, (example_args, example_kwargs))
    wanted = wanted_widths(widths, prepared.wires)
    merger = GroupMerger(prepared, repair)
    for w, wire in enumerate(prepared.wires):
        if wanted.get(wire.name, wire.size) < wire.size:
            labels = kmeans_labels(compared_rows(merger.merging, w), wanted[wire.name], seed, restarts)
            merger.merge(w, [np.flatnonzero(labels == c).tolist() for c in range(labels.max() + 1)])
    return merger.finish()


def compared_rows(merging: MergeState, w: int) -> Array:
    """The rows by which the features of a wire are compared, rotated into as few coordinates as keep all distances."""
    rows = torch.cat([feature_slices(s.block.data, s.dim) for s in merging.wires[w].slots if merging.measured(s)], 1)
    if rows.shape[1] > len(rows):  # rows = Rᵀ Qᵀ, and Q is a rotation
        rows = torch.linalg.qr(rows.T, mode="r").R.T
    return rows.contiguous().numpy()


def kmeans_labels(rows: Array, width: int, seed: int = 0, restarts: int = 3) -> Labels:
    """The cluster of every row: k-means with k-means++, the best of some starts; no cluster is empty.

    Rows that are equal up to rounding are in one cluster, so there may be fewer clusters than `width`.

    >>> import numpy as np
    >>> kmeans_labels(np.array([[0.0], [5.0], [0.1], [5.1], [0.0]]), 2).tolist()
    [0, 1, 0, 1, 0]
    """
    same = duplicate_rows(rows)
    first = np.unique(same, return_index=True)[1]
    if len(first) <= width:
        return same
    rng = np.random.default_rng(seed)
    found = [_lloyd(rows, same, first, _initial_centers(rows, width, rng)) for _ in range(restarts)]
    labels = min(found, key=lambda labels: within_cluster_scatter(rows, labels))
    first, inverse = np.unique(labels, return_index=True, return_inverse=True)[1:]
    return np.argsort(np.argsort(first))[inverse]  # clusters in the order of their first members


def duplicate_rows(rows: Array) -> Labels:
    """A number for every row; rows that are equal up to rounding have the same."""
    squares = (rows**2).sum(1)
    distances = squares[:, None] + squares[None, :] - 2 * rows @ rows.T
    return connected_components(distances <= ROUNDING * squares.max(), directed=False)[1].astype(np.int64)


def within_cluster_scatter(rows: Array, labels: Labels) -> float:
    """The sum of squared distances of rows from the means of their clusters."""
    return float(((rows - _means(rows, labels)[labels]) ** 2).sum())


def _means(rows: Array, labels: Labels) -> Array:
    counts = np.bincount(labels)
    sums = np.zeros((len(counts), rows.shape[1]))
    np.add.at(sums, labels, rows)
    return sums / np.maximum(counts, 1)[:, None]


def _initial_centers(rows: Array, width: int, rng: np.random.Generator) -> Array:
    """k-means++: each center is a row, drawn in proportion to its squared distance from the centers so far."""
    chosen = [int(rng.integers(len(rows)))]
    nearest = ((rows - rows[chosen[0]]) ** 2).sum(1)
    while len(chosen) < width:
        nearest[chosen] = 0.0
        chosen.append(int(rng.choice(len(rows), p=nearest / nearest.sum())))
        nearest = np.minimum(nearest, ((rows - rows[chosen[-1]]) ** 2).sum(1))
    return rows[chosen]


def _lloyd(rows: Array, same: Labels, first: Labels, centers: Array) -> Labels:
    """Lloyd's algorithm from given centers until nothing changes."""
    labels = np.full(len(rows), -1)
    for _ in range(CALLS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # empty clusters are filled below
            centers, found = kmeans2(rows, centers, iter=ROUNDS, minit="matrix", missing="warn")
        found = found.astype(np.int64)[first][same]
        filled = _fill_empty(rows, same, found, len(centers))
        if np.array_equal(filled, labels):
            break
        labels, centers = filled, _means(rows, filled)
    return labels


def _fill_empty(rows: Array, same: Labels, labels: Labels, width: int) -> Labels:
    """Give every empty cluster the row farthest from the mean of its cluster, and the rows equal to it."""
    labels = labels.copy()
    for empty in np.flatnonzero(np.bincount(labels, minlength=width) == 0):
        far = ((rows - _means(rows, labels)[labels]) ** 2).sum(1).argmax()
        labels[same == same[far]] = empty
    return labels


def fold_activations(
    model: nn.Module,
    data: Any,
    *,
    beta: Beta | None = None,
    widths: Widths | None = None,
    at: str = "post",
    statistics: str = "keep",
    repair: str | None = None,
) -> Fold:
    """Merge the features of a network whose activations on data are nearly the same; labels are not used.

    One pass over the data, before anything is merged, gives Σ a aᵀ of the features of every wire; positions of images
    and tokens count as samples. The two nearest features of a wire are merged, groups as means of their
    members, until the stop rule of `fold` or the width is reached.

    Args:
        model: any network; it is not changed.
        data: batches of (inputs, targets), or of inputs alone. Read once; twice with statistics="reset".
        beta: in (0, 1): a wire stops when its smallest distance exceeds beta times its largest at the start.
        widths: instead of beta: the share of its features that every wire keeps, or wire → number of features.
        at: the activations to compare: "post" (after nonlinearities) or "pre" (before).
        statistics: "reset" re-estimates those of BatchNorm on the data in the folded network; "keep" does not.
        repair: "variances" gives merged features the mean variance of their members; see `repair_variances`.

    Returns:
        A `Fold`, as `fold` gives it.

    Raises:
        InputError: neither or both of beta and widths, options out of range, no data, or statistics="reset" without
            BatchNorm.

    Example:
        >>> import torch
        >>> from intertwine.fold.clustering import fold_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> fold_activations(model, [torch.randn(64, 3)], widths=0.5).model[0].out_features
        4
    """
    _check(model, data, beta, widths, statistics)
    check_repair(repair)
    batches = _Batches(data)
    prepared = prepare(model, on_device_of(next(calls(batches.peek())), model))
    limits = _limits(prepared, beta, widths)
    grams = inner_products(prepared, batches, at)
    merger = GroupMerger(prepared, repair)
    merger.merge_named({name: merge_nearest(gram, limits[name]) for name, gram in grams.items() if name in limits})
    folded = merger.finish()
    return replace(folded, model=reset_statistics(folded.model, batches)) if statistics == "reset" else folded


@dataclass(frozen=True)
class StopRule:
    """A wire stops at this width, or where the smallest distance exceeds beta times the largest."""

    width: int = 1
    beta: float = 1.0


def merge_nearest(gram: Array, limit: StopRule) -> list[list[int]]:
    """Groups of features from their inner products: the two nearest are merged until a limit.

    >>> import numpy as np
    >>> a = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]])
    >>> merge_nearest(a @ a.T, StopRule(width=2))
    [[0, 2], [1]]
    """
    groups = [[i] for i in range(len(gram))]
    alive = np.ones(len(gram), bool)
    distances = FeatureDistances({"mean": gram.copy()}, np.ones(len(gram)), alive, rows="ward")
    enough = max(limit.beta * distances.largest, distances.rounding)
    while alive.sum() > limit.width and distances.smallest <= enough:
        m, n = distances.pair()
        distances.merge(m, n)
        groups[m] += groups[n]
        groups[n] = []
    return [sorted(group) for group in groups if group]


def inner_products(prepared: PreparedModel, data: Any, at: str = "post") -> dict[str, Array]:
    """Wire → Σ a aᵀ of its features over all data, for the wires that can be folded."""
    symmetry = prepared.symmetry
    names = {wire.index: wire.name for wire in prepared.wires}
    paired = PairedActivations(MovableWires(symmetry.wire_specs, frozenset()), frozenset(names), at)
    run_side_by_side(symmetry, prepared.model, prepared.model, data, [paired])
    # signs and scales are not distinguished: the products of a wire are one matrix
    return {names[s]: products.inner().numpy() for s, kinds in paired.products.items() for products in kinds.values()}


def _limits(prepared: PreparedModel, beta: Beta | None, widths: Widths | None) -> dict[str, StopRule]:
    """The stop rule of each wire that is folded."""
    if widths is not None:
        return {name: StopRule(width=width) for name, width in wanted_widths(widths, prepared.wires).items()}
    assert beta is not None
    options = Options(beta)
    options.check_wires([wire.name for wire in prepared.wires])
    found = {wire.name: options.beta_of(wire.name) for wire in prepared.wires}
    return {name: StopRule(beta=value) for name, value in found.items() if value is not None}


def _check(model: nn.Module, data: Any, beta: Beta | None, widths: Widths | None, statistics: str) -> None:
    """Refuse wrong options before any work."""
    if (beta is None) == (widths is None):
        given = "Neither beta nor widths is" if beta is None else "Both beta and widths are"
        raise InputError(f"{given} given. Give one: beta=0.1 for a stop rule, or widths=0.5 for a share to keep.")
    if beta is not None:
        Options(beta)
    if widths is not None:
        check_share(widths)
    check_word("statistics", statistics, STATISTICS)
    if statistics == "reset":
        if not batch_norms(model):
            raise InputError(
                "statistics='reset' needs BatchNorm with running statistics, but the network has none. Leave it out; "
                "repair='variances' works on any network."
            )
        check_readable_again(data)


class _Batches:
    """Batches of inputs, with or without targets, as pairs; the first can be read before the others."""

    def __init__(self, data: Any) -> None:
        check_batches(data)
        self._data = data

    def peek(self) -> list[Any]:
        """The first batch, in a list; iteration yields it again, also of a generator."""
        source = iter(self._data)
        first = [_pair(batch) for batch in islice(source, 1)]
        if not first:
            raise InputError("The data holds no batches, so there are no features to compare. Pass at least one.")
        if source is self._data:
            self._data = chain(first, source)
        return first

    def __iter__(self) -> Iterator[Any]:
        return map(_pair, self._data)


def _pair(batch: Any) -> Any:
    return (batch, None) if isinstance(batch, Tensor) else batch
