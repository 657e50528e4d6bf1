"""Which input goes to which output, each at most once, where an output is one input times a factor."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.errors import MismatchError
from intertwine.shapes import Float, Int
from intertwine.stitch.moments import Products

#: The smallest factor, as a share of the ratio of lengths ‖b‖/‖a‖: a member of the group has none that is zero.
FLOOR = 1e-6
#: What the factors of a family may be.
FACTORS = ("one", "sign", "positive", "nonzero")


def best_assignment(gains: Float[Tensor, "outputs inputs"]) -> Int[Tensor, " outputs"]:
    """The input of every output, no input twice, with the largest sum of gains (Hungarian method; row 000-G33).

    >>> best_assignment(torch.tensor([[5.0, 4.0], [4.0, 0.0]]))
    tensor([1, 0])
    """
    found = linear_sum_assignment(gains.detach().double().numpy(force=True), maximize=True)[1]
    return torch.from_numpy(found).to(gains.device)


def check_injection(name: str, inputs: int, outputs: int) -> None:
    """Refuse more outputs than inputs: some output would have no input of its own."""
    if outputs > inputs:
        raise MismatchError(
            f"The family {name!r} was asked to take {inputs} features to {outputs}. Every output is one input, and no "
            'input is used twice, so there can be no more outputs than inputs. Use "linear" or "affine" here, or '
            "stitch in the other direction."
        )


def gains(products: Products, factors: str) -> Float[Tensor, "outputs inputs"]:
    """By how much input j, with the best factor allowed, lowers the squared distance to output i.

    For positive factors this is max(0, ⟨b_i, a_j⟩)²/‖a_j‖². Inputs that are zero lower nothing.
    """
    ab, lengths = products.ab.T, products.aa.diagonal()
    dead = lengths <= 0
    if factors == "one":
        return 2 * ab - lengths
    if factors == "sign":
        return 2 * ab.abs() - lengths
    met = ab.clamp(min=0) if factors == "positive" else ab
    return torch.where(dead, 0.0, met.square() / torch.where(dead, 1.0, lengths))


def best_factors(products: Products, order: Int[Tensor, " outputs"], factors: str) -> Float[Tensor, " outputs"]:
    """The best factor of each output on its input, ⟨b, a⟩/‖a‖² where it may be any.

    Two rules for dead features: on an input that is zero the factor is 1; an output that is zero, or that its input
    opposes, has the smallest factor (`FLOOR`, relative to the ratio of lengths).
    """
    met = products.ab.T.gather(1, order[:, None])[:, 0]
    if factors == "one":
        return torch.ones_like(met)
    if factors == "sign":
        return torch.where(met < 0, -1.0, 1.0).to(met)
    inputs, outputs = products.aa.diagonal()[order], products.bb.diagonal()
    dead = inputs <= 0
    safe = torch.where(dead, 1.0, inputs)
    lowest = FLOOR * torch.where(outputs > 0, (outputs / safe).clamp(min=0).sqrt(), 1.0)
    best = met / safe
    if factors == "positive":
        best = torch.maximum(best, lowest)
    else:
        best = torch.where(best.abs() < lowest, torch.where(best < 0, -lowest, lowest), best)
    return torch.where(dead, 1.0, best)


def matrix_from(
    order: Int[Tensor, " outputs"], factors: Float[Tensor, " outputs"], inputs: int
) -> Float[Tensor, "outputs inputs"]:
    """The matrix with one entry a row: factors[i] at column order[i].

    >>> matrix_from(torch.tensor([1, 0]), torch.tensor([2.0, 3.0]), 2)
    tensor([[0., 2.], [3., 0.]])
    """
    return factors.new_zeros(len(order), inputs).scatter(1, order[:, None], factors[:, None])


def usual_factors(products: Products, factors: str) -> Float[Tensor, "outputs inputs"]:
    """What input j is multiplied by where it stands for output i: the ratio of lengths, the sign of ⟨b_i, a_j⟩, both.

    One where a feature is zero.
    """
    ab = products.ab.T
    table = torch.ones_like(ab)
    if factors in ("positive", "nonzero"):
        a, b = (x.diagonal().clamp(min=0).sqrt() for x in (products.aa, products.bb))
        live = (b[:, None] > 0) & (a > 0)
        table = torch.where(live, b[:, None] / torch.where(a > 0, a, 1.0), 1.0)
    return torch.where(ab < 0, -table, table) if factors in ("sign", "nonzero") else table


def correlations(centred: Products) -> Float[Tensor, "outputs inputs"]:
    """Of every output with every input; zero where one of them does not vary."""
    a, b = (x.diagonal().clamp(min=0).sqrt() for x in (centred.aa, centred.bb))
    sizes = b[:, None] * a
    return torch.where(sizes > 0, centred.ab.T / torch.where(sizes > 0, sizes, 1.0), 0.0)
