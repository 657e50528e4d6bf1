"""Matching: the element that takes one network's weights onto another's, when they agree up to noise.

Sorting fails on noise, because a sort is decided by the last digit where two numbers nearly agree. Here units of the
two networks are paired by the distance of their weights, wire after wire, and a wire is paired only when every unit has
one clear partner; until then it enters the rows of other wires by lengths, which no order changes.
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
    along,
    hidden,
    multiply,
    untouched_first,
)
from intertwine.symmetry.blocks import SHORTEST, BlockedWeights, BlockSlot, block_weights
from intertwine.symmetry.element import Element, copies
from intertwine.symmetry.geometry import WireAxis, spread
from intertwine.symmetry.symmetry import Symmetry

CLEAR = 0.25  # a partner is clear when its squared distance is below this share of the next one's
ENOUGH = 2048  # entries of a row that are looked at first
LEAST_COSINE = 0.5  # a sign is read where two slices point the same or the opposite way


def pair_units(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Element:
    """The element that takes weights b as near to weights a as pairing units can; whether it is near is not judged."""
    cut_a, cut_b = block_weights(symmetry, a, copy=True), block_weights(symmetry, b, copy=True)
    lengths_a, lengths_b = ScaleNormaliser(cut_a).run(), ScaleNormaliser(cut_b).run()
    matching = _Matching(cut_a, cut_b)
    matching.run()
    identity = symmetry.identity()

    def element(part: str, parts: Mapping[int, Tensor]) -> Element:
        moves = {i: replace(m, **{part: parts[i]}) if i in parts else m for i, m in identity.moves.items()}
        return replace(identity, moves=moves)

    total = element("scale", lengths_b)
    for depth in range(1 + max((len(s.bases) for s in symmetry.wire_specs), default=0)):
        # fibres were paired after their bases had been put in order
        found = {s: p for s, p in matching.order.items() if len(symmetry.wire_specs[s].bases) == depth}
        total = element("permutation", found) @ total
    total = element("scale", _fitted_scales(cut_a, cut_b)) @ element("sign", matching.signs) @ total
    return element("scale", lengths_a).inverse() @ total


class _Matching:
    """Pairs the strands of two sets of weights; the blocks of b are reordered and flipped on the way."""

    def __init__(self, a: BlockedWeights, b: BlockedWeights) -> None:
        self.a, self.b = a, b
        self.wire_specs = a.wire_specs
        self.order: dict[int, Int[Tensor, "*copies n"]] = {}
        self.ordered = [not (s.permutes and sites) for s, sites in zip(self.wire_specs, a.sites, strict=True)]
        self.signs = {
            i: torch.ones(s.signs, *copies(self.wire_specs, i), s.size, dtype=torch.float64)
            for i, s in enumerate(self.wire_specs)
            if s.signs
        }
        self.fixed = {s: PartialSolution(a, s, [x.axis.flip for x in a.sites[s]], modulus=2) for s in self.signs}
        self.seen: dict[int, tuple[int, int]] = {}  # strand → what was known around it when it was last tried

    def run(self) -> None:
        while not all(self.ordered):
            if not any(self._try(s) for s in self._waiting()):
                self._force()
        while sum(self._read_signs(s) for s in self.fixed):
            pass
        while self._keep_a_sign():
            while sum(self._read_signs(s) for s in self.fixed):
                pass

    def _keep_a_sign(self) -> bool:
        """Of the units whose signs only each other can tell, the first one keeps its own."""
        for s, site in untouched_first(self.a, self.fixed):
            there = ~self.fixed[s].knows(site.axis.flip) & hidden(site, self._alive(site))
            if bool(there.any()):
                first = there.flatten().cumsum(0).reshape(there.shape) == 1
                self.fixed[s].learn(site.axis.flip, there & first)
                return True
        return False

    def _waiting(self) -> list[int]:
        return [
            s
            for s, done in enumerate(self.ordered)
            if not done and all(self.ordered[b] for b in self.wire_specs[s].bases)
        ]

    def _try(self, s: int) -> bool:
        """Pair a strand if every unit has one clear partner."""
        known = self._known_around(s)
        if self.seen.get(s) == known:
            return False
        self.seen[s] = known
        left, right = self._features(s, ENOUGH)
        if left.shape[-1] == 0:
            return False
        partner = _clear_partners(left, right)
        if partner is None:
            return False
        self._commit(s, partner)
        return True

    def _force(self) -> None:
        """Pair the strand about which most is known, as well as possible."""
        s = max(self._waiting(), key=self._known_around)
        left, right = self._features(s, None)
        n = left.shape[-2]
        pairs = zip(left.reshape(-1, n, left.shape[-1]), right.reshape(-1, n, right.shape[-1]), strict=True)
        rows = [torch.from_numpy(linear_sum_assignment(_distances(x, y).numpy())[1]) for x, y in pairs]
        self._commit(s, torch.stack(rows).reshape(left.shape[:-1]))

    def _known_around(self, s: int) -> tuple[int, int]:
        sites = self.a.sites[s]
        ordered = sum(self.ordered[leaf.wire] for site in sites for _, leaf in site.others())
        signed = sum(self._signed(leaf) for site in sites for leaf in (site.axis, *(x for _, x in site.company())))
        return ordered, signed

    def _signed(self, leaf: WireAxis) -> bool:
        return not any(leaf.flips) or self.fixed[leaf.wire].complete(leaf.flip)

    def _features(
        self, s: int, most: int | None
    ) -> tuple[Float[Tensor, "*copies n entries"], Float[Tensor, "*copies n entries"]]:
        """Rows that can be compared although the order of other strands is not known yet."""
        found: list[tuple[Tensor, Tensor]] = []
        count = 0
        for x, y in zip(self.a.sites[s], self.b.sites[s], strict=True):
            if most is not None and count >= most:
                break
            rows = self._comparable(s, x, most), self._comparable(s, y, most)
            count += rows[0].shape[-1]
            found.append(rows)
        empty = torch.zeros(*copies(self.wire_specs, s), self.wire_specs[s].size, 0)
        left = torch.cat([empty, *(r[0] for r in found)], -1)
        return left, torch.cat([empty, *(r[1] for r in found)], -1)

    def _comparable(self, s: int, site: BlockSlot, most: int | None) -> Tensor:
        x, fronts = site.rows, len(site.front)
        open_dims = [
            fronts + site.rest.index(d) for d, leaf in site.others() if not self.ordered[leaf.wire] or leaf.wire == s
        ]
        if open_dims:
            x = torch.linalg.vector_norm(x, dim=open_dims)
        seen = [site.axis, *(leaf for _, leaf in site.company() if self.ordered[leaf.wire])]
        if not all(self._signed(leaf) for leaf in seen):
            x = x.abs()
        return x.reshape(*x.shape[:fronts], -1)[..., :most].float().cpu()

    def _commit(self, s: int, partner: Int[Tensor, "*copies n"]) -> None:
        self.order[s] = partner
        self.ordered[s] = True
        for site in self.b.sites[s]:
            index = spread(partner, site.front, site.block.data.ndim).to(site.block.data.device)
            site.block.data.copy_(torch.take_along_dim(site.block.data, index, site.front[-1]))
        for q in self.fixed:
            if q == s or any(leaf.wire == q for site in self.a.sites[s] for _, leaf in site.others()):
                self._read_signs(q)

    def _read_signs(self, s: int) -> bool:
        """Flip units of b that point the opposite way, wherever everything else is known."""
        if not self.ordered[s] or not all(self.ordered[b] for b in self.wire_specs[s].bases):
            return False
        fixed = self.fixed[s]
        goals: dict[Direction, Tensor] = {}
        before = fixed.pattern
        for x, y in zip(self.a.sites[s], self.b.sites[s], strict=True):
            # what was just read is not applied yet, so a block that the strand enters twice has to wait
            twice = any(leaf.wire == s for _, leaf in x.company())
            if self._signed(x.axis) or (goals and twice) or not self._readable(s, x):
                continue
            direction, wanted = x.axis.flip, ~fixed.knows(x.axis.flip)
            cosine = _cosine(self._alive(x), self._alive(y), len(x.front))
            accepted = wanted & (cosine.abs() > LEAST_COSINE)
            if bool(accepted.any()):
                fixed.learn(direction, accepted)
                goals[direction] = goals.get(direction, torch.zeros(())) + (accepted & (cosine < 0)).to(torch.float64)
        if torch.equal(before, fixed.pattern):
            return False
        signs = 1 - 2 * fixed.solve(goals).remainder(2).round()
        self.signs[s] = self.signs[s] * signs
        for site in self.b.sites[s]:
            if any(site.axis.flips):
                multiply(site, torch.stack([signs[k] for k, f in enumerate(site.axis.flips) if f]).prod(0))
        return True

    def _alive(self, site: BlockSlot) -> Tensor:
        """The rows of a site, with zeros where they belong to units whose signs are not known yet."""
        x = site.rows
        for d, leaf in site.company():
            if not self._signed(leaf):
                x = x * along(self.fixed[leaf.wire].knows(leaf.flip).to(x.dtype), self.a, site, d)
        return x

    def _readable(self, s: int, site: BlockSlot) -> bool:
        ordered = all(self.ordered[leaf.wire] for _, leaf in site.others())
        flipping = [leaf for _, leaf in site.company() if any(leaf.flips)]
        return ordered and all(bool(self.fixed[leaf.wire].knows(leaf.flip).any()) for leaf in flipping)


def _fitted_scales(a: BlockedWeights, b: BlockedWeights) -> dict[int, Float[Tensor, "scales *copies n"]]:
    """Scales that take paired weights b to a with the least error over all blocks; those of b are applied to it.

    Lengths alone put the whole error of a short row into the scale, which then disturbs every other block.
    """
    logs: dict[int, Tensor] = {}
    for _ in range(2):  # twice, because a scale is fitted while those of other strands still have their first error
        for s, strand in enumerate(a.wire_specs):
            if strand.scales:
                step = _fitted_step(s, a, b)
                logs[s] = logs.get(s, 0) + step
                for site in b.sites[s]:
                    multiply(site, torch.einsum("k,k...->...", torch.tensor(site.axis.power).double(), step).exp())
    return {s: log.exp() for s, log in logs.items()}


def _fitted_step(s: int, a: BlockedWeights, b: BlockedWeights) -> Float[Tensor, "scales *copies n"]:
    """Log-scales of one strand by least squares; a slice of many entries tells its length better than one of few."""
    strand = a.wire_specs[s]
    shape = (*copies(a.wire_specs, s), strand.size)
    normal = torch.zeros(*shape, strand.scales, strand.scales, dtype=torch.float64)
    right = torch.zeros(*shape, strand.scales, dtype=torch.float64)
    for x, y in zip(a.sites[s], b.sites[s], strict=True):
        if any(x.axis.powers):
            power = torch.tensor(x.axis.power, dtype=torch.float64)
            left_length, right_length = x.lengths(), y.lengths()
            there = (left_length > SHORTEST) & (right_length > SHORTEST)
            ratio = torch.where(there, left_length, 1.0).log() - torch.where(there, right_length, 1.0).log()
            weight = there * float(prod(x.block.data.shape[d] for d in x.rest))
            normal += weight[..., None, None] * torch.outer(power, power)
            right += (weight * ratio)[..., None] * power
    return (torch.linalg.pinv(normal, hermitian=True) @ right[..., None])[..., 0].movedim(-1, 0)


def _cosine(left: Tensor, right: Tensor, fronts: int) -> Float[Tensor, "*copies n"]:
    """How far the slices of two blocks point the same way, per unit; 0 for zero slices."""
    shape = (*left.shape[:fronts], prod(left.shape[fronts:]))
    pair = (t.reshape(shape).double() for t in (left, right))
    return torch.nn.functional.cosine_similarity(*pair, dim=-1, eps=1e-300).cpu()


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
