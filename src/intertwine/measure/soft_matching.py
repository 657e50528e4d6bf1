"""Soft matching: optimal transport between the features of two representations of any widths.

Every feature of x carries a mass of 1/width(x), every one of y 1/width(y), and the plan moves one onto the other. The
optimum is exact. Equal widths are an assignment. Unequal ones are too, once every feature is repeated until both sides
have as many as the least common multiple of the widths. Many copies of one feature are alike, which an assignment takes
long to tell apart: where there are more than a few of each, HiGHS's dual simplex solves the same problem with whole
numbers for masses, whose corners are whole, so that the plan's sums are exact as well. 64 features against 63, as one
dead unit leaves them, take a twentieth of a second so, and ten the other way.
"""

from __future__ import annotations

from functools import partial
from math import gcd, inf, lcm, sqrt

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import linear_sum_assignment, linprog
from torch import Tensor

from intertwine.errors import InputError, IntertwineError
from intertwine.measure.measure import FEATURES, Measure, register
from intertwine.measure.procrustes import Columns, check_rows, columns, constant, without_dead
from intertwine.measure.result import Alignment, Result
from intertwine.shapes import Float

#: An assignment takes longer than the linear program where each feature of the wider side stands in more copies than
#: this, and all of them are more than so many.
COPIES, FEW = 4, 512


def transport(gain: Float[Tensor, "first second"]) -> Float[Tensor, "first second"]:
    """The plan with uniform sums over rows and columns that has the largest total gain.

    Example:
        >>> transport(torch.tensor([[3.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 3.0]]).double()).tolist()
        [[0.25, 0.25, 0.0, 0.0], [0.0, 0.0, 0.25, 0.25]]
    """
    values = gain.numpy(force=True)
    width = lcm(*values.shape)
    moved = _repeated(values, width) if width <= max(COPIES * max(values.shape), FEW) else _program(values)
    return torch.from_numpy(moved / width).to(gain)


def _repeated(gain: np.ndarray, width: int) -> np.ndarray:
    times = [width // n for n in gain.shape]
    rows, cols = linear_sum_assignment(gain.repeat(times[0], 0).repeat(times[1], 1), maximize=True)
    moved = np.zeros(gain.shape)
    np.add.at(moved, (rows // times[0], cols // times[1]), 1.0)
    return moved


def _program(gain: np.ndarray) -> np.ndarray:
    n, m = gain.shape
    sums = sparse.vstack([sparse.kron(sparse.eye(n), np.ones((1, m))), sparse.kron(np.ones((1, n)), sparse.eye(m))])
    masses = np.repeat([m // gcd(n, m), n // gcd(n, m)], [n, m])
    # The last sum follows from the others.
    solved = linprog(-gain.ravel(), A_eq=sums.tocsr()[:-1], b_eq=masses[:-1], method="highs-ds")
    moved = np.round(solved.x) if solved.x is not None else np.zeros(n * m)
    if not solved.success or not np.array_equal(sums @ moved, masses):
        raise IntertwineError(
            f"The transport between {n} and {m} features was not solved: {solved.message} Give widths that share a "
            "larger divisor, or fewer features."
        )
    return moved.reshape(n, m)


def _correlate(a: Columns, b: Columns) -> Result:
    if a.dead or b.dead:
        return constant("soft_matching", a.dead, b.dead)
    x, y, notes = without_dead(a, b)
    check_rows(x, y)
    products = x.T @ y
    small = transport(products)
    plan = products.new_zeros(len(a.lengths), len(b.lengths))
    plan[a.live[:, None], b.live] = small
    return Result("soft_matching", float((small * products).sum()), alignment=Alignment(plan=plan), notes=notes)


def _distance(a: Columns, b: Columns) -> Result:
    if a.dead or b.dead:
        return constant("soft_matching", a.dead, b.dead)
    check_rows(a.x, b.x)
    size = float(torch.maximum(a.lengths, b.lengths))  # squares of what was given could overflow
    x, y = a.x * (a.lengths / size), b.x * (b.lengths / size)
    plan = transport(x.T @ y)  # the lengths of features are moved in full by every plan
    i, j = plan.nonzero(as_tuple=True)
    left = plan[i, j] @ torch.cat([_apart(x, y, *ij) for ij in zip(i.split(1024), j.split(1024), strict=True)])
    return Result("soft_matching", size * sqrt(float(left)), alignment=Alignment(plan=plan))


def _apart(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (x[:, i] - y[:, j]).square().sum(0)


@register
def soft_matching(score: str = "correlation") -> Measure:
    """Soft matching between features of different widths, always centred; the alignment is the plan.

    Args:
        score: "correlation", the mean correlation of the features that the best plan brings together, without those
            that do not vary; or "distance", the soft matching distance √(min Σ Pᵢⱼ‖xᵢ − yⱼ‖²), a metric, in the units
            of the features.

    Example:
        >>> x = torch.randn(50, 3)
        >>> twice = torch.cat([x, 5 * x], 1)
        >>> round(soft_matching()(x, twice).value, 5)
        1.0
    """
    if score not in ("correlation", "distance"):
        raise InputError(f"soft_matching was asked for with score={score!r}; it can be 'correlation' or 'distance'.")
    reference = "Khosla and Williams 2024"
    if score == "distance":
        return Measure(
            "soft_matching", "distance", (0.0, inf), 0.0, frozenset({"permutation", "translation"}), reference,
            "soft matching distance between features", partial(columns, center=True, each=False), _distance,
            positions=True, meets=True, memory=FEATURES,
        )  # fmt: skip
    return Measure(
        "soft_matching", "similarity", (-1.0, 1.0), 1.0,
        frozenset({"permutation", "positive scales", "isotropic scale", "translation"}), reference,
        "mean correlation of features brought together by optimal transport",
        partial(columns, center=True, each=True), _correlate, positions=True, meets=True,
        memory=FEATURES,
    )  # fmt: skip
