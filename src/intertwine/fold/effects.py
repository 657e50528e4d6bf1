"""Effects: features compared by what merging them would change in the layers that read them.

Positive scales pass through ReLU, so the length of a row means nothing by itself. Where they pass, rows are brought
to length one, and their columns take the length up. A feature then counts by the square of its columns. The mean of two
rows is taken with these weights, and the distance of two features of weights a and b is 2ab/(a + b) times that of their
rows: what is wrong in the next layer after the merge, had the features nothing else in common. A feature that is hardly
read is merged into its nearest at no cost, and does not move it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from intertwine.fold.distances import Array
from intertwine.fold.sites import Foldable, Site
from intertwine.shapes import Float

#: The least weight of a feature, as a share of the largest of its wire: none is divided by zero.
LEAST = 1e-12


class Effects:
    """Wires balanced in their working tensors, with rows to be averaged, and the weights of their features."""

    def __init__(self, wires: Sequence[Foldable], bias: bool = True) -> None:
        """`bias`: whether biases are part of a row's length."""
        self._given, self._lengths = wires, []
        for wire in wires:  # in turn: the columns of one are in the rows of the next
            self._lengths.append(_row_lengths(wire, bias))
            _rescale(wire, 1 / self._lengths[-1])
        self.wires = [_averaged(wire) for wire in wires]
        self.weights = [_weights(wire) for wire in wires]
        self._read = [weights.copy() for weights in self.weights]

    def settle(self, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """Give every feature that is left the length of that one of its group which is read most."""
        for wire, sizes, read, of in zip(self._given, self._lengths, self._read, groups, strict=True):
            best = [max(group, key=lambda i: read[i]) if group else i for i, group in enumerate(of)]
            _rescale(wire, sizes[best])


def _row_lengths(wire: Foldable, bias: bool) -> Float[Tensor, " features"]:
    """The lengths of rows where scales pass; 1 where they do not, or where a row is zero."""
    if wire.rule != "sum":
        return torch.ones(wire.size, dtype=torch.float64)
    size = _length([s for s in wire.sites if s.added and s.piece.counted in (("in", "bias") if bias else ("in",))])
    return torch.where(size > 0, size, 1.0)


def _rescale(wire: Foldable, factors: Float[Tensor, " features"]) -> None:
    """Rows times a factor, columns divided by it; the function of the network stays as it is."""
    for site in wire.sites if wire.rule == "sum" else ():
        shape = [1] * site.piece.data.ndim
        shape[site.dim] = -1
        if site.added:
            site.piece.data.mul_(factors.view(shape))
        elif site.role == "read":
            site.piece.data.div_(factors.view(shape))


def _averaged(wire: Foldable) -> Foldable:
    return replace(wire, rule="mean", sites=tuple(replace(s, added=s.role == "read") for s in wire.sites))


def _weights(wire: Foldable) -> Array:
    found = lengths(wire, ("read",)).square().numpy()
    return np.maximum(found / max(found.mean(), 1e-300), LEAST)


def lengths(wire: Foldable, roles: tuple[str, ...]) -> Float[Tensor, " features"]:
    """The length of everything that writes, or reads, each feature."""
    return _length([s for s in wire.sites if s.role in roles and s.piece.counted is not None])


def _length(sites: Sequence[Site]) -> Float[Tensor, " features"]:
    squares = [s.piece.data.square().movedim(s.dim, 0).reshape(s.piece.data.shape[s.dim], -1) for s in sites]
    return torch.stack([x.sum(1) for x in squares]).sum(0).sqrt()
