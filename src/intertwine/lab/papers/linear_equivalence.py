"""Whether an invertible linear map takes the features of one network to those of another (Chen, Zhou and Yan 2024).

Proposition 3.2 says that networks joined by a line of constant loss have such maps. Its proof assumes more (features
that are linear along the line) and does not follow from that either; the proposition is false, see `silent_feature`.
`linear_equivalence` answers for two given networks whether the map exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.argument_types import Float
from intertwine.errors import InputError, MismatchError


@dataclass(frozen=True)
class LinearEquivalence:
    """The distance of two sets of features from being equal up to an invertible linear map.

    `forward`: the part of a outside the span of b, ‖rest‖ / ‖a‖; `backward`: that of b outside the span of a. Both
    vanish exactly if an invertible map exists; one alone may vanish if the ranks differ. `matrix`: the invertible τ
    with the best fit of τ z_b = z_a; None if the ranks differ.
    """

    forward: float
    backward: float
    rank_a: int
    rank_b: int
    tolerance: float
    matrix: Float[Tensor, "d d"] | None = field(default=None, repr=False, compare=False)

    @property
    def residual(self) -> float:
        """The larger of the two directions."""
        return max(self.forward, self.backward)

    @property
    def ok(self) -> bool:
        return self.residual <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        ranks = {"rank_a": self.rank_a, "rank_b": self.rank_b, "tolerance": self.tolerance}
        return {"ok": self.ok, "residual": self.residual, "forward": self.forward, "backward": self.backward} | ranks

    def __repr__(self) -> str:
        verdict = "equivalent" if self.ok else "not equivalent"
        return f"LinearEquivalence({verdict}: residual {self.residual:.1e}, ranks {self.rank_a} and {self.rank_b})"


def linear_equivalence(
    za: Float[Tensor, "samples d"], zb: Float[Tensor, "samples d"], *, tolerance: float = 1e-9
) -> LinearEquivalence:
    """The best invertible linear map that takes the features of b to those of a, on one set of samples.

    Least squares alone is not enough: a map that drops a feature can fit perfectly and has no inverse. The two sets are
    equivalent if they span the same space of functions of the samples, so both directions are measured.

    Args:
        za, zb: features of two networks on the same samples, one column per feature, equally many.
        tolerance: of `.ok`; singular values below it, relative to the largest, count as 0.

    Returns:
        A `LinearEquivalence`.

    Example:
        >>> import torch
        >>> from intertwine.lab.papers.linear_equivalence import linear_equivalence
        >>> z = torch.randn(20, 3)
        >>> linear_equivalence(z @ torch.tensor([[1.0, 2, 0], [0, 1, 0], [1, 0, 3]]), z, tolerance=1e-5).ok
        True
        >>> forgets = torch.diag(torch.tensor([1.0, 1, 0]))
        >>> linear_equivalence(z @ forgets, z).ok
        False

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Definition 3.1 and
    Proposition 3.2.
    """
    if za.ndim != 2 or za.shape != zb.shape:
        raise MismatchError(
            f"The features have shapes {tuple(za.shape)} and {tuple(zb.shape)}. An invertible map needs the same "
            "number of features on both sides and the same samples: pass two matrices of one shape."
        )
    if not bool(za.isfinite().all() and zb.isfinite().all()):
        raise InputError("The features have infinite entries or NaN. Leave out these samples.")
    a, b = _Span(za, tolerance), _Span(zb, tolerance)
    matrix = None
    if a.rank == b.rank:  # the kernel of b goes to that of a, so that the map is invertible
        matrix = (b.pseudo_inverse @ a.z + b.kernel @ a.kernel.mT).mT
    return LinearEquivalence(b.misses(a.z), a.misses(b.z), a.rank, b.rank, tolerance, matrix)


class _Span:
    """The space that the columns of a matrix span, and the combinations of columns that vanish."""

    def __init__(self, z: Tensor, tolerance: float) -> None:
        self.z = z.detach().to("cpu", torch.float64)
        few = self.z.new_zeros(max(z.shape[1] - len(z), 0), z.shape[1])  # with fewer samples than features
        u, s, vt = torch.linalg.svd(torch.cat([self.z, few]), full_matrices=False)
        least = max(tolerance, max(z.shape) * torch.finfo(torch.float64).eps)
        self.rank = int((s > least * s[:1].sum()).sum())
        self.basis, self.kernel = u[: len(z), : self.rank], vt[self.rank :].mT
        self.pseudo_inverse = vt[: self.rank].mT @ torch.diag(1 / s[: self.rank]) @ self.basis.mT

    def misses(self, other: Tensor) -> float:
        """The part of other columns outside the span, relative to them."""
        size = float(other.norm())
        return float((other - self.basis @ (self.basis.mT @ other)).norm()) / size if size else 0.0


# -- Counterexamples --


def sum_of_two_features() -> tuple[nn.Sequential, Tensor]:
    """Theorem 3.3 without the input arrow: the readout adds two different features, so their swap does not change it.

    z = (relu(x), relu(x − 1)), y = z₁ + z₂, on x from 0 to 3.

    Example:
        >>> from intertwine.lab.papers.linear_equivalence import sum_of_two_features
        >>> model, x = sum_of_two_features()
        >>> model[:2](x)[-1].tolist()
        [3.0, 2.0]
    """
    return _network((1.0, 1.0), (0.0, -1.0), (1.0, 1.0)), _inputs()


def silent_feature() -> tuple[nn.Sequential, nn.Sequential, Tensor]:
    """Proposition 3.2: two networks on a line of constant loss, one with a feature that the other lacks.

    a: z = (x, relu(x − 1)), b: z = (x, 0), both y = z₁, on x from 0 to 3. All along the line from b to a the output is
    x, and even the features move linearly; yet a's features span a plane of functions and b's a line, so that no
    invertible map takes one to the other.

    Example:
        >>> import torch
        >>> from intertwine.lab.papers.linear_equivalence import silent_feature
        >>> a, b, x = silent_feature()
        >>> torch.equal(a(x), b(x))
        True
    """
    return _network((1.0, 1.0), (0.0, -1.0), (1.0, 0.0)), _network((1.0, 0.0), (0.0, 0.0), (1.0, 0.0)), _inputs()


def _network(weight: tuple[float, float], bias: tuple[float, float], readout: tuple[float, float]) -> nn.Sequential:
    hidden, last = nn.Linear(1, 2), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        hidden.weight.copy_(torch.tensor(weight)[:, None])
        hidden.bias.copy_(torch.tensor(bias))
        last.weight.copy_(torch.tensor(readout)[None, :])
    return nn.Sequential(hidden, nn.ReLU(), last)


def _inputs() -> Tensor:
    return torch.linspace(0, 3, 13)[:, None]
