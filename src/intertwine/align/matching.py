"""The best permutation (with signs) of one wire: linear assignment on similarities of weights or of features, nested
assignment for heads, Frank-Wolfe where a wire enters a weight twice, and the doubly stochastic relaxation with
Sinkhorn normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.align.similarity import Flips, Matrix
from intertwine.align.state import SHORT, MatchingState, MovableWires, StateSlot, move_of
from intertwine.argument_types import Float, Int
from intertwine.symmetry.element import Element, Move, WireSpec, copies
from intertwine.symmetry.geometry import Dim, WireAxis, act, base_dims, spread
from intertwine.symmetry.symmetry import Symmetry

#: The most signs of one index whose combinations are all tried.
MOST_SIGNS = 6
STEPS = 50  # the most corners that Frank–Wolfe walks to from one start
LEAST_GAIN = 1e-9  # a linear gain, as a share of the value, that is worth a step
ROUNDS = 20  # of scaling rows and columns

Value = Callable[[Tensor], Tensor]  # of a mixture of units: the similarity of A and B mixed so


def linear_assignment(similarity: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """The column of each row in the assignment with the largest total similarity.

    >>> linear_assignment(torch.tensor([[0.0, 2.0], [1.0, 2.5]])).tolist()
    [1, 0]
    """
    return torch.from_numpy(linear_sum_assignment(similarity.detach().cpu().double().numpy(), maximize=True)[1])


def nested_assignment(
    similarity: Float[Tensor, "outer outer n n"],
) -> tuple[Int[Tensor, "outer outer n"], Float[Tensor, "outer outer"]]:
    """For every two outer units: the best order of the units nested in them, and its total similarity."""
    orders = torch.stack([torch.stack([linear_assignment(x) for x in row]) for row in similarity])
    return orders, similarity.double().gather(-1, orders.unsqueeze(-1)).squeeze(-1).sum(-1)


def at_source(found: Tensor, partner: Int[Tensor, " n"]) -> Tensor:
    """What was found for each unit of A, indexed by its partner in B."""
    return torch.empty_like(found).index_copy_(0, partner, found)


@dataclass(frozen=True)
class FeatureMatching:
    """The best orders and signs of wires by similarities of units.

    Similarity matrices have one row and column for every unit of every copy, in the coordinates that both networks have
    before anything moves. A wire whose units hold units of others is matched by the best order inside each pair of its
    units. `similarities`: wire → exponents of signs → matrix. `signs`: choose the best signs with the order.
    """

    wires: MovableWires
    similarities: Mapping[int, Mapping[Flips, Tensor]]
    signs: bool

    def moves(self, w: int, element: Element) -> dict[int, Move]:
        """The best moves of a wire and of the wires nested in it, where its bases have moved by an element."""
        nested = [t for t in self.wires.nested(w) if t in self.similarities]
        if w not in self.similarities and not nested:
            return {}
        inner = sum((self._nested_similarity(t) for t in nested), torch.zeros((), dtype=torch.float64))
        found = {w: self._move(w, element, inner)}
        for t in nested:
            found[t] = self._move(t, replace(element, moves={**element.moves, **found}), torch.zeros(()))
        return found

    def total(self, w: int, element: Element) -> float:
        """Σ over units of their similarity with the unit that the element brings to their place."""
        if w not in self.similarities:
            return 0.0
        source, total = source_units(element, w), 0.0
        for flips, matrix in self.similarities[w].items():
            total += float((sign_factors(element, w, flips)[source] * matrix[torch.arange(len(source)), source]).sum())
        return total

    def _move(self, w: int, element: Element, inner: Tensor) -> Move:
        spec, shape = self.wires.wire_specs[w], copies(self.wires.wire_specs, w)
        many, n = prod(shape), spec.size
        counts = torch.arange(many)
        source = element.carry(counts.reshape(shape), spec.bases).flatten()
        order, parts = torch.arange(n).expand(many, n), dict[str, Tensor]()
        if spec.permutes:
            blocks = self._similarity(w).reshape(many, n, many, n)[counts, :, source] + inner
            order = torch.stack([linear_assignment(block) for block in blocks])
            parts["permutation"] = at_source(order, source)
        if spec.signs and self.signs:
            units = (source[:, None] * n + order).flatten()  # the units of B that match those of A
            matched = {
                flips: matrix[torch.arange(many * n), units] for flips, matrix in self.similarities.get(w, {}).items()
            }
            parts["sign"] = torch.empty(spec.signs, many * n, dtype=torch.float64)
            parts["sign"][:, units] = best_signs(matched, spec.signs, (many * n,))[1]
        return move_of(self.wires.wire_specs, w, **parts)

    def _similarity(self, w: int) -> Matrix:
        """The similarity of all pairs of units, with the best signs of each pair."""
        units = unit_count(self.wires.wire_specs, w)
        signs = self.wires.wire_specs[w].signs if self.signs else 0
        return best_signs(self.similarities.get(w, {}), signs, (units, units))[0]

    def _nested_similarity(self, t: int) -> Float[Tensor, "outer outer"]:
        """For every two units that hold units of wire t: the similarity of those in their best order."""
        n, outer = self.wires.wire_specs[t].size, prod(copies(self.wires.wire_specs, t))
        return nested_assignment(self._similarity(t).reshape(outer, n, outer, n).transpose(1, 2))[1]


def best_signs(similarities: Mapping[Flips, Tensor], count: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The sum of similarities with the best signs at every entry, and those signs.

    One sign after the other is changed wherever that helps, until none does. Where no two kinds of tensors share a
    sign, which is the rule, this is the best of all combinations.

    >>> value, signs = best_signs({(1,): torch.tensor([2.0, -3.0])}, 1, (2,))
    >>> value.tolist(), signs.tolist()
    ([2.0, 3.0], [[1.0, -1.0]])
    """
    kept = {flips: matrix.double().clone() for flips, matrix in similarities.items()}
    signs = torch.ones(count, *shape, dtype=torch.float64)
    for _ in range(count + 1):
        changed = False
        for k in range(count):
            parts = [matrix for flips, matrix in kept.items() if flips and flips[k] % 2]
            worse = sum(parts, torch.zeros(shape, dtype=torch.float64)) < 0
            if bool(worse.any()):
                changed = True
                signs[k] = torch.where(worse, -signs[k], signs[k])
                for matrix in parts:
                    matrix.mul_(torch.where(worse, -1.0, 1.0))
        if not changed:
            break
    return sum(kept.values(), torch.zeros(shape, dtype=torch.float64)), signs


