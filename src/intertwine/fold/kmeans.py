"""`fold_kmeans`: the features of every wire clustered by their incoming rows; each cluster becomes one feature."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from scipy.sparse.csgraph import connected_components
from torch import nn

from intertwine.errors import InputError
from intertwine.fold.distances import ROUNDING, Array
from intertwine.fold.folded import Fold
from intertwine.fold.merging import Merging, slices
from intertwine.fold.prepared import prepare
from intertwine.fold.variances import GroupMerging, check_repair
from intertwine.fold.widths import Widths, check_share, wanted_widths

Labels = NDArray[np.int64]
#: Rounds of reassignment in one call of scipy, and the most calls of one start.
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

    Features are compared by their incoming rows with bias, in which BatchNorm counts as part of the layer before it.
    Wires are taken in order, each seeing what was merged before it. Features that are the same always go together, so
    a wire with more of them than the width asks for ends up narrower.

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs it can be called with.
        widths: the share of its features that every wire keeps, in (0, 1); or wire → number of features to keep, which
            leaves the wires it does not name as they are.
        seed: of the starts; the same seed gives the same network. restarts: of k-means; the best one counts.
        repair: "variances" gives merged features the mean variance of their members; see `repair_variances`.

    Returns:
        A `Fold`, as `fold` gives it.

    Raises:
        InputError: a share outside (0, 1), or widths that the wires of the network cannot have.

    Example:
        >>> import torch
        >>> from intertwine.fold.kmeans import fold_kmeans
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> fold_kmeans(model, torch.zeros(1, 3), widths=0.5).model[0].out_features
        4
    """
    check_share(widths)
    check_repair(repair)
    if restarts < 1:
        raise InputError(f"restarts={restarts} was asked for. k-means starts at least once.")
    prepared = prepare(model, (example_args, example_kwargs))
    wanted = wanted_widths(widths, prepared.wires)
    joint = GroupMerging(prepared, repair)
    for w, wire in enumerate(prepared.wires):
        if wanted.get(wire.name, wire.size) < wire.size:
            labels = cluster(compared_rows(joint.merging, w), wanted[wire.name], seed, restarts)
            joint.merge(w, [np.flatnonzero(labels == c).tolist() for c in range(labels.max() + 1)])
    return joint.finish()


def compared_rows(merging: Merging, w: int) -> Array:
    """What the features of a wire are compared by, turned into as few coordinates as keep all distances."""
    rows = torch.cat([slices(s.piece.data, s.dim) for s in merging.wires[w].sites if merging.measured(s)], 1)
    if rows.shape[1] > len(rows):  # a rotation: rows = Rᵀ Qᵀ
        rows = torch.linalg.qr(rows.T, mode="r").R.T
    return rows.contiguous().numpy()


def cluster(rows: Array, width: int, seed: int = 0, restarts: int = 3) -> Labels:
    """The cluster of every row: k-means with k-means++ starts, the best of some; no cluster is empty.

    Rows that are the same but for rounding are in one cluster, so there may be fewer clusters than asked for.

    >>> import numpy as np
    >>> cluster(np.array([[0.0], [5.0], [0.1], [5.1], [0.0]]), 2).tolist()
    [0, 1, 0, 1, 0]
    """
    same = classes(rows)
    first = np.unique(same, return_index=True)[1]
    if len(first) <= width:
        return same
    rng = np.random.default_rng(seed)
    found = [_settled(rows, same, first, _spread_out(rows, width, rng)) for _ in range(restarts)]
    labels = min(found, key=lambda labels: scatter(rows, labels))
    return _numbered(labels)


def _numbered(labels: Labels) -> Labels:
    """The same clusters, numbered by their first members."""
    first, inverse = np.unique(labels, return_index=True, return_inverse=True)[1:]
    return np.argsort(np.argsort(first))[inverse]


def classes(rows: Array) -> Labels:
    """Rows that are the same but for rounding have one number."""
    squares = (rows**2).sum(1)
    distances = squares[:, None] + squares[None, :] - 2 * rows @ rows.T
    return connected_components(distances <= ROUNDING * squares.max(), directed=False)[1].astype(np.int64)


def scatter(rows: Array, labels: Labels) -> float:
    """The sum of squared distances of rows from the means of their clusters."""
    return float(((rows - _means(rows, labels)[labels]) ** 2).sum())


def _means(rows: Array, labels: Labels) -> Array:
    counts = np.bincount(labels)
    sums = np.zeros((len(counts), rows.shape[1]))
    np.add.at(sums, labels, rows)
    return sums / np.maximum(counts, 1)[:, None]


def _spread_out(rows: Array, width: int, rng: np.random.Generator) -> Array:
    """k-means++: each center a row, drawn by its squared distance from the centers so far."""
    chosen = [int(rng.integers(len(rows)))]
    nearest = ((rows - rows[chosen[0]]) ** 2).sum(1)
    while len(chosen) < width:
        nearest[chosen] = 0.0
        chosen.append(int(rng.choice(len(rows), p=nearest / nearest.sum())))
        nearest = np.minimum(nearest, ((rows - rows[chosen[-1]]) ** 2).sum(1))
    return rows[chosen]


def _settled(rows: Array, same: Labels, first: Labels, centers: Array) -> Labels:
    """Lloyd's rounds from given centers until nothing changes."""
    labels = np.full(len(rows), -1)
    for _ in range(CALLS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # empty clusters: they are filled below
            centers, found = kmeans2(rows, centers, iter=ROUNDS, minit="matrix", missing="warn")
        found = found.astype(np.int64)[first][same]
        filled = _fill(rows, same, found, len(centers))
        if np.array_equal(filled, labels):
            break
        labels, centers = filled, _means(rows, filled)
    return labels


def _fill(rows: Array, same: Labels, labels: Labels, width: int) -> Labels:
    """Every empty cluster gets the row that is farthest from the mean of its own, and those like it."""
    labels = labels.copy()
    for empty in np.flatnonzero(np.bincount(labels, minlength=width) == 0):
        far = ((rows - _means(rows, labels)[labels]) ** 2).sum(1).argmax()
        labels[same == same[far]] = empty
    return labels
