"""Families of general matrices: identity, linear, affine, orthogonal, low rank, and sparse (lasso)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError, MismatchError
from intertwine.stitch.direct import (
    LinearMap,
    PairMoments,
    PairProducts,
    fit_with_bias,
    least_squares,
    polar,
    procrustes,
    reduced_rank,
    solve,
)
from intertwine.stitch.families.base import (
    PLAIN_STARTS,
    MapFamily,
    Parameters,
    check_square,
    leaf,
    random_uniform,
    start_matrix,
)

#: Each maps a singular value s to (3s − s³)/2; from between 0.3 and 1, eight reach 1 in single precision.
NEWTON_SCHULZ_ROUNDS = 8
#: The gap to the optimum at which the lasso stops, as a share of the value of the zero map.
LASSO_GAP = 1e-7
LASSO_STEPS = 20000


class WeightFamily(MapFamily):
    """A family trained through one matrix, "weight", and optionally a "bias"."""

    starts = ("direct", *PLAIN_STARTS)

    @property
    @abstractmethod
    def bias(self) -> bool:
        """Whether the maps have a bias."""

    def _start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        direct = how == "direct" and moments is not None
        found = self.direct(moments) if direct else self._start_map(inputs, outputs, how, rng)
        return with_bias({"weight": leaf(found.matrix)}, found.bias, self.bias)

    def _start_map(self, inputs: int, outputs: int, how: str, rng: Generator) -> LinearMap:
        return LinearMap(start_matrix(inputs, outputs, how, rng))

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["weight"], parameters.get("bias"))


@dataclass(frozen=True)
class Linear(WeightFamily):
    """Any matrix, with a bias as "affine"."""

    bias: bool = False

    @property
    def name(self) -> str:
        return "affine" if self.bias else "linear"

    def _start_map(self, inputs: int, outputs: int, how: str, rng: Generator) -> LinearMap:
        matrix = start_matrix(inputs, outputs, how, rng)
        return LinearMap(matrix, random_uniform((outputs,), inputs, rng) if self.bias and how == "random" else None)

    def decayed(self) -> frozenset[str]:
        return frozenset({"weight"})

    def direct(self, moments: PairMoments) -> LinearMap:
        return least_squares(moments, bias=self.bias)


@dataclass(frozen=True)
class IdentityFamily(MapFamily):
    """Only the identity: the networks are stitched without a map, and there is nothing to train."""

    starts = ("identity", "direct")

    @property
    def name(self) -> str:
        return "identity"

    def check(self, inputs: int, outputs: int) -> None:
        check_square(self.name, inputs, outputs)

    def _start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        return {"matrix": leaf(torch.eye(outputs), trained=False)}

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["matrix"])

    def direct(self, moments: PairMoments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        return LinearMap(torch.eye(moments.inputs).to(moments.a_mean))


def with_bias(parameters: Parameters, bias: Tensor | None, wanted: bool) -> Parameters:
    """The parameters with a bias added if one is wanted: the given one, or zeros."""
    if not wanted:
        return parameters
    matrix = next(iter(parameters.values()))
    return parameters | {"bias": leaf(matrix.new_zeros(matrix.shape[0]) if bias is None else bias)}


@dataclass(frozen=True)
class Orthogonal(WeightFamily):
    """Rotations and reflections; orthonormal rows or columns where widths differ.

    After every optimizer step the weight is projected onto the nearest one. `bias`: True adds a bias.
    """

    bias: bool = False
    starts = ("direct", "identity", "random", "permutation")

    @property
    def name(self) -> str:
        return "orthogonal+bias" if self.bias else "orthogonal"

    def _start_map(self, inputs: int, outputs: int, how: str, rng: Generator) -> LinearMap:
        if how == "random":
            return LinearMap(random_orthogonal(outputs, inputs, rng))
        return LinearMap(start_matrix(inputs, outputs, how, rng))

    def final(self, parameters: Parameters) -> LinearMap:
        found = self.map(parameters).detach()
        return LinearMap(polar(found.matrix.double()).to(found.matrix.dtype), found.bias)

    def project_(self, parameters: Parameters) -> None:
        parameters["weight"].data.copy_(nearly_polar(parameters["weight"].data))

    def direct(self, moments: PairMoments) -> LinearMap:
        return fit_with_bias(moments, self.bias, procrustes)


def random_orthogonal(outputs: int, inputs: int, rng: Generator) -> Float[Tensor, "outputs inputs"]:
    """Random orthonormal rows or columns."""
    return polar(torch.randn(outputs, inputs, generator=rng, dtype=torch.float64))


def nearly_polar(matrix: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """The nearest matrix with orthonormal rows or columns, by Newton–Schulz steps from a matrix close to it.

    Singular values are first brought below one, by the bound that the rows of the Gram matrix give.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.mT
    x = x / (x @ x.mT).abs().sum(-1).max().sqrt().clamp(min=1.0)
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        x = 1.5 * x - 0.5 * (x @ x.mT) @ x
    return x if wide else x.mT


