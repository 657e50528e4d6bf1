"""Families with one input per output: permutations with factors, masked matrices, and the relaxations of G_ReLU from
the papers (Birkhoff polytope, SoftSort).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from intertwine.align.matching import sinkhorn
from intertwine.argument_types import Float
from intertwine.errors import InputError, did_you_mean
from intertwine.stitch.direct import LinearMap, PairMoments, PairProducts, fit_with_bias
from intertwine.stitch.families.base import (
    FACTORS,
    FLOOR,
    MapFamily,
    Parameters,
    best_assignment,
    best_factors,
    check_injection,
    check_square,
    correlations,
    default_factors,
    gains,
    leaf,
    matrix_from,
    random_order,
    ratio,
)
from intertwine.stitch.families.linear import with_bias

NAMES = {"one": "permutation", "sign": "signed", "positive": "relu", "nonzero": "nonzero"}
#: Few rounds suffice while training: the soft assignment need not add up exactly.
SINKHORN_ROUNDS = 5
#: The soft assignment is sinkhorn(exp(PACE · scores)), so that one learning rate suits both factors and scores.
PACE = 30.0
MASKS = ("semi-match", "abs-semi-match", "random-permutation")
BIRKHOFF_ROUNDS = 16
FIRST_BIRKHOFF_ROUNDS = 100


@dataclass(frozen=True)
class Monomial(MapFamily):
    """Matrices with one entry per row and at most one per column: every output is one input times a factor.

    The activation decides which factors are allowed: 1 ("permutation"), ±1 ("signed"), positive ("relu": the group
    G_ReLU) or any but zero ("nonzero"). "relu" and "nonzero" keep the order of their start, which the direct fit finds
    well, and train their scales. "permutation", "signed" and those called ":annealed" train the order too, by a soft
    assignment: a table of scores gives a doubly stochastic matrix (Sinkhorn) that mixes the inputs. The scores are
    sharpened from epoch to epoch. After the share `settle` of the training the best order by the scores is fixed, and
    the rest of the training fits the factors of this member.

    `annealed`: train the order too, as is always done where there are no scales. `contrast`: the soft assignment starts
    in proportion to exp(contrast · correlation). `sharper`: by how much differences of scores grow until `settle`.
    """

    factors: str = "positive"
    annealed: bool = False
    contrast: float = 10.0
    sharper: float = 10.0
    settle: float = 0.7

    def __post_init__(self) -> None:
        if self.factors not in FACTORS:
            raise InputError(f"Unknown factors {self.factors!r}. Choose one of: {', '.join(FACTORS)}.")
        if not (self.contrast > 0 and self.sharper >= 1 and 0 < self.settle <= 1):
            raise InputError(
                f"The family {self.name!r} needs contrast > 0, sharper ≥ 1 and 0 < settle ≤ 1, but has contrast="
                f"{self.contrast}, sharper={self.sharper} and settle={self.settle}."
            )

    @property
    def name(self) -> str:
        return NAMES[self.factors] + (":annealed" if self.scaled and self.annealed else "")

    @property
    def scaled(self) -> bool:
        """Whether there are scales to train."""
        return self.factors in ("positive", "nonzero")

    @property
    def fixed(self) -> bool:
        """Whether the order of the start stays, and only scales are trained."""
        return self.scaled and not self.annealed

    @property
    def starts(self) -> tuple[str, ...]:  # pyrefly: ignore
        """A fixed order must be a good one from the start."""
        return ("direct", "identity") if self.fixed else ("direct", "identity", "random")

    def check(self, inputs: int, outputs: int) -> None:
        check_injection(self.name, inputs, outputs)

    def _start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        factors, table = torch.ones(outputs), torch.ones(outputs, inputs)
        if how == "direct" and moments is not None:
            products = moments.products(centred=False)
            order = best_assignment(gains(products, self.factors))
            factors, table = best_factors(products, order, self.factors), default_factors(products, self.factors)
            scores = correlations(moments.products(centred=True))
            scores = scores.abs() if self.factors in ("sign", "nonzero") else scores
        elif how == "identity":
            order, scores = torch.arange(outputs), torch.eye(outputs, inputs)
        else:
            order = random_order(inputs, outputs, rng)
            # the random order is also the best by the scores, by a small margin
            scores = (torch.rand(outputs, inputs, generator=rng) + matrix_from(order, factors, inputs)) / 10
        found = {"held": leaf(matrix_from(order, torch.ones_like(factors), inputs), trained=False)}
        found["table"] = leaf(table, trained=False)
        if self.scaled:
            found["log_scales"] = leaf((factors / table.gather(1, order[:, None])[:, 0]).log())
        if not self.fixed:
            found["scores"] = leaf(scores * (self.contrast / PACE))
            for name, value in (("sharpness", 1.0), ("settled", 0.0), ("stepped", 0.0)):
                found[name] = leaf(torch.tensor(value, device=scores.device), trained=False)
        return found

    def map(self, parameters: Parameters) -> LinearMap:
        order = parameters["held"]
        if not self.fixed:
            order = torch.where(parameters["settled"] > 0, order, soft_assignment(PACE * parameters["scores"]))
        return self._scaled(order, parameters)

    def _scaled(self, order: Float[Tensor, "outputs inputs"], parameters: Parameters) -> LinearMap:
        matrix = parameters["table"] * order
        return LinearMap(matrix * parameters["log_scales"].exp()[:, None] if self.scaled else matrix)

    def final(self, parameters: Parameters) -> LinearMap:
        """With the fixed order; if training ended before `settle`, with the best order by the scores."""
        order = parameters["held"]
        if not self.fixed and bool(parameters["stepped"]) and not bool(parameters["settled"]):
            order = best_order(parameters["scores"])
        return self._scaled(order, parameters).detach()

    def project_(self, parameters: Parameters) -> None:
        """Record that the scores have moved: before that, the order of the start is the better one."""
        if not self.fixed:
            parameters["stepped"].fill_(1.0)

    def refresh_(self, parameters: Parameters, done: float) -> None:
        if self.fixed or done <= 0 or bool(parameters["settled"]):
            return
        if done < self.settle:
            wanted = self.sharper ** (done / self.settle)
            parameters["scores"].data.mul_(wanted / float(parameters["sharpness"]))
            parameters["sharpness"].fill_(wanted)
        else:
            parameters["held"].copy_(best_order(parameters["scores"]))
            parameters["settled"].fill_(1.0)

    def direct(self, moments: PairMoments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        products = moments.products(centred=False)
        order = best_assignment(gains(products, self.factors))
        return LinearMap(matrix_from(order, best_factors(products, order, self.factors), moments.inputs))


def soft_assignment(logits: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """The share of every input in every output, from exp(logits) by Sinkhorn; unused inputs fill padding rows.

    Example:
        >>> import torch
        >>> soft_assignment(torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])).round(decimals=3)
        tensor([[1., 0., 0.], [0., 1., 0.]])
    """
    outputs, inputs = logits.shape
    square = torch.cat([logits, logits.new_zeros(inputs - outputs, inputs)]) if outputs < inputs else logits
    return sinkhorn(square, SINKHORN_ROUNDS)[:outputs]


def best_order(scores: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """The best assignment by the scores, as a matrix of zeros and ones."""
    return matrix_from(best_assignment(scores), torch.ones_like(scores[:, 0]), scores.shape[1])


@dataclass(frozen=True)
class Masked(MapFamily):
    """Matrices with one entry per row, at a position that a mask fixes before training.

    "semi-match": the input that correlates best with the output, "abs-semi-match": by absolute value (one input may
    then serve several outputs); "random-permutation": random inputs by `seed`, each at most once.
    """

    mask: str = "semi-match"
    seed: int = 0
    bias: bool = False
    starts = ("direct", "random", "ones")

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise InputError(
                f"Unknown mask {self.mask!r}. {did_you_mean(self.mask, MASKS)}Choose one of: {', '.join(MASKS)}."
            )

    @property
    def name(self) -> str:
        return f"masked:{self.mask}{'+bias' if self.bias else ''}"

    def check(self, inputs: int, outputs: int) -> None:
        if self.mask == "random-permutation":
            check_injection(self.name, inputs, outputs)

    def _start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        if moments is not None:
            places = self.places(moments)
        elif self.mask == "random-permutation":
            places = self._random_places(inputs, outputs)
        else:
            raise InputError(
                f"The family {self.name!r} chooses its entries by correlation and needs moments of the features. Pass "
                "moments."
            )
        bias, weight = None, torch.ones(outputs)
        if how == "random":
            weight = 2 * torch.rand(outputs, generator=rng) - 1
        elif how == "direct" and moments is not None:
            found = self.direct(moments)
            weight, bias = found.matrix.gather(1, places.argmax(1, keepdim=True))[:, 0], found.bias
        return with_bias({"weight": leaf(weight), "mask": leaf(places, trained=False)}, bias, self.bias)

    def places(self, moments: PairMoments) -> Float[Tensor, "outputs inputs"]:
        """One where the entry of each row is, zero elsewhere."""
        if self.mask == "random-permutation":
            return self._random_places(moments.inputs, moments.outputs).to(moments.a_mean.device)
        table = correlations(moments.products(centred=True))
        order = (table.abs() if self.mask == "abs-semi-match" else table).argmax(1)
        return matrix_from(order, torch.ones(moments.outputs, device=order.device), moments.inputs)

    def _random_places(self, inputs: int, outputs: int) -> Tensor:
        order = random_order(inputs, outputs, torch.Generator().manual_seed(self.seed))
        return matrix_from(order, torch.ones(outputs), inputs)

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["weight"][:, None] * parameters["mask"], parameters.get("bias"))

    def decayed(self) -> frozenset[str]:
        return frozenset({"weight"})

    def direct(self, moments: PairMoments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        places = self.places(moments)

        def fit(products: PairProducts) -> Tensor:
            return places * ratio(products.ab.T, products.aa.diagonal())

        return fit_with_bias(moments, self.bias, fit)


# -- relaxations of G_ReLU ---------------------------------------------------------------------------------------------


class Relaxation(MapFamily):
    """A relaxation of G_ReLU: square matrices whose direct fit is that of "relu"."""

    def check(self, inputs: int, outputs: int) -> None:
        check_square(self.name, inputs, outputs)

    def direct(self, moments: PairMoments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        return Monomial("positive").direct(moments)


@dataclass(frozen=True)
class Birkhoff(Relaxation):
    """G_ReLU by projected descent, as printed by Godfrey et al. (2022).

    The map is P·D: the permutation relaxed to a doubly stochastic matrix P (a point of the Birkhoff polytope), and
    scales D ≥ 0. After every step negative entries become zero, and rows and columns are scaled to sum to one; this
    heuristic is not the projection onto the polytope. At the end P is rounded to a permutation.

    `alpha`: the weight of −‖P‖, which is smallest at permutations. `head_start`: the share of the training in which
    only P moves.
    """

    alpha: float = 0.1
    head_start: float = 0.5

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and 0 <= self.head_start <= 1):
            raise InputError(
                f"relu:birkhoff needs alpha ≥ 0 and 0 ≤ head_start ≤ 1, but has alpha={self.alpha} and head_start="
                f"{self.head_start}."
            )

    @property
    def name(self) -> str:
        return "relu:birkhoff"

    def _start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        mixture, scales = torch.eye(inputs), torch.ones(inputs)
        if how == "direct" and moments is not None:
            matrix = self.direct(moments).matrix
            mixture, scales = (matrix > 0).float(), matrix.amax(0)
        elif how == "random":
            mixture = doubly_stochastic(torch.rand(outputs, inputs, generator=rng), FIRST_BIRKHOFF_ROUNDS)
        constants = {"first_scales": leaf(scales, trained=False), "scaling": leaf(torch.zeros(()), trained=False)}
        found = {"mixture": leaf(mixture), "scales": leaf(scales), **constants}
        self.refresh_(found, 0.0)
        return found

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["mixture"] * self._scales(parameters))

    def _scales(self, parameters: Parameters) -> Tensor:
        first = parameters["first_scales"]
        return first + parameters["scaling"] * (parameters["scales"] - first)

    def final(self, parameters: Parameters) -> LinearMap:
        mixture = parameters["mixture"].detach()
        order = best_assignment(mixture)
        return LinearMap(matrix_from(order, self._scales(parameters).detach()[order], mixture.shape[1]))

    def project_(self, parameters: Parameters) -> None:
        mixture, scales = parameters["mixture"].data, parameters["scales"].data
        mixture.copy_(doubly_stochastic(mixture.relu()))
        scales.copy_(torch.where(parameters["scaling"] > 0, scales.clamp(min=FLOOR), parameters["first_scales"]))

    def penalty(self, parameters: Parameters) -> Tensor:
        return -self.alpha * parameters["mixture"].norm()

    def refresh_(self, parameters: Parameters, done: float) -> None:
        parameters["scaling"].fill_(float(done >= self.head_start))

    def decayed(self) -> frozenset[str]:
        return frozenset({"scales"})


def doubly_stochastic(matrix: Float[Tensor, "n n"], rounds: int = BIRKHOFF_ROUNDS) -> Float[Tensor, "n n"]:
    """Columns, then rows of a non-negative matrix scaled to sum to one, in some rounds (Sinkhorn).

    A column or row of zeros stays as it is.

    Example:
        >>> import torch
        >>> doubly_stochastic(torch.tensor([[1.0, 1.0], [0.0, 1.0]]), rounds=1)
        tensor([[0.6667, 0.3333], [0.0000, 1.0000]])
    """
    # the scales are kept apart from the matrix, which each round then reads twice and never writes
    smallest = torch.finfo(matrix.dtype).tiny  # zeros stay zeros
    rows = columns = matrix.new_ones(len(matrix))
    for _ in range(rounds):
        columns = torch.mv(matrix.mT, rows).clamp_(min=smallest).reciprocal_()
        rows = torch.mv(matrix, columns).clamp_(min=smallest).reciprocal_()
    return rows[:, None] * matrix * columns


@dataclass(frozen=True)
class SoftSort(Relaxation):
    """P·D with P = softmax(−|sort(s)1ᵀ − 1sᵀ|·n) and D = diag(e^λ); at the end every row is its largest entry.

    The printed formula lacks the absolute value, without which all rows are equal.
    """

    @property
    def name(self) -> str:
        return "softsort"

    def _start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        logs = torch.zeros(inputs)
        if how == "random":
            return {"keys": leaf(2 * torch.rand(inputs, generator=rng) - 1), "log_scales": leaf(logs)}
        order = torch.arange(inputs)
        if how == "direct" and moments is not None:
            matrix = self.direct(moments).matrix
            order, logs = matrix.argmax(1).cpu(), matrix.amax(0).log()
        keys = torch.empty(inputs)
        keys[order] = torch.linspace(1, -1, inputs)  # the i-th largest key is that of the i-th output's input
        return {"keys": leaf(keys), "log_scales": leaf(logs)}

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(soft_sort(parameters["keys"]) * parameters["log_scales"].exp())

    def final(self, parameters: Parameters) -> LinearMap:
        keys, scales = parameters["keys"].detach(), parameters["log_scales"].detach().exp()
        rows = soft_sort(keys)
        order = rows.argmax(1)
        if len(order.unique()) < len(order):
            warnings.warn(
                f"softsort: some of the {len(keys)} keys are equal, so the largest entries of the rows are no "
                "permutation. The best assignment is used instead.",
                stacklevel=2,
            )
            order = best_assignment(rows)
        return LinearMap(matrix_from(order, scales[order], len(keys)))


def soft_sort(keys: Float[Tensor, " n"]) -> Float[Tensor, "n n"]:
    """Row i has its largest entry at the i-th largest key; the temperature is 1/n.

    Example:
        >>> import torch
        >>> soft_sort(torch.tensor([0.0, 5.0, 9.0])).argmax(1)
        tensor([2, 1, 0])
    """
    ordered = keys.sort(descending=True).values
    return torch.softmax(-(ordered[:, None] - keys[None, :]).abs() * len(keys), dim=1)
