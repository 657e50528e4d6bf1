"""The best matrix of one wire: orthogonal by Procrustes, general by Gauss-Newton; and matching of attention heads that
carry a matrix, by products that do not depend on the basis inside a head.

Everything is computed from Gram matrices of slices, n × n per copy of the wire. B₊ are the slices that a matrix G
multiplies (values, queries), B₋ those that its inverse transpose multiplies (outputs, keys); A₊ and A₋ are their
partners.

- Orthogonal (kind "O"): G is its own inverse transpose, and the nearest one is the orthogonal factor of A₊B₊ᵀ + A₋B₋ᵀ.
  Kind "O1" also keeps the all-ones vector, so the factor is taken on its complement.
- General (kind "GL"): ‖A₊ − G B₊‖² + ‖A₋ − G⁻ᵀ B₋‖² has no closed-form minimum. With a step G ← exp(X) G its
  linear part gives X S₊ + S₋ X = A₊B₊ᵀ − S₊ − (A₋B₋ᵀ − S₋)ᵀ, where S = B Bᵀ: a Sylvester equation, solved by two
  eigendecompositions. There may be several minima, so the search has several starts and keeps the best.

The objective of a general matrix depends on the basis in A: moving a factor from A₊ to A₋ keeps the function but
changes the distance. `balanced_matrix` gives the basis in which both sides have equal Gram matrices, of minimal norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.align.matching import at_source, linear_assignment, nested_assignment
from intertwine.align.state import MatchingState, StateSlot
from intertwine.argument_types import Float
from intertwine.symmetry.element import Element, Move, ones_first_basis

LEAST_GAIN = 1e-7  # a decrease of the objective, as a share of it, that is worth a step
STEPS = 40  # of Gauss–Newton
TRIED = 4  # steps of every start before only the best one continues
CONVERGED = 1e-13  # a decrease of the objective, as a share of the squared length, that ends the search
WORST = 1e6  # a start needs a smaller condition number
SHORTER = 6  # how often a step of a wire that enters a block twice is halved

Square = Float[Tensor, "*copies n n"]
Fit = Float[Tensor, "heads heads"]


@dataclass(frozen=True)
class Grams:
    """Products of slices, in double precision: side 0 is what a matrix multiplies, side 1 what its inverse does."""

    cross: Float[Tensor, "2 *copies n n"]  # A Bᵀ
    a: Float[Tensor, "2 *copies n n"]  # A Aᵀ
    b: Float[Tensor, "2 *copies n n"]  # B Bᵀ


def matrix_step(state: MatchingState, w: int) -> bool:
    """Give a wire its best matrices; whether anything moved. One that enters a block twice follows the gradient."""
    moved = state.step({w: state.move(w, matrix=best_matrix(state, w, grams(state, w)))}, LEAST_GAIN)
    return moved or (w in state.neighbours[w] and _gradient_step(state, w))


def best_matrix(state: MatchingState, w: int, products: Grams) -> Square:
    """The matrix of the wire's own kind that fits some products best."""
    kind = state.wire_specs[w].matrix
    return nearest_general(products) if kind == "GL" else nearest_orthogonal(products.cross.sum(0), kind == "O1")


def grams(state: MatchingState, w: int, b: Sequence[Tensor] | None = None) -> Grams:
    """The products of a wire's slices, summed over its slots; `b`: blocks to use instead of the present ones."""
    n = state.wire_specs[w].size
    cross, own_a, own_b = (torch.zeros(2, state.copies(w), n, n, dtype=torch.float64) for _ in range(3))
    for slot in state.slots[w]:
        side = 0 if slot.axis.powers[0] > 0 else 1
        x = state.rows_of_a(slot).double()
        y = slot.rows((state.b if b is None else b)[slot.block]).double()
        cross[side] += (x @ y.mT).cpu()
        own_a[side] += (x @ x.mT).cpu()
        own_b[side] += (y @ y.mT).cpu()
    return Grams(cross, own_a, own_b)


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


