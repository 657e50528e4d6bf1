"""Mutual nearest neighbours: how many of a sample's k nearest samples two representations agree on.

A sample is never its own neighbour. Where several samples are equally far at the k-th place, they share the places that
are left, so that the value does not depend on the order of samples; without ties this is the plain count. Distances
come from one product of matrices; those too near the k-th to be told apart by it are taken again from the differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from intertwine.errors import InputError
from intertwine.measure.measure import Measure, degenerate, register
from intertwine.measure.procrustes import constant
from intertwine.measure.representation import Representation
from intertwine.measure.result import Result
from intertwine.measure.rsa import unit_rows, varying_features

METRICS = ("euclidean", "cosine")
CHANCE = 0.2  # from here on a note says what unrelated features would share


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Each sample's neighbours, samples × samples, every row with a sum of k; or the reason why there are none."""

    weights: sparse.csr_array | None
    reason: str | None = None


def nearest(x: Tensor, k: int, block: int = 512) -> sparse.csr_array:
    """The k nearest rows of each row, other than itself; rows tied at the k-th place share what is left."""
    wide = 8 * x.shape[1] * torch.finfo(x.dtype).eps * float(x.square().sum(1).max())  # more than a product is wrong by
    centred = x - x.mean(0)  # a common offset would drown the distances
    parts = [_block(x, centred, i, min(i + block, len(x)), k, wide) for i in range(0, len(x), block)]
    return sparse.csr_array(sparse.vstack(parts))


def _block(x: Tensor, centred: Tensor, start: int, stop: int, k: int, wide: float) -> sparse.csr_array:
    lengths = centred.square().sum(1)
    apart = lengths[start:stop, None] + lengths - 2 * centred[start:stop] @ centred.T
    own = torch.arange(start, stop, device=x.device)
    apart[own - start, own] = inf
    last = apart.kthvalue(k, dim=1, keepdim=True).values
    sure, near = apart < last - wide, (apart - last).abs() <= wide
    weights = (sure | near).double()
    for row in (near.sum(1) > 1).nonzero().flatten().tolist():
        places = near[row].nonzero().flatten()
        weights[row, places] = _share((x[places] - x[start + row]).square().sum(1), k - int(sure[row].sum()))
    return sparse.csr_array(weights.numpy(force=True))


def _share(apart: Tensor, places: int) -> Tensor:
    """1 for each that is nearer than the last place, an equal part of what is left for those at it, 0 beyond."""
    last = apart.kthvalue(places).values
    nearer, tied = apart < last, apart == last
    return nearer.double() + tied.double() * ((places - nearer.sum()).double() / tied.sum())


def _prepare(k: int, metric: str, representation: Representation) -> Neighbours:
    n = representation.samples
    if k >= n - 1:
        return Neighbours(None, f"{k} neighbours were asked for, and a sample has only {n - 1} others")
    if not representation.size:
        return Neighbours(None)
    x = varying_features(representation) if metric == "euclidean" else unit_rows(representation.flat.double())
    if x is None:
        return Neighbours(None, "a sample has no features above zero, and so no cosine with others")
    return Neighbours(nearest(x, k))


def _compare(k: int, a: Neighbours, b: Neighbours) -> Result:
    if (reason := a.reason or b.reason) is not None:
        return degenerate("mutual_knn", reason)
    if a.weights is None or b.weights is None:
        return constant("mutual_knn", a.weights is None, b.weights is None)
    n = len(a.weights.indptr) - 1
    chance = k / (n - 1)
    notes = (f"few samples: unrelated features would share {chance:.3f}",) if chance > CHANCE else ()
    return Result("mutual_knn", float(np.sum(a.weights.minimum(b.weights).data)) / (k * n), notes=notes)


@register
def mutual_knn(k: int = 10, metric: str = "euclidean") -> Measure:
    """The fraction of each sample's k nearest neighbours that both representations share, on average.

    Args:
        k: the number of neighbours; fewer than there are other samples, or all would be shared.
        metric: "euclidean"; or "cosine", between the features as given, as Huh et al. do.

    Example:
        >>> x = torch.randn(50, 3)
        >>> mutual_knn(k=5)(x, 4 - 2 * x).value
        1.0
    """
    if k < 1 or metric not in METRICS:
        raise InputError(
            f"mutual_knn was asked for with k={k} and metric={metric!r}; k is at least 1, and the metrics are "
            f"{' and '.join(METRICS)}."
        )
    invariances = {"permutation", "signs", "orthogonal", "isotropic scale"}
    return Measure(
        "mutual_knn", "similarity", (0.0, 1.0), 1.0,
        frozenset(invariances | ({"translation"} if metric == "euclidean" else set())), "Huh et al. 2024",
        f"shared {metric} neighbours of each sample, {k} at a time", partial(_prepare, k, metric), partial(_compare, k),
    )  # fmt: skip