def unit_count(wire_specs: tuple[WireSpec, ...], w: int) -> int:
    """How many units a wire has, copies included."""
    return wire_specs[w].size * prod(copies(wire_specs, w))


def source_units(element: Element, w: int) -> Int[Tensor, " units"]:
    """For every unit of a wire, copies included: which unit the element brings to its place."""
    shape = (*copies(element.wire_specs, w), element.wire_specs[w].size)
    return element.carry(torch.arange(prod(shape)).reshape(shape), (*element.wire_specs[w].bases, w)).flatten()


def sign_factors(element: Element, w: int, flips: Flips) -> Float[Tensor, " units"]:
    """The sign that the element gives to every unit before it moves, in tensors with some exponents of signs."""
    found, sign = torch.ones(unit_count(element.wire_specs, w), dtype=torch.float64), element.moves[w].sign
    for k, flip in enumerate(flips):
        if sign is not None and flip % 2:
            found = found * sign[k].flatten()
    return found


# -- Relaxed elements --


@dataclass(frozen=True)
class RelaxedMove:
    """What a relaxed element does to one wire: scales and signs first, then the units are mixed.

    `weights`: row i holds the shares of the old units in the new unit i. `copies` stands for one axis per base.
    """

    weights: Float[Tensor, "*copies n n"] | None = None
    log_scale: Float[Tensor, "scales *copies n"] | None = None
    sign: Float[Tensor, "signs *copies n"] | None = None

    def factor(self, axis: WireAxis, degree: int) -> Tensor | None:
        """What each unit is multiplied by along an axis."""
        parts: list[Tensor] = []
        if self.log_scale is not None and any(axis.powers):
            logs = [degree * p * self.log_scale[k] for k, p in enumerate(axis.power) if p]
            parts.append(torch.stack(logs).sum(0).exp())
        if self.sign is not None and degree % 2:
            parts += [self.sign[k] for k, flip in enumerate(axis.flips) if flip]
        return torch.stack(parts).prod(0) if parts else None


