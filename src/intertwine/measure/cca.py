"""Linear maps between representations: CCA, SVCCA, PWCCA and R².

Directions come from a singular value decomposition of the features themselves, not of their products, which would
square the condition number. A direction counts if it rises above the rounding of the input.

With few samples canonical correlations and R² are large for any features. If one side has as many directions as the
centred samples can have, every correlation is 1 and the result is degenerate. With fewer than five samples per
direction, a note gives the mean squared correlation of unrelated features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from math import inf, nan

import torch
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError, MismatchError, unknown_name
from intertwine.measure.cka import ROTATIONS
from intertwine.measure.measure import (
    CHANGES,
    FEATURES,
    ZERO,
    Measure,
    Representation,
    Result,
    constant_result,
    degenerate,
    register,
)

ENOUGH = 5  # samples per direction
#: Correlations (and principal values, relatively) this close coincide: rounding determines their variates.
COINCIDE = float(torch.finfo(torch.float64).eps) ** 0.5


@dataclass(frozen=True, eq=False)
class Span:
    """Features in float64, their largest entry 1, and the directions they span among the samples.

    `freedom` is the largest possible number of directions: one fewer than samples if features are centred. `noise`
    bounds the singular values that rounding of the input can cause.
    """

    x: Float[Tensor, "samples features"]
    size: float
    noise: float
    freedom: int

    @cached_property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Orthonormal directions among samples, singular values, directions among features; those above the noise."""
        u, s, vt = torch.linalg.svd(self.x, full_matrices=False)
        floor = max(self.noise, float(s[0]) * max(self.x.shape) * torch.finfo(s.dtype).eps)
        rank = int((s > floor).sum())
        return u[:, :rank], s[:rank], vt[:rank]

    @property
    def rank(self) -> int:
        return len(self.parts[1])


def span(representation: Representation, center: bool = True) -> Span:
    """Prepare a representation.

    Rounding moves an entry v by at most eps·|v|, and so a singular value by at most eps·‖values‖. The values are those
    before centring, because the means are rounded too.
    """
    x = (representation.centred if center else representation.flat).double()
    size = float(x.abs().max())
    scale = size or 1.0
    noise = representation.eps * float((representation.flat.double() / scale).square().sum().sqrt())
    return Span(x / scale, size, noise, representation.samples - int(center))


def kept(s: Span, variance: float | None) -> int:
    """How many directions hold this fraction of the variance; all of them if it is None."""
    if variance is None:
        return s.rank
    squares = s.parts[1].square()
    before = squares.cumsum(0) - squares
    return int((before < variance * squares.sum()).sum())


def few_samples(freedom: int, directions: int) -> tuple[str, ...]:
    """A note if unrelated features would score high."""
    if freedom >= ENOUGH * directions:
        return ()
    chance = directions / freedom
    return (f"few samples for {directions} directions: unrelated features would score {chance:.3f} (mean square)",)


def cca_degenerate(name: str, a: Span, b: Span, directions: tuple[int, int]) -> Result | None:
    """The result if there is no value, else None."""
    if not a.size or not b.size:
        return constant_result(name, not a.size, not b.size)
    if not min(directions):
        return constant_result(name, not directions[0], not directions[1], "rounding only: no direction rises above it")
    if max(directions) >= a.freedom:
        return degenerate(
            name,
            f"{a.freedom + 1} samples are too few: {'x' if directions[0] >= a.freedom else 'y'} spans all directions "
            "among them, so every correlation is 1 whatever the features",
        )
    return None


def _compare(name: str, statistic: str, variance: float | None, a: Span, b: Span) -> Result:
    directions = (0, 0) if not a.size or not b.size else (kept(a, variance), kept(b, variance))
    if (found := cca_degenerate(name, a, b, directions)) is not None:
        return found
    i, j = directions
    rho = torch.linalg.svdvals(a.parts[0][:, :i].T @ b.parts[0][:, :j])
    value = rho.mean() if statistic == "mean" else rho.square().mean()
    return Result(name, float(value), notes=few_samples(a.freedom, max(directions)))


