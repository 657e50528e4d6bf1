"""The best matrix of one wire: orthogonal by Procrustes, general by Gauss-Newton; and matching of attention heads that
carry a matrix, by products that do not depend on the basis inside a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.align.state import MatchingState, StateSlot
from intertwine.argument_types import Float
from intertwine.symmetry.element import Element, Move, identity_move, ones_first_basis

# ----------------------------------------------------------------------------------------------------
# The best matrix of one strand, all else held still: orthogonal by Procrustes, general by Gauss–Newton.
#
# Everything is read off Gram matrices of slices, n × n per copy of the strand. Write B₊ for the slices that a matrix G
# multiplies (values, queries) and B₋ for those that its inverse transpose does (outputs, keys), A₊ and A₋ for their
# partners.
#
# - Orthogonal (kind "O"): G and its inverse transpose are one, and the nearest one to A B⁻¹ is the orthogonal factor of
#   A₊B₊ᵀ + A₋B₋ᵀ. Kind "O1" also keeps the all-ones vector, so the factor is taken on its complement.
# - General (kind "GL"): ‖A₊ − G B₊‖² + ‖A₋ − G⁻ᵀ B₋‖² has no closed minimum. With a step G ← exp(X) G its linear part
#   asks for X S₊ + S₋ X = A₊B₊ᵀ − S₊ − (A₋B₋ᵀ − S₋)ᵀ, where S = B Bᵀ: a Sylvester equation, solved by two
#   eigendecompositions. There may be several minima, so it has several starts, and the best one is kept.
#
# The objective of a general matrix depends on the basis that A itself has chosen: a factor moved from A₊ to A₋ changes
# no function, yet changes which distances count. `balanced_matrix` gives the basis in which both sides have equal Gram
# matrices, which is also the one of least length.
#
# Where a strand enters one block twice, the step is the slope's; `Pair.step` keeps it only if the objective itself falls.


LEAST_GAIN = 1e-7  # a fall of the objective, as a share of it, that is worth a step
STEPS = 40  # of Gauss–Newton
TRIED = 4  # steps of every start before the best one goes on alone
ARRIVED = 1e-13  # a fall of the objective, as a share of the squared length, after which G stays
WORST = 1e6  # the condition of a matrix above which it is no start
SHORTER = 6  # how often a step of a strand that enters a block twice is halved

Square = Float[Tensor, "*copies n n"]


@dataclass(frozen=True)
class Grams:
    """Products of slices, in double precision: side 0 is what a matrix multiplies, side 1 what its inverse does."""

    cross: Float[Tensor, "2 *copies n n"]  # A Bᵀ
    a: Float[Tensor, "2 *copies n n"]  # A Aᵀ
    b: Float[Tensor, "2 *copies n n"]  # B Bᵀ


def matrix_step(pair: MatchingState, s: int) -> bool:
    """Give a strand its best matrices; whether anything moved."""
    found = best_matrix(pair, s, grams(pair, s))
    if s not in pair.around[s]:
        return pair.step({s: matrix_move(pair, s, found)}, LEAST_GAIN)
    return pair.step({s: matrix_move(pair, s, found)}, LEAST_GAIN) or _follow_slope(pair, s)


def best_matrix(pair: MatchingState, s: int, products: Grams) -> Square:
    """The matrix of the strand's own kind that fits some products best."""
    kind = pair.wire_specs[s].matrix
    return nearest_general(products) if kind == "GL" else nearest_orthogonal(products.cross.sum(0), kind == "O1")


def matrix_move(pair: MatchingState, s: int, matrix: Square) -> Move:
    move = identity_move(pair.wire_specs, s)
    assert move.matrix is not None
    return replace(move, matrix=matrix.reshape(move.matrix.shape))


def grams(pair: MatchingState, s: int, b: Sequence[Tensor] | None = None) -> Grams:
    """The products of a strand's slices, summed over its places; with other blocks of `b` where they are given."""
    shape = pair.copies(s), pair.wire_specs[s].size
    cross, own_a, own_b = (torch.zeros(2, shape[0], shape[1], shape[1], dtype=torch.float64) for _ in range(3))
    for place in pair.places[s]:
        side = 0 if place.axis.powers[0] > 0 else 1
        x = pair.rows_of_a(place).double()
        y = place.rows((pair.b if b is None else b)[place.block]).double()
        cross[side] += (x @ y.mT).cpu()
        own_a[side] += (x @ x.mT).cpu()
        own_b[side] += (y @ y.mT).cpu()
    return Grams(cross, own_a, own_b)


