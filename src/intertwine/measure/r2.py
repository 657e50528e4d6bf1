"""R²: how much of y a linear map of x explains, the best map or a given one.

The best map makes R² blind to any invertible change of x, so that it cannot follow a stitching layer while it is
trained; the R² of the given map can. Where x has as many directions as the samples allow, the best map explains any y:
the result is degenerate and says so.
"""

from __future__ import annotations

from functools import partial
from math import inf, nan

from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.measure.cca import ROTATIONS, Span, few_samples, span
from intertwine.measure.measure import FEATURES, Measure, degenerate, register
from intertwine.measure.procrustes import constant
from intertwine.measure.result import Result


def _fit(center: bool, a: Span, b: Span) -> Result:
    if (found := _trouble(center, a, b)) is not None:
        return found
    if not a.rank:
        return degenerate("r2", "x is rounding only: no direction rises above it")
    if a.rank >= a.freedom:
        samples = a.freedom + int(center)
        return degenerate("r2", f"{samples} samples are too few: x spans all that they can differ by and fits any y")
    explained = (a.parts[0].T @ b.x).square().sum() / b.x.square().sum()
    return Result("r2", float(explained), notes=few_samples(a.freedom, a.rank))


def _given(center: bool, matrix: Tensor, a: Span, b: Span) -> Result:
    if tuple(matrix.shape) != (a.x.shape[1], b.x.shape[1]):
        raise MismatchError(
            f"r2 was asked for with a matrix of shape {tuple(matrix.shape)}, but x has {a.x.shape[1]} features and y "
            f"{b.x.shape[1]}. Give one of shape {(a.x.shape[1], b.x.shape[1])}: x @ matrix is compared with y."
        )
    if (found := _trouble(center, a, b)) is not None:
        return found
    rest = a.x @ (matrix.detach().to(a.x) * (a.size / b.size)) - b.x
    return Result("r2", float(1 - rest.square().sum() / b.x.square().sum()))


def _trouble(center: bool, a: Span, b: Span) -> Result | None:
    if a.size and b.size:
        return None
    return constant("r2", not a.size, not b.size, *([] if center else ["zero everywhere"]))


@register
def r2(center: bool = True, matrix: Tensor | None = None) -> Measure:
    """R² of y from x: 1 − ‖xM − y‖²/‖y‖², summed over the features of y.

    Args:
        center: False fits without a constant and compares with zero in place of the mean, as printed.
        matrix: the map M to judge, x's features × y's; None takes the best one, by least squares. The value of a given
            map has no lower bound.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 3)
        >>> round(r2()(x, x[:, :2] + 1).value, 5), round(r2(matrix=torch.eye(3))(x, -x).value, 5)
        (1.0, -3.0)
    """
    if matrix is not None:
        if matrix.dim() != 2 or not bool(matrix.isfinite().all()):
            raise InputError(
                f"r2 needs a matrix of finite numbers, x's features × y's; found one of shape {tuple(matrix.shape)}."
            )
        return Measure(
            "r2", "similarity", (-inf, 1.0), nan, frozenset({"translation"} if center else ()),
            "Csiszárik et al. 2021", "fraction of y that a given linear map of x explains",
            partial(span, center=center), partial(_given, center, matrix), 2, memory=FEATURES,
        )  # fmt: skip
    return Measure(
        "r2", "similarity", (0.0, 1.0), 1.0, ROTATIONS if center else ROTATIONS - {"translation"},
        "Csiszárik et al. 2021, Definition 6.1", "fraction of y that the best linear map of x explains",
        partial(span, center=center), partial(_fit, center), 3, memory=FEATURES,
    )  # fmt: skip