def nearest_general(products: Grams) -> Square:
    """The invertible G of least ‖A₊ − G B₊‖² + ‖A₋ − G⁻ᵀ B₋‖²; the identity where one of the sides is zero."""
    one = torch.eye(products.b.shape[-1], dtype=torch.float64).expand(products.b.shape[1:]).contiguous()
    starts = torch.stack([one, *(_well_conditioned(x, one) for x in _starts(products))])
    ends, values = _gauss_newton(products, starts, TRIED)
    best = values.argmin(0)[None, ..., None, None].expand(1, *one.shape)
    found = _gauss_newton(products, ends.gather(0, best), STEPS)[0][0]
    return torch.where((_trace(products.b) > 0).all(0)[..., None, None], found, one)


def balanced_matrix(own: Float[Tensor, "2 *copies n n"]) -> Square:
    """The symmetric G with G S₊ Gᵀ = G⁻ᵀ S₋ G⁻¹ for the Gram matrices S₊, S₋ of the two sides."""
    plus, minus = own
    root, back = _power(plus, 0.5), _power(plus, -0.5)
    return _power(back @ _power(root @ minus @ root, 0.5) @ back, 0.5)


def _starts(products: Grams) -> list[Square]:
    """Least squares on either side; and the orthogonal fit between the balanced bases of A and of B."""
    plus, minus = (
        torch.linalg.solve(s + _damping(s), c.mT).mT for s, c in zip(products.b, products.cross, strict=True)
    )
    here, there = balanced_matrix(products.a), balanced_matrix(products.b)
    cross = here @ products.cross[0] @ there.mT + _inverse(here).mT @ products.cross[1] @ _inverse(there)
    fit = nearest_orthogonal(cross.nan_to_num(0.0, 0.0, 0.0))
    return [plus, _inverse(minus).mT, _inverse(here) @ fit @ there]


def _damping(matrix: Square) -> Square:
    n, info = matrix.shape[-1], torch.finfo(matrix.dtype)
    size = (_trace(matrix) / n).clamp(min=info.tiny)
    return info.eps * n * size[..., None, None] * torch.eye(n, dtype=matrix.dtype)


def _well_conditioned(matrix: Square, otherwise: Square) -> Square:
    """A matrix, or another where it is not finite or nearly singular."""
    spectrum = torch.linalg.svdvals(matrix.nan_to_num(0.0, 0.0, 0.0))
    good = matrix.isfinite().all(-1).all(-1) & (spectrum[..., -1] * WORST > spectrum[..., 0])
    return torch.where(good[..., None, None], matrix, otherwise)


def _inverse(matrix: Square) -> Square:
    """The inverse; NaN where there is none."""
    inverse, info = torch.linalg.inv_ex(matrix.nan_to_num(0.0, 0.0, 0.0))
    return torch.where((info == 0)[..., None, None], inverse, torch.nan)


def _power(matrix: Square, power: float) -> Square:
    """A power of a symmetric positive semi-definite matrix; eigenvalues below rounding are raised to it."""
    values, vectors = torch.linalg.eigh(matrix.nan_to_num(0.0, 0.0, 0.0))
    least = values.amax(-1, keepdim=True).clamp(min=0) * torch.finfo(values.dtype).eps
    return vectors @ (values.clamp(min=least).pow(power).unsqueeze(-1) * vectors.mT)


def _gauss_newton(products: Grams, g: Square, steps: int) -> tuple[Square, Float[Tensor, "*copies"]]:
    """Minima near some matrices, with the values there; a step that does not lower the value is damped and repeated."""
    value, slope, plus, minus = _linearise(products, g)
    size = _trace(plus) + _trace(minus)
    damping = 1e-6 * size
    for _ in range(steps):
        step = _sylvester(plus, minus, slope, damping)
        long = torch.linalg.matrix_norm(step)
        trial = torch.matrix_exp(step / long.clamp(min=1.0)[..., None, None]) @ g
        new_value, *new = _linearise(products, trial)
        better = new_value < value + 4 * torch.finfo(torch.float64).eps * size  # rounding must not stop the last steps
        falls = torch.where(better, value - new_value, torch.inf)
        keep = better[..., None, None]
        g = torch.where(keep, trial, g)
        slope, plus, minus = (torch.where(keep, x, old) for x, old in zip(new, (slope, plus, minus), strict=True))
        value = torch.where(better, new_value, value)
        damping = torch.where(better, damping / 4, damping * 8 + 1e-9 * size)
        if bool((falls <= CONVERGED * size).all()):
            break
    return g, value


def _linearise(products: Grams, g: Square) -> tuple[Tensor, Square, Square, Square]:
    """At G: the objective up to a constant, the right side of the Sylvester equation, S₊ and S₋."""
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