# -- orthogonal --------------------------------------------------------------------------------------------------------


def nearest_orthogonal(cross: Square, keep_ones: bool = False) -> Square:
    """The orthogonal Q with the largest ⟨Q, cross⟩; with `keep_ones` among those that fix the all-ones vector."""
    if keep_ones:
        basis = ones_first_basis(cross.shape[-1]).to(cross.dtype)
        inside = basis.mT @ cross @ basis
        found = torch.zeros_like(inside)
        found[..., 0, 0] = 1
        found[..., 1:, 1:] = nearest_orthogonal(inside[..., 1:, 1:])
        return basis @ found @ basis.mT
    left, _, right = torch.linalg.svd(cross)
    return left @ right


# -- general -----------------------------------------------------------------------------------------------------------


def nearest_general(products: Grams) -> Square:
    """The invertible G of least ‖A₊ − G B₊‖² + ‖A₋ − G⁻ᵀ B₋‖²; the identity where one of the sides is zero."""
    n = products.b.shape[-1]
    one = torch.eye(n, dtype=torch.float64).expand(products.b.shape[1:]).contiguous()
    starts = torch.stack([one, *(_sound(x, one) for x in _starts(products))])
    ends, values = _gauss_newton(products, starts, TRIED)
    best = values.argmin(0)[None, ..., None, None].expand(1, *one.shape)
    found = _gauss_newton(products, ends.gather(0, best), STEPS)[0][0]
    lengths = products.b.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where((lengths > 0).all(0)[..., None, None], found, one)


def balanced_matrix(own: Float[Tensor, "2 *copies n n"]) -> Square:
    """The symmetric G with G S₊ Gᵀ = G⁻ᵀ S₋ G⁻¹ for the Gram matrices S₊, S₋ of the two sides."""
    plus, minus = own
    root = _power(plus, 0.5)
    back = _power(plus, -0.5)
    return _power(back @ _power(root @ minus @ root, 0.5) @ back, 0.5)


def _starts(products: Grams) -> list[Square]:
    """Least squares on either side; and the orthogonal fit between the balanced bases of A and of B."""
    tiny = torch.finfo(torch.float64).eps
    plus, minus = (
        torch.linalg.solve(s + _damping(s, tiny), c.mT).mT for s, c in zip(products.b, products.cross, strict=True)
    )
    here, there = balanced_matrix(products.a), balanced_matrix(products.b)
    cross = here @ products.cross[0] @ there.mT + _inverse(here).mT @ products.cross[1] @ _inverse(there)
    fit = nearest_orthogonal(cross.nan_to_num(0.0, 0.0, 0.0))
    return [plus, _inverse(minus).mT, _inverse(here) @ fit @ there]


def _sound(matrix: Square, otherwise: Square) -> Square:
    """A matrix, or another where it is not finite or nearly singular."""
    spectrum = torch.linalg.svdvals(matrix.nan_to_num(0.0, 0.0, 0.0))
    good = matrix.isfinite().all(-1).all(-1) & (spectrum[..., -1] * WORST > spectrum[..., 0])
    return torch.where(good[..., None, None], matrix, otherwise)


def _inverse(matrix: Square) -> Square:
    """The inverse; not a number where there is none."""
    inverse, info = torch.linalg.inv_ex(matrix.nan_to_num(0.0, 0.0, 0.0))
    return torch.where((info == 0)[..., None, None], inverse, torch.nan)


def _power(matrix: Square, power: float) -> Square:
    """A power of a symmetric matrix without negative eigenvalues; those that round to nothing count as rounding."""
    values, vectors = torch.linalg.eigh(matrix.nan_to_num(0.0, 0.0, 0.0))
    least = values.amax(-1, keepdim=True).clamp(min=0) * torch.finfo(values.dtype).eps
    return vectors @ (values.clamp(min=least).pow(power).unsqueeze(-1) * vectors.mT)


def _damping(matrix: Square, share: float) -> Square:
    n = matrix.shape[-1]
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(matrix.dtype).tiny)
    return share * n * size[..., None, None] * torch.eye(n, dtype=matrix.dtype)


