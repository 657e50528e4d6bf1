"""Measures that compare the distances between samples: representational similarity analysis and mutual nearest
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import frexp, inf

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError, unknown_name
from intertwine.measure.measure import (
    CONSTANT,
    PAIRS,
    Measure,
    Representation,
    Result,
    constant_result,
    degenerate,
    register,
)

RSA_METRICS = ("euclidean", "sqeuclidean", "cityblock", "cosine", "correlation")


@dataclass(frozen=True, eq=False)
class Dissimilarities:
    """One number per pair of samples, of mean 0 and length 1, or the reason why there are none.

    They come from differences of samples in float64, so equal samples are at distance zero exactly and equal distances
    stay tied.
    """

    vector: Float[Tensor, " pairs"]
    reason: str | None


def varying_features(representation: Representation) -> Float[Tensor, "samples features"]:
    """The features in float64, with constant ones as zero, divided by a power of two; equal differences stay equal."""
    x = torch.where((representation.centred != 0).any(0), representation.flat, 0.0).double()
    return x * 2.0 ** -frexp(float(x.abs().max()))[1]


def unit_rows(x: Tensor) -> Tensor | None:
    """Every sample divided by its length; None if one has length zero."""
    size = x.abs().amax(1, keepdim=True)
    if not bool(size.all()):
        return None
    x = x / size
    return x / x.square().sum(1, keepdim=True).sqrt()


def ranks(values: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
    """Ranks from 1; equal values share the mean of theirs.

    Example:
        >>> ranks(torch.tensor([0.5, 0.1, 0.5])).tolist()
        [2.5, 1.0, 2.5]
    """
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[place]


def _distances(metric: str, representation: Representation) -> Tensor | None:
    if metric in ("cosine", "correlation"):
        x = representation.flat.double()
        if metric == "correlation":  # every sample minus its mean over the features; zero if only rounding is left
            x = Representation(x.T, representation.eps).centred.T
        unit = unit_rows(x)
        return None if unit is None else torch.pdist(unit).square() / 2  # 1 − cos, without cancellation
    distances = torch.pdist(varying_features(representation), 1.0 if metric == "cityblock" else 2.0)
    return distances.square() if metric == "sqeuclidean" else distances


def _prepare_rsa(metric: str, method: str, representation: Representation) -> Dissimilarities:
    nothing = torch.zeros(0, dtype=torch.float64)
    if not representation.size:
        return Dissimilarities(nothing, CONSTANT)
    distances = _distances(metric, representation)
    if distances is None:
        what = "zero in all features" if metric == "cosine" else "the same value in all features"
        return Dissimilarities(nothing, f"without {metric} distances: a sample has {what}")
    if bool((distances == distances[0]).all()):
        return Dissimilarities(nothing, "without structure: all samples are equally far from each other")
    vector = ranks(distances) if method == "spearman" else distances / distances.max()
    vector = vector - vector.mean()
    return Dissimilarities(vector / vector.square().sum().sqrt(), None)


def _compare_rsa(a: Dissimilarities, b: Dissimilarities) -> Result:
    if a.reason and a.reason == b.reason:
        return constant_result("rsa", True, True, a.reason)
    if a.reason or b.reason:
        return degenerate("rsa", "; ".join(f"{side} is {z.reason}" for side, z in (("x", a), ("y", b)) if z.reason))
    return Result("rsa", float(a.vector @ b.vector))


def _invariances(metric: str) -> frozenset[str]:
    always = {"permutation", "isotropic scale"}
    more = {
        "euclidean": {"signs", "orthogonal", "translation"},
        "sqeuclidean": {"signs", "orthogonal", "translation"},
        "cityblock": {"signs", "translation"},
        "cosine": {"signs", "orthogonal"},
    }
    return frozenset(always | more.get(metric, set()))


@register
def rsa(metric: str = "euclidean", method: str = "spearman") -> Measure:
    """Correlation of dissimilarity matrices, over all pairs of different samples.

    Args:
        metric: "euclidean", "sqeuclidean", "cityblock", "cosine" or "correlation" (over features) between samples.
        method: "spearman" correlates ranks, "pearson" the dissimilarities themselves.

    Example:
        >>> x = torch.randn(20, 3)
        >>> round(rsa()(x, 5 - 2 * x).value, 5)
        1.0
    """
    if metric not in RSA_METRICS:
        raise InputError(unknown_name("metric of rsa", metric, RSA_METRICS))
    if method not in ("spearman", "pearson"):
        raise InputError(unknown_name("method of rsa", method, ("spearman", "pearson")))
    return Measure(
        "rsa", "similarity", (-1.0, 1.0), 1.0, _invariances(metric), "Kriegeskorte et al. 2008",
        f"{method} correlation of {metric} dissimilarities between samples",
        partial(_prepare_rsa, metric, method), _compare_rsa, 3, memory=PAIRS,
    )  # fmt: skip


# -- Mutual nearest neighbours -----------------------------------------------------------------------------------------

NEIGHBOUR_METRICS = ("euclidean", "cosine")
CHANCE = 0.2  # above it a note gives the value of unrelated features


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Each sample's neighbours, samples × samples, every row with a sum of k; or the reason why there are none."""

    weights: sparse.csr_array | None
    reason: str | None = None


def nearest(x: Tensor, k: int, block: int = 512) -> sparse.csr_array:
    """The k nearest rows of each row, other than itself; rows tied at the k-th place share what is left.

    So the value does not depend on the order of samples. Distances come from one matrix product; those too near the
    k-th are computed again from the differences.
    """
    # more than the error of a product
    wide = 8 * x.shape[1] * torch.finfo(x.dtype).eps * float(x.square().sum(1).max())
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
    """1 for each nearer than the last place, an equal part of what is left for those at it, 0 beyond."""
    last = apart.kthvalue(places).values
    nearer, tied = apart < last, apart == last
    return nearer.double() + tied.double() * ((places - nearer.sum()).double() / tied.sum())


def _prepare_neighbours(k: int, metric: str, representation: Representation) -> Neighbours:
    n = representation.samples
    if k >= n - 1:
        return Neighbours(None, f"k is {k}, and a sample has only {n - 1} others")
    if not representation.size:
        return Neighbours(None)
    x = varying_features(representation) if metric == "euclidean" else unit_rows(representation.flat.double())
    if x is None:
        return Neighbours(None, "a sample is zero everywhere, so it has no cosine with others")
    return Neighbours(nearest(x, k))


def _compare_neighbours(k: int, a: Neighbours, b: Neighbours) -> Result:
    if (reason := a.reason or b.reason) is not None:
        return degenerate("mutual_knn", reason)
    if a.weights is None or b.weights is None:
        return constant_result("mutual_knn", a.weights is None, b.weights is None)
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
    if metric not in NEIGHBOUR_METRICS:
        raise InputError(unknown_name("metric of mutual_knn", metric, NEIGHBOUR_METRICS))
    if k < 1:
        raise InputError(f"k of mutual_knn must be at least 1, but is {k}.")
    invariances = {"permutation", "signs", "orthogonal", "isotropic scale"}
    return Measure(
        "mutual_knn", "similarity", (0.0, 1.0), 1.0,
        frozenset(invariances | ({"translation"} if metric == "euclidean" else set())), "Huh et al. 2024",
        f"shared {metric} neighbours of each sample, {k} at a time", partial(_prepare_neighbours, k, metric),
        partial(_compare_neighbours, k),
    )  # fmt: skip