def _check_statistic(name: str, statistic: str) -> None:
    if statistic not in ("mean", "mean_squared"):
        raise InputError(unknown_name(f"statistic of {name}", statistic, ("mean", "mean_squared")))


@register
def cca(statistic: str = "mean") -> Measure:
    """Mean canonical correlation over as many pairs as the smaller rank.

    Args:
        statistic: "mean" of the correlations, or "mean_squared", of their squares.

    Example:
        >>> x = torch.randn(50, 2)
        >>> round(cca()(x, x @ torch.tensor([[1.0, 2.0], [0.0, 3.0]])).value, 5)
        1.0
    """
    _check_statistic("cca", statistic)
    return Measure(
        "cca", "similarity", (0.0, 1.0), 1.0, frozenset(CHANGES), "Hotelling 1936; Raghu et al. 2017",
        "mean canonical correlation", span, partial(_compare, "cca", statistic, None), 3, memory=FEATURES,
    )  # fmt: skip


@register
def svcca(variance: float = 0.99, statistic: str = "mean") -> Measure:
    """Mean canonical correlation of the leading principal directions, over as many pairs as the smaller number of them.

    Args:
        variance: the fraction of each side's variance (its squared singular values) that the directions must hold.
        statistic: "mean" or "mean_squared".

    Example:
        >>> x = torch.randn(50, 2)
        >>> quiet = torch.randn(50, 3) / 1000
        >>> round(svcca()(torch.cat([x, quiet[:, :1]], 1), torch.cat([quiet, 3 * x], 1)).value, 3)
        1.000
    """
    _check_statistic("svcca", statistic)
    if not 0 < variance <= 1:
        raise InputError(f"variance of svcca must be in (0, 1], but is {variance}.")
    return Measure(
        "svcca", "similarity", (0.0, 1.0), 1.0, ROTATIONS, "Raghu et al. 2017",
        f"mean canonical correlation of the directions with {variance:.3g} of the variance",
        span, partial(_compare, "svcca", statistic, variance), 3, memory=FEATURES,
    )  # fmt: skip


def _weigh(side: str, a: Span, b: Span) -> Result:
    ranks = (0, 0) if not a.size or not b.size else (a.rank, b.rank)
    if (found := cca_degenerate("pwcca", a, b, ranks)) is not None:
        return found
    own, other = (a, b) if side == "x" else (b, a)
    meeting = own.parts[0].T @ other.parts[0]
    u, rho, _ = torch.linalg.svd(meeting, full_matrices=False)
    if rho[-1] <= COINCIDE and own.rank > other.rank:  # more uncorrelated directions than there are pairs
        u = torch.linalg.svd(meeting, full_matrices=True)[0]
    weights, undecided = _weights((u.T * own.parts[1]) @ own.parts[2], rho)
    notes = few_samples(a.freedom, max(ranks))
    if undecided:
        notes += (
            f"{undecided} pairs have one correlation, and {side} holds as much of one as of another: their weights, "
            "and so the value, are one choice of many",
        )
    return Result("pwcca", float(weights @ rho / weights.sum()), notes=notes)


def _weights(held: Float[Tensor, "variates features"], rho: Float[Tensor, " pairs"]) -> tuple[Tensor, int]:
    """The weight of each pair, and for how many pairs it is one choice of many.

    Variates of equal correlation are determined up to a rotation. They are rotated to the principal directions of the
    features' projections on them (`held`), which no rotation changes, the largest first.
    """
    ends = [*(torch.where(rho[:-1] - rho[1:] > COINCIDE)[0] + 1).tolist(), len(rho)]
    found, undecided, begin = [], 0, 0
    for end in ends:
        rows = held[begin : len(held) if end == len(rho) else end]
        if len(rows) > 1:
            _, s, vt = torch.linalg.svd(rows, full_matrices=False)
            rows = s[:, None] * vt
            close = s[:-1] - s[1:] <= COINCIDE * s[:-1]
            no = close.new_zeros(1)
            undecided += int((torch.cat([close, no]) | torch.cat([no, close]))[: end - begin].sum())
        found.append(rows[: end - begin].abs().sum(1))
        begin = end
    return torch.cat(found), undecided if len(ends) > 1 else 0  # where all coincide, no weight matters


