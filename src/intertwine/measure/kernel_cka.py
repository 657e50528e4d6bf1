"""Centred kernel alignment with kernels of distances: Gaussian, and Laplace exp(−c‖x − y‖ₚᵖ) for p in [1, 2].

The Laplace kernel is the positive definite one that stays the same under signed permutations (Godfrey et al. 2022,
eq. 5.6); beyond p = 2 it is no kernel. Distances are taken in float64.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.measure.hsic import CONSTANT, CentredGram, align, centred_gram, nothing, reordered
from intertwine.measure.measure import PAIRS, Measure, register
from intertwine.measure.representation import Representation
from intertwine.shapes import Float

#: Of a squared distance smaller than this fraction of the squared lengths, too few digits are left by the product.
LOST = 1e-6
SIGNED = frozenset({"permutation", "signs", "isotropic scale", "translation"})


def powers(x: Float[Tensor, "samples features"], p: float, block: int = 512) -> Float[Tensor, "samples samples"]:
    """‖xᵢ − xⱼ‖ₚᵖ of all pairs in float64, block by block; exactly zero for equal samples.

    >>> powers(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), 1.0)
    tensor([[0., 7.],
            [7., 0.]], dtype=torch.float64)
    """
    n = len(x)
    out = torch.empty(n, n, dtype=torch.float64, device=x.device)
    for i in range(0, n, block):
        a = x[i : i + block].double()
        for j in range(i, n, block):
            b = x[j : j + block].double()
            part = _squares(a, b, i == j) if p == 2 else torch.cdist(a, b, p=p).pow_(p)
            if i == j:  # a product need not be symmetric to the last digit
                part = part.triu(1) + part.triu(1).T
            out[i : i + block, j : j + block] = part
            out[j : j + block, i : i + block] = part.T
    return out


def _squares(a: Tensor, b: Tensor, same: bool) -> Tensor:
    """Squared distances by one product, or from the differences where samples are so near that the product is not."""
    lengths = a.square().sum(1)[:, None] + b.square().sum(1)
    squares = torch.addmm(lengths, a, b.T, alpha=-2)
    lost = squares < LOST * lengths
    if same:
        lost.fill_diagonal_(False)
    if lost.any():
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square_()
    return squares


def median_power(distances: Float[Tensor, "samples samples"], p: float) -> float:
    """The median distance, to the power p, over pairs of different samples; 0 where there is no such pair.

    Sorted, the matrix begins with its zeros, and each pair follows twice.
    """
    flat = distances.flatten()
    zeros = int((flat == 0).sum())
    pairs = (len(flat) - zeros) // 2
    if not pairs:
        return 0.0
    low, high = (float(flat.kthvalue(zeros + 2 * k + 1).values) for k in ((pairs - 1) // 2, pairs // 2))
    return ((low ** (1 / p) + high ** (1 / p)) / 2) ** p


def _prepare(x: Representation, p: float, typical: float, biased: bool) -> CentredGram:
    """The centred Gram matrix of exp(−typical · (distance / median)ᵖ)."""
    if not x.size:
        return nothing(CONSTANT)
    gram = powers(x.centred.double() / x.size, p)
    gram *= -typical / median_power(gram, p)
    # A constant in all entries changes nothing, so of a wide kernel, which is near 1, only the difference is kept.
    gram = gram.expm1_() if typical < 1 else gram.exp_()
    return centred_gram(gram, biased, x.values.dtype)


def _kernel(
    name: str, p: float, typical: float, biased: bool, invariances: frozenset[str], reference: str, about: str
) -> Measure:
    return Measure(
        name, "similarity", (0.0 if biased else -1.0, 1.0), 1.0, invariances, reference, about,
        partial(_prepare, p=p, typical=typical, biased=biased), partial(align, name), 2 if biased else 4,
        permute_with=reordered, memory=PAIRS,
    )  # fmt: skip


def _checked(name: str, factor: float) -> float:
    if not 1e-6 <= factor <= 1e6:
        raise InputError(
            f"The measure {name} was asked for with factor={factor}, by which the median distance is multiplied. "
            "Give one between 1e-6 and 1e6; 0.2 to 2 are usual."
        )
    return float(factor)


@register
def rbf_cka(factor: float = 1.0, biased: bool = False) -> Measure:
    """CKA with Gaussian kernels exp(−‖x − y‖²/(2σ²)), where σ is `factor` times the median distance between samples.

    >>> x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    >>> round(float(rbf_cka(factor=0.8)(x, 3 * x + 1)), 6)
    1.0
    """
    typical = 0.5 / _checked("rbf_cka", factor) ** 2
    about = "CKA of Gaussian kernels, as wide as the median distance"
    return _kernel("rbf_cka", 2.0, typical, biased, SIGNED | {"orthogonal"}, "Kornblith et al. 2019", about)


@register
def laplace_cka(factor: float = 1.0, p: float = 1.0, biased: bool = False) -> Measure:
    """CKA with kernels exp(−(‖x − y‖ₚ/ℓ)ᵖ), where ℓ is `factor` times the median distance in the same norm.

    >>> x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    >>> round(float(laplace_cka()(x, -2 * x.flip(1))), 6)
    1.0

    Raises:
        InputError: p is not in [1, 2]; beyond 2 the kernel is not positive definite.
    """
    if not 1 <= p <= 2:
        raise InputError(
            f"The measure laplace_cka was asked for with p={p}. Give one in [1, 2]: beyond 2 the function "
            "exp(−c‖x − y‖ₚᵖ) is not positive definite, and below 1 ‖·‖ₚ is no norm."
        )
    typical = _checked("laplace_cka", factor) ** -float(p)
    about = "CKA of kernels exp(−c‖x − y‖ₚᵖ), which keep signed permutations apart from other rotations"
    invariances = SIGNED | ({"orthogonal"} if p == 2 else set())
    return _kernel("laplace_cka", float(p), typical, biased, invariances, "Godfrey et al. 2022, eq. 5.6", about)
