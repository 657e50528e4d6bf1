"""Measures that align features: by a rotation, a permutation, a permutation with positive scales, or optimal transport
(soft matching).

Procrustes similarities compute the distance after the best map from the difference itself, in float64, never as
2 − 2·c: no digits cancel, and no square root is of a negative number. A representation and itself score 1; the best
rotation can miss by 1e-8, if features have directions as small as that beside their largest.

If channels have positions, (samples, channels, positions), features are channels and rows are samples × positions.
Different widths are compared as if the narrower side had columns of zeros.

Unrelated features do not score 0, so every value has a `.baseline`: the value of the same features with the samples of
y in another order. It costs a second comparison; baseline=False leaves it out. Independent ReLU features of Gaussian
values (512 samples, 64 features) have a `relu_procrustes` of 0.33, and of 0.45 without centring, where non-negative
features never score below 1 − 1/√2 = 0.29. `orthogonal_procrustes` never does, because features can always be rotated
to agree; the two are not on one scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import gcd, inf, lcm, sqrt

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import linear_sum_assignment, linprog
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError, IntertwineError, MismatchError, unknown_name
from intertwine.measure.measure import (
    FEATURES,
    ZERO,
    FeatureAlignment,
    Measure,
    Representation,
    Result,
    constant_result,
    register,
)

LOWEST_ROTATED = 1 - sqrt(0.5)  # features can be rotated until no product is negative, so that δ² ≤ 2
REFERENCE = "Godfrey et al. 2022, Definition 5.2"


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a representation in float64, divided by `lengths`: one number for all, or one for each."""

    x: Float[Tensor, "rows features"]
    lengths: Float[Tensor, " lengths"]

    @property
    def dead(self) -> bool:
        return not bool(self.lengths.any())

    @property
    def live(self) -> Int[Tensor, " live"]:
        return self.lengths.nonzero().flatten()


def columns(representation: Representation, center: bool, each: bool) -> Columns:
    """Columns of length 1 (`each`), or all scaled by one factor; constant columns are zero."""
    values = representation.values
    if values.dim() == 3:
        representation = Representation(values.movedim(1, 2).flatten(0, 1), representation.eps)
    x = (representation.centred if center else representation.flat).double()
    size = x.abs().amax(0) if each else x.abs().amax().reshape(1)  # so that squares neither over- nor underflow
    x = x / torch.where(size > 0, size, 1.0)
    length = x.square().sum(0 if each else None).sqrt().reshape(-1)
    return Columns(x / torch.where(length > 0, length, 1.0), size * length)


def by_sample(rows: Float[Tensor, "rows features"], order: Int[Tensor, " samples"]) -> Float[Tensor, "rows features"]:
    """The rows with samples in another order; the positions of each sample stay together."""
    return rows.unflatten(0, (len(order), -1))[order.to(rows.device)].flatten(0, 1)


def _reordered(a: Columns, order: Tensor) -> Columns:
    return replace(a, x=by_sample(a.x, order))


def check_rows(x: Tensor, y: Tensor) -> None:
    """Refuse channels with different positions."""
    if len(x) != len(y):
        raise MismatchError(
            f"Channels are matched over samples and positions, but x has {len(x)} of these and y {len(y)}. Resize one "
            "to the other's positions first."
        )


# -- Rotations ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RotationColumns:
    """Columns x = small @ basisᵀ with orthonormal columns in the basis; no basis if there are enough samples.

    Values need `small` alone, so the basis stays as the reflectors and factors of a QR decomposition until a map is
    written out.
    """

    small: Float[Tensor, "rows directions"]
    reflectors: tuple[Float[Tensor, "features directions"], Float[Tensor, " directions"]] | None
    length: float

    def from_directions(self, matrix: Float[Tensor, "directions n"]) -> Float[Tensor, "features n"]:
        """basis @ matrix."""
        return matrix if self.reflectors is None else torch.linalg.householder_product(*self.reflectors) @ matrix


def _prepare_rotation(center: bool, representation: Representation) -> RotationColumns:
    """With fewer samples than features, only the span of the samples matters: an N × N problem instead of d × d."""
    whole = columns(representation, center, each=False)
    if len(whole.x) >= whole.x.shape[1]:
        return RotationColumns(whole.x, None, float(whole.lengths))
    packed, factors = torch.geqrf(whole.x.T)
    return RotationColumns(packed[: len(whole.x)].triu().T, (packed, factors), float(whole.lengths))


