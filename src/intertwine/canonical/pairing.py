"""Pairing: the element that takes one network's weights to another's if they agree up to noise.

Sorting fails on noise, because a sort depends on the last digit where two numbers nearly agree. Here units of the two
networks are paired by the distance of their weights, wire after wire, and a wire is paired only when every unit has one
clear partner; until then it enters the rows of other wires by lengths, which no order changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.canonical.scales import (
    Direction,
    PartialSolution,
    ScaleNormaliser,
    flip,
    hidden,
    known_rows,
    multiply,
    signs_known,
    untouched_first,
)
from intertwine.symmetry.blocks import SHORTEST, BlockedWeights, BlockSlot, block_weights
from intertwine.symmetry.element import Element, copies
from intertwine.symmetry.geometry import spread
from intertwine.symmetry.symmetry import Symmetry

CLEAR = 0.25  # a partner is clear when its squared distance is below this share of the next one's
ENOUGH = 2048  # entries of a row that are compared first
LEAST_COSINE = 0.5  # a sign counts as known if the absolute cosine of two slices is larger


def pair_units(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Element:
    """The element that takes weights b as near to weights a as pairing units can, however near that is."""
    cut_a, cut_b = block_weights(symmetry, a, copy=True), block_weights(symmetry, b, copy=True)
    lengths_a, lengths_b = ScaleNormaliser(cut_a).run(), ScaleNormaliser(cut_b).run()
    matching = _Matching(cut_a, cut_b)
    matching.run()
    identity = symmetry.identity()

    def element(part: str, parts: Mapping[int, Tensor]) -> Element:
        moves = {i: replace(m, **{part: parts[i]}) if i in parts else m for i, m in identity.moves.items()}
        return replace(identity, moves=moves)

    total = element("scale", lengths_b)
    for depth in range(1 + max((len(w.bases) for w in symmetry.wire_specs), default=0)):
        # dependent wires were paired after their bases had been put in order
        found = {w: p for w, p in matching.order.items() if len(symmetry.wire_specs[w].bases) == depth}
        total = element("permutation", found) @ total
    total = element("scale", _fitted_scales(cut_a, cut_b)) @ element("sign", matching.signs) @ total
    return element("scale", lengths_a).inverse() @ total


class _Matching:
    """Pairs the wires of two sets of weights; the blocks of b are reordered and flipped during the search."""

    def __init__(self, a: BlockedWeights, b: BlockedWeights) -> None:
        self.a, self.b = a, b
        self.wire_specs = a.wire_specs
        self.order: dict[int, Int[Tensor, "*copies n"]] = {}
        self.ordered = [not (w.permutes and sites) for w, sites in zip(self.wire_specs, a.sites, strict=True)]
        self.signs = {
            w: torch.ones(spec.signs, *copies(self.wire_specs, w), spec.size, dtype=torch.float64)
            for w, spec in enumerate(self.wire_specs)
            if spec.signs
        }
        self.fixed = {w: PartialSolution(a, w, [x.axis.flip for x in a.sites[w]], modulus=2) for w in self.signs}
        self.seen: dict[int, tuple[int, int]] = {}  # wire → how many neighbours were known at the last try

    def run(self) -> None:
        while not all(self.ordered):
            if not any(self._try(w) for w in self._waiting()):
                self._force()
        reading = True
        while reading:
            while sum(self._read_signs(w) for w in self.fixed):
                pass
            reading = self._keep_a_sign()

    def _keep_a_sign(self) -> bool:
        """Of the units whose signs are known only relative to each other, the first one keeps its own."""
        for w, site in untouched_first(self.a, self.fixed):
            there = ~self.fixed[w].knows(site.axis.flip) & hidden(site, known_rows(self.a, self.fixed, site))
            if bool(there.any()):
                first = there.flatten().cumsum(0).reshape(there.shape) == 1
                self.fixed[w].learn(site.axis.flip, there & first)
                return True
        return False

    def _waiting(self) -> list[int]:
        return [
            w
            for w, done in enumerate(self.ordered)
            if not done and all(self.ordered[b] for b in self.wire_specs[w].bases)
        ]

    def _try(self, w: int) -> bool:
        """Pair a wire if every unit has one clear partner."""
        known = self._known_around(w)
        if self.seen.get(w) == known:
            return False
        self.seen[w] = known
        left, right = self._features(w, ENOUGH)
        if left.shape[-1] == 0:
            return False
        partner = _clear_partners(left, right)
        if partner is None:
            return False
        self._commit(w, partner)
        return True

    def _force(self) -> None:
        """Pair the wire with the most known neighbours, as well as possible."""
        w = max(self._waiting(), key=self._known_around)
        left, right = self._features(w, None)
        n = left.shape[-2]
        pairs = zip(left.reshape(-1, n, left.shape[-1]), right.reshape(-1, n, right.shape[-1]), strict=True)
        rows = [torch.from_numpy(linear_sum_assignment(_distances(x, y).numpy())[1]) for x, y in pairs]
        self._commit(w, torch.stack(rows).reshape(left.shape[:-1]))

    def _known_around(self, w: int) -> tuple[int, int]:
        sites = self.a.sites[w]
        ordered = sum(self.ordered[axis.wire] for site in sites for _, axis in site.others())
        signed = sum(
            signs_known(self.fixed, axis) for site in sites for axis in (site.axis, *(x for _, x in site.company()))
        )
        return ordered, signed

    def _features(
        self, w: int, most: int | None
    ) -> tuple[Float[Tensor, "*copies n entries"], Float[Tensor, "*copies n entries"]]:
        """Rows that can be compared although the order of other wires is not known yet."""
        found: list[tuple[Tensor, Tensor]] = []
        count = 0
        for x, y in zip(self.a.sites[w], self.b.sites[w], strict=True):
            if most is not None and count >= most:
                break
            rows = self._comparable(w, x, most), self._comparable(w, y, most)
            count += rows[0].shape[-1]
            found.append(rows)
        empty = torch.zeros(*copies(self.wire_specs, w), self.wire_specs[w].size, 0)
        left = torch.cat([empty, *(r[0] for r in found)], -1)
        return left, torch.cat([empty, *(r[1] for r in found)], -1)

    def _comparable(self, w: int, site: BlockSlot, most: int | None) -> Tensor:
        x, fronts = site.rows, len(site.front)
        open_dims = [
            fronts + site.rest.index(d) for d, axis in site.others() if not self.ordered[axis.wire] or axis.wire == w
        ]
        if open_dims:
            x = torch.linalg.vector_norm(x, dim=open_dims)
        seen = [site.axis, *(axis for _, axis in site.company() if self.ordered[axis.wire])]
        if not all(signs_known(self.fixed, axis) for axis in seen):
            x = x.abs()
        return x.reshape(*x.shape[:fronts], -1)[..., :most].float().cpu()

    def _commit(self, w: int, partner: Int[Tensor, "*copies n"]) -> None:
        self.order[w] = partner
        self.ordered[w] = True
        for site in self.b.sites[w]:
            index = spread(partner, site.front, site.block.data.ndim).to(site.block.data.device)
            site.block.data.copy_(torch.take_along_dim(site.block.data, index, site.front[-1]))
        for q in self.fixed:
            if q == w or any(axis.wire == q for site in self.a.sites[w] for _, axis in site.others()):
                self._read_signs(q)

    def _read_signs(self, w: int) -> bool:
        """Flip units of b whose slices point the opposite way, where all other orders and signs are known."""
        if not self.ordered[w] or not all(self.ordered[b] for b in self.wire_specs[w].bases):
            return False
        fixed = self.fixed[w]
        goals: dict[Direction, Tensor] = {}
        before = fixed.pattern
        for x, y in zip(self.a.sites[w], self.b.sites[w], strict=True):
            # new signs are not applied yet, so a block that the wire enters twice has to wait
            twice = any(axis.wire == w for _, axis in x.company())
            if signs_known(self.fixed, x.axis) or (goals and twice) or not self._readable(w, x):
                continue
            direction, wanted = x.axis.flip, ~fixed.knows(x.axis.flip)
            rows = known_rows(self.a, self.fixed, x), known_rows(self.a, self.fixed, y)
            flat = [t.reshape(*t.shape[: len(x.front)], -1).double() for t in rows]
            cosine = torch.nn.functional.cosine_similarity(*flat, dim=-1, eps=1e-300).cpu()  # 0 for zero slices
            accepted = wanted & (cosine.abs() > LEAST_COSINE)
            if bool(accepted.any()):
                fixed.learn(direction, accepted)
                goals[direction] = goals.get(direction, torch.zeros(())) + (accepted & (cosine < 0)).to(torch.float64)
        if torch.equal(before, fixed.pattern):
            return False
        signs = 1 - 2 * fixed.solve(goals).remainder(2).round()
        self.signs[w] = self.signs[w] * signs
        flip(self.b.sites[w], signs)
        return True

    def _readable(self, w: int, site: BlockSlot) -> bool:
        ordered = all(self.ordered[axis.wire] for _, axis in site.others())
        flipping = [axis for _, axis in site.company() if any(axis.flips)]
        return ordered and all(bool(self.fixed[axis.wire].knows(axis.flip).any()) for axis in flipping)


def _fitted_scales(a: BlockedWeights, b: BlockedWeights) -> dict[int, Float[Tensor, "scales *copies n"]]:
    """Scales that take paired weights b to a with the least error over all blocks; they are applied to b.

    Lengths alone put the whole error of a short row into the scale, which then disturbs every other block.
    """
    logs: dict[int, Tensor] = {}
    for _ in range(2):  # twice, because a scale is fitted while those of other wires still have their first error
        for w, spec in enumerate(a.wire_specs):
            if spec.scales:
                step = _fitted_step(w, a, b)
                logs[w] = logs.get(w, 0) + step
                for site in b.sites[w]:
                    multiply(site, torch.einsum("k,k...->...", torch.tensor(site.axis.power).double(), step).exp())
    return {w: log.exp() for w, log in logs.items()}


def _fitted_step(w: int, a: BlockedWeights, b: BlockedWeights) -> Float[Tensor, "scales *copies n"]:
    """Log-scales of one wire by least squares, weighted by the number of entries of each slice."""
    spec = a.wire_specs[w]
    shape = (*copies(a.wire_specs, w), spec.size)
    normal = torch.zeros(*shape, spec.scales, spec.scales, dtype=torch.float64)
    right = torch.zeros(*shape, spec.scales, dtype=torch.float64)
    for x, y in zip(a.sites[w], b.sites[w], strict=True):
        if any(x.axis.powers):
            power = torch.tensor(x.axis.power, dtype=torch.float64)
            left_length, right_length = x.lengths(), y.lengths()
            there = (left_length > SHORTEST) & (right_length > SHORTEST)
            ratio = torch.where(there, left_length, 1.0).log() - torch.where(there, right_length, 1.0).log()
            weight = there * float(prod(x.block.data.shape[d] for d in x.rest))
            normal += weight[..., None, None] * torch.outer(power, power)
            right += (weight * ratio)[..., None] * power
    return (torch.linalg.pinv(normal, hermitian=True) @ right[..., None])[..., 0].movedim(-1, 0)


def _distances(left: Float[Tensor, "*copies n entries"], right: Float[Tensor, "*copies n entries"]) -> Tensor:
    """Squared distances of all rows."""
    if left.shape[-2] <= 1024:
        left, right = left.double(), right.double()
    squares = left.square().sum(-1).unsqueeze(-1) + right.square().sum(-1).unsqueeze(-2)
    return (squares - 2 * left @ right.mT).clamp_min(0)


def _clear_partners(
    left: Float[Tensor, "*copies n entries"], right: Float[Tensor, "*copies n entries"]
) -> Int[Tensor, "*copies n"] | None:
    """For every row on the left its one near row on the right; None unless all are clear and none is shared."""
    distance = _distances(left, right)
    if distance.shape[-1] == 1:
        return torch.zeros(left.shape[:-1], dtype=torch.int64)
    two = distance.topk(2, dim=-1, largest=False)
    nearest, next_one = two.values.unbind(-1)
    partner = two.indices[..., 0]
    clear = bool((nearest < CLEAR * next_one).all())
    whole = torch.equal(partner.sort(-1).values, torch.arange(partner.shape[-1]).expand(partner.shape))
    return partner if clear and whole else None