def _gradient_step(state: MatchingState, w: int) -> bool:
    """A step along the negative gradient of the objective, halved until the objective falls."""
    products = grams(state, w)
    if state.wire_specs[w].matrix == "GL":
        slope = (products.cross[0] - products.b[0]) - (products.cross[1] - products.b[1]).mT
        step = _sylvester(products.b[0], products.b[1], slope, 1e-3 * _trace(products.b.sum(0)))
    else:
        cross = products.cross.sum(0)
        if state.wire_specs[w].matrix == "O1":
            inside = torch.eye(cross.shape[-1], dtype=cross.dtype) - 1 / cross.shape[-1]
            cross = inside @ cross @ inside
        step = (cross - cross.mT) / torch.linalg.matrix_norm(cross, 2).clamp(min=1e-300)[..., None, None]
    step = step / torch.linalg.matrix_norm(step).clamp(min=1.0)[..., None, None]
    return any(
        state.step({w: state.move(w, matrix=torch.matrix_exp(step / 2**i))}, LEAST_GAIN) for i in range(SHORTER + 1)
    )


# -- Attention heads --


@dataclass(frozen=True)
class HeadGroup:
    """A wire of heads and the movable wires over it alone, by what they carry."""

    heads: int
    matrices: tuple[int, ...]
    scales: tuple[int, ...]
    orders: tuple[int, ...]

    @staticmethod
    def of(state: MatchingState, w: int) -> HeadGroup:
        specs = {t: state.wire_specs[t] for t in sorted(state.movable) if state.wire_specs[t].bases == (w,)}

        def two_sided(t: int) -> bool:
            return all(abs(slot.axis.powers[0]) == 1 for slot in state.slots[t])

        return HeadGroup(
            w,
            tuple(t for t, spec in specs.items() if spec.matrix),
            tuple(t for t, spec in specs.items() if spec.scales == 1 and not spec.permutes and two_sided(t)),
            tuple(t for t, spec in specs.items() if spec.permutes),
        )


def head_step(state: MatchingState, w: int) -> bool:
    """Give heads that hold matrices their best order, with the best matrices inside; whether anything moved.

    The similarity of head i of A and head j of B must not depend on the bases inside. A matrix inside a head multiplies
    some slices X₊ (queries) and divides others, X₋ (keys), so X₊ᵀX₋ is invariant. The inner product of two such
    products is Σ (X₊Y₊ᵀ) ∘ (X₋Y₋ᵀ), a sum over small matrices. Where a head holds scales instead of a matrix
    (queries and keys under rotary positions), the same holds index by index, on the diagonals of the small matrices.

    Units inside a head that have an order (queries that share a key) are ordered with it, each pair of heads by its own
    best order. Then every head of B gets its best matrices towards its partner, and all of it is one step.
    """
    group = HeadGroup.of(state, w)
    if not group.matrices or not state.wire_specs[w].permutes:
        return False
    moves = _orders(state, group)
    step = Element(state.wire_specs, dict(moves), state.symmetry.signature)
    partner = moves[w].permutation
    if partner is None or not step.without_identities().moves:
        return False  # what is inside has steps of its own
    moved = [state.act(step, i) if i in state.blocks_of[w] else x for i, x in enumerate(state.b)]
    for t in group.matrices:
        found = best_matrix(state, t, grams(state, t, moved))
        moves[t] = state.move(t, matrix=at_source(found, partner))
    return state.step(moves, LEAST_GAIN)


def _orders(state: MatchingState, group: HeadGroup) -> dict[int, Move]:
    """The best order of heads, and of what has an order inside them."""
    n = state.wire_specs[group.heads].size
    total = torch.zeros(n, n, dtype=torch.float64)
    sizes = {u: state.wire_specs[u].size for u in group.orders}
    inside = {u: torch.zeros(n, n, k, k, dtype=torch.float64) for u, k in sizes.items()}
    for t in (*group.matrices, *group.scales):
        plain, split = _invariant_fit(state, group, t)
        total += plain
        for u, fit in split.items():
            inside[u] += fit
    for u, fit in _plain_fits(state, group):
        if u is None:
            total += fit
        else:
            inside[u] += fit
    orders = {u: nested_assignment(fit) for u, fit in inside.items()}
    partner = linear_assignment(total + sum((value for _, value in orders.values()), torch.zeros(())))
    moves = {group.heads: state.move(group.heads, permutation=partner)}
    for u, (order, _) in orders.items():
        moves[u] = state.move(u, permutation=at_source(order[torch.arange(n), partner], partner))
    return moves


