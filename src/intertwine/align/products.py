"""Products of features: how every unit of one network varies with every unit of another, summed over all data.

What is kept are matrices of units by units, never features, so memory does not grow with the data. Positions of a
tensor are samples too: those of images, and tokens. All sums are in double precision. Every tensor has its own means,
and batches are joined around them, so that nothing is lost to cancellation.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.shapes import Float

#: Numbers that are turned into double precision at once.
CHUNK = 1 << 24
#: A unit whose deviations are below this many roundings of its size does not vary.
STILL = 8.0


@dataclass
class _Means:
    count: int
    a: Float[Tensor, " first"]
    b: Float[Tensor, " second"]


@dataclass
class Products:
    """Over tensors t and positions p: Σ (a − mean_t a)(b − mean_t b)ᵀ, and the same of each network with itself.

    Example:
        >>> import torch
        >>> a, b = torch.randn(3, 50), torch.randn(4, 50)
        >>> products = Products()
        >>> for part in range(5):
        ...     products.add("layer", a[:, part::5], b[:, part::5])
        >>> torch.allclose(products.correlation(), torch.corrcoef(torch.cat([a, b]))[:3, 3:].double(), atol=1e-6)
        True
    """

    cross: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    squares_a: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    squares_b: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    eps: float = 0.0
    _means: dict[Hashable, _Means] = field(default_factory=dict)

    def add(self, tensor: Hashable, a: Float[Tensor, "first entries"], b: Float[Tensor, "second entries"]) -> None:
        """Take in some positions of one tensor, which is known by any name.

        Positions with an infinite entry are left out: they are masked. NaN is refused.
        """
        self.eps = max(self.eps, *(torch.finfo(x.dtype).eps for x in (a, b)))
        width = max(CHUNK // max(len(a), len(b)), 1)
        for x, y in zip(a.split(width, 1), b.split(width, 1), strict=True):
            x, y = x.double(), y.double()
            if not bool((x.sum() + y.sum()).isfinite()):  # one sum is cheaper than a look at every number
                x, y = _without_masked(tensor, x, y)
            if x.shape[1]:
                self._join(tensor, x, y)

    def _join(self, tensor: Hashable, x: Tensor, y: Tensor) -> None:
        if not self.cross.numel():
            self.cross = x.new_zeros(len(x), len(y))
            self.squares_a, self.squares_b = x.new_zeros(len(x)), y.new_zeros(len(y))
        mean_x, mean_y, count = x.mean(1), y.mean(1), x.shape[1]
        means = self._means.setdefault(tensor, _Means(0, torch.zeros_like(mean_x), torch.zeros_like(mean_y)))
        x, y = x - mean_x[:, None], y - mean_y[:, None]
        shift_x, shift_y = mean_x - means.a, mean_y - means.b
        total = means.count + count
        weight = means.count * count / total
        self.cross.addmm_(x, y.T).addr_(shift_x, shift_y, alpha=weight)
        self.squares_a += x.square().sum(1) + weight * shift_x.square()
        self.squares_b += y.square().sum(1) + weight * shift_y.square()
        means.a, means.b = means.a + shift_x * (count / total), means.b + shift_y * (count / total)
        means.count = total

    # -- what is known when all data has passed --------------------------------------------------------------------

    def inner(self) -> Float[Tensor, "first second"]:
        """Σ a bᵀ: inner products of the features as they are."""
        found = self.cross.clone()
        for means in self._means.values():
            found.addr_(means.a, means.b, alpha=means.count)
        return found.cpu()

    def lengths(self) -> tuple[Float[Tensor, " first"], Float[Tensor, " second"]]:
        """Σ a² and Σ b² of every unit."""
        return (self.squares_a + self._sizes("a")).cpu(), (self.squares_b + self._sizes("b")).cpu()

    def correlation(self) -> Float[Tensor, "first second"]:
        """Of deviations from each tensor's own means; 0 for a unit that does not vary."""
        inverse = [
            torch.where(dead, 0.0, 1 / torch.where(dead, 1.0, squares).sqrt())
            for dead, squares in zip(self._dead(), (self.squares_a, self.squares_b), strict=True)
        ]
        return (self.cross * inverse[0][:, None] * inverse[1]).clamp(-1.0, 1.0).cpu()

    def dead(self) -> tuple[Tensor, Tensor]:
        """Which units of the first and of the second network do not vary, but for rounding."""
        return self._dead()[0].cpu(), self._dead()[1].cpu()

    def _dead(self) -> list[Tensor]:
        sides = ((self.squares_a, "a"), (self.squares_b, "b"))
        return [squares <= (STILL * self.eps) ** 2 * (squares + self._sizes(side)) for squares, side in sides]

    def _sizes(self, side: str) -> Tensor:
        means = [m.count * getattr(m, side).square() for m in self._means.values()]
        return torch.stack(means).sum(0)


def _without_masked(tensor: Hashable, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Only the positions at which every unit is finite; NaN is refused."""
    if bool(x.isnan().any() | y.isnan().any()):
        raise InputError(
            f"The features at {tensor} hold NaN, so units cannot be compared by them. Look at the data and the weights "
            "of both networks; the method 'weights' needs no features."
        )
    finite = x.isfinite().all(0) & y.isfinite().all(0)
    return x[:, finite], y[:, finite]