def _gauss_newton(products: Grams, g: Square, steps: int) -> tuple[Square, Float[Tensor, "*copies"]]:
    """Minima near some matrices, with the values there; a step that does not lower the value is damped and repeated."""
    value, slope, plus, minus = _look(products, g)
    size = _trace(plus) + _trace(minus)
    damping = 1e-6 * size
    for _ in range(steps):
        step = _sylvester(plus, minus, slope, damping)
        long = torch.linalg.matrix_norm(step)
        trial = torch.matrix_exp(step / long.clamp(min=1.0)[..., None, None]) @ g
        seen = _look(products, trial)
        better = seen[0] < value + 4 * torch.finfo(torch.float64).eps * size  # rounding must not stop the last steps
        falls = torch.where(better, value - seen[0], torch.inf)
        keep = better[..., None, None]
        g, slope = torch.where(keep, trial, g), torch.where(keep, seen[1], slope)
        plus, minus = torch.where(keep, seen[2], plus), torch.where(keep, seen[3], minus)
        value = torch.where(better, seen[0], value)
        damping = torch.where(better, damping / 4, damping * 8 + 1e-9 * size)
        if bool((falls <= ARRIVED * size).all()):
            break
    return g, value


def _look(products: Grams, g: Square) -> tuple[Tensor, Square, Square, Square]:
    """At G: the objective but for a constant, the right side of the Sylvester equation, S₊ and S₋."""
    h = torch.linalg.inv(g).mT
    plus, minus = g @ products.b[0] @ g.mT, h @ products.b[1] @ h.mT
    cross_plus, cross_minus = products.cross[0] @ g.mT, products.cross[1] @ h.mT
    value = _trace(plus) - 2 * _trace(cross_plus) + _trace(minus) - 2 * _trace(cross_minus)
    return value, (cross_plus - plus) - (cross_minus - minus).mT, plus, minus


def _sylvester(plus: Square, minus: Square, right: Square, damping: Float[Tensor, "*copies"]) -> Square:
    """X with X S₊ + S₋ X + damping · X = right."""
    (u, left_of), (v, right_of) = torch.linalg.eigh(plus), torch.linalg.eigh(minus)
    weight = v.clamp(min=0)[..., :, None] + u.clamp(min=0)[..., None, :] + damping[..., None, None]
    inside = right_of.mT @ right @ left_of
    return right_of @ torch.where(weight > 0, inside / weight, 0.0) @ left_of.mT


def _trace(matrix: Square) -> Float[Tensor, "*copies"]:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


# -- strands that enter a block twice ----------------------------------------------------------------------------------


def _follow_slope(pair: MatchingState, s: int) -> bool:
    """A step down the slope of the objective, halved until the objective falls."""
    products = grams(pair, s)
    size = _trace(products.b.sum(0))
    if pair.wire_specs[s].matrix == "GL":
        slope = (products.cross[0] - products.b[0]) - (products.cross[1] - products.b[1]).mT
        step = _sylvester(products.b[0], products.b[1], slope, 1e-3 * size)
    else:
        cross = products.cross.sum(0)
        if pair.wire_specs[s].matrix == "O1":
            inside = torch.eye(cross.shape[-1], dtype=cross.dtype) - 1 / cross.shape[-1]
            cross = inside @ cross @ inside
        step = (cross - cross.mT) / torch.linalg.matrix_norm(cross, 2).clamp(min=1e-300)[..., None, None]
    step = step / torch.linalg.matrix_norm(step).clamp(min=1.0)[..., None, None]
    return any(
        pair.step({s: matrix_move(pair, s, torch.matrix_exp(step / 2**i))}, LEAST_GAIN) for i in range(SHORTER + 1)
    )


# ----------------------------------------------------------------------------------------------------
# Heads matched by what they do: a strand of units that each hold a basis of their own.
#
# How well head i of A and head j of B fit must not depend on the bases inside. A matrix inside a head multiplies some
# slices X₊ (queries) and divides others, X₋ (keys), so X₊ᵀX₋ does not know of it. The inner product of two such products
# is Σ (X₊Y₊ᵀ) ∘ (X₋Y₋ᵀ), a sum over matrices as small as the head. Where a head holds scales instead of a matrix (queries
# and keys under rotary positions), the same holds index by index, on the diagonals of the small matrices.
#
# Units inside a head that have an order (queries that share a key) are ordered along with it, each pair of heads by its
# own best order. Then every head of B gets its best matrices towards its partner, and the whole is one step.