def _invariant_fit(state: MatchingState, group: HeadGroup, t: int) -> tuple[Fit, dict[int, Tensor]]:
    """The similarity of heads through one inner wire: alone, and per unit of an ordered wire in the same blocks.

    Products of weights are rescaled to the size of weights, so that they can be added to other similarities.
    """
    n, diagonal = state.wire_specs[group.heads].size, t in group.scales
    whole: list[Tensor | float] = [0.0, 0.0]
    split: list[dict[int, Tensor]] = [{}, {}]
    for slot in state.slots[t]:
        side = 0 if slot.axis.powers[0] > 0 else 1
        u = _order_beside(state, group, slot)
        x, y = (_slices(state, blocks[slot.block], slot, u) for blocks in (state.a, state.b))
        products = torch.einsum("igae,jhae->ijgha" if diagonal else "igae,jhbe->ijghab", x, y).cpu()
        if u is None:
            whole[side] = whole[side] + products
        else:
            split[side][u] = split[side].get(u, torch.zeros(())) + products
    size = _weight(state, t, diagonal)
    plain = _inner(whole[0], whole[1], n)[..., 0, 0]
    fits: dict[int, Tensor] = {}
    for u in {*split[0], *split[1]}:
        parts = [(split[0].get(u, 0.0), whole[1]), (whole[0], split[1].get(u, 0.0)), (split[0].get(u), split[1].get(u))]
        found = [_inner(p, q, n) for p, q in parts if isinstance(p, Tensor) and isinstance(q, Tensor)]
        if found:
            fits[u] = size * sum(found, torch.zeros(()))
    return size * plain, fits


def _inner(p: Tensor | float, q: Tensor | float, n: int) -> Float[Tensor, "heads heads g h"]:
    """Σ P ∘ Q over the small matrices; zero where a side is missing."""
    if not (isinstance(p, Tensor) and isinstance(q, Tensor)):
        return torch.zeros(n, n, 1, 1, dtype=torch.float64)
    return (p * q).flatten(4).sum(-1)


def _weight(state: MatchingState, t: int, diagonal: bool) -> float:
    """Squared length of a wire's slices over that of their products."""
    found = grams(state, t)
    own = torch.stack([found.a, found.b])  # A or B, side, copies, n, n
    lengths = own.diagonal(dim1=-2, dim2=-1)
    here, there = ((lengths if diagonal else own).prod(1).flatten(1).sum(-1)).tolist()
    return float(lengths.sum()) / 2 / (here * there) ** 0.5 if here * there > 0 else 0.0


def _plain_fits(state: MatchingState, group: HeadGroup) -> Iterator[tuple[int | None, Tensor]]:
    """Inner products of whole heads, or of their units, in blocks that no matrix or scale inside them enters."""
    entered = {slot.block for t in (*group.matrices, *group.scales) for slot in state.slots[t]}
    for u in (None, *group.orders):
        for slot in state.slots[group.heads if u is None else u]:
            if slot.block not in entered and not (u is None and _order_beside(state, group, slot)):
                x, y = state.rows_of_a(slot).double(), state.rows_of_b(slot).double()
                yield u, torch.einsum("xie,xje->ij" if u is None else "ige,jhe->ijgh", x, y).cpu()


def _order_beside(state: MatchingState, group: HeadGroup, slot: StateSlot) -> int | None:
    """The ordered wire of the group that stands in the same block."""
    return next((u for u in group.orders if state.blocks[slot.block].places(u)), None)


def _slices(
    state: MatchingState, block: Tensor, slot: StateSlot, u: int | None
) -> Float[Tensor, "heads units n entries"]:
    """The slices of an inner wire, per head and per unit of an ordered wire beside it; one unit if there is none."""
    if u is None:
        return slot.rows(block).double().unsqueeze(1)
    beside = state.blocks[slot.block].places(u)[0]
    order = (slot.front[0], beside, slot.front[1], *(d for d in slot.rest if d != beside))
    return block.permute(*order).flatten(3).double() if block.ndim > 3 else block.permute(*order)[..., None].double()
