"""The best permutation (with signs) of one wire: linear assignment on similarities of weights or of features, nested
assignment for heads, Frank-Wolfe where a wire enters a weight twice, and the doubly stochastic relaxation with
Sinkhorn normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.align.similarity import Flips, MovableStrands
from intertwine.align.state import SHORT, MatchingState, StateSlot
from intertwine.argument_types import Float, Int
from intertwine.symmetry.element import Element, Move, WireSpec, copies, identity_move
from intertwine.symmetry.geometry import Dim, WireAxis, act, base_dims, spread
from intertwine.symmetry.symmetry import Symmetry

# ----------------------------------------------------------------------------------------------------
# Choice: the orders and signs of strands that fit best, from matrices of how well units fit.
#
# The matrices have one row and column for every unit of every copy, in the coordinates that both networks have before
# anything moves. A strand whose units hold units of others is matched by the best order inside each pair of its units.


Similarities = Mapping[int, Mapping[Flips, Tensor]]


@dataclass(frozen=True)
class FeatureMatching:
    """What can be chosen from: `fits` says how well units fit. `signs`: choose the best signs with the order."""

    moving: MovableStrands
    fits: Similarities
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
        source, total = source_units(element, s), 0.0
        for flips, fit in self.fits[s].items():
            total += float((sign_factors(element, s, flips)[source] * fit[torch.arange(len(source)), source]).sum())
        return total

    def _move(self, s: int, element: Element, extra: Tensor) -> Move:
        strand, move = self.moving.wire_specs[s], identity_move(self.moving.wire_specs, s)
        many, n = prod(copies(self.moving.wire_specs, s)), strand.size
        counts = torch.arange(many)
        source = element.carry(counts.reshape(copies(self.moving.wire_specs, s)), strand.bases).flatten()
        order = torch.arange(n).expand(many, n)
        if strand.permutes:
            fit, _ = self._best_signs(self.fits.get(s, {}), s, (many * n, many * n))
            blocks = fit.reshape(many, n, many, n)[counts, :, source] + extra
            order = torch.stack([linear_assignment(block) for block in blocks])
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
        count = self.moving.wire_specs[s].signs
        fit, signs = best_signs(fits, count if self.signs else 0, shape)
        return fit, signs if self.signs else torch.ones(count, *shape, dtype=torch.float64)

    def _best_inside(self, t: int) -> Float[Tensor, "outer outer"]:
        """For every two units that hold units of strand t: how well those fit in their best order."""
        n = self.moving.wire_specs[t].size
        outer = prod(copies(self.moving.wire_specs, t))
        fit, _ = self._best_signs(self.fits[t], t, (outer * n, outer * n))
        blocks = fit.reshape(outer, n, outer, n).transpose(1, 2).flatten(0, 1)
        best = [float(block[torch.arange(n), linear_assignment(block)].sum()) for block in blocks]
        return torch.tensor(best, dtype=torch.float64).reshape(outer, outer)


def linear_assignment(fit: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """The column that each row is given so that the fits add up to the most.

    >>> linear_assignment(torch.tensor([[0.0, 2.0], [1.0, 2.5]])).tolist()
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


def unit_count(strands: tuple[WireSpec, ...], s: int) -> int:
    """How many units a strand has, copies included."""
    return strands[s].size * prod(copies(strands, s))


def source_units(element: Element, s: int) -> Int[Tensor, " units"]:
    """For every unit of a strand, copies included: which unit the element brings to its place."""
    shape = (*copies(element.wire_specs, s), element.wire_specs[s].size)
    return element.carry(torch.arange(prod(shape)).reshape(shape), (*element.wire_specs[s].bases, s)).flatten()


def sign_factors(element: Element, s: int, flips: Flips) -> Float[Tensor, " units"]:
    """The sign that the element gives to every unit before it moves, in tensors with some exponents of signs."""
    sign = element.moves[s].sign
    found = torch.ones(unit_count(element.wire_specs, s), dtype=torch.float64)
    for k, flip in enumerate(flips if sign is not None else ()):
        found = found * sign[k].flatten() if flip % 2 and sign is not None else found
    return found


