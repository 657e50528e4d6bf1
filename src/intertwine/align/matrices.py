"""The best matrix of one strand, all else held still: orthogonal by Procrustes, general by Gauss–Newton.

Everything is read off Gram matrices of slices, n × n per copy of the strand. Write B₊ for the slices that a matrix G
multiplies (values, queries) and B₋ for those that its inverse transpose does (outputs, keys), A₊ and A₋ for their
partners.

- Orthogonal (kind "O"): G and its inverse transpose are one, and the nearest one to A B⁻¹ is the orthogonal factor of
  A₊B₊ᵀ + A₋B₋ᵀ. Kind "O1" also keeps the all-ones vector, so the factor is taken on its complement.
- General (kind "GL"): ‖A₊ − G B₊‖² + ‖A₋ − G⁻ᵀ B₋‖² has no closed minimum. With a step G ← exp(X) G its linear part
  asks for X S₊ + S₋ X = A₊B₊ᵀ − S₊ − (A₋B₋ᵀ − S₋)ᵀ, where S = B Bᵀ: a Sylvester equation, solved by two
  eigendecompositions. There may be several minima, so it has several starts, and the best one is kept.

The objective of a general matrix depends on the basis that A itself has chosen: a factor moved from A₊ to A₋ changes
no function, yet changes which distances count. `balanced_matrix` gives the basis in which both sides have equal Gram
matrices, which is also the one of least length.

Where a strand enters one block twice, the step is the slope's; `Pair.step` keeps it only if the objective itself falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from intertwine.align.pair import Pair
from intertwine.shapes import Float
from intertwine.symmetry.element import Move, identity_move, ones_first_basis

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


def turn(pair: Pair, s: int) -> bool:
    """Give a strand its best matrices; whether anything moved."""
    found = best_matrix(pair, s, grams(pair, s))
    if s not in pair.around[s]:
        return pair.step({s: matrix_move(pair, s, found)}, LEAST_GAIN)
    return pair.step({s: matrix_move(pair, s, found)}, LEAST_GAIN) or _follow_slope(pair, s)


def best_matrix(pair: Pair, s: int, products: Grams) -> Square:
    """The matrix of the strand's own kind that fits some products best."""
    kind = pair.strands[s].matrix
    return nearest_general(products) if kind == "GL" else nearest_orthogonal(products.cross.sum(0), kind == "O1")


def matrix_move(pair: Pair, s: int, matrix: Square) -> Move:
    move = identity_move(pair.strands, s)
    assert move.matrix is not None
    return replace(move, matrix=matrix.reshape(move.matrix.shape))


def grams(pair: Pair, s: int, b: Sequence[Tensor] | None = None) -> Grams:
    """The products of a strand's slices, summed over its places; with other blocks of `b` where they are given."""
    shape = pair.copies(s), pair.strands[s].size
    cross, own_a, own_b = (torch.zeros(2, shape[0], shape[1], shape[1], dtype=torch.float64) for _ in range(3))
    for place in pair.places[s]:
        side = 0 if place.leaf.powers[0] > 0 else 1
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


def _follow_slope(pair: Pair, s: int) -> bool:
    """A step down the slope of the objective, halved until the objective falls."""
    products = grams(pair, s)
    size = _trace(products.b.sum(0))
    if pair.strands[s].matrix == "GL":
        slope = (products.cross[0] - products.b[0]) - (products.cross[1] - products.b[1]).mT
        step = _sylvester(products.b[0], products.b[1], slope, 1e-3 * size)
    else:
        cross = products.cross.sum(0)
        if pair.strands[s].matrix == "O1":
            inside = torch.eye(cross.shape[-1], dtype=cross.dtype) - 1 / cross.shape[-1]
            cross = inside @ cross @ inside
        step = (cross - cross.mT) / torch.linalg.matrix_norm(cross, 2).clamp(min=1e-300)[..., None, None]
    step = step / torch.linalg.matrix_norm(step).clamp(min=1.0)[..., None, None]
    return any(
        pair.step({s: matrix_move(pair, s, torch.matrix_exp(step / 2**i))}, LEAST_GAIN) for i in range(SHORTER + 1)
    )
