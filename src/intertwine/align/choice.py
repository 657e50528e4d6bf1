"""Choice: the orders and signs of strands that fit best, from matrices of how well units fit.

The matrices have one row and column for every unit of every copy, in the coordinates that both networks have before
anything moves. A strand whose units hold units of others is matched by the best order inside each pair of its units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.align.fits import Flips, Moving
from intertwine.shapes import Float, Int
from intertwine.symmetry.element import Element, Move, Strand, copies, identity_move

Fits = Mapping[int, Mapping[Flips, Tensor]]


@dataclass(frozen=True)
class Choice:
    """What can be chosen from: `fits` says how well units fit. `signs`: choose the best signs with the order."""

    moving: Moving
    fits: Fits
    signs: bool

    def moves(self, s: int, element: Element) -> dict[int, Move]:
        """The best moves of a strand and of what stands inside it, where its bases have moved by an element."""
        inside = self.moving.inside(s)
        extra = sum((self._best_inside(t) for t in inside if t in self.fits), torch.zeros((), dtype=torch.float64))
        if s not in self.fits and not extra.ndim:
            return {}
        found = {s: self._move(s, element, extra)}
        for t in inside:
            if t in self.fits:
                found[t] = self._move(t, replace(element, moves={**element.moves, **found}), torch.zeros(()))
        return found

    def fit(self, s: int, element: Element) -> float:
        """Σ over units of how well each fits what the element brings to its place."""
        if s not in self.fits:
            return 0.0
        source, total = sources(element, s), 0.0
        for flips, fit in self.fits[s].items():
            total += float((factors(element, s, flips)[source] * fit[torch.arange(len(source)), source]).sum())
        return total

    def _move(self, s: int, element: Element, extra: Tensor) -> Move:
        strand, move = self.moving.strands[s], identity_move(self.moving.strands, s)
        many, n = prod(copies(self.moving.strands, s)), strand.size
        counts = torch.arange(many)
        source = element.carry(counts.reshape(copies(self.moving.strands, s)), strand.bases).flatten()
        order = torch.arange(n).expand(many, n)
        if strand.permutes:
            fit, _ = self._best_signs(self.fits.get(s, {}), s, (many * n, many * n))
            blocks = fit.reshape(many, n, many, n)[counts, :, source] + extra
            order = torch.stack([best_order(block) for block in blocks])
            permutation = torch.empty_like(order)
            permutation[source] = order
            assert move.permutation is not None
            move = replace(move, permutation=permutation.reshape(move.permutation.shape))
        if move.sign is not None:
            here, there = (
                torch.arange(many * n),
                (source[:, None] * n + order).flatten(),
            )  # units of A, and of B for them
            matched = {flips: fit[here, there] for flips, fit in self.fits.get(s, {}).items()}
            sign = torch.empty(strand.signs, many * n, dtype=torch.float64)
            sign[:, there] = self._best_signs(matched, s, (many * n,))[1]
            move = replace(move, sign=sign.reshape(move.sign.shape))
        return move

    def _best_signs(self, fits: Mapping[Flips, Tensor], s: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        count = self.moving.strands[s].signs
        fit, signs = best_signs(fits, count if self.signs else 0, shape)
        return fit, signs if self.signs else torch.ones(count, *shape, dtype=torch.float64)

    def _best_inside(self, t: int) -> Float[Tensor, "outer outer"]:
        """For every two units that hold units of strand t: how well those fit in their best order."""
        n = self.moving.strands[t].size
        outer = prod(copies(self.moving.strands, t))
        fit, _ = self._best_signs(self.fits[t], t, (outer * n, outer * n))
        blocks = fit.reshape(outer, n, outer, n).transpose(1, 2).flatten(0, 1)
        best = [float(block[torch.arange(n), best_order(block)].sum()) for block in blocks]
        return torch.tensor(best, dtype=torch.float64).reshape(outer, outer)


def best_order(fit: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """The column that each row is given so that the fits add up to the most.

    >>> best_order(torch.tensor([[0.0, 2.0], [1.0, 2.5]])).tolist()
    [1, 0]
    """
    return torch.from_numpy(linear_sum_assignment(fit.double().numpy(), maximize=True)[1])


def best_signs(fits: Mapping[Flips, Tensor], count: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The sum of fits with the best signs at every entry, and those signs.

    One sign after the other is changed wherever that helps, until none does. Where no two kinds of tensors share a
    sign, which is the rule, this is the best of all combinations.

    >>> value, signs = best_signs({(1,): torch.tensor([2.0, -3.0])}, 1, (2,))
    >>> value.tolist(), signs.tolist()
    ([2.0, 3.0], [[1.0, -1.0]])
    """
    kept = {flips: fit.double().clone() for flips, fit in fits.items()}
    signs = torch.ones(count, *shape, dtype=torch.float64)
    for _ in range(count + 1):
        changed = False
        for k in range(count):
            parts = [fit for flips, fit in kept.items() if flips and flips[k] % 2]
            worse = sum(parts, torch.zeros(shape, dtype=torch.float64)) < 0
            if bool(worse.any()):
                changed = True
                signs[k] = torch.where(worse, -signs[k], signs[k])
                for fit in parts:
                    fit.mul_(torch.where(worse, -1.0, 1.0))
        if not changed:
            break
    return sum(kept.values(), torch.zeros(shape, dtype=torch.float64)), signs


def size(strands: tuple[Strand, ...], s: int) -> int:
    """How many units a strand has, copies included."""
    return strands[s].size * prod(copies(strands, s))


def sources(element: Element, s: int) -> Int[Tensor, " units"]:
    """For every unit of a strand, copies included: which unit the element brings to its place."""
    shape = (*copies(element.strands, s), element.strands[s].size)
    return element.carry(torch.arange(prod(shape)).reshape(shape), (*element.strands[s].bases, s)).flatten()


def factors(element: Element, s: int, flips: Flips) -> Float[Tensor, " units"]:
    """The sign that the element gives to every unit before it moves, in tensors with some exponents of signs."""
    sign = element.moves[s].sign
    found = torch.ones(size(element.strands, s), dtype=torch.float64)
    for k, flip in enumerate(flips if sign is not None else ()):
        found = found * sign[k].flatten() if flip % 2 and sign is not None else found
    return found