@dataclass(frozen=True, eq=False)
class RelaxedElement:
    """Acts on weights as an element does, with doubly stochastic mixtures in place of permutations.

    The permutations of n units are the corners of the set of doubly stochastic matrices (non-negative, rows and columns
    sum to one). Gradients flow from the moved weights to every tensor of the mixtures.

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
        """How many bases a wire has; dependent axes act before their bases."""
        return len(self.wire_specs[wire].bases)

    def act_on_axis(self, x: Tensor, dim: int, dims: Sequence[Dim], degree: int = 1) -> Tensor:
        """Act on one exposed dimension of a tensor (see `symmetry.geometry.act`)."""
        axis = dims[dim].tree
        assert isinstance(axis, WireAxis)
        mixture = self.mixtures.get(axis.wire)
        if mixture is None:
            return x
        bases = base_dims(dims, dim, self.wire_specs[axis.wire].bases)
        factor = mixture.factor(axis, degree)
        if factor is not None:
            x = x * spread(factor, [*bases, dim], x.ndim).to(x.device, x.dtype)
        if mixture.weights is None:
            return x
        # the units along `dim` are mixed by one matrix for every index of the bases
        order = [*bases, *(d for d in range(x.ndim) if d not in (*bases, dim)), dim]
        rows = x.permute(*order)
        flat = rows.reshape(*rows.shape[: len(bases)], -1, rows.shape[-1])
        back = sorted(range(x.ndim), key=lambda d: order[d])
        return torch.matmul(flat, mixture.weights.to(x.device, x.dtype).mT).reshape(rows.shape).permute(*back)


def mixed(symmetry: Symmetry, actor: RelaxedElement, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights moved by a relaxed element."""
    return {n: act(symmetry.layouts[n], x, actor) if n in symmetry.layouts else x for n, x in weights.items()}


def matrix_of(permutation: Int[Tensor, "*copies n"]) -> Float[Tensor, "*copies n n"]:
    """The matrix P with (P x)[i] = x[permutation[i]].

    >>> matrix_of(torch.tensor([1, 0]))
    tensor([[0., 1.], [1., 0.]], dtype=torch.float64)
    """
    return torch.nn.functional.one_hot(permutation, permutation.shape[-1]).double()


def nearest_permutation(weights: Float[Tensor, "*copies n n"]) -> Int[Tensor, "*copies n"]:
    """The permutation with the largest sum of shares.

    >>> nearest_permutation(torch.tensor([[0.4, 0.6], [0.6, 0.4]]))
    tensor([1, 0])
    """
    shares = weights.reshape(-1, *weights.shape[-2:])
    return torch.stack([linear_assignment(x) for x in shares]).reshape(weights.shape[:-1])


def sinkhorn(scores: Float[Tensor, "*copies n n"], rounds: int = ROUNDS) -> Float[Tensor, "*copies n n"]:
    """Shares in proportion to exp(scores), rows and columns scaled to sum to one; rows exactly.

    The scaling works on logarithms, so no score is too large. Gradients are those of the rounds themselves.

    >>> sinkhorn(torch.tensor([[4.0, 0.0], [0.0, 4.0]])).round(decimals=3)
    tensor([[0.9820, 0.0180], [0.0180, 0.9820]])
    """
    for _ in range(rounds):
        scores = scores - scores.logsumexp(-2, keepdim=True)
        scores = scores - scores.logsumexp(-1, keepdim=True)
    return scores.exp()


# -- Frank–Wolfe --


