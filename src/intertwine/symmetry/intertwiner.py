"""The intertwiner group of an activation on n units: the matrices A with σ(A·x) = B·σ(x) for all x, and B = φ(A).

Membership is decided by sampling, without the theorem that reduces it to scalars, so that the theorem can be checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError
from intertwine.symmetry.activation import ActivationGroup, activation_group
from intertwine.symmetry.elementwise import Elementwise, elementwise

#: Largest relative residual of a member. Members stay below 1e-12, the next best matrix is far above.
TOLERANCE = 1e-9
_MAGNITUDES = (0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Intertwining:
    """Whether σ∘A = B∘σ. `output`: the best B; `residual`: its largest relative error over units and samples."""

    ok: bool
    output: Float[Tensor, "n n"]
    residual: float

    @property
    def margin(self) -> float:
        """Powers of ten between the residual and the threshold of membership."""
        return abs(math.log10(max(self.residual, 1e-300)) - math.log10(TOLERANCE))

    def __repr__(self) -> str:
        verdict = "a member" if self.ok else "not a member"
        return f"Intertwining({verdict} on {len(self.output)} units, residual {self.residual:.1e})"


def intertwines(fn: Callable[..., Any], matrix: Float[Tensor, "n n"], seed: int = 0) -> Intertwining:
    """Whether a matrix passes an activation: is there a B with σ(A·x) = B·σ(x) for all x?

    Samples of both signs and of several magnitudes are drawn in float64, and B is fitted to them by least squares.
    Where several B fit (σ is constant), the one nearest to the identity is taken.

    Args:
        fn: an elementwise function. matrix: A, invertible. seed: of the samples.

    Raises:
        InputError: the function is not an activation, or the matrix is not square and invertible.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.intertwiner import intertwines
        >>> intertwines(torch.relu, torch.tensor([[0.0, 1.0], [2.0, 0.0]])).ok
        True
        >>> intertwines(torch.relu, torch.tensor([[1.0, 1.0], [0.0, 1.0]])).ok
        False
    """
    a = _invertible(matrix)
    sigma = elementwise(fn)
    x = _samples(len(a), seed)
    y, moved = _apply(sigma, x), _apply(sigma, x @ a.T)
    if not bool(y.any()) and not bool(moved.any()):  # σ = 0 passes everything
        return Intertwining(True, torch.eye(len(a), dtype=torch.float64), 0.0)
    own, size = y.norm(dim=1, keepdim=True), moved.norm(dim=1, keepdim=True)
    scale = torch.maximum(own, 1e-50 * size)  # each sample counts alike, whatever its magnitude
    known = (torch.isfinite(own + size) & (scale > 0))[:, 0]
    if int(known.sum()) < 2 * len(a):
        raise InputError(
            f"Membership cannot be decided: {sigma.name} is finite at only {int(known.sum())} of {len(x)} samples. "
            "Pass an activation that is defined for both signs."
        )
    return _fit(y[known] / scale[known], moved[known] / scale[known])


def _fit(y: Tensor, moved: Tensor) -> Intertwining:
    """The B with moved = y·Bᵀ, and how well it does; of many, the one nearest to the identity."""
    found = torch.linalg.lstsq(y, moved, driver="gelsd")
    output = found.solution.T
    if int(found.rank) < y.shape[1]:
        change = torch.linalg.lstsq(y, moved - y, driver="gelsd").solution
        output = change.T + torch.eye(y.shape[1], dtype=torch.float64)
    error, size = (y @ output.T - moved).norm(dim=0), moved.norm(dim=0)
    residual = float(torch.where(size > 0, error / size, error).max())
    return Intertwining(residual < TOLERANCE, output, residual)


def phi(fn: Callable[..., Any], matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """φ_σ(A) = σ(A)·σ(I)⁻¹, with σ entry by entry: the B of a member A. On other matrices it has no such meaning.

    Raises:
        InputError: σ(I) is singular (Lemma E.7), so that the formula does not apply.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.intertwiner import phi
        >>> phi(torch.square, torch.tensor([[0.0, 3.0], [-2.0, 0.0]]))
        tensor([[0., 9.],
                [4., 0.]], dtype=torch.float64)
    """
    a = _square(matrix)
    sigma = elementwise(fn)
    n = len(a)
    at_zero, at_one = _at_zero_and_one(sigma)
    once, often = _spectrum(at_zero, at_one, n)
    size = max(abs(at_zero), abs(at_one))
    if not (abs(once) > 1e-12 * n * size and (n == 1 or abs(often) > 1e-12 * size)):
        broken = "σ(1) = σ(0)" if n > 1 and abs(often) <= 1e-12 * size else "σ(1) = −(n − 1)·σ(0)"
        raise InputError(
            f"φ_σ(A) = σ(A)·σ(I)⁻¹ is not defined for {sigma.name} on {n} units: σ(I) is singular because {broken}, "
            f"with σ(0) = {at_zero:g}, σ(1) = {at_one:g}. Use intertwines(fn, matrix).output, which fits B to many "
            "samples, or activation_group(fn).phi for one factor."
        )
    identity = at_zero + (at_one - at_zero) * torch.eye(n, dtype=torch.float64)
    return torch.linalg.solve(identity, _apply(sigma, a), left=False)


def identity_spectrum(fn: Callable[..., Any], n: int) -> tuple[float, float]:
    """The eigenvalues of σ(I) on n units: σ(1) + (n − 1)·σ(0) once, and σ(1) − σ(0) n − 1 times (Lemma E.7).

    φ_σ(A) = σ(A)·σ(I)⁻¹ needs both to be different from zero; for n = 1 there is only the first.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.intertwiner import identity_spectrum
        >>> identity_spectrum(torch.cos, 3)  # cos 1 + 2, cos 1 − 1
        (2.5403, -0.4597)
    """
    if n < 1:
        raise InputError(f"n must be at least 1, but is {n}.")
    return _spectrum(*_at_zero_and_one(elementwise(fn)), n)


def _spectrum(at_zero: float, at_one: float, n: int) -> tuple[float, float]:
    return at_one + (n - 1) * at_zero, at_one - at_zero


def _at_zero_and_one(sigma: Elementwise) -> tuple[float, float]:
    at_zero, at_one = sigma(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    if not (math.isfinite(at_zero) and math.isfinite(at_one)):
        raise InputError(
            f"σ(I) must be finite, but {sigma.name} has σ(0) = {at_zero} and σ(1) = {at_one}. Use intertwines(fn, "
            "matrix), which samples elsewhere."
        )
    return at_zero, at_one


def _apply(sigma: Elementwise, x: Tensor) -> Tensor:
    return sigma(x.flatten()).reshape(x.shape)


def _samples(n: int, seed: int) -> Tensor:
    """Normal vectors of several magnitudes, and vectors whose entries have magnitudes of their own."""
    many = max(32, 4 * n)
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(len(_MAGNITUDES) + 1, many, n, generator=generator, dtype=torch.float64)
    own = 10 ** torch.empty(many, n, dtype=torch.float64).uniform_(-2, 2, generator=generator)
    alike = torch.tensor(_MAGNITUDES, dtype=torch.float64)[:, None, None].expand(-1, many, n)
    return (draw * torch.cat([alike, own[None]])).flatten(0, 1)


def _square(matrix: Tensor) -> Tensor:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise InputError(f"The matrix must be square, but has shape {tuple(matrix.shape)}.")
    return matrix.detach().to("cpu", torch.float64)


def _invertible(matrix: Tensor) -> Tensor:
    a = _square(matrix)
    values = torch.linalg.svdvals(a)
    if not bool(torch.isfinite(a).all()) or float(values[-1]) <= 1e-13 * float(values[0]):
        raise InputError(
            f"The matrix must be invertible, but its singular values reach from {float(values[-1]):.1e} to "
            f"{float(values[0]):.1e}. The intertwiner group holds invertible matrices only."
        )
    return a


# -- Members: draw one at random, find the one nearest to a matrix -----------------------------------------------------


#: Smallest scale of a nearest member: positive scales have no smallest one, so zero is never reached.
SMALLEST_SCALE = 1e-6


def random_member(fn: Callable[..., Any], n: int, seed: int = 0, spread: float = 1.0) -> Float[Tensor, "n n"]:
    """A random member of G_σ on n units: a permutation times factors that pass σ, log-normal where all do.

    For a linear σ it is a matrix of independent normal entries.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.intertwiner import intertwines
        >>> from intertwine.symmetry.intertwiner import random_member
        >>> intertwines(torch.tanh, random_member(torch.tanh, 4)).ok
        True
    """
    if n < 1:
        raise InputError(f"n must be at least 1, but is {n}.")
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
        >>> from intertwine.symmetry.intertwiner import nearest_member
        >>> nearest_member(torch.relu, torch.tensor([[0.1, 2.0], [1.0, 0.3]]))
        tensor([[0., 2.],
                [1., 0.]], dtype=torch.float64)
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"The matrix must be square, but has shape {tuple(matrix.shape)}.")
    a = matrix.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(a).all():
        raise InputError("The matrix has entries that are not finite, so no member is nearest to it.")
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
        return signs * np.maximum(signs * a, SMALLEST_SCALE)
    if group.discrete is None:
        return signs
    base = group.discrete[0]
    most = math.ceil(-math.log(SMALLEST_SCALE) / math.log(abs(base)))  # covers SMALLEST_SCALE to its inverse
    choices = signs[..., None] * base ** np.arange(-most, most + 1, dtype=float)
    return np.take_along_axis(choices, np.abs(choices - a[..., None]).argmin(-1)[..., None], -1)[..., 0]


# -- Defect from homogeneity -------------------------------------------------------------------------------------------


_REACH = 20.0  # a normal number is larger with probability 1e-88
_MOST = 100_000  # intervals at once; a function that needs more is noise
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def homogeneity_defect(fn: Callable[..., Any], scale: float) -> float:
    """ξ(λ) = √E[(σ(λX) − λ·σ(X))²] for a standard normal X: zero for all λ > 0 exactly if σ is homogeneous of degree 1.

    GELU is nearly ReLU, and its intertwiner group holds permutations only: ξ says how much of the scale symmetry of
    ReLU is lost at each scale (Godfrey et al. 2022, equation E.22 and Figure 17). It is integrated by adaptive
    Gauss–Legendre quadrature, to about 1e-12 for smooth and kinked functions.

    Args:
        fn: an elementwise function. scale: λ, any finite number.

    Raises:
        InputError: the function is not an activation, the scale is not finite, or the mean does not exist.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.intertwiner import homogeneity_defect
        >>> homogeneity_defect(torch.nn.GELU(), 2.0)
        0.1767
        >>> homogeneity_defect(torch.relu, 2.0)
        0.0
    """
    if not math.isfinite(scale):
        raise InputError(f"scale must be finite, but is {scale}.")
    sigma = elementwise(fn)

    def at(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        moved, still = (sigma(torch.from_numpy(p.ravel())).numpy().reshape(p.shape) for p in (scale * x, x))
        return moved, scale * still

    with np.errstate(over="ignore", invalid="ignore"):
        size = _gauss(lambda x: sum(part**2 for part in at(x)) * _normal(x), *_intervals()).sum()
        # below this the two terms differ by their rounding only
        floor = 1e-26 * float(size)
        mean = _integral(lambda x: np.subtract(*at(x)) ** 2 * _normal(x), floor)
    if not math.isfinite(mean):
        raise InputError(
            f"The homogeneity defect of {sigma.name} at the scale {scale} is not finite: the function is not defined "
            "somewhere, or grows too fast for a normal input. Pass an activation of moderate growth."
        )
    return math.sqrt(mean)


def _normal(x: np.ndarray) -> np.ndarray:
    return np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _intervals() -> tuple[np.ndarray, np.ndarray]:
    """Left and right ends that cover [−20, 20], finer towards zero, where large scales act."""
    edges = np.concatenate([[0.0], _REACH * 2.0 ** np.arange(-24, 1)])
    return np.concatenate([edges[:-1], -edges[1:]]), np.concatenate([edges[1:], -edges[:-1]])


def _integral(density: Callable[[np.ndarray], np.ndarray], floor: float) -> float:
    """The integral to `floor` and to 1e-14 of itself: intervals on which one and two Gauss rules differ are halved."""
    left, right = _intervals()
    total = 0.0
    while True:
        middle = (left + right) / 2
        whole = _gauss(density, left, right)
        halves = _gauss(density, left, middle) + _gauss(density, middle, right)
        wrong = np.abs(whole - halves) > 1e-14 * max(total, float(np.abs(halves).max())) + floor
        narrow = (right - left) < 1e-14 * np.maximum(np.abs(left), 1e-9)  # a jump: nothing is left to halve
        wrong &= ~narrow
        if not wrong.any() or not np.isfinite(halves).all() or wrong.sum() > _MOST:
            return total + float(halves.sum())
        total += float(halves[~wrong].sum())
        left, right = np.concatenate([left[wrong], middle[wrong]]), np.concatenate([middle[wrong], right[wrong]])


def _gauss(density: Callable[[np.ndarray], np.ndarray], left: np.ndarray, right: np.ndarray) -> np.ndarray:
    half = (right - left) / 2
    return half * (density((left + right)[:, None] / 2 + half[:, None] * _NODES) @ _WEIGHTS)