# ----------------------------------------------------------------------------------------------------
# Relaxed elements: matrices between permutations, so that what is computed from moved weights has a slope.
#
# The permutations of n units are the corners of the set of doubly stochastic matrices (no entry below zero, all rows and
# columns add up to one). An element moves weights by its corner; a relaxed element moves them by any point between.


@dataclass(frozen=True)
class RelaxedMove:
    """What a relaxed element does to one strand: scales and signs first, then the units are mixed.

    `weights`: row i holds the shares of the old units in the new unit i. `copies` stands for one axis per base.
    """

    weights: Float[Tensor, "*copies n n"] | None = None
    log_scale: Float[Tensor, "scales *copies n"] | None = None
    sign: Float[Tensor, "signs *copies n"] | None = None

    def factor(self, leaf: WireAxis, degree: int) -> Tensor | None:
        """The number each unit is multiplied by where it stands as this leaf."""
        parts: list[Tensor] = []
        if self.log_scale is not None and any(leaf.powers):
            logs = [degree * p * self.log_scale[k] for k, p in enumerate(leaf.power) if p]
            parts.append(torch.stack(logs).sum(0).exp())
        if self.sign is not None and degree % 2:
            parts += [self.sign[k] for k, flip in enumerate(leaf.flips) if flip]
        return torch.stack(parts).prod(0) if parts else None


@dataclass(frozen=True, eq=False)
class RelaxedElement:
    """Acts on weights as an element does (`symmetry.layout.act`), with mixtures in the place of permutations.

    Gradients flow from the moved weights to every tensor of the mixtures.

    Example:
        >>> import torch, intertwine
        >>> from intertwine.symmetry.geometry import act
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> sym = intertwine.symmetry(model, torch.zeros(1, 3))
        >>> even = RelaxedElement(sym.wire_specs, {0: RelaxedMove(torch.full((4, 4), 0.25))})
        >>> bias = act(sym.layouts["0.bias"], model[0].bias, even)
        >>> torch.allclose(bias, model[0].bias.mean().expand(4))
        True
    """

    wire_specs: tuple[WireSpec, ...]
    mixtures: Mapping[int, RelaxedMove]

    def depth(self, wire: int) -> int:
        """How many fibres lie below a strand; fibres act before their bases."""
        return len(self.wire_specs[wire].bases)

    def act_on_axis(self, x: Tensor, dim: int, dims: Sequence[Dim], degree: int = 1) -> Tensor:
        """Act on one exposed dimension of a tensor (see `symmetry.layout.act`)."""
        leaf = dims[dim].tree
        assert isinstance(leaf, WireAxis)
        mixture = self.mixtures.get(leaf.wire)
        if mixture is None:
            return x
        places = [*base_dims(dims, dim, self.wire_specs[leaf.wire].bases), dim]
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


