"""R² of maps between two sets of features, from their moments alone: of the best map, and of a given one."""

from __future__ import annotations

from intertwine.errors import InputError, MismatchError
from intertwine.stitch.direct import least_squares
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments


def r2_fit(moments: Moments) -> float:
    """R² of the best affine map: the share of the variance of B that a fit of A explains (row D19).

    It does not change where A is mapped by an invertible matrix, so it cannot follow a stitch while it is trained;
    `r2_map` can.

    Example:
        >>> import torch
        >>> from intertwine.stitch.moments import Moments
        >>> a, moments = torch.randn(100, 3), Moments()
        >>> moments.update(a, 2 * a[:, :2] + 1)
        >>> round(r2_fit(moments), 6)
        1.0
    """
    return r2_map(moments, least_squares(moments, bias=True))


def r2_map(moments: Moments, fitted: LinearMap) -> float:
    """R² of a given map: 1 − ‖map(A) − B‖²/‖B − mean of B‖², from the moments alone. It has no lower bound.

    Raises:
        InputError: B does not vary. MismatchError: the map is of other widths.

    Example:
        >>> import torch
        >>> from intertwine.stitch.linear_map import LinearMap
        >>> from intertwine.stitch.moments import Moments
        >>> a, moments = torch.randn(100, 3), Moments()
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
