"""R² and similarities of stitched features from second moments alone, and their mean over many stitches, as the
stitching papers report them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, sqrt

import torch

from intertwine.errors import InputError, MismatchError
from intertwine.measure.measure import find
from intertwine.measure.streaming import Summary
from intertwine.stitch.direct import NOISE, LinearMap, PairMoments
from intertwine.stitch.result import Stitch, summary


def r2_map(moments: PairMoments, fitted: LinearMap) -> float:
    """R² of a given map: 1 − ‖map(A) − B‖²/‖B − mean of B‖², from the moments alone. It has no lower bound.

    Raises:
        InputError: B does not vary. MismatchError: the map is of other widths.

    Example:
        >>> import torch
        >>> from intertwine.stitch.direct import LinearMap
        >>> from intertwine.stitch.direct import PairMoments
        >>> a, moments = torch.randn(100, 3), PairMoments()
        >>> moments.update(a, a)
        >>> round(r2_map(moments, LinearMap(torch.eye(3))), 6)
        1.0
    """
    if (fitted.inputs, fitted.outputs) != (moments.inputs, moments.outputs):
        raise MismatchError(
            f"R² was asked for of a map {fitted.inputs} → {fitted.outputs}, and the moments are of "
            f"{moments.inputs} → {moments.outputs} features. Use the moments of the place the map is for."
        )
    own = moments.products(centred=True)
    total = own.bb.trace()
    if not float(total):
        raise InputError(
            f"R² was asked for, and the features of the back do not vary over {moments.count} rows, so there is "
            "nothing to explain. Use more data, or another place."
        )
    m = fitted.detach().to(own.aa).matrix
    spread = total - 2 * (own.ab.T * m).sum() + ((m @ own.aa) * m).sum()
    offset = m @ moments.a_mean - moments.b_mean
    if fitted.bias is not None:
        offset = offset + fitted.bias.detach().to(offset)
    return float(1 - (spread + moments.count * offset.square().sum()) / total)


@dataclass(frozen=True)
class SimilarityBaseline:
    """Mean and standard deviation (n − 1) of a similarity over so many stitches."""

    measure: str
    mean: float
    deviation: float
    count: int

    def __repr__(self) -> str:
        return f"Baseline({self.measure} {self.mean:.3f} ± {self.deviation:.3f} over {self.count} stitches)"


def similarity_baseline(stitches: Iterable[Stitch], measure: str = "linear_cka_biased") -> SimilarityBaseline:
    """How similar stitched features and the back network's own are, over all pairs and layers given.

    Reads the last traced value of every history; the papers compare with it what a similarity is worth.

    Raises:
        InputError: a stitch without that measure in its history.
    """
    values = [_last(stitch, measure) for stitch in stitches]
    if not values:
        raise InputError("A baseline was asked for over no stitches. Give at least one.")
    return SimilarityBaseline(measure, *summary(values), len(values))


def _last(stitch: Stitch, measure: str) -> float:
    found = [record[measure] for record in stitch.history if isfinite(record.get(measure) or float("nan"))]
    if not found:
        known = sorted({name for record in stitch.history for name in record}) or ["nothing"]
        raise InputError(
            f"A baseline of {measure!r} was asked for, but the history of {stitch!r} has {', '.join(known)}. Fit the "
            "stitches with trace_every=1 or more."
        )
    return found[-1]


FROM_SUMS = ("linear_cka_biased", "cca")
#: Features are taken to be of single precision: of finer ones the products show no more.
SINGLE = float(torch.finfo(torch.float32).eps)


def trace_sums(moments: PairMoments, fitted: LinearMap) -> dict[str, float]:
    """The same from the sums over any number of rows, for any map, without running a network.

    The debiased CKA is not among them: it needs the lengths of single rows.

    Args:
        moments: of the front's and the back's rows at the cut. fitted: the map to judge.

    Example:
        >>> import torch
        >>> rows, moments = torch.randn(100, 3), PairMoments()
        >>> moments.update(rows, rows)
        >>> {name: round(value, 4) for name, value in trace_sums(moments, LinearMap(torch.eye(3))).items()}
        {'linear_cka_biased': 1.0, 'cca': 1.0, 'r2': 1.0}
    """
    explained = r2_map(moments, fitted)
    x, y = _rows_with_these_products(moments, fitted)
    found = {}
    for name in FROM_SUMS:
        measure = find(name)
        found[name] = measure.compare_with(measure.prepare_with(x), measure.prepare_with(y)).value
    return found | {"r2": explained}


def _rows_with_these_products(moments: PairMoments, fitted: LinearMap) -> tuple[Summary, Summary]:
    """A few rows whose products are those of all mapped and all target rows, so that measures can be asked as usual."""
    own = moments.products(centred=True)
    m = fitted.detach().to(own.aa).matrix
    mixed = m @ own.ab
    joint = torch.cat([torch.cat([m @ own.aa @ m.T, mixed], 1), torch.cat([mixed.T, own.bb], 1)])
    lengths = joint.diagonal().clamp(min=0).sqrt()
    scales = torch.where(lengths > 0, 1 / lengths, 0.0)
    # columns of length one, so that the smallest feature is as exact as the largest
    values, vectors = torch.linalg.eigh(joint * scales[:, None] * scales)
    values = torch.where(values > NOISE * len(values), values, 0.0)
    rows = (vectors * values.sqrt()).T * lengths
    count = own.count
    mapped = m @ moments.a_mean + (0 if fitted.bias is None else fitted.bias.detach().to(m))
    first, second = (
        Summary(torch.cat([part, sqrt(count) * mean[None]]), SINGLE, count)
        for part, mean in zip(rows.split(len(m), 1), (mapped, moments.b_mean), strict=True)
    )
    return first, second
