"""CKA that respects what ReLU networks keep: channels, up to order, scale and sign (Godfrey et al. 2022, Def. 5.3).

Channels are centred over samples and positions and divided by their lengths. `relu_cka` compares two samples by the
channel in which they agree most; `channel_cka` by the sum over channels, which the paper's code calls orthogonal though
dividing by lengths makes it change under rotations. Neither needs the two sides to have the same channels or positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.measure.cka import Centred, centred, linear_cka
from intertwine.measure.hsic import CentredGram, align, centred_gram, nothing, reordered
from intertwine.measure.measure import PAIRS, Measure, register
from intertwine.measure.representation import STILL, Representation
from intertwine.measure.result import Result
from intertwine.shapes import Float

SIGNED_SCALES = frozenset({"permutation", "positive scales", "signs", "isotropic scale", "translation"})
REFERENCE = "Godfrey et al. 2022, Def. 5.3"
CONSTANT = "is constant: no channel varies over samples and positions"
ESTIMATORS, DEAD, PRECISIONS = ("max", "median"), ("drop", "zero"), ("ieee", "tf32x3", "tf32")

#: Entries of a tile of the Gram matrix, small enough to stay in the cache; entries of all channels for the median.
TILE, HELD = 512, 1 << 24


def unit_channels(x: Representation) -> tuple[Float[Tensor, "channels samples positions"], Tensor]:
    """Channels, centred and of length one, and which of them are constant, which are zero."""
    values = x.values.flatten(2) if x.values.dim() > 2 else x.values[..., None]
    flat = values.transpose(0, 1).contiguous().flatten(1)
    size = _largest(flat)
    rest = flat - flat.mean(1, keepdim=True, dtype=torch.float64).to(flat.dtype)
    rest -= rest.mean(1, keepdim=True, dtype=torch.float64).to(flat.dtype)  # what the rounding of the mean left
    spread = _largest(rest)
    dead = spread <= STILL * x.eps * size
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


# -- Gram matrices over channels ---------------------------------------------------------------------------------------


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


# -- the measures ------------------------------------------------------------------------------------------------------


def _prepare(x: Representation, estimator: str, dead: str, biased: bool, precision: str) -> CentredGram:
    channels, still = unit_channels(x)
    if still.all():
        return nothing(CONSTANT)
    note = None
    if still.any():
        what = "left out" if dead == "drop" else "kept as zero"
        note = f"{int(still.sum())} of {len(still)} channels are constant and were {what}"
        channels = channels[~still] if dead == "drop" else channels
    return centred_gram(_gram(channels, estimator, precision), biased, note=note)


def _prepare_linear(x: Representation) -> Centred:
    """Channels of length one, centred per feature, which HSIC₁ does not see; only rounding left is nothing left."""
    eps = float(torch.finfo(x.values.dtype).eps)  # the rounding of the input has been taken care of
    state = centred(Representation(unit_channels(x)[0].transpose(0, 1), eps), biased=False)
    rounding = STILL * eps * x.samples**0.5 * float(state.lengths @ state.lengths)
    return state if state.own > rounding else replace(state, own=0.0)


def _compare_linear(a: Centred, b: Centred) -> Result:
    return replace(linear_cka().compare_with(a, b), measure="channel_cka")


def _check(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(
            f"The measure relu_cka was asked for with {option}={value!r}. Give one of {', '.join(map(repr, allowed))}."
        )


@register
def relu_cka(estimator: str = "max", dead: str = "drop", biased: bool = False, precision: str = "tf32x3") -> Measure:
    """CKA with the kernel max over channels of ⟨x_c, y_c⟩; the kernel is not positive definite, so it can be negative.

    Args:
        estimator: "max", or "median" over channels.
        dead: constant channels are left out ("drop"), or are zero in the maximum ("zero"), as in the paper's code.
        biased: the biased estimator of HSIC. precision: of products on a GPU, "tf32x3" (about
            that of single precision), "ieee" (that, and ten times as slow) or "tf32" (fastest; 1e-6 in the value).

    >>> x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    >>> round(float(relu_cka()(x, x.flip(1) * torch.arange(1.0, 9) + 2)), 6)
    1.0
    """
    _check("estimator", estimator, ESTIMATORS)
    _check("dead", dead, DEAD)
    _check("precision", precision, PRECISIONS)
    prepare = partial(_prepare, estimator=estimator, dead=dead, biased=biased, precision=precision)
    return Measure(
        "relu_cka", "similarity", (-1.0, 1.0), 1.0, SIGNED_SCALES, REFERENCE,
        "CKA of the largest agreement over channels, for the symmetries of ReLU networks",
        prepare, partial(align, "relu_cka"), 2 if biased else 4, positions=True, permute_with=reordered, memory=PAIRS,
    )  # fmt: skip


@register
def channel_cka() -> Measure:
    """Debiased linear CKA of channels of length one: what the paper's heat-maps show as orthogonal CKA.

    >>> x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    >>> round(float(channel_cka()(x, x.flip(1) * torch.arange(1.0, 9) + 2)), 6)
    1.0
    """
    about = "linear CKA after dividing every channel by its length"
    return Measure(
        "channel_cka", "similarity", (-1.0, 1.0), 1.0, SIGNED_SCALES, REFERENCE + ", as in its code", about,
        _prepare_linear, _compare_linear, 4, positions=True, permute_with=linear_cka().permute_with,
    )  # fmt: skip
