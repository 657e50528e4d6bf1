"""CKA with nonlinear kernels: Gaussian and Laplace kernels of distances, and the kernels over channels for the
symmetries of ReLU networks (Godfrey et al. 2022, Definition 5.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError, unknown_name
from intertwine.measure.cka import (
    Centred,
    CentredGram,
    centred,
    centred_alignment,
    centred_gram,
    empty_gram,
    linear_cka,
    reordered_gram,
)
from intertwine.measure.measure import CONSTANT, CONSTANT_TOLERANCE, PAIRS, Measure, Representation, Result, register

#: A squared distance below this fraction of the squared lengths has too few correct digits if computed by a product.
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
            if i == j:  # a product may not be symmetric to the last digit
                part = part.triu(1) + part.triu(1).T
            out[i : i + block, j : j + block] = part
            out[j : j + block, i : i + block] = part.T
    return out


def _squares(a: Tensor, b: Tensor, same: bool) -> Tensor:
    """Squared distances by one product, or from the differences if samples are too near for the product."""
    lengths = a.square().sum(1)[:, None] + b.square().sum(1)
    squares = torch.addmm(lengths, a, b.T, alpha=-2)
    lost = squares < LOST * lengths
    if same:
        lost.fill_diagonal_(False)
    if lost.any():
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square_()
    return squares


def median_power(distances: Float[Tensor, "samples samples"], p: float) -> float:
    """The median distance, to the power p, over pairs of different samples; 0 if there is no such pair.

    Sorted, the matrix begins with its zeros, and each pair follows twice.
    """
    flat = distances.flatten()
    zeros = int((flat == 0).sum())
    pairs = (len(flat) - zeros) // 2
    if not pairs:
        return 0.0
    low, high = (float(flat.kthvalue(zeros + 2 * k + 1).values) for k in ((pairs - 1) // 2, pairs // 2))
    return ((low ** (1 / p) + high ** (1 / p)) / 2) ** p


def _prepare_distances(x: Representation, p: float, typical: float, biased: bool) -> CentredGram:
    """The centred Gram matrix of exp(−typical · (distance / median)ᵖ)."""
    if not x.size:
        return empty_gram(f"is {CONSTANT}")
    gram = powers(x.centred.double() / x.size, p)
    gram *= -typical / median_power(gram, p)
    # a constant in all entries changes nothing, so a wide kernel, which is near 1, is stored minus 1
    gram = gram.expm1_() if typical < 1 else gram.exp_()
    return centred_gram(gram, biased, x.values.dtype)


def _kernel(
    name: str, p: float, typical: float, biased: bool, invariances: frozenset[str], reference: str, about: str
) -> Measure:
    return Measure(
        name, "similarity", (0.0 if biased else -1.0, 1.0), 1.0, invariances, reference, about,
        partial(_prepare_distances, p=p, typical=typical, biased=biased), partial(centred_alignment, name),
        2 if biased else 4, permute_with=reordered_gram, memory=PAIRS,
    )  # fmt: skip


def _checked(name: str, factor: float) -> float:
    if not 1e-6 <= factor <= 1e6:
        raise InputError(
            f"factor={factor}, which multiplies the median distance in {name}, must be between 1e-6 and 1e6; 0.2 to 2 "
            "are usual."
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

    It is the positive definite kernel that is invariant to signed permutations (Godfrey et al. 2022, eq. 5.6).

    >>> x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    >>> round(float(laplace_cka()(x, -2 * x.flip(1))), 6)
    1.0

    Raises:
        InputError: p is not in [1, 2]; beyond 2 the kernel is not positive definite.
    """
    if not 1 <= p <= 2:
        raise InputError(
            f"p of laplace_cka must be in [1, 2], but is {p}: beyond 2 the function exp(−c‖x − y‖ₚᵖ) is not positive "
            "definite, and below 1 ‖·‖ₚ is not a norm."
        )
    typical = _checked("laplace_cka", factor) ** -float(p)
    about = "CKA of kernels exp(−c‖x − y‖ₚᵖ), which keep signed permutations apart from other rotations"
    invariances = SIGNED | ({"orthogonal"} if p == 2 else set())
    return _kernel("laplace_cka", float(p), typical, biased, invariances, "Godfrey et al. 2022, eq. 5.6", about)


