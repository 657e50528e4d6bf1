"""Members of an activation's intertwiner group on n units: draw one at random, find the one nearest to a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.errors import InputError
from intertwine.shapes import Float
from intertwine.symmetry.activation import ActivationGroup, activation_group

#: Smallest scale of a nearest member: positive scales have no smallest one, so zero is never reached.
SMALLEST = 1e-6


def random_member(fn: Callable[..., Any], n: int, seed: int = 0, spread: float = 1.0) -> Float[Tensor, "n n"]:
    """A random member of G_σ on n units: a permutation times factors that pass σ, log-normal where all do.

    For a linear σ it is a matrix of independent normal entries.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.intertwiner import intertwines
        >>> from intertwine.symmetry.members import random_member
        >>> intertwines(torch.tanh, random_member(torch.tanh, 4)).ok
        True
    """
    if n < 1:
        raise InputError(f"A random member on {n} units was asked for. Pass at least one unit.")
    group = activation_group(fn)
    generator = torch.Generator().manual_seed(seed)
    if group.kind == "all":
        return torch.randn(n, n, generator=generator, dtype=torch.float64)
    sizes, signs = torch.randn(2, n, generator=generator, dtype=torch.float64)
    factors = torch.ones(n, dtype=torch.float64)
    if group.exponent is not None:
        factors = (spread * sizes).exp()
    elif group.discrete is not None:
        factors = group.discrete[0] ** torch.randint(-2, 3, (n,), generator=generator).double()
    if group.parity is not None:
        factors = factors * signs.sign()
    return torch.diag(factors)[torch.randperm(n, generator=generator)]


def nearest_member(fn: Callable[..., Any], matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """The member of G_σ nearest to a matrix in the Frobenius norm: the best factor per entry, then an assignment.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.members import nearest_member
        >>> nearest_member(torch.relu, torch.tensor([[0.1, 2.0], [1.0, 0.3]]))
        tensor([[0., 2.],
                [1., 0.]], dtype=torch.float64)
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"A square matrix was expected, one of shape {tuple(matrix.shape)} was given.")
    a = matrix.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(a).all():
        raise InputError(
            "The member nearest to a matrix was asked for, and the matrix has entries that are not finite."
        )
    group = activation_group(fn)
    if group.kind == "all":
        return torch.from_numpy(a.copy())
    factor = _nearest_factor(group, a)
    # an entry left at zero costs a², one at the factor f costs (a − f)²
    rows, columns = linear_sum_assignment(a**2 - (a - factor) ** 2, maximize=True)
    member = np.zeros_like(a)
    member[rows, columns] = factor[rows, columns]
    return torch.from_numpy(member)


def _nearest_factor(group: ActivationGroup, a: np.ndarray) -> np.ndarray:
    """The factor that passes and is nearest to each number."""
    signs = np.where(a < 0, -1.0, 1.0) if group.parity is not None else np.ones_like(a)
    if group.exponent is not None:
        return signs * np.maximum(signs * a, SMALLEST)
    if group.discrete is None:
        return signs
    base = group.discrete[0]
    choices = signs[..., None] * base ** np.arange(*_powers(base), dtype=float)
    return np.take_along_axis(choices, np.abs(choices - a[..., None]).argmin(-1)[..., None], -1)[..., 0]


def _powers(base: float) -> tuple[int, int]:
    """Exponents of a generator that cover the scales from `SMALLEST` to its inverse."""
    most = math.ceil(-math.log(SMALLEST) / math.log(abs(base)))
    return -most, most + 1
