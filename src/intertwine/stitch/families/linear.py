"""Families of general matrices: identity, linear, affine, orthogonal, low rank, and sparse (lasso)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    leaf,
    random_uniform,
    register,
    start_matrix,
)

# ----------------------------------------------------------------------------------------------------
# Families "linear", "affine" and "identity": any matrix, any matrix with a bias, and the one that changes nothing.


@dataclass(frozen=True)
class Linear(MapFamily):
    """Any matrix (row 000-G28), with a bias as "affine" (rows 001-C04, D18)."""

    bias: bool = False
    starts = ("direct", *PLAIN_STARTS)

    @property
    def name(self) -> str:
        return "affine" if self.bias else "linear"

    def _start(
        self, inputs: int, outputs: int, how: str, moments: PairMoments | None, generator: torch.Generator
    ) -> Parameters:
        if how == "direct" and moments is not None:
            found = self.direct(moments)
        else:
            found = LinearMap(start_matrix(inputs, outputs, how, generator))
            if self.bias and how == "random":
                found = LinearMap(found.matrix, random_uniform((outputs,), inputs, generator))
        return with_bias({"weight": leaf(found.matrix)}, found.bias, self.bias)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["weight"], parameters.get("bias"))

    def decayed(self) -> frozenset[str]:
        return frozenset({"weight"})

    def direct(self, moments: PairMoments) -> LinearMap:
        return least_squares(moments, bias=self.bias)


@dataclass(frozen=True)
class IdentityFamily(MapFamily):
    """Nothing but the identity: the network stitched without a map. There is nothing to train."""

    starts = ("identity", "direct")

    @property
    def name(self) -> str:
        return "identity"

    def check(self, inputs: int, outputs: int) -> None:
        if inputs != outputs:
            raise MismatchError(
                f'The family "identity" was asked to take {inputs} features to {outputs}. It changes nothing, so both '
                'must be the same. Use "linear" or "affine" here.'
            )

    def _start(
        self, inputs: int, outputs: int, how: str, moments: PairMoments | None, generator: torch.Generator
    ) -> Parameters:
        return {"matrix": leaf(torch.eye(outputs), trained=False)}

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["matrix"])

    def direct(self, moments: PairMoments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        return LinearMap(torch.eye(moments.inputs).to(moments.a_mean))


def with_bias(parameters: Parameters, bias: Tensor | None, wanted: bool) -> Parameters:
    """The parameters with a bias beside them where one is wanted: the given one, or zeros."""
    if not wanted:
        return parameters
    matrix = next(iter(parameters.values()))
    outputs = matrix.shape[0]
    return parameters | {"bias": leaf(matrix.new_zeros(outputs) if bias is None else bias)}


register(IdentityFamily(), Linear(), Linear(bias=True))


# ----------------------------------------------------------------------------------------------------
# Family "orthogonal": rotations and reflections, and matrices with orthonormal rows or columns where widths differ.


#: Each brings a singular value s to (3s − s³)/2; from between 0.3 and 1 this many end at 1 in single precision.
NEWTON_SCHULZ_ROUNDS = 8


@dataclass(frozen=True)
class Orthogonal(MapFamily):
    """Orthogonal matrices (row 001-C08). After every step the weight is taken back to the nearest one.

    `bias`: None by default (row D18); True adds one.
    """

    bias: bool = False
    starts = ("direct", "identity", "random", "permutation")

    @property
    def name(self) -> str:
        return "orthogonal+bias" if self.bias else "orthogonal"

    def _start(
        self, inputs: int, outputs: int, how: str, moments: PairMoments | None, generator: torch.Generator
    ) -> Parameters:
        bias = None
        if how == "direct" and moments is not None:
            found = self.direct(moments)
            weight, bias = found.matrix, found.bias
        elif how == "random":
            weight = random_orthogonal(outputs, inputs, generator)
        else:
            weight = start_matrix(inputs, outputs, how, generator)
        return with_bias({"weight": leaf(weight)}, bias, self.bias)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["weight"], parameters.get("bias"))

    def final(self, parameters: Parameters) -> LinearMap:
        weight = parameters["weight"].detach()
        bias = parameters.get("bias")
        return LinearMap(polar(weight.double()).to(weight.dtype), None if bias is None else bias.detach())

    def project_(self, parameters: Parameters) -> None:
        parameters["weight"].data.copy_(nearly_polar(parameters["weight"].data))

    def direct(self, moments: PairMoments) -> LinearMap:
        return fit_with_bias(moments, self.bias, procrustes)


def random_orthogonal(outputs: int, inputs: int, generator: torch.Generator) -> Float[Tensor, "outputs inputs"]:
    """Orthonormal rows or columns in directions at random."""
    return polar(torch.randn(outputs, inputs, generator=generator, dtype=torch.float64))


def nearly_polar(matrix: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """The nearest matrix with orthonormal rows or columns by products alone (Newton and Schulz), for one near to it.

    Large singular values are brought below one first, as a longest row of the Gram matrix bounds them.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.mT
    bound = (x @ x.mT).abs().sum(-1).max().sqrt()
    x = x / bound.clamp(min=1.0)
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        x = 1.5 * x - 0.5 * (x @ x.mT) @ x
    return x if wide else x.mT


