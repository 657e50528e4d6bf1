"""Family "relu:birkhoff": G_ReLU trained as printed by Godfrey et al. (2022), rows 000-G30 to G35.

The permutation is relaxed to a doubly stochastic matrix P (a point of the Birkhoff polytope), the scales to a diagonal
D ≥ 0; the map is P·D. After every step entries below zero are cut and rows and columns scaled to one. This is a
heuristic: it is not the nearest point of the polytope. In the end P is rounded to a permutation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.shapes import Float
from intertwine.stitch.assignment import FLOOR, best_assignment, matrix_from
from intertwine.stitch.families.base import Family, Parameters, leaf
from intertwine.stitch.families.monomial import Monomial
from intertwine.stitch.families.registry import register
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments

ROUNDS = 16
FIRST_ROUNDS = 100


@dataclass(frozen=True)
class Birkhoff(Family):
    """G_ReLU by projected descent. `alpha`: the weight of −‖P‖, which is least at permutations (row 000-G32).

    `head_start`: the share of the training in which only P moves (row 000-G35).
    """

    alpha: float = 0.1
    head_start: float = 0.5

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and 0 <= self.head_start <= 1):
            raise InputError(
                f"relu:birkhoff was asked for with alpha={self.alpha} and head_start={self.head_start}. alpha must be "
                "0 or more, head_start a share between 0 and 1."
            )

    @property
    def name(self) -> str:
        return "relu:birkhoff"

    def check(self, inputs: int, outputs: int) -> None:
        check_square(self.name, inputs, outputs)

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        mixture, scales = torch.eye(inputs), torch.ones(inputs)
        if how == "direct" and moments is not None:
            matrix = self.direct(moments).matrix
            mixture, scales = (matrix > 0).float(), matrix.amax(0)
        elif how == "random":
            mixture = doubly_stochastic(torch.rand(outputs, inputs, generator=generator), FIRST_ROUNDS)
        kept = {"first_scales": leaf(scales, trained=False), "scaling": leaf(torch.zeros(()), trained=False)}
        found = {"mixture": leaf(mixture), "scales": leaf(scales), **kept}
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

    def direct(self, moments: Moments) -> LinearMap:
        self.check(moments.inputs, moments.outputs)
        return Monomial("positive").direct(moments)


def check_square(name: str, inputs: int, outputs: int) -> None:
    """Refuse widths that differ."""
    if inputs != outputs:
        raise MismatchError(
            f"The family {name!r} was asked to take {inputs} features to {outputs}. It has square matrices only. Use "
            '"relu" where there are fewer outputs than inputs, or "linear".'
        )


def doubly_stochastic(matrix: Float[Tensor, "n n"], rounds: int = ROUNDS) -> Float[Tensor, "n n"]:
    """Columns, then rows scaled to sum to one, this many times (Sinkhorn; row 000-G31). No entry may be below zero.

    A column or row of zeros stays as it is. `sum_error` tells how far the sums are from one.

    Example:
        >>> import torch
        >>> doubly_stochastic(torch.tensor([[1.0, 1.0], [0.0, 1.0]]), rounds=1)
        tensor([[0.6667, 0.3333], [0.0000, 1.0000]])
    """
    # scales of rows and columns are kept apart from the matrix: a recorded step reads it twice a round, writes it once
    smallest = torch.finfo(matrix.dtype).tiny  # zeros stay zeros
    rows = matrix.new_ones(len(matrix))
    columns = rows
    for _ in range(rounds):
        columns = torch.mv(matrix.mT, rows).clamp_(min=smallest).reciprocal_()
        rows = torch.mv(matrix, columns).clamp_(min=smallest).reciprocal_()
    return rows[:, None] * matrix * columns


def sum_error(matrix: Float[Tensor, "n n"]) -> float:
    """The largest distance of a row's or column's sum from one.

    >>> import torch
    >>> sum_error(torch.tensor([[1.0, 0.0], [0.25, 0.75]]))
    0.25
    """
    return float(torch.stack([(matrix.sum(axis) - 1).abs().max() for axis in (0, 1)]).max())


register(Birkhoff())
