"""Traced similarities: how the features a stitch makes stand to the back network's own, from rows or from sums alone.

CKA, R² and CCA can fall while the task loss falls too (Csiszárik et al. 2021, their Figure 4), so they are worth
following. R² is that of the map as it is: the R² of the best refit could not change under an invertible stitch.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from intertwine.errors import MismatchError
from intertwine.measure.measure import find
from intertwine.measure.moments import Summary
from intertwine.shapes import Float
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import NOISE, Moments
from intertwine.stitch.r2 import r2_map

#: Measures of `intertwine.measure` that are traced. The debiased CKA needs rows; the others can be had from sums.
FROM_ROWS = ("linear_cka", "linear_cka_biased", "cca")
FROM_SUMS = ("linear_cka_biased", "cca")
#: Features are taken to be of single precision: of finer ones the products show no more.
SINGLE = float(torch.finfo(torch.float32).eps)


def trace(target: Float[Tensor, "*rows features"], mapped: Float[Tensor, "*others width"]) -> dict[str, float]:
    """How near mapped rows are to those they stand for.

    Args:
        target: rows of the back network at the cut. mapped: the front's rows behind the stitch, in the same order.

    Returns:
        "linear_cka" (debiased), "linear_cka_biased", "cca" (mean correlation), and "r2" of the rows as they are:
        1 − ‖mapped − target‖²/‖target − its mean‖². Not a number where the rows have no such value, as CCA of fewer
        rows than features.

    Example:
        >>> import torch
        >>> rows = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> {name: round(value, 4) for name, value in trace(rows, 2 * rows).items() if name != "r2"}
        {'linear_cka': 1.0, 'linear_cka_biased': 1.0, 'cca': 1.0}
    """
    if target.shape != mapped.shape:
        raise MismatchError(
            f"Rows were to be traced that stand for each other, but the back network's are {tuple(target.shape)} and "
            f"the stitched ones {tuple(mapped.shape)}. Trace rows behind the stitch."
        )
    x, y = (rows.detach().flatten(0, -2) for rows in (mapped, target))
    if not bool(x.isfinite().all()):
        return dict.fromkeys((*FROM_ROWS, "r2"), float("nan"))  # the stitch diverged, which its history shall show
    found = {name: find(name)(x, y).value for name in FROM_ROWS}
    y = y.double()
    rest = (x - y).square().sum()
    spread = (y - y.mean(0)).square().sum()
    return found | {"r2": float(1 - rest / spread) if float(spread) else float("nan")}


def trace_sums(moments: Moments, fitted: LinearMap) -> dict[str, float]:
    """The same from the sums over any number of rows, for any map, without running a network.

    The debiased CKA is not among them: it needs the lengths of single rows.

    Args:
        moments: of the front's and the back's rows at the cut. fitted: the map to judge.

    Example:
        >>> import torch
        >>> rows, moments = torch.randn(100, 3), Moments()
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


def _rows_with_these_products(moments: Moments, fitted: LinearMap) -> tuple[Summary, Summary]:
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


def cka(
    x: Float[Tensor, "*many rows first"], y: Float[Tensor, "*others rows second"]
) -> Float[Tensor, "*found"]:  # fmt: skip
    """Biased linear CKA that gradients flow through: what a stitch can be driven away from while it is trained.

    Args:
        x, y: rows of features, or stacks of such; stacks are compared one by one, and one y with all of a stack x.

    Returns:
        ‖XᵀY‖²/(‖XᵀX‖·‖YᵀY‖) of centred rows; the value that `intertwine.measure(x, y, "linear_cka_biased")` gives.
        Not a number where one side does not vary.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4, requires_grad=True)
        >>> value = cka(x, x.detach().roll(1, 1) * 3)
        >>> value.backward()
        >>> round(float(value.detach()), 4), bool(x.grad.abs().max() < 1e-3)  # at its highest, so without a slope
        (1.0, True)
    """
    x, y = (rows - rows.mean(-2, keepdim=True) for rows in (x, y))
    # at length one, squares of squares stay within the range of single precision
    x, y = (rows / torch.linalg.matrix_norm(rows, keepdim=True) for rows in (x, y))
    cross, first, second = (torch.linalg.matrix_norm(a.mT @ b) for a, b in ((x, y), (x, x), (y, y)))
    return cross.square() / (first * second)