def frank_wolfe_step(state: MatchingState, w: int) -> bool:
    """Reorder a wire that enters one weight twice, as hidden units of a recurrent network do; whether anything moved.

    There W becomes P W Pᵀ, so the similarity of A and B is not a sum over pairs of units: matching is a quadratic
    assignment. The search runs over doubly stochastic matrices (Vogelstein et al. 2015). From a point, the best corner
    by the gradient is one linear assignment; on the way to it the similarity is a polynomial, whose maximum is exact.
    The last point is rounded to a permutation. It starts at the present order and at the uniform matrix.
    """
    spec = state.wire_specs[w]
    if not spec.permutes or w not in state.neighbours[w]:
        return False
    touched = [(state.a[i].double().cpu(), state.b[i].double().cpu(), state.blocks[i]) for i in state.blocks_of[w]]

    def value(mixture: Tensor) -> Tensor:
        """The inner product of A with B, units of the wire mixed wherever they stand."""
        actor = RelaxedElement(state.wire_specs, {w: RelaxedMove(mixture)})
        total = torch.zeros((), dtype=torch.float64)
        for a, b, block in touched:
            for d in block.places(w):
                b = actor.act_on_axis(b, d, block.dims)
            total = total + (a * b).sum()
        return total

    degree = max(len(block.places(w)) for _, _, block in touched)
    present = torch.eye(spec.size, dtype=torch.float64).expand(*copies(state.wire_specs, w), spec.size, spec.size)
    starts = (present, torch.full_like(present, 1 / spec.size))
    orders = [frank_wolfe_order(value, start, degree) for start in starts]
    best = max(orders, key=lambda order: float(value(matrix_of(order))))
    return state.step({w: state.move(w, permutation=best)})


