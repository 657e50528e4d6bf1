"""Relaxed elements: matrices between permutations, so that what is computed from moved weights has a slope.

The permutations of n units are the corners of the set of doubly stochastic matrices (no entry below zero, all rows and
columns add up to one). An element moves weights by its corner; a relaxed element moves them by any point between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.shapes import Float, Int
from intertwine.symmetry.element import Element, Strand
from intertwine.symmetry.layout import Dim, Leaf, act, base_dims, spread
from intertwine.symmetry.symmetry import Symmetry


@dataclass(frozen=True)
class Mixture:
    """What a relaxed element does to one strand: scales and signs first, then the units are mixed.

    `weights`: row i holds the shares of the old units in the new unit i. `copies` stands for one axis per base.
    """

    weights: Float[Tensor, "*copies n n"] | None = None
    log_scale: Float[Tensor, "scales *copies n"] | None = None
    sign: Float[Tensor, "signs *copies n"] | None = None

    def factor(self, leaf: Leaf, degree: int) -> Tensor | None:
        """The number each unit is multiplied by where it stands as this leaf."""
        parts: list[Tensor] = []
        if self.log_scale is not None and any(leaf.powers):
            logs = [degree * p * self.log_scale[k] for k, p in enumerate(leaf.power) if p]
            parts.append(torch.stack(logs).sum(0).exp())
        if self.sign is not None and degree % 2:
            parts += [self.sign[k] for k, flip in enumerate(leaf.flips) if flip]
        return torch.stack(parts).prod(0) if parts else None


@dataclass(frozen=True, eq=False)
class Relaxed:
    """Acts on weights as an element does (`symmetry.layout.act`), with mixtures in the place of permutations.

    Gradients flow from the moved weights to every tensor of the mixtures.

    Example:
        >>> import torch, intertwine
        >>> from intertwine.symmetry.layout import act
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> sym = intertwine.symmetry(model, torch.zeros(1, 3))
        >>> even = Relaxed(sym.strands, {0: Mixture(torch.full((4, 4), 0.25))})
        >>> bias = act(sym.layouts["0.bias"], model[0].bias, even)
        >>> torch.allclose(bias, model[0].bias.mean().expand(4))
        True
    """

    strands: tuple[Strand, ...]
    mixtures: Mapping[int, Mixture]

    def depth(self, strand: int) -> int:
        """How many fibres lie below a strand; fibres act before their bases."""
        return len(self.strands[strand].bases)

    def act_on_leaf(self, x: Tensor, dim: int, dims: Sequence[Dim], degree: int = 1) -> Tensor:
        """Act on one exposed dimension of a tensor (see `symmetry.layout.act`)."""
        leaf = dims[dim].tree
        assert isinstance(leaf, Leaf)
        mixture = self.mixtures.get(leaf.strand)
        if mixture is None:
            return x
        places = [*base_dims(dims, dim, self.strands[leaf.strand].bases), dim]
        factor = mixture.factor(leaf, degree)
        if factor is not None:
            x = x * spread(factor, places, x.ndim).to(x.device, x.dtype)
        if mixture.weights is None:
            return x
        return _mix_units(x, mixture.weights.to(x.device, x.dtype), places)


def _mix_units(x: Tensor, weights: Tensor, places: list[int]) -> Tensor:
    """The units along the last of `places` mixed, by one matrix for every index of the other places."""
    *bases, dim = places
    order = [*bases, *(d for d in range(x.ndim) if d not in places), dim]
    rows = x.permute(*order)
    flat = rows.reshape(*rows.shape[: len(bases)], -1, rows.shape[-1])
    back = sorted(range(x.ndim), key=lambda d: order[d])
    return torch.matmul(flat, weights.mT).reshape(rows.shape).permute(*back)


def mixed(symmetry: Symmetry, actor: Relaxed, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights moved by a relaxed element, without a model around them."""
    return {n: act(symmetry.layouts[n], x, actor) if n in symmetry.layouts else x for n, x in weights.items()}


def relaxed(element: Element) -> Relaxed:
    """An element as a relaxed one: its permutations as matrices of zeros and ones."""
    mixtures = {}
    for i, move in element.moves.items():
        weights = None if move.permutation is None else matrix_of(move.permutation)
        mixtures[i] = Mixture(weights, None if move.scale is None else move.scale.log(), move.sign)
    return Relaxed(element.strands, mixtures)


def matrix_of(permutation: Int[Tensor, "*copies n"]) -> Float[Tensor, "*copies n n"]:
    """The matrix P with (P x)[i] = x[permutation[i]].

    >>> matrix_of(torch.tensor([1, 0]))
    tensor([[0., 1.], [1., 0.]], dtype=torch.float64)
    """
    return torch.nn.functional.one_hot(permutation, permutation.shape[-1]).double()


def nearest_permutation(weights: Float[Tensor, "*copies n n"]) -> Int[Tensor, "*copies n"]:
    """The permutation that holds the largest sum of shares.

    >>> nearest_permutation(torch.tensor([[0.4, 0.6], [0.6, 0.4]]))
    tensor([1, 0])
    """
    shares = weights.detach().cpu().flatten(0, -3) if weights.ndim > 2 else weights.detach().cpu()[None]
    orders = [torch.from_numpy(linear_sum_assignment(x.numpy(), maximize=True)[1]) for x in shares]
    return torch.stack(orders).reshape(weights.shape[:-1])