def _rotate(center: bool, a: RotationColumns, b: RotationColumns) -> Result:
    name = "orthogonal_procrustes"
    if not a.length or not b.length:
        return constant_result(name, not a.length, not b.length, *([] if center else [ZERO]))
    check_rows(a.small, b.small)
    u, _, vt = torch.linalg.svd(b.small.T @ a.small, full_matrices=False)
    left = (a.small @ vt.T - b.small @ u).square().sum() + _outside(a.small, vt.T) + _outside(b.small, u)
    alignment = FeatureAlignment(write_matrix=partial(_feature_map, a, b, u @ vt * (a.length / b.length)))
    return Result(name, 1 - sqrt(float(left)) / 2, alignment=alignment)


def _feature_map(
    a: RotationColumns, b: RotationColumns, turn: Float[Tensor, "directions_b directions_a"]
) -> Float[Tensor, "features_b features_a"]:
    """A map of directions as a map of features; a function of the module, so that results can be pickled."""
    return a.from_directions(b.from_directions(turn).T).T


def _outside(x: Tensor, directions: Tensor) -> Tensor:
    """The squared length outside some orthonormal directions, which is compared with zeros."""
    square = directions.shape[0] == directions.shape[1]
    return x.new_zeros(()) if square else (x - x @ directions @ directions.T).square().sum()


@register
def orthogonal_procrustes(center: bool = True, baseline: bool = True) -> Measure:
    """Orthogonal Procrustes similarity 1 − min‖X − YQ‖/2, where X and Y have Frobenius norm 1.

    The alignment's `matrix` is Q times the ratio of norms. With fewer samples than features it is zero on the
    directions that no sample has.

    Args:
        center: False compares without centring, as the paper's code does.
        baseline: whether the value of unrelated features is computed as well.

    Example:
        >>> x = torch.randn(50, 3)
        >>> turned = 2 * x @ torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]]) + 5
        >>> round(orthogonal_procrustes()(x, turned).value, 5)
        1.0
    """
    invariances = {"permutation", "signs", "orthogonal", "isotropic scale"} | ({"translation"} if center else set())
    return Measure(
        "orthogonal_procrustes", "similarity", (LOWEST_ROTATED, 1.0), 1.0, frozenset(invariances), REFERENCE,
        "distance after the best rotation, both of norm 1", partial(_prepare_rotation, center),
        partial(_rotate, center), positions=True, meets=True,
        permute_with=lambda a, order: replace(a, small=by_sample(a.small, order)), baseline=baseline, memory=FEATURES,
    )  # fmt: skip


# -- Permutations ------------------------------------------------------------------------------------------------------