@dataclass(frozen=True)
class LowRank(MapFamily):
    """Matrices of rank at most k, as two factors: features → k numbers → outputs."""

    rank: int
    bias: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f'rank must be at least 1, but is {self.rank}. Write, for example, "lowrank:4".')

    @property
    def name(self) -> str:
        return f"lowrank:{self.rank}{'+bias' if self.bias else ''}"

    def check(self, inputs: int, outputs: int) -> None:
        most = min(inputs, outputs)
        if self.rank > most:
            raise MismatchError(
                f"The family {self.name!r} cannot map {inputs} → {outputs} features: no such map has a rank above "
                f'{most}. Use "lowrank:{most}" or less, or "linear".'
            )

    def _start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        bias = None
        if how == "direct" and moments is not None:
            up, down = reduced_rank(moments.products(centred=self.bias), self.rank)
            bias = moments.b_mean - up @ (down @ moments.a_mean)
        elif how == "random":
            up, down = random_orthogonal(outputs, self.rank, rng), random_orthogonal(self.rank, inputs, rng)
        else:
            up, down = torch.eye(outputs, self.rank), torch.eye(self.rank, inputs)
        return with_bias({"up": leaf(up), "down": leaf(down)}, bias, self.bias)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["up"] @ parameters["down"], parameters.get("bias"))

    def decayed(self) -> frozenset[str]:
        return frozenset({"up", "down"})

    def direct(self, moments: PairMoments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        return fit_with_bias(moments, self.bias, lambda products: torch.matmul(*reduced_rank(products, self.rank)))


# -- sparse ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lasso:
    """What `lasso` found. The same matrix solves two problems:

    ‖AM − B‖²/2n + squared·Σ|M|, and ‖AM − B‖ + unsquared·Σ|M|. `gap`: an upper bound of the distance of the first value
    from its optimum, as a share of the value of the zero map. `steps`: the number of steps taken.
    """

    matrix: Float[Tensor, "outputs inputs"]
    squared: float
    unsquared: float
    gap: float
    steps: int


def lasso(products: PairProducts, strength: float, *, squared: bool = True) -> Lasso:
    """The matrix M that minimises ‖AM − B‖²/2n + strength·Σ|M|; with squared=False, ‖AM − B‖ + strength·Σ|M|.

    Only moments are needed. Accelerated descent (FISTA) treats all outputs at once.

    Example:
        >>> import torch
        >>> from intertwine.stitch.direct import PairMoments
        >>> a, moments = torch.randn(500, 4).double(), PairMoments()
        >>> moments.update(a, 3 * a[:, :1])
        >>> lasso(moments.products(centred=False), 0.5).matrix.count_nonzero()
        tensor(1)
    """
    if not strength >= 0:
        raise InputError(f"The strength of a lasso must be at least 0, but is {strength}.")
    if strength == 0:
        return Lasso(solve(products).T, 0.0, 0.0, 0.0, 0)
    descent = _Descent(products)
    if squared:
        return descent.minimise(strength)
    # ‖r‖ is the minimum of ‖r‖²/2s + s/2 over s, so both problems are solved in turn until s is ‖r‖ itself
    size = descent.zero_residual
    while True:
        found, before = descent.minimise(strength * size / products.count), size
        size = descent.residual()
        if abs(size - before) <= 1e-8 * descent.zero_residual:
            return found


class _Descent:
    """The state of the descent; another strength continues from the last matrix.

    Columns of A are scaled to length one, which changes the problem only by one threshold per column.
    """

    def __init__(self, products: PairProducts) -> None:
        self.products, self.count = products, products.count
        self.matrix = torch.zeros_like(products.ab)
        self.slope = products.ab.clone()  # Aᵀ(B − AM)
        self.zero_residual = float(products.bb.trace().clamp(min=0).sqrt())
        lengths = products.aa.diagonal().clamp(min=0).sqrt()[:, None]
        self.inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
        self.aa = products.aa * self.inverse * self.inverse.T
        self.step = 1 / max(float(torch.linalg.eigvalsh(self.aa)[-1]), 1e-300)

    def residual(self) -> float:
        """‖AM − B‖."""
        left = self.products.bb.trace() - ((self.products.ab + self.slope) * self.matrix).sum()
        return float(left.clamp(min=0).sqrt())

    def minimise(self, strength: float) -> Lasso:
        """FISTA, restarted whenever its momentum points uphill."""
        target, threshold = self.inverse * self.products.ab, self.step * strength * self.count * self.inverse
        at = ahead = self.matrix * torch.where(self.inverse > 0, 1 / self.inverse, 0.0)
        steps, gap, pace = 0, self.gap(strength), 1.0
        while gap > LASSO_GAP and steps < LASSO_STEPS:
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
        """The distance to a lower bound: the dual problem at the residual, scaled down until it is feasible."""
        alpha, n = strength * self.count, self.count
        if not self.zero_residual:
            return 0.0
        bb = self.products.bb.diagonal()
        left = (bb - ((self.products.ab + self.slope) * self.matrix).sum(0)).clamp(min=0)
        highest = self.slope.abs().amax(0)
        share = torch.where(highest > alpha, alpha / highest.clamp(min=1e-300), 1.0)
        inner = bb - (self.products.ab * self.matrix).sum(0)  # ⟨b, r⟩
        value = left / 2 + alpha * self.matrix.abs().sum(0)
        bound = share * inner - share.square() * left / 2
        return float((value - bound).sum()) / n / (self.zero_residual**2 / (2 * n))


@dataclass(frozen=True)
class Sparse(WeightFamily):
    """Any matrix, with λ·Σ|W| added to the loss, so that most entries end at zero.

    `mean`: the penalty is λ times the mean of |W| instead of the sum, as in the code of Csiszárik et al. `threshold`:
    smaller entries become zero at the end; the papers use 1e-4 for zeroing and 1e-3 for counting. `squared`: the direct
    fit minimises ‖AM − B‖²/2n + the penalty, a lasso; False takes ‖AM − B‖ as printed.
    """

    strength: float
    threshold: float = 1e-3
    mean: bool = False
    squared: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        if not (self.strength >= 0 and self.threshold >= 0):
            raise InputError(
                "The strength and the threshold of the family sparse must be at least 0, but strength is "
                f'{self.strength} and threshold is {self.threshold}. Write, for example, "sparse:0.01".'
            )

    @property
    def name(self) -> str:
        return f"sparse:{self.strength:g}{'+bias' if self.bias else ''}"

    def final(self, parameters: Parameters) -> LinearMap:
        found = self.map(parameters).detach()
        return LinearMap(torch.where(found.matrix.abs() > self.threshold, found.matrix, 0.0), found.bias)

    def penalty(self, parameters: Parameters) -> Tensor:
        sizes = parameters["weight"].abs()
        return self.strength * (sizes.mean() if self.mean else sizes.sum())

    def direct(self, moments: PairMoments) -> LinearMap:
        def fit(products: PairProducts) -> Tensor:
            share = products.ab.numel() if self.mean else 1
            return lasso(products, self.strength / share, squared=self.squared).matrix

        return fit_with_bias(moments, self.bias, fit)