@register
def pwcca(side: str = "x") -> Measure:
    """Projection-weighted canonical correlation: Σ αᵢρᵢ / Σ αᵢ over as many pairs as the smaller rank.

    The weight αᵢ = Σⱼ |⟨hᵢ, xⱼ⟩| is how much of the centred features xⱼ of one side the canonical variate hᵢ of that
    side accounts for, where hᵢ has length 1. Packages differ here; this is Morcos et al.'s definition with the weights
    of the first representation, so that the measure is not symmetric. If correlations coincide, as those of common
    features do, their variates are determined up to a rotation; they are rotated to the principal directions of the
    features, which neither the other side nor the order of samples changes. If those coincide as well, the weights are
    one choice of many, and a note says so.

    Args:
        side: whose features weigh, "x" or "y".

    Example:
        >>> x = torch.randn(50, 2)
        >>> round(pwcca()(x, x @ torch.tensor([[1.0, 2.0], [0.0, 3.0]])).value, 5)
        1.0
    """
    if side not in ("x", "y"):
        raise InputError(unknown_name("side of pwcca", side, ("x", "y")))
    invariances = frozenset(CHANGES) if side == "x" else ROTATIONS - {"orthogonal"}
    return Measure(
        "pwcca", "similarity", (0.0, 1.0), 1.0, invariances, "Morcos et al. 2018",
        f"mean canonical correlation, weighted by what the features of {side} hold of each",
        span, partial(_weigh, side), 3, memory=FEATURES,
    )  # fmt: skip


# -- R² ----------------------------------------------------------------------------------------------------------------


def _best_map(center: bool, a: Span, b: Span) -> Result:
    if not a.size or not b.size:
        return constant_result("r2", not a.size, not b.size, *([] if center else [ZERO]))
    if not a.rank:
        return degenerate("r2", "x is rounding only: no direction rises above it")
    if a.rank >= a.freedom:
        samples = a.freedom + int(center)
        return degenerate("r2", f"{samples} samples are too few: x spans all directions among them and fits any y")
    explained = (a.parts[0].T @ b.x).square().sum() / b.x.square().sum()
    return Result("r2", float(explained), notes=few_samples(a.freedom, a.rank))


def _given_map(center: bool, matrix: Tensor, a: Span, b: Span) -> Result:
    if tuple(matrix.shape) != (a.x.shape[1], b.x.shape[1]):
        raise MismatchError(
            f"The matrix of r2 has shape {tuple(matrix.shape)}, but x has {a.x.shape[1]} features and y "
            f"{b.x.shape[1]}. Give one of shape {(a.x.shape[1], b.x.shape[1])}: x @ matrix is compared with y."
        )
    if not a.size or not b.size:
        return constant_result("r2", not a.size, not b.size, *([] if center else [ZERO]))
    rest = a.x @ (matrix.detach().to(a.x) * (a.size / b.size)) - b.x
    return Result("r2", float(1 - rest.square().sum() / b.x.square().sum()))


@register
def r2(center: bool = True, matrix: Tensor | None = None) -> Measure:
    """R² of y from x: 1 − ‖xM − y‖²/‖y‖², summed over the features of y.

    Args:
        center: False fits without a constant and compares with zero instead of the mean, as in the paper.
        matrix: the map M, x's features × y's; None takes the best one, by least squares. The best map makes R²
            invariant to invertible changes of x. The value of a given map has no lower bound.

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
            partial(span, center=center), partial(_given_map, center, matrix), 2, memory=FEATURES,
        )  # fmt: skip
    return Measure(
        "r2", "similarity", (0.0, 1.0), 1.0, ROTATIONS if center else ROTATIONS - {"translation"},
        "Csiszárik et al. 2021, Definition 6.1", "fraction of y that the best linear map of x explains",
        partial(span, center=center), partial(_best_map, center), 3, memory=FEATURES,
    )  # fmt: skip
