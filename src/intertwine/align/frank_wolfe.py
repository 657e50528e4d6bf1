"""Frank–Wolfe: the order of a strand that enters one weight twice, as hidden units of a recurrent network do.

There W becomes P W Pᵀ, and how well the units of A and B fit is no longer a sum over pairs of units: it is a quadratic
assignment, for which no quick exact method is known. The search runs over the doubly stochastic matrices instead. From
a point, the best corner by slope is one linear assignment; along the way to it the fit is a polynomial, whose maximum
is found exactly. The last point is rounded to a permutation (after Vogelstein et al. 2015, who match two graphs). The
search begins twice: at the present order, and where every unit has an equal share in every other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from intertwine.align.pair import Pair
from intertwine.align.relaxed import Mixture, Relaxed, matrix_of, nearest_permutation
from intertwine.shapes import Float, Int
from intertwine.symmetry.element import copies, identity_move

STEPS = 50  # the most corners that are walked to from one start
LEAST_GAIN = 1e-9  # a rise of the fit by slope, as a share of it, that is worth a step

Value = Callable[[Tensor], Tensor]  # of a mixture of units: how well B so mixed fits A


def frank_wolfe(pair: Pair, s: int) -> bool:
    """Bring a strand into the best order found, all others held still; whether anything moved."""
    strand = pair.strands[s]
    if not strand.permutes or s not in pair.around[s]:
        return False
    value, degree = _fit(pair, s), _times(pair, s)
    many = copies(pair.strands, s)
    still = torch.eye(strand.size, dtype=torch.float64).expand(*many, strand.size, strand.size)
    orders = [best_order(value, start, degree) for start in (still, torch.full_like(still, 1 / strand.size))]
    best = max(orders, key=lambda order: float(value(matrix_of(order))))
    return pair.step({s: replace(identity_move(pair.strands, s), permutation=best)})


def _fit(pair: Pair, s: int) -> Value:
    """The inner product of A with B, units of the strand mixed wherever they stand; the distance falls as it rises."""
    touched = [(pair.a[i].double().cpu(), pair.b[i].double().cpu(), pair.blocks[i]) for i in pair.touched[s]]

    def value(mixture: Tensor) -> Tensor:
        actor = Relaxed(pair.strands, {s: Mixture(mixture)})
        total = torch.zeros((), dtype=torch.float64)
        for a, b, block in touched:
            for d in block.places(s):
                b = actor.act_on_leaf(b, d, block.dims)
            total = total + (a * b).sum()
        return total

    return value


def _times(pair: Pair, s: int) -> int:
    """How often the strand enters the block in which it stands most often."""
    return max(len(pair.blocks[i].places(s)) for i in pair.touched[s])


def best_order(
    value: Value, start: Float[Tensor, "*copies n n"], degree: int, steps: int = STEPS
) -> Int[Tensor, "*copies n"]:
    """The permutation near the end of a walk uphill; `degree`: that of the value, a polynomial of the mixture.

    >>> a = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 5.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    >>> order = torch.tensor([2, 0, 1])
    >>> b = a[order][:, order]
    >>> even = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    >>> found = best_order(lambda p: (a * (p @ b @ p.mT)).sum(), even, degree=2)
    >>> torch.equal(b[found][:, found], a)
    True
    """
    here = start
    for _ in range(steps):
        at = here.detach().requires_grad_(True)
        height = value(at)
        (slope,) = torch.autograd.grad(height, at)
        corner = matrix_of(nearest_permutation(slope))
        way = corner - here
        level, rise = float(height.detach()), float((slope * way).sum())
        if rise <= LEAST_GAIN * abs(level):
            break
        share = _best_share(value, here, way, degree, level, rise)
        here = corner if share == 1 else here + share * way
    return nearest_permutation(here)


def _best_share(value: Value, here: Tensor, way: Tensor, degree: int, level: float, rise: float) -> float:
    """How far to go along a way, from 0 to 1: the maximum of a polynomial with this level and rise at 0.

    Its other coefficients follow from as many more points.
    """
    powers, points = np.arange(2, degree + 1), np.arange(1, degree) / (degree - 1)
    heights = [float(value(here + float(t) * way)) - level - t * rise for t in points]
    curve = np.polynomial.Polynomial([level, rise, *np.linalg.solve(points[:, None] ** powers, np.array(heights))])
    roots = np.asarray(curve.deriv().roots())
    bends = roots.real[(np.abs(roots.imag) < 1e-9) & (roots.real > 0) & (roots.real < 1)]
    return max([1.0, *bends.tolist()], key=lambda t: float(curve(t)))