# -- Kernels over channels ---------------------------------------------------------------------------------------------

SIGNED_SCALES = frozenset({"permutation", "positive scales", "signs", "isotropic scale", "translation"})
REFERENCE = "Godfrey et al. 2022, Def. 5.3"
ESTIMATORS, DEAD, PRECISIONS = ("max", "median"), ("drop", "zero"), ("ieee", "tf32x3", "tf32")

#: Rows of a tile of the Gram matrix that stays in the cache; entries of all channels for the median.
TILE, HELD = 512, 1 << 24


def unit_channels(x: Representation) -> tuple[Float[Tensor, "channels samples positions"], Tensor]:
    """Channels, centred and of length one, and which of them are constant; those are zero."""
    values = x.values.flatten(2) if x.values.dim() > 2 else x.values[..., None]
    flat = values.transpose(0, 1).contiguous().flatten(1)
    size = _largest(flat)
    rest = flat - flat.mean(1, keepdim=True, dtype=torch.float64).to(flat.dtype)
    rest -= rest.mean(1, keepdim=True, dtype=torch.float64).to(flat.dtype)  # removes the rounding error of the mean
    spread = _largest(rest)
    dead = spread <= CONSTANT_TOLERANCE * x.eps * size
    rest /= torch.where(dead, 1.0, spread)[:, None]  # no square over- or underflows now
    rest /= torch.where(dead, 1.0, _lengths(rest))[:, None].to(flat.dtype)
    rest[dead] = 0.0
    return rest.unflatten(1, (x.samples, -1)), dead


def _largest(rows: Tensor) -> Tensor:
    """The largest absolute value of every row, without a copy of all (`aminmax` along an axis is far slower)."""
    return torch.maximum(rows.amax(1), -rows.amin(1))


def _lengths(x: Tensor) -> Tensor:
    """The length of every row in float64, one at a time: a copy of all in float64 may not fit."""
    return torch.stack([row.double().square().sum().sqrt() for row in x])


def max_gram(x: Float[Tensor, "channels samples positions"]) -> Float[Tensor, "samples samples"]:
    """Kᵢⱼ = max over channels c of Σ over positions of x[c, i] · x[c, j], by a running maximum.

    >>> max_gram(torch.tensor([[[1.0], [2.0]], [[3.0], [-1.0]]]))
    tensor([[9., 2.],
            [2., 4.]])
    """
    room = x.new_empty(min(TILE, x.shape[1]) ** 2)
    product = torch.mul if x.shape[2] == 1 else torch.mm  # an outer product is faster without a library call

    def tile(a: Tensor, b: Tensor) -> Tensor:
        now = room[: a.shape[1] * b.shape[1]].view(a.shape[1], b.shape[1])
        best = a[0] @ b[0].T
        for c in range(1, len(a)):
            torch.maximum(best, product(a[c], b[c].T, out=now), out=best)
        return best

    return _by_tiles(x, tile, TILE)


def median_gram(x: Float[Tensor, "channels samples positions"]) -> Float[Tensor, "samples samples"]:
    """The median over channels in place of the maximum; of an even number of channels the lower one in the middle.

    >>> median_gram(torch.tensor([[[1.0], [2.0]], [[3.0], [-1.0]], [[1.0], [1.0]]]))
    tensor([[1., 1.],
            [1., 1.]])
    """
    rows = max(1, int((HELD / len(x)) ** 0.5))
    return _by_tiles(x, lambda a, b: torch.bmm(a, b.transpose(1, 2)).median(0).values, rows)


def _by_tiles(x: Tensor, tile: Callable[[Tensor, Tensor], Tensor], rows: int) -> Tensor:
    """A symmetric matrix, tile by tile from its upper half."""
    n = x.shape[1]
    out = x.new_empty(n, n)
    for i in range(0, n, rows):
        for j in range(i, n, rows):
            part = tile(x[:, i : i + rows], x[:, j : j + rows])
            out[i : i + rows, j : j + rows] = part
            out[j : j + rows, i : i + rows] = part.T
    return out