Fit = Float[Tensor, "heads heads"]


@dataclass(frozen=True)
class HeadGroup:
    """A strand of heads and the movable strands fibred over it alone, by what they carry."""

    heads: int
    matrices: tuple[int, ...]
    scales: tuple[int, ...]
    orders: tuple[int, ...]


def head_step(pair: MatchingState, s: int) -> bool:
    """Bring heads that hold matrices into the best order, with the best insides; whether anything moved."""
    family = _family(pair, s)
    if not family.matrices or not pair.wire_specs[s].permutes:
        return False
    moves = _orders(pair, family)
    if all(torch.equal(m.permutation, _still(pair, t)) for t, m in moves.items() if m.permutation is not None):
        return False  # what is inside has visits of its own
    step = Element(pair.wire_specs, moves, pair.symmetry.signature)
    partner = moves[s].permutation
    moved = [pair.act(step, i) if i in pair.touched[s] else x for i, x in enumerate(pair.b)]
    for t in family.matrices:
        found = best_matrix(pair, t, grams(pair, t, moved))
        moves[t] = matrix_move(pair, t, _at_source(found, partner))
    return pair.step(moves, LEAST_GAIN)


def _still(pair: MatchingState, t: int) -> Tensor:
    order = identity_move(pair.wire_specs, t).permutation
    assert order is not None
    return order


def _family(pair: MatchingState, s: int) -> HeadGroup:
    over = [t for t in sorted(pair.movable) if pair.wire_specs[t].bases == (s,)]
    strands = pair.wire_specs
    return HeadGroup(
        s,
        tuple(t for t in over if strands[t].matrix),
        tuple(t for t in over if strands[t].scales == 1 and not strands[t].permutes and _two_sided(pair, t)),
        tuple(t for t in over if strands[t].permutes),
    )


def _two_sided(pair: MatchingState, t: int) -> bool:
    return all(abs(place.axis.powers[0]) == 1 for place in pair.places[t])


def _at_source(found: Tensor, partner: Tensor | None) -> Tensor:
    """What each head of A asks of its partner, told by the partner's own number."""
    assert partner is not None
    told = torch.empty_like(found)
    told[partner] = found
    return told


def _orders(pair: MatchingState, family: HeadGroup) -> dict[int, Move]:
    """The best order of heads, and of what has an order inside them."""
    n = pair.wire_specs[family.heads].size
    total = torch.zeros(n, n, dtype=torch.float64)
    inside = {
        u: torch.zeros(n, n, k, k, dtype=torch.float64) for u in family.orders for k in (pair.wire_specs[u].size,)
    }
    for t in (*family.matrices, *family.scales):
        plain, split = _invariant_fit(pair, family, t)
        total += plain
        for u, fit in split.items():
            inside[u] += fit
    for u, fit in _plain_fits(pair, family):
        if u is None:
            total += fit
        else:
            inside[u] += fit
    orders = {u: _best_orders(fit) for u, fit in inside.items()}
    total += sum((value for _, value in orders.values()), torch.zeros(()))
    partner = torch.from_numpy(linear_sum_assignment(total.numpy(), maximize=True)[1])
    moves = {family.heads: replace(identity_move(pair.wire_specs, family.heads), permutation=partner)}
    for u, (order, _) in orders.items():
        own = order[torch.arange(n), partner]
        moves[u] = replace(identity_move(pair.wire_specs, u), permutation=_at_source(own, partner))
    return moves


def _best_orders(fit: Float[Tensor, "heads heads k k"]) -> tuple[Tensor, Fit]:
    """For every two heads: the best order of the units inside, and how well it fits."""
    values = fit.numpy()
    n, k = values.shape[0], values.shape[-1]
    orders, best = np.empty((n, n, k), dtype=np.int64), np.empty((n, n))
    for i, j in np.ndindex(n, n):
        orders[i, j] = linear_sum_assignment(values[i, j], maximize=True)[1]
        best[i, j] = values[i, j, np.arange(k), orders[i, j]].sum()
    return torch.from_numpy(orders), torch.from_numpy(best)


