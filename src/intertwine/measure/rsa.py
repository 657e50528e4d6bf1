"""Representational similarity analysis: the correlation of two tables of dissimilarities between samples.

Dissimilarities are taken on differences of samples in float64, so that equal samples are at distance zero exactly and
equal distances stay tied; ranks of tied distances are their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import frexp

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.measure.measure import PAIRS, Measure, degenerate, register
from intertwine.measure.procrustes import constant
from intertwine.measure.representation import Representation
from intertwine.measure.result import Result
from intertwine.shapes import Float

METRICS = ("euclidean", "sqeuclidean", "cityblock", "cosine", "correlation")


@dataclass(frozen=True, eq=False)
class Dissimilarities:
    """One number per pair of samples, of mean 0 and length 1, or the reason why there are none."""

    vector: Float[Tensor, " pairs"]
    reason: str | None


def varying_features(representation: Representation) -> Float[Tensor, "samples features"]:
    """Features as given, in float64, without those that do not vary; only powers of two are divided out.

    Centring would round differences that are equal into ones that are not.
    """
    x = torch.where((representation.centred != 0).any(0), representation.flat, 0.0).double()
    return x * 2.0 ** -frexp(float(x.abs().max()))[1]


def unit_rows(x: Tensor) -> Tensor | None:
    """Every sample divided by its length; None where one has none."""
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
        unit = unit_rows(_row_centred(x, representation.eps) if metric == "correlation" else x)
        return None if unit is None else torch.pdist(unit).square() / 2  # 1 − cos, without cancellation
    distances = torch.pdist(varying_features(representation), 1.0 if metric == "cityblock" else 2.0)
    return distances.square() if metric == "sqeuclidean" else distances


def _row_centred(x: Tensor, eps: float) -> Tensor:
    """Every sample minus its mean over the features; zero where only rounding is left."""
    return Representation(x.T, eps).centred.T


def _prepare(metric: str, method: str, representation: Representation) -> Dissimilarities:
    nothing = torch.zeros(0, dtype=torch.float64)
    if not representation.size:
        return Dissimilarities(nothing, "constant: no feature varies over the samples")
    distances = _distances(metric, representation)
    if distances is None:
        what = "no features above zero" if metric == "cosine" else "the same value in all features"
        return Dissimilarities(nothing, f"without {metric} distances: a sample has {what}")
    if bool((distances == distances[0]).all()):
        return Dissimilarities(nothing, "without structure: all samples are equally far from each other")
    vector = ranks(distances) if method == "spearman" else distances / distances.max()
    vector = vector - vector.mean()
    return Dissimilarities(vector / vector.square().sum().sqrt(), None)


def _compare(a: Dissimilarities, b: Dissimilarities) -> Result:
    if a.reason and a.reason == b.reason:
        return constant("rsa", True, True, a.reason)
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
    if metric not in METRICS or method not in ("spearman", "pearson"):
        raise InputError(
            f"rsa was asked for with metric={metric!r} and method={method!r}. The metrics are {', '.join(METRICS)}; "
            "the methods are spearman and pearson."
        )
    return Measure(
        "rsa", "similarity", (-1.0, 1.0), 1.0, _invariances(metric), "Kriegeskorte et al. 2008",
        f"{method} correlation of {metric} dissimilarities between samples",
        partial(_prepare, metric, method), _compare, 3, memory=PAIRS,
    )  # fmt: skip