def mixed(symmetry: Symmetry, actor: RelaxedElement, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights moved by a relaxed element, without a model around them."""
    return {n: act(symmetry.layouts[n], x, actor) if n in symmetry.layouts else x for n, x in weights.items()}


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


# ----------------------------------------------------------------------------------------------------
# Frank–Wolfe: the order of a strand that enters one weight twice, as hidden units of a recurrent network do.
#
# There W becomes P W Pᵀ, and how well the units of A and B fit is no longer a sum over pairs of units: it is a quadratic
# assignment, for which no quick exact method is known. The search runs over the doubly stochastic matrices instead. From
# a point, the best corner by slope is one linear assignment; along the way to it the fit is a polynomial, whose maximum
# is found exactly. The last point is rounded to a permutation (after Vogelstein et al. 2015, who match two graphs). The
# search begins twice: at the present order, and where every unit has an equal share in every other.


STEPS = 50  # the most corners that are walked to from one start
LEAST_GAIN = 1e-9  # a rise of the fit by slope, as a share of it, that is worth a step

Value = Callable[[Tensor], Tensor]  # of a mixture of units: how well B so mixed fits A


def frank_wolfe_step(pair: MatchingState, s: int) -> bool:
    """Bring a strand into the best order found, all others held still; whether anything moved."""
    strand = pair.wire_specs[s]
    if not strand.permutes or s not in pair.around[s]:
        return False
    value, degree = _fit(pair, s), _times(pair, s)
    many = copies(pair.wire_specs, s)
    still = torch.eye(strand.size, dtype=torch.float64).expand(*many, strand.size, strand.size)
    orders = [frank_wolfe_order(value, start, degree) for start in (still, torch.full_like(still, 1 / strand.size))]
    best = max(orders, key=lambda order: float(value(matrix_of(order))))
    return pair.step({s: replace(identity_move(pair.wire_specs, s), permutation=best)})


def _fit(pair: MatchingState, s: int) -> Value:
    """The inner product of A with B, units of the strand mixed wherever they stand; the distance falls as it rises."""
    touched = [(pair.a[i].double().cpu(), pair.b[i].double().cpu(), pair.blocks[i]) for i in pair.touched[s]]

    def value(mixture: Tensor) -> Tensor:
        actor = RelaxedElement(pair.wire_specs, {s: RelaxedMove(mixture)})
        total = torch.zeros((), dtype=torch.float64)
        for a, b, block in touched:
            for d in block.places(s):
                b = actor.act_on_axis(b, d, block.dims)
            total = total + (a * b).sum()
        return total

    return value


def _times(pair: MatchingState, s: int) -> int:
    """How often the strand enters the block in which it stands most often."""
    return max(len(pair.blocks[i].places(s)) for i in pair.touched[s])


def frank_wolfe_order(
    value: Value, start: Float[Tensor, "*copies n n"], degree: int, steps: int = STEPS
) -> Int[Tensor, "*copies n"]:
    """The permutation near the end of a walk uphill; `degree`: that of the value, a polynomial of the mixture.

    >>> a = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 5.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    >>> order = torch.tensor([2, 0, 1])
    >>> b = a[order][:, order]
    >>> even = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    >>> found = frank_wolfe_order(lambda p: (a * (p @ b @ p.mT)).sum(), even, degree=2)
    >>> torch.equal(b[found][:, found], a)
    True
    """
    here = start
    for _ in range(steps):
        at = here.detach().requires_grad_(True)
        height = value(at)
        (slope,) = torch.autograd.grad(height, at)
        corner = matrix_of(nearest_permutation(slope))
        way = corner - here
        level, rise = float(height.detach()), float((slope * way).sum())
        if rise <= LEAST_GAIN * abs(level):
            break
        share = _best_share(value, here, way, degree, level, rise)
        here = corner if share == 1 else here + share * way
    return nearest_permutation(here)


def _best_share(value: Value, here: Tensor, way: Tensor, degree: int, level: float, rise: float) -> float:
    """How far to go along a way, from 0 to 1: the maximum of a polynomial with this level and rise at 0.

    Its other coefficients follow from as many more points.
    """
    powers, points = np.arange(2, degree + 1), np.arange(1, degree) / (degree - 1)
    heights = [float(value(here + float(t) * way)) - level - t * rise for t in points]
    curve = np.polynomial.Polynomial([level, rise, *np.linalg.solve(points[:, None] ** powers, np.array(heights))])
    roots = np.asarray(curve.deriv().roots())
    bends = roots.real[(np.abs(roots.imag) < 1e-9) & (roots.real > 0) & (roots.real < 1)]
    return max([1.0, *bends.tolist()], key=lambda t: float(curve(t)))


# ----------------------------------------------------------------------------------------------------
# The best permutation of one strand, with its signs where asked, all others held still.
#
# How well unit i of A and unit j of B fit is the inner product of their slices, summed over all places of the strand. A
# strand whose units hold units of other strands (heads, groups of channels) is matched together with those: each pair of
# its units is judged by the best order inside. Where a strand enters one block twice, this is the slope of the objective
# at the present element, and a search over mixtures of orders follows (`frank_wolfe`); `Pair.step` keeps a result only if
# the objective itself falls.


#: Pairs of units whose insides are matched; with more of them the order inside is held still.
MOST_PAIRS = 4096
#: Signs of one index that are tried in every combination.
MOST_SIGNS = 6

Fit = Float[Tensor, "copies n n"]


def permutation_step(pair: MatchingState, s: int, signs: bool = False) -> bool:
    """Bring a strand into the order (with `signs`: order and signs) that fits best; whether anything moved."""
    inner = _inner_strands(pair, s)
    moved = bool(inner) and _try(pair, _nested_moves(pair, s, inner))
    moves, before = _plain_moves(pair, s, signs), tuple(pair.b)
    if _try(pair, moves):
        moved = True
        order, sign = moves[s].permutation, moves[s].sign
        if order is not None and (sign is None or bool((sign > 0).all())):
            pair.products.reordered(pair.places[s], order.reshape(-1, order.shape[-1]), before)
    return frank_wolfe_step(pair, s) or moved


def _try(pair: MatchingState, moves: dict[int, Move]) -> bool:
    return bool(moves) and pair.step(moves)


def _plain_moves(pair: MatchingState, s: int, signs: bool) -> dict[int, Move]:
    strand = pair.wire_specs[s]
    fit, pattern = _best_signs(pair, s, signs, _fits(pair, s, signs))
    order = (
        torch.stack([_assign(f) for f in fit]) if strand.permutes else torch.arange(strand.size).expand(fit.shape[:2])
    )
    move = identity_move(pair.wire_specs, s)
    if strand.permutes:
        move = replace(move, permutation=order.reshape(_shape(move)))
    if pattern is not None and move.sign is not None:
        chosen = pattern.gather(-1, order.unsqueeze(-1)).squeeze(-1)  # the combination of every unit of A
        at_source = torch.empty_like(chosen).scatter_(-1, order, chosen)
        table = torch.tensor(list(product((1.0, -1.0), repeat=strand.signs)), dtype=torch.float64)
        move = replace(move, sign=table[at_source].movedim(-1, 0).reshape(move.sign.shape))
    still = torch.equal(order, torch.arange(strand.size).expand(order.shape))
    return {} if still and (move.sign is None or bool((move.sign > 0).all())) else {s: move}


def _shape(move: Move) -> tuple[int, ...]:
    assert move.permutation is not None
    return tuple(move.permutation.shape)


def _fits(pair: MatchingState, s: int, signs: bool) -> dict[tuple[int, ...], Fit]:
    """How well units fit, summed over places; with `signs`, over those with the same exponents of signs."""
    groups: dict[tuple[int, ...], list[StateSlot]] = {}
    for place in pair.places[s]:
        groups.setdefault(tuple(int(f) for f in place.axis.flips) if signs else (), []).append(place)
    return {flips: pair.products.total(places) for flips, places in groups.items()}


def _products(x: Tensor, y: Tensor) -> Float[Tensor, "copies n m"]:
    """Inner products of all rows; short rows in double precision, which costs nothing there."""
    if x.shape[-1] <= SHORT:
        x, y = x.double(), y.double()
    return torch.matmul(x, y.mT).cpu()


def _best_signs(
    pair: MatchingState, s: int, signs: bool, fits: dict[tuple[int, ...], Tensor]
) -> tuple[Fit, Tensor | None]:
    """The fit with the best signs for each pair of units, and which combination of signs that is."""
    count = pair.wire_specs[s].signs
    if not (signs and count) or count > MOST_SIGNS:
        return sum(fits.values(), torch.zeros(())), None
    ways = []
    for combination in product((0, 1), repeat=count):
        parity = {flips: sum(f * c for f, c in zip(flips, combination, strict=False)) % 2 for flips in fits}
        ways.append(sum((-fit if parity[flips] else fit for flips, fit in fits.items()), torch.zeros(())))
    best = torch.stack(ways).max(0)
    return best.values, best.indices


def _assign(fit: Float[Tensor, "n n"]) -> Tensor:
    return torch.from_numpy(linear_sum_assignment(fit.numpy(), maximize=True)[1])


# -- units that hold units ---------------------------------------------------------------------------------------------


def _inner_strands(pair: MatchingState, s: int) -> list[int]:
    """The strands fibred over s alone that permute, where there are few enough pairs to look into all of them."""
    if pair.wire_specs[s].bases or not pair.wire_specs[s].permutes or pair.wire_specs[s].size ** 2 > MOST_PAIRS:
        return []
    return [t for t in sorted(pair.movable) if pair.wire_specs[t].bases == (s,) and pair.wire_specs[t].permutes]


def _nested_moves(pair: MatchingState, s: int, inner: list[int]) -> dict[int, Move]:
    n = pair.wire_specs[s].size
    total = np.zeros((n, n))
    for place in _without(pair, s, inner):
        total += _products(pair.rows_of_a(place), pair.rows_of_b(place))[0].double().numpy()
    orders = {}
    for t in inner:
        orders[t], value = _orders_inside(pair, t)
        total += value
    partner = linear_sum_assignment(total, maximize=True)[1]
    moves = {s: replace(identity_move(pair.wire_specs, s), permutation=torch.from_numpy(partner))}
    stays = np.array_equal(partner, np.arange(n))
    for t in inner:
        at_source = np.empty((n, pair.wire_specs[t].size), dtype=np.int64)
        at_source[partner] = orders[t][np.arange(n), partner]
        stays = stays and bool((at_source == np.arange(pair.wire_specs[t].size)).all())
        moves[t] = replace(identity_move(pair.wire_specs, t), permutation=torch.from_numpy(at_source))
    return {} if stays else moves


def _without(pair: MatchingState, s: int, inner: list[int]) -> Iterator[StateSlot]:
    """The places of a strand in blocks that none of its inner strands enters."""
    entered = {place.block for t in inner for place in pair.places[t]}
    return (place for place in pair.places[s] if place.block not in entered)


def _orders_inside(pair: MatchingState, t: int) -> tuple[np.ndarray, np.ndarray]:
    """For every unit of A and of B that hold units of strand t: the best order inside, and how well it fits."""
    fit: Tensor | float = 0.0
    for place in pair.places[t]:
        x, y = pair.rows_of_a(place), pair.rows_of_b(place)
        outer, n, entries = x.shape
        flat = _products(x.reshape(1, outer * n, entries), y.reshape(1, outer * n, entries))[0]
        fit = fit + flat.reshape(outer, n, outer, n).transpose(1, 2).double()
    assert isinstance(fit, Tensor)
    values = fit.numpy()
    outer, n = values.shape[0], values.shape[-1]
    orders, best = np.empty((outer, outer, n), dtype=np.int64), np.empty((outer, outer))
    for i, j in product(range(outer), repeat=2):
        orders[i, j] = linear_sum_assignment(values[i, j], maximize=True)[1]
        best[i, j] = values[i, j, np.arange(n), orders[i, j]].sum()
    return orders, best


ROUNDS = 20  # of scaling rows and columns


def sinkhorn(scores: Float[Tensor, "*copies n n"], rounds: int = ROUNDS) -> Float[Tensor, "*copies n n"]:
    """Shares in proportion to exp(scores), rows and columns scaled so that they add up to one; rows exactly.

    Logarithms are scaled, so that no score is too large. Gradients are those of the rounds themselves.

    >>> sinkhorn(torch.tensor([[4.0, 0.0], [0.0, 4.0]])).round(decimals=3)
    tensor([[0.9820, 0.0180], [0.0180, 0.9820]])
    """
    for _ in range(rounds):
        scores = scores - scores.logsumexp(-2, keepdim=True)
        scores = scores - scores.logsumexp(-1, keepdim=True)
    return scores.exp()