# -- fits --------------------------------------------------------------------------------------------------------------


def _invariant_fit(pair: MatchingState, family: HeadGroup, t: int) -> tuple[Fit, Mapping[int, Tensor]]:
    """How well heads fit through one inner strand: alone, and per unit of an ordered strand that shares its blocks.

    Products of weights are brought back to the size of weights, so that they can be added to other fits.
    """
    n, diagonal = pair.wire_specs[family.heads].size, t in family.scales
    whole: list[Tensor | float] = [0.0, 0.0]
    split: list[dict[int, Tensor]] = [{}, {}]
    for place in pair.places[t]:
        side = 0 if place.axis.powers[0] > 0 else 1
        u = _order_beside(pair, family, place)
        x, y = (_slices(pair, blocks[place.block], place, u) for blocks in (pair.a, pair.b))
        products = torch.einsum("igae,jhae->ijgha" if diagonal else "igae,jhbe->ijghab", x, y).cpu()
        if u is None:
            whole[side] = whole[side] + products
        else:
            split[side][u] = split[side].get(u, torch.zeros(())) + products
    size = _weight(pair, t, diagonal)
    plain = _inner(whole[0], whole[1], n)[..., 0, 0]
    fits: dict[int, Tensor] = {}
    for u in {*split[0], *split[1]}:
        parts = [(split[0].get(u, 0.0), whole[1]), (whole[0], split[1].get(u, 0.0)), (split[0].get(u), split[1].get(u))]
        found = [_inner(p, q, n) for p, q in parts if isinstance(p, Tensor) and isinstance(q, Tensor)]
        fits[u] = size * sum(found, torch.zeros(()))
    return size * plain, {u: fit for u, fit in fits.items() if fit.ndim}


def _inner(p: Tensor | float, q: Tensor | float, n: int) -> Float[Tensor, "heads heads g h"]:
    """Σ P ∘ Q over the small matrices; zero where a side is missing."""
    if not (isinstance(p, Tensor) and isinstance(q, Tensor)):
        return torch.zeros(n, n, 1, 1, dtype=torch.float64)
    return (p * q).flatten(4).sum(-1)


def _weight(pair: MatchingState, t: int, diagonal: bool) -> float:
    """Squared length of a strand's slices over that of their products."""
    found = grams(pair, t)
    own = torch.stack([found.a, found.b])  # A or B, side, copies, n, n
    lengths = own.diagonal(dim1=-2, dim2=-1)
    here, there = ((lengths if diagonal else own).prod(1).flatten(1).sum(-1)).tolist()
    return float(lengths.sum()) / 2 / (here * there) ** 0.5 if here * there > 0 else 0.0


def _plain_fits(pair: MatchingState, family: HeadGroup) -> Iterator[tuple[int | None, Tensor]]:
    """Inner products of whole heads, or of their units, in blocks that no matrix or scale inside them enters."""
    entered = {place.block for t in (*family.matrices, *family.scales) for place in pair.places[t]}
    for place in pair.places[family.heads]:
        if place.block not in entered and not _order_beside(pair, family, place):
            x, y = pair.rows_of_a(place).double(), pair.rows_of_b(place).double()
            yield None, torch.einsum("xie,xje->ij", x, y).cpu()
    for u in family.orders:
        for place in pair.places[u]:
            if place.block not in entered:
                x, y = pair.rows_of_a(place).double(), pair.rows_of_b(place).double()
                yield u, torch.einsum("ige,jhe->ijgh", x, y).cpu()


def _order_beside(pair: MatchingState, family: HeadGroup, place: StateSlot) -> int | None:
    """The ordered strand of the family that stands in the same block."""
    return next((u for u in family.orders if pair.blocks[place.block].places(u)), None)


def _slices(
    pair: MatchingState, block: Tensor, place: StateSlot, u: int | None
) -> Float[Tensor, "heads units n entries"]:
    """The slices of an inner strand, per head and per unit of an ordered strand beside it; one unit if none is."""
    if u is None:
        return place.rows(block).double().unsqueeze(1)
    beside = pair.blocks[place.block].places(u)[0]
    order = (place.front[0], beside, place.front[1], *(d for d in place.rest if d != beside))
    return block.permute(*order).flatten(3).double() if block.ndim > 3 else block.permute(*order)[..., None].double()