register(Orthogonal(), Orthogonal(bias=True))


# ----------------------------------------------------------------------------------------------------
# Family "lowrank:k": matrices of rank at most k, as two factors.


@dataclass(frozen=True)
class LowRank(MapFamily):
    """The features are taken to k numbers and from there to the outputs (rows 000-G29, 001-C09, 001-C28)."""

    rank: int
    bias: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f'A rank of {self.rank} was asked for. It must be 1 or more, as in "lowrank:4".')

    @property
    def name(self) -> str:
        return f"lowrank:{self.rank}{'+bias' if self.bias else ''}"

    def check(self, inputs: int, outputs: int) -> None:
        if self.rank > min(inputs, outputs):
            raise MismatchError(
                f"The family {self.name!r} was asked to take {inputs} features to {outputs}, and no such map has a "
                f'rank above {min(inputs, outputs)}. Use "lowrank:{min(inputs, outputs)}" or less, or "linear".'
            )

    def _start(
        self, inputs: int, outputs: int, how: str, moments: PairMoments | None, generator: torch.Generator
    ) -> Parameters:
        bias = None
        if how == "direct" and moments is not None:
            up, down = reduced_rank(moments.products(centred=self.bias), self.rank)
            bias = moments.b_mean - up @ (down @ moments.a_mean)
        elif how == "random":
            up = random_orthogonal(outputs, self.rank, generator)
            down = random_orthogonal(self.rank, inputs, generator)
        else:
            up, down = torch.eye(outputs, self.rank), torch.eye(self.rank, inputs)
        return with_bias({"up": leaf(up), "down": leaf(down)}, bias, self.bias)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["up"] @ parameters["down"], parameters.get("bias"))

    def decayed(self) -> frozenset[str]:
        return frozenset({"up", "down"})

    def direct(self, moments: PairMoments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)

        def fit(products: PairProducts) -> Tensor:
            up, down = reduced_rank(products, self.rank)
            return up @ down

        return fit_with_bias(moments, self.bias, fit)


# ----------------------------------------------------------------------------------------------------
# Sparse least squares (lasso) from moments alone, by accelerated descent (FISTA) for all outputs at once.


#: The gap to the best value at which the descent ends, as a share of the value of the zero map.
LASSO_GAP = 1e-7
LASSO_STEPS = 20000


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


def lasso(products: PairProducts, strength: float, *, squared: bool = True) -> Lasso:
    """The matrix M with the least ‖AM − B‖²/2n + strength·Σ|M|; with squared=False the least ‖AM − B‖ + strength·Σ|M|.

    Example:
        >>> import torch
        >>> from intertwine.stitch.direct import PairMoments
        >>> a, moments = torch.randn(500, 4).double(), PairMoments()
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

    def __init__(self, products: PairProducts) -> None:
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


# ----------------------------------------------------------------------------------------------------
# Family "sparse:λ": a penalty on the sum of absolute entries holds matrices so small that most entries end at zero.


@dataclass(frozen=True)
class Sparse(MapFamily):
    """Any matrix, with λ·Σ|W| added to the loss (rows 000-G38, 001-C10).

    `mean`: the penalty is λ times the mean of |W| in place of the sum, as in the code of Csiszárik et al. `threshold`:
    entries below it are zero in the end; the papers zero at 1e-4 and count at 1e-3. `squared`: the direct fit is by
    ‖AM − B‖²/2n, a lasso; False takes ‖AM − B‖ as printed.
    """

    strength: float
    threshold: float = 1e-3
    mean: bool = False
    squared: bool = True
    bias: bool = False
    starts = ("direct", *PLAIN_STARTS)

    def __post_init__(self) -> None:
        if not (self.strength >= 0 and self.threshold >= 0):
            raise InputError(
                f"The family sparse was asked for with strength {self.strength} and threshold {self.threshold}. Both "
                'must be numbers from 0 on, as in "sparse:0.01".'
            )

    @property
    def name(self) -> str:
        return f"sparse:{self.strength:g}{'+bias' if self.bias else ''}"

    def _start(
        self, inputs: int, outputs: int, how: str, moments: PairMoments | None, generator: torch.Generator
    ) -> Parameters:
        if how == "direct" and moments is not None:
            found = self.direct(moments)
        else:
            found = LinearMap(start_matrix(inputs, outputs, how, generator))
        return with_bias({"weight": leaf(found.matrix)}, found.bias, self.bias)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["weight"], parameters.get("bias"))

    def final(self, parameters: Parameters) -> LinearMap:
        weight, bias = parameters["weight"].detach(), parameters.get("bias")
        kept = torch.where(weight.abs() > self.threshold, weight, 0.0)
        return LinearMap(kept, None if bias is None else bias.detach())

    def penalty(self, parameters: Parameters) -> Tensor:
        sizes = parameters["weight"].abs()
        return self.strength * (sizes.mean() if self.mean else sizes.sum())

    def direct(self, moments: PairMoments) -> LinearMap:
        return fit_with_bias(moments, self.bias, lambda products: self.fit(products).matrix)

    def fit(self, products: PairProducts) -> Lasso:
        """The lasso of the direct fit, with its strength in both scalings."""
        share = products.ab.numel() if self.mean else 1
        return lasso(products, self.strength / share, squared=self.squared)