def _gram(x: Tensor, estimator: str, precision: str) -> Tensor:
    if estimator == "median":
        return median_gram(x)
    if x.is_cuda and x.dtype == torch.float32 and find_spec("triton"):
        from intertwine.measure.kernels import max_gram as kernel

        return kernel.max_gram(x.contiguous(), precision)
    return max_gram(x)


def _prepare_channels(x: Representation, estimator: str, dead: str, biased: bool, precision: str) -> CentredGram:
    channels, constant = unit_channels(x)
    if constant.all():
        return empty_gram("is constant: no channel varies over samples and positions")
    note = None
    if constant.any():
        what = "left out" if dead == "drop" else "kept as zero"
        note = f"{int(constant.sum())} of {len(constant)} channels are constant and are {what}"
        channels = channels[~constant] if dead == "drop" else channels
    return centred_gram(_gram(channels, estimator, precision), biased, note=note)


def _prepare_linear(x: Representation) -> Centred:
    """Channels of length one, centred per feature, which leaves HSIC₁ unchanged; pure rounding counts as nothing."""
    eps = float(torch.finfo(x.values.dtype).eps)  # the channels are computed, so the precision of the input is past
    state = centred(Representation(unit_channels(x)[0].transpose(0, 1), eps), biased=False)
    rounding = CONSTANT_TOLERANCE * eps * x.samples**0.5 * float(state.lengths @ state.lengths)
    return state if state.own > rounding else replace(state, own=0.0)


def _compare_linear(a: Centred, b: Centred) -> Result:
    return replace(linear_cka().compare_with(a, b), measure="channel_cka")


def _check(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(unknown_name(f"{option} of relu_cka", value, allowed))


@register
def relu_cka(estimator: str = "max", dead: str = "drop", biased: bool = False, precision: str = "tf32x3") -> Measure:
    """CKA with the kernel max over channels of ⟨x_c, y_c⟩; the kernel is not positive definite, so it can be negative.

    Channels are centred over samples and positions and have length one. The two sides may differ in both.

    Args:
        estimator: "max", or "median" over channels.
        dead: constant channels are left out ("drop"), or are zero in the maximum ("zero"), as in the paper's code.
        biased: the biased estimator of HSIC. precision: of products on a GPU: "tf32x3" (about single precision), "ieee"
            (single precision, ten times as slow) or "tf32" (fastest; an error of 1e-6 in the value).

    >>> x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    >>> round(float(relu_cka()(x, x.flip(1) * torch.arange(1.0, 9) + 2)), 6)
    1.0
    """
    _check("estimator", estimator, ESTIMATORS)
    _check("dead", dead, DEAD)
    _check("precision", precision, PRECISIONS)
    prepare = partial(_prepare_channels, estimator=estimator, dead=dead, biased=biased, precision=precision)
    return Measure(
        "relu_cka", "similarity", (-1.0, 1.0), 1.0, SIGNED_SCALES, REFERENCE,
        "CKA of the largest agreement over channels, for the symmetries of ReLU networks", prepare,
        partial(centred_alignment, "relu_cka"), 2 if biased else 4, positions=True, permute_with=reordered_gram,
        memory=PAIRS,
    )  # fmt: skip


@register
def channel_cka() -> Measure:
    """Debiased linear CKA of channels of length one; the paper's heat maps call it orthogonal CKA.

    Dividing by lengths makes it change under rotations.

    >>> x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    >>> round(float(channel_cka()(x, x.flip(1) * torch.arange(1.0, 9) + 2)), 6)
    1.0
    """
    about = "linear CKA after dividing every channel by its length"
    return Measure(
        "channel_cka", "similarity", (-1.0, 1.0), 1.0, SIGNED_SCALES, REFERENCE + ", as in its code", about,
        _prepare_linear, _compare_linear, 4, positions=True, permute_with=linear_cka().permute_with,
    )  # fmt: skip
