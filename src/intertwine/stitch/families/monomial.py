"""Families "permutation", "relu" and their kin: every output is one input times a factor, no input used twice.

What the factors may be depends on the activation: 1 ("permutation"), ±1 ("signed"), positive ("relu": the group G_ReLU)
or any but zero ("nonzero"). "relu" and "nonzero" keep the order they start from, which the direct fit finds well, and
train its scales. "permutation", "signed" and those called ":annealed" train the order too, through shares: a table of
scores gives a doubly stochastic matrix (Sinkhorn) that mixes the inputs. The scores are made sharper from epoch to
epoch; after `settle` of the training the best order by the scores is held, and what is left of the training goes to the
factors of this true member.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.align.sinkhorn import sinkhorn
from intertwine.errors import InputError
from intertwine.shapes import Float
from intertwine.stitch.assignment import (
    FACTORS,
    best_assignment,
    best_factors,
    check_injection,
    correlations,
    gains,
    matrix_from,
    usual_factors,
)
from intertwine.stitch.families.base import Family, Parameters, leaf
from intertwine.stitch.families.registry import register
from intertwine.stitch.families.starts import random_order
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments

NAMES = {"one": "permutation", "sign": "signed", "positive": "relu", "nonzero": "nonzero"}
#: Of scaling rows and columns; few, for the shares need not add up exactly on the way.
ROUNDS = 5
#: Shares go with exp(PACE · scores), so that an optimiser whose steps suit the factors is fast enough for the scores.
PACE = 30.0


@dataclass(frozen=True)
class Monomial(Family):
    """Matrices with one entry a row and at most one a column.

    `annealed`: the order is trained too, as it always is where there are no scales to train. `contrast`: shares begin
    in proportion to exp(contrast · correlation). `sharper`: how many times larger the differences of scores are made up
    to `settle`, the share of the training behind which the order is held.
    """

    factors: str = "positive"
    annealed: bool = False
    contrast: float = 10.0
    sharper: float = 10.0
    settle: float = 0.7

    def __post_init__(self) -> None:
        if self.factors not in FACTORS:
            raise InputError(f"Factors {self.factors!r} were asked for. They can be: {', '.join(FACTORS)}.")
        if not (self.contrast > 0 and self.sharper >= 1 and 0 < self.settle <= 1):
            raise InputError(
                f"The family {self.name!r} was asked for with contrast={self.contrast}, sharper={self.sharper} and "
                f"settle={self.settle}. It needs a contrast above 0, sharper from 1 on, and 0 < settle ≤ 1."
            )

    @property
    def name(self) -> str:
        scaled = self.factors in ("positive", "nonzero")
        return NAMES[self.factors] + (":annealed" if scaled and self.annealed else "")

    @property
    def fixed(self) -> bool:
        """Whether the order of the start stays, and only factors are trained."""
        return not self.annealed and self.factors in ("positive", "nonzero")

    @property
    def starts(self) -> tuple[str, ...]:  # pyrefly: ignore
        """An order that is never changed must be a good one from the start."""
        return ("direct", "identity") if self.fixed else ("direct", "identity", "random")

    def check(self, inputs: int, outputs: int) -> None:
        check_injection(self.name, inputs, outputs)

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        factors, table = torch.ones(outputs), torch.ones(outputs, inputs)
        if how == "direct" and moments is not None:
            products = moments.products(centred=False)
            order = best_assignment(gains(products, self.factors))
            factors, table = best_factors(products, order, self.factors), usual_factors(products, self.factors)
            scores = correlations(moments.products(centred=True))
            scores = scores.abs() if self.factors in ("sign", "nonzero") else scores
        elif how == "identity":
            order, scores = torch.arange(outputs), torch.eye(outputs, inputs)
        else:
            order = random_order(inputs, outputs, generator)
            # the order drawn is also the best one by the scores, and hardly ahead of the others
            scores = (torch.rand(outputs, inputs, generator=generator) + matrix_from(order, factors, inputs)) / 10
        found = {"held": leaf(matrix_from(order, torch.ones_like(factors), inputs), trained=False)}
        found["table"] = leaf(table, trained=False)
        if self.factors in ("positive", "nonzero"):
            found["log_scales"] = leaf((factors / table.gather(1, order[:, None])[:, 0]).log())
        if not self.fixed:
            found["scores"] = leaf(scores * (self.contrast / PACE))
            found["sharpness"] = leaf(torch.ones((), device=scores.device), trained=False)
            found["settled"] = leaf(torch.zeros((), device=scores.device), trained=False)
            found["stepped"] = leaf(torch.zeros((), device=scores.device), trained=False)
        return found

    def map(self, parameters: Parameters) -> LinearMap:
        order = parameters["held"]
        if not self.fixed:
            order = torch.where(parameters["settled"] > 0, order, shares(PACE * parameters["scores"]))
        return self._scaled(order, parameters)

    def _scaled(self, order: Float[Tensor, "outputs inputs"], parameters: Parameters) -> LinearMap:
        matrix = parameters["table"] * order
        return LinearMap(matrix * parameters["log_scales"].exp()[:, None] if "log_scales" in parameters else matrix)

    def final(self, parameters: Parameters) -> LinearMap:
        """The order that is held; where training ended before it settled, the best by the scores as they are."""
        order = parameters["held"]
        if not self.fixed and bool(parameters["stepped"]) and not bool(parameters["settled"]):
            order = best_order(parameters["scores"])
        return self._scaled(order, parameters).detach()

    def project_(self, parameters: Parameters) -> None:
        """Remember that the scores have moved: until then the order of the start is the better one."""
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

    def direct(self, moments: Moments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        products = moments.products(centred=False)
        order = best_assignment(gains(products, self.factors))
        return LinearMap(matrix_from(order, best_factors(products, order, self.factors), moments.inputs))


def shares(logits: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """The shares of the inputs in each output, as exp(logits); inputs that no output needs are left over.

    Example:
        >>> import torch
        >>> shares(torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])).round(decimals=3)
        tensor([[1., 0., 0.], [0., 1., 0.]])
    """
    outputs, inputs = logits.shape
    whole = torch.cat([logits, logits.new_zeros(inputs - outputs, inputs)]) if outputs < inputs else logits
    return sinkhorn(whole, ROUNDS)[:outputs]


def best_order(scores: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """The best assignment by the scores, as a matrix of zeros and ones."""
    order = best_assignment(scores)
    return matrix_from(order, torch.ones(len(order), dtype=scores.dtype, device=scores.device), scores.shape[1])


register(
    *(Monomial(factors) for factors in ("one", "sign", "positive", "nonzero")),
    *(Monomial(factors, annealed=True) for factors in ("positive", "nonzero")),
)
