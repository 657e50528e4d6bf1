"""Sparse least squares (lasso) from moments alone, by accelerated descent (FISTA) for all outputs at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.shapes import Float
from intertwine.stitch.direct import solve
from intertwine.stitch.moments import Products

#: The gap to the best value at which the descent ends, as a share of the value of the zero map.
GAP = 1e-7
STEPS = 20000


@dataclass(frozen=True, eq=False)
class Lasso:
    """What `lasso` found. The same matrix is the answer to two problems (row 001-C10):

    ‖AM − B‖²/2n + squared·Σ|M|, and ‖AM − B‖ + unsquared·Σ|M|. `gap`: how far at most the value of the first is from
    the best one, as a share of the value of the zero map. `steps`: how many it took.
    """

    matrix: Float[Tensor, "outputs inputs"]
    squared: float
    unsquared: float
    gap: float
    steps: int


def lasso(products: Products, strength: float, *, squared: bool = True) -> Lasso:
    """The matrix M with the least ‖AM − B‖²/2n + strength·Σ|M|; with squared=False the least ‖AM − B‖ + strength·Σ|M|.

    Example:
        >>> import torch
        >>> from intertwine.stitch.moments import Moments
        >>> a, moments = torch.randn(500, 4).double(), Moments()
        >>> moments.update(a, 3 * a[:, :1])
        >>> lasso(moments.products(centred=False), 0.5).matrix.count_nonzero()
        tensor(1)
    """
    if not strength >= 0:
        raise InputError(f"A lasso of strength {strength} was asked for. It must be a number from 0 on.")
    if strength == 0:
        return Lasso(solve(products).T, 0.0, 0.0, 0.0, 0)
    found = _Descent(products)
    if squared:
        return found.down_to(strength)
    # ‖r‖ is the least of ‖r‖²/2s + s/2 over s, so the two problems are solved in turn until s is ‖r‖ itself
    size = found.whole
    while True:
        answer, before = found.down_to(strength * size / products.count), size
        size = found.residual()
        if abs(size - before) <= 1e-8 * found.whole:
            return answer


class _Descent:
    """One matrix on its way down; a new strength goes on from where the last one ended.

    Columns of A are brought to length one, which changes the problem only by a threshold for each.
    """

    def __init__(self, products: Products) -> None:
        self.products, self.count = products, products.count
        self.matrix = torch.zeros_like(products.ab)
        self.slope = products.ab.clone()  # Aᵀ(B − AM)
        self.whole = float(products.bb.trace().clamp(min=0).sqrt())
        lengths = products.aa.diagonal().clamp(min=0).sqrt()[:, None]
        self.inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
        self.aa = products.aa * self.inverse * self.inverse.T
        self.step = 1 / max(float(torch.linalg.eigvalsh(self.aa)[-1]), 1e-300)

    def residual(self) -> float:
        """‖AM − B‖."""
        left = self.products.bb.trace() - ((self.products.ab + self.slope) * self.matrix).sum()
        return float(left.clamp(min=0).sqrt())

    def down_to(self, strength: float) -> Lasso:
        """Steps from a point ahead of the last one; where that leads up again, the run begins anew."""
        target, threshold = self.inverse * self.products.ab, self.step * strength * self.count * self.inverse
        lengths = torch.where(self.inverse > 0, 1 / self.inverse, 0.0)
        at = ahead = self.matrix * lengths
        steps, gap, pace = 0, self.gap(strength), 1.0
        while gap > GAP and steps < STEPS:
            moved = ahead + self.step * (target - self.aa @ ahead)
            new = moved.sign() * (moved.abs() - threshold).clamp(min=0)
            if float(((ahead - new) * (new - at)).sum()) > 0:
                pace = 1.0
            faster = (1 + (1 + 4 * pace * pace) ** 0.5) / 2
            ahead, at, pace = new + (pace - 1) / faster * (new - at), new, faster
            steps += 1
            if steps % 20 == 0:
                self.matrix = at * self.inverse
                self.slope = self.products.ab - self.products.aa @ self.matrix
                gap = self.gap(strength)
        size = self.residual()
        unsquared = strength * self.count / size if size > 0 else float("inf")
        return Lasso(self.matrix.T.clone(), strength, unsquared, gap, steps)

    def gap(self, strength: float) -> float:
        """The distance to a lower bound, the dual problem at the residual, shrunk until it is allowed there."""
        alpha, n = strength * self.count, self.count
        if not self.whole:
            return 0.0
        bb = self.products.bb.diagonal()
        left = (bb - ((self.products.ab + self.slope) * self.matrix).sum(0)).clamp(min=0)
        highest = self.slope.abs().amax(0)
        share = torch.where(highest > alpha, alpha / highest.clamp(min=1e-300), 1.0)
        met = bb - (self.products.ab * self.matrix).sum(0)  # ⟨b, r⟩
        value = left / 2 + alpha * self.matrix.abs().sum(0)
        bound = share * met - share.square() * left / 2
        return float((value - bound).sum()) / n / (self.whole**2 / (2 * n))