def frank_wolfe_order(
    value: Value, start: Float[Tensor, "*copies n n"], degree: int, steps: int = STEPS
) -> Int[Tensor, "*copies n"]:
    """The permutation nearest to the end of the search; `value` is a polynomial of the mixture, of a known degree.

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
        (gradient,) = torch.autograd.grad(height, at)
        corner = matrix_of(nearest_permutation(gradient))
        way = corner - here
        level, gain = float(height.detach()), float((gradient * way).sum())
        if gain <= LEAST_GAIN * abs(level):
            break
        share = _best_share(value, here, way, degree, level, gain)
        here = corner if share == 1 else here + share * way
    return nearest_permutation(here)


def _best_share(value: Value, here: Tensor, way: Tensor, degree: int, level: float, slope: float) -> float:
    """How far to go along a way, from 0 to 1: the maximum of the polynomial with this level and slope at 0.

    Its other coefficients follow from as many more points.
    """
    powers, points = np.arange(2, degree + 1), np.arange(1, degree) / (degree - 1)
    heights = [float(value(here + float(t) * way)) - level - t * slope for t in points]
    curve = np.polynomial.Polynomial([level, slope, *np.linalg.solve(points[:, None] ** powers, np.array(heights))])
    roots = np.asarray(curve.deriv().roots())
    inside = roots.real[(np.abs(roots.imag) < 1e-9) & (roots.real > 0) & (roots.real < 1)]
    return max([1.0, *inside.tolist()], key=lambda t: float(curve(t)))


# -- One wire by its weights --


def permutation_step(state: MatchingState, w: int, signs: bool = False) -> bool:
    """Give a wire its best order (with `signs`: order and signs) while all others stay; whether anything moved.

    The similarity of units i of A and j of B is the inner product of their slices, summed over all slots of the wire. A
    wire whose units hold units of other wires (heads, groups of channels) is matched together with those. Where a wire
    enters one block twice, this is the gradient of the objective at the present element, and a Frank–Wolfe search
    follows; `MatchingState.step` keeps a result only if the objective itself falls.
    """
    nested = state.wires.nested(w)
    moves = _nested_moves(state, w, nested) if nested else {}
    moved = bool(moves) and state.step(moves)
    moves, before = _plain_moves(state, w, signs), tuple(state.b)
    if moves and state.step(moves):
        moved = True
        order, sign = moves[w].permutation, moves[w].sign
        if order is not None and (sign is None or bool((sign > 0).all())):
            state.products.reorder(w, order.reshape(-1, order.shape[-1]), before)
    return frank_wolfe_step(state, w) or moved


def _plain_moves(state: MatchingState, w: int, signs: bool) -> dict[int, Move]:
    spec = state.wire_specs[w]
    groups: dict[tuple[int, ...], list[StateSlot]] = {}
    for slot in state.slots[w]:
        groups.setdefault(tuple(int(f) for f in slot.axis.flips) if signs else (), []).append(slot)
    similarity, pattern = _best_combination(
        {flips: state.products.total(slots) for flips, slots in groups.items()}, spec.signs if signs else 0
    )
    present = torch.arange(spec.size).expand(similarity.shape[:2])
    order = torch.stack([linear_assignment(x) for x in similarity]) if spec.permutes else present
    parts = {"permutation": order} if spec.permutes else {}
    if pattern is not None:
        chosen = pattern.gather(-1, order.unsqueeze(-1)).squeeze(-1)  # the combination of every unit of A
        table = torch.tensor(list(product((1.0, -1.0), repeat=spec.signs)), dtype=torch.float64)
        parts["sign"] = table[torch.empty_like(chosen).scatter_(-1, order, chosen)].movedim(-1, 0)
    stays = torch.equal(order, present) and bool((parts["sign"] > 0).all() if "sign" in parts else True)
    return {} if stays else {w: state.move(w, **parts)}


def _best_combination(
    similarities: Mapping[tuple[int, ...], Tensor], count: int
) -> tuple[Float[Tensor, "copies n n"], Tensor | None]:
    """The similarity of each pair of units with their best combination of signs, and which combination that is."""
    if not 0 < count <= MOST_SIGNS:
        return sum(similarities.values(), torch.zeros(())), None
    ways = []
    for combination in product((0, 1), repeat=count):
        parity = {flips: sum(f * c for f, c in zip(flips, combination, strict=False)) % 2 for flips in similarities}
        ways.append(sum((-x if parity[flips] else x for flips, x in similarities.items()), torch.zeros(())))
    best = torch.stack(ways).max(0)
    return best.values, best.indices


def _nested_moves(state: MatchingState, w: int, nested: list[int]) -> dict[int, Move]:
    """The best order of a wire and of the wires nested in it; empty if all stay."""
    n = state.wire_specs[w].size
    total = torch.zeros(n, n, dtype=torch.float64)
    entered = {slot.block for t in nested for slot in state.slots[t]}
    for slot in state.slots[w]:
        if slot.block not in entered:
            total += _products(state.rows_of_a(slot), state.rows_of_b(slot))[0].double()
    orders = {}
    for t in nested:
        orders[t], value = nested_assignment(_nested_similarity(state, t))
        total += value
    partner = linear_assignment(total)
    moves = {w: state.move(w, permutation=partner)}
    stays = torch.equal(partner, torch.arange(n))
    for t in nested:
        order = at_source(orders[t][torch.arange(n), partner], partner)
        stays = stays and bool((order == torch.arange(order.shape[-1])).all())
        moves[t] = state.move(t, permutation=order)
    return {} if stays else moves


def _nested_similarity(state: MatchingState, t: int) -> Float[Tensor, "outer outer n n"]:
    """The similarity of nested units, for every unit of A and of B that holds them."""
    total = torch.zeros((), dtype=torch.float64)
    for slot in state.slots[t]:
        x, y = state.rows_of_a(slot), state.rows_of_b(slot)
        outer, n, entries = x.shape
        flat = _products(x.reshape(1, outer * n, entries), y.reshape(1, outer * n, entries))[0]
        total = total + flat.reshape(outer, n, outer, n).transpose(1, 2).double()
    return total


def _products(x: Tensor, y: Tensor) -> Float[Tensor, "copies n m"]:
    """Inner products of all rows; short rows in double precision, which costs nothing there."""
    if x.shape[-1] <= SHORT:
        x, y = x.double(), y.double()
    return torch.matmul(x, y.mT).cpu()