def match(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of columns (i, j), as many as the narrower side has, with the largest sum of products xᵢ·yⱼ."""
    check_rows(x, y)
    first, second = linear_sum_assignment((x.T @ y).numpy(force=True), maximize=True)
    return torch.from_numpy(first).to(x.device), torch.from_numpy(second).to(x.device)


def _left(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> float:
    """The squared distance of matched columns plus the squared lengths of unmatched ones."""
    left = (x[:, i] - y[:, j]).square().sum()
    for side, matched in ((x, i), (y, j)):
        free = torch.ones(side.shape[1], dtype=torch.bool, device=side.device).index_fill(0, matched, False)
        left = left + side[:, free].square().sum()
    return float(left)


def _whole(i: Tensor, j: Tensor, width: int) -> Tensor:
    """The permutation of `width` columns with these pairs; the rest is matched in order."""
    free = torch.ones(2, width, dtype=torch.bool, device=i.device)
    free[0, i], free[1, j] = False, False
    permutation = torch.empty(width, dtype=torch.int64, device=i.device)
    permutation[i] = j
    permutation[free[0]] = free[1].nonzero().flatten()
    return permutation


def _permute(center: bool, a: Columns, b: Columns) -> Result:
    name = "permutation_procrustes"
    if a.dead or b.dead:
        return constant_result(name, a.dead, b.dead, *([] if center else [ZERO]))
    i, j = match(a.x, b.x)
    width = max(a.x.shape[1], b.x.shape[1])
    ratio = (a.lengths / b.lengths).expand(width)
    alignment = FeatureAlignment(permutation=_whole(i, j, width), scales=ratio)
    return Result(name, 1 - sqrt(_left(a.x, b.x, i, j)) / 2, alignment=alignment)


@register
def permutation_procrustes(center: bool = True, baseline: bool = True) -> Measure:
    """Permutation Procrustes similarity 1 − min‖X − YP‖/2, where X and Y have Frobenius norm 1.

    The alignment is a permutation of the wider width, in which numbers past y's width stand for columns of zeros, and
    one common scale.

    Args:
        center: False compares without centring.
        baseline: whether the value of unrelated features is computed as well.

    Example:
        >>> x = torch.randn(50, 3)
        >>> found = permutation_procrustes()(x, x[:, [2, 0, 1]])
        >>> round(found.value, 5), found.alignment.permutation.tolist()
        (1.0, [1, 2, 0])
    """
    invariances = {"permutation", "isotropic scale"} | ({"translation"} if center else set())
    return Measure(
        "permutation_procrustes", "similarity", (0.0, 1.0), 1.0, frozenset(invariances), REFERENCE,
        "distance after the best permutation, both of norm 1",
        partial(columns, center=center, each=False), partial(_permute, center), positions=True, meets=True,
        permute_with=_reordered, baseline=baseline, memory=FEATURES,
    )  # fmt: skip


# -- Permutations and positive scales ----------------------------------------------------------------------------------


def without_dead(a: Columns, b: Columns) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The live columns of both, and a note of how many were left out."""
    return a.x[:, a.live], b.x[:, b.live], dead_note(a, b, "left out")


def dead_note(a: Columns, b: Columns, fate: str) -> tuple[str, ...]:
    """How many features of both are dead and what became of them; empty where none is."""
    counts = [("x", len(a.lengths) - len(a.live)), ("y", len(b.lengths) - len(b.live))]
    words = [f"{count} of {side}" for side, count in counts if count]
    return (f"dead features {fate}: {' and '.join(words)}",) if words else ()


def _rescale(center: bool, paper: bool, a: Columns, b: Columns) -> Result:
    name = "relu_procrustes"
    if a.dead or b.dead:
        return constant_result(name, a.dead, b.dead, *([] if center else [ZERO]))
    width = max(len(a.lengths), len(b.lengths))
    if paper:
        x, y, notes = a.x, b.x, dead_note(a, b, "kept as zeros, as in the paper's code")
        i, j = first, second = match(x, y)
        bound = 4.0 * width
    else:
        x, y, notes = without_dead(a, b)
        i, j = match(x, y)
        first, second = a.live[i], b.live[j]
        bound = 2.0 * (x.shape[1] + y.shape[1])
    value = 1 - sqrt(_left(x, y, i, j) / bound)
    alignment = FeatureAlignment(permutation=_whole(first, second, width), scales=_scales(a, b, first, second, width))
    return Result(name, value, alignment=alignment, notes=notes)


def _scales(a: Columns, b: Columns, first: Tensor, second: Tensor, width: int) -> Tensor:
    """The ratios of lengths of matched columns, in y's order; 1 if either is dead or missing."""
    scales = a.lengths.new_ones(width)
    ratio = a.lengths[first] / torch.where(b.lengths[second] > 0, b.lengths[second], 1.0)
    scales[second] = torch.where((ratio > 0) & (b.lengths[second] > 0), ratio, 1.0)
    return scales


@register
def relu_procrustes(center: bool = True, dead: str = "drop", baseline: bool = True) -> Measure:
    """G_ReLU-Procrustes similarity: columns of length 1, the best permutation, 1 − δ/√(2(‖X‖² + ‖Y‖²)).

    With d live columns on both sides this is the paper's 1 − δ/(2√d). The alignment is a permutation of the wider
    width, with dead features matched last, and the positive scales of y's features.

    Args:
        center: False compares without centring, as in the paper, and is then not invariant to translations.
        dead: "drop" leaves constant features (without centring: zero ones) out of the matching and the divisor. With
            "paper", as in the paper's code, they stay as zeros and the divisor stays 2√d, so dead features raise the
            value.
        baseline: whether the value of unrelated features is computed as well.

    Example:
        >>> x = torch.randn(50, 3).relu()
        >>> found = relu_procrustes()(x, x[:, [2, 0, 1]] * torch.tensor([2.0, 4.0, 8.0]))
        >>> round(found.value, 5), found.alignment.permutation.tolist(), found.alignment.scales.tolist()
        (1.0, [1, 2, 0], [0.5, 0.25, 0.125])
    """
    if dead not in ("drop", "paper"):
        raise InputError(unknown_name("dead of relu_procrustes", dead, ("drop", "paper")))
    invariances = {"permutation", "positive scales", "isotropic scale"} | ({"translation"} if center else set())
    return Measure(
        "relu_procrustes", "similarity", (0.0, 1.0), 1.0, frozenset(invariances), REFERENCE,
        "distance after the best permutation, every feature of norm 1",
        partial(columns, center=center, each=True), partial(_rescale, center, dead == "paper"),
        positions=True, meets=True, permute_with=_reordered, baseline=baseline, memory=FEATURES,
    )  # fmt: skip


# -- Soft matching -----------------------------------------------------------------------------------------------------

#: An assignment of repeated features takes longer than the linear program if each feature of the wider side has more
#: copies than COPIES, and there are more than FEW copies in all.
COPIES, FEW = 4, 512


def transport(gain: Float[Tensor, "first second"]) -> Float[Tensor, "first second"]:
    """The plan with uniform sums over rows and columns that has the largest total gain; the optimum is exact.

    Equal widths are an assignment. So are unequal ones, once every feature is repeated until both sides have the least
    common multiple of the widths. Many copies make that slow; then HiGHS's dual simplex solves the same problem with
    integer masses, whose corners are integers, so that the sums of the plan are exact as well.

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
    # the last sum follows from the others
    solved = linprog(-gain.ravel(), A_eq=sums.tocsr()[:-1], b_eq=masses[:-1], method="highs-ds")
    moved = np.round(solved.x) if solved.x is not None else np.zeros(n * m)
    if not solved.success or not np.array_equal(sums @ moved, masses):
        raise IntertwineError(
            f"The solver failed on the transport between {n} and {m} features: {solved.message} Give widths that share "
            "a larger divisor, or fewer features."
        )
    return moved.reshape(n, m)


def _correlate(a: Columns, b: Columns) -> Result:
    if a.dead or b.dead:
        return constant_result("soft_matching", a.dead, b.dead)
    x, y, notes = without_dead(a, b)
    check_rows(x, y)
    products = x.T @ y
    small = transport(products)
    plan = products.new_zeros(len(a.lengths), len(b.lengths))
    plan[a.live[:, None], b.live] = small
    return Result("soft_matching", float((small * products).sum()), alignment=FeatureAlignment(plan=plan), notes=notes)


def _distance(a: Columns, b: Columns) -> Result:
    if a.dead or b.dead:
        return constant_result("soft_matching", a.dead, b.dead)
    check_rows(a.x, b.x)
    size = float(torch.maximum(a.lengths, b.lengths))  # squares of the input could overflow
    x, y = a.x * (a.lengths / size), b.x * (b.lengths / size)
    plan = transport(x.T @ y)  # every plan moves the full lengths of features
    i, j = plan.nonzero(as_tuple=True)
    parts = zip(i.split(1024), j.split(1024), strict=True)
    left = plan[i, j] @ torch.cat([(x[:, some] - y[:, others]).square().sum(0) for some, others in parts])
    return Result("soft_matching", size * sqrt(float(left)), alignment=FeatureAlignment(plan=plan))


@register
def soft_matching(score: str = "correlation") -> Measure:
    """Soft matching between features of different widths, always centred; the alignment is the plan.

    Args:
        score: "correlation", the mean correlation of features matched by the best plan, without constant ones; or
            "distance", the soft matching distance √(min Σ Pᵢⱼ‖xᵢ − yⱼ‖²), a metric, in the units of the features.

    Example:
        >>> x = torch.randn(50, 3)
        >>> twice = torch.cat([x, 5 * x], 1)
        >>> round(soft_matching()(x, twice).value, 5)
        1.0
    """
    if score not in ("correlation", "distance"):
        raise InputError(unknown_name("score of soft_matching", score, ("correlation", "distance")))
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
