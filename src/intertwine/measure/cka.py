"""HSIC and linear CKA: debiased, biased, the RV coefficient, and kernel alignment without centring.

The unbiased estimator HSIC₁ (Song et al. 2012; Székely and Rizzo 2014) is the inner product of U-centred Gram matrices
over n(n − 3). That of a matrix with itself is never negative, whatever the kernel, so CKA lies in [-1, 1]; nothing is
clamped. Features are centred first, in higher precision; only then are products computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.measure.measure import (
    CONSTANT_TOLERANCE,
    FEATURES,
    ZERO,
    Measure,
    Representation,
    Result,
    constant_result,
    degenerate,
    register,
)

#: Entries in float64 at once.
HELD = 1 << 22
FLAT = "has no similarity between different samples to align: it is the same for all pairs"


@dataclass(frozen=True, eq=False)
class CentredGram:
    """A centred Gram matrix, or the reason why there is none.

    Attributes:
        entries: divided by `scale`; the largest is 1 or -1. own: the inner product with itself.
        reason: what is wrong, in words that follow the name of the representation.
    """

    entries: Float[Tensor, "samples samples"] | None
    scale: float
    own: float
    reason: str | None = None
    note: str | None = None


def empty_gram(reason: str) -> CentredGram:
    """Of a representation without similarities to align."""
    return CentredGram(None, 0.0, 0.0, reason)


def centred_gram(
    gram: Float[Tensor, "samples samples"],
    biased: bool = False,
    dtype: torch.dtype | None = None,
    note: str | None = None,
) -> CentredGram:
    """Centre a symmetric Gram matrix, which is overwritten, and keep it in `dtype`.

    Unbiased, the diagonal is left out and the matrix is U-centred: every row sums to zero without it. Biased, rows and
    columns sum to zero. If all entries are the same, only rounding is left, and the result is empty.
    """
    n, dtype = len(gram), dtype or gram.dtype
    if not biased:
        gram.fill_diagonal_(0)
    before, sums = largest(gram), gram.sum(1, dtype=torch.float64)
    rows, whole = (n, n * n) if biased else (n - 2, (n - 1) * (n - 2))
    for part in _blocks(n):
        gram[part] = gram[part].double() - sums[part, None] / rows + (sums.sum() / whole - sums / rows)
    if not biased:
        gram.fill_diagonal_(0)
    scale = largest(gram)
    if scale <= CONSTANT_TOLERANCE * torch.finfo(dtype).eps * before:
        return empty_gram(FLAT)
    entries = gram.div_(scale).to(dtype)
    return CentredGram(entries, scale, _gram_product(entries, entries), note=note)


def reordered_gram(gram: CentredGram, order: Tensor) -> CentredGram:
    """The same matrix with its samples in another order."""
    return gram if gram.entries is None else replace(gram, entries=gram.entries[order][:, order])


def largest(gram: Tensor) -> float:
    """The largest absolute value, without a copy."""
    return max(float(gram.max()), -float(gram.min()))


def _blocks(n: int) -> Iterator[slice]:
    rows = max(1, HELD // n)
    return (slice(i, i + rows) for i in range(0, n, rows))


def _gram_product(a: Tensor, b: Tensor) -> float:
    return sum(float((a[part].double() * b[part]).sum()) for part in _blocks(len(a)))


def centred_alignment(name: str, a: CentredGram, b: CentredGram) -> Result:
    """Centred kernel alignment: the cosine between two centred Gram matrices."""
    notes = tuple(f"{which}: {side.note}" for which, side in (("x", a), ("y", b)) if side.note)
    if a.entries is None or b.entries is None:
        which, reason = ("x", a.reason) if a.entries is None else ("y", b.reason)
        return degenerate(name, f"{which} {reason}", notes)
    value = a.own if a is b else _gram_product(a.entries, b.entries)
    return Result(name, value / (sqrt(a.own) * sqrt(b.own)), notes=notes)


# -- Linear kernels ----------------------------------------------------------------------------------------------------

ROTATIONS = frozenset({"permutation", "signs", "orthogonal", "isotropic scale", "translation"})
#: Entries from this to its inverse can be multiplied, squared and summed in single precision.
SMALLEST = 2.0**-12
#: Up to this width libraries sum a product in single precision row after row and lose half of the digits.
NARROW = 16
#: Size at which a symmetric product is no longer halved, and the widest part of a product.
BLOCK, WIDEST = 512, 2048
REFERENCE = "Kornblith et al. 2019; debiased: Song et al. 2012"


@dataclass(frozen=True, eq=False)
class Centred:
    """Centred features, the squared lengths of their rows, and their inner product with themselves."""

    x: Float[Tensor, "samples features"]
    lengths: Float[Tensor, " samples"]
    scale: float  # the largest entry
    own: float
    noise: float  # the largest rounding error of an inner product that is zero

    @property
    def dead(self) -> bool:
        return self.scale == 0


def centred(representation: Representation, biased: bool, center: bool = True) -> Centred:
    """Prepare a representation; one whose squares would over- or underflow is scaled to size 1.

    The noise has two parts: products are rounded in their own precision; the input is rounded entry by entry, which
    averages out over d features.
    """
    x = representation.centred if center else representation.flat
    scale = representation.size if center else float(torch.linalg.vector_norm(x, torch.inf))
    if scale and not SMALLEST < scale < 1 / SMALLEST:
        x = x / scale
    lengths = torch.linalg.vector_norm(x, dim=1).double().square()
    rounding = torch.finfo(x.dtype).eps * sqrt(len(x)) + representation.eps**2 * len(x) / x.shape[1]
    noise = CONSTANT_TOLERANCE * rounding * float(lengths @ lengths)
    return Centred(x, lengths, scale, _inner(x, x, lengths, lengths, biased), noise)


def _inner(x: Tensor, y: Tensor, k: Tensor, m: Tensor, biased: bool) -> float:
    """HSIC of two centred representations, up to the factor that cancels.

    ‖XᵀY‖² = Σᵢⱼ (XXᵀ)ᵢⱼ (YYᵀ)ᵢⱼ is computed on the cheaper side. The debiased form leaves the diagonals out and
    U-centres the rest, which for centred features adds two sums over the squared lengths of rows.
    """
    total, n = _squared_product(x, y), len(x)
    if biased:
        return total
    return total - n / (n - 2) * float(k @ m) + float(k.sum() * m.sum()) / ((n - 1) * (n - 2))


def _squared_product(x: Tensor, y: Tensor) -> float:
    """‖XᵀY‖² in float64: over features if there are fewer of them than samples, else over blocks of samples.

    Symmetric products are computed by halves: that of a representation with itself, and Gram matrices.
    """
    n, p, q = len(x), x.shape[1], y.shape[1]
    if p * q > n * (p + q) / 2:
        pairs = _halves(0, n)
        grams = ((product(x[i].T, x[j].T), product(y[i].T, y[j].T), times) for i, j, times in pairs)
        products = (first.mul_(second).sum(dtype=torch.float64) * times for first, second, times in grams)
    elif x is y:
        products = (_square(product(x[:, i], x[:, j])) * times for i, j, times in _halves(0, p))
    else:
        products = (_square(product(x, y[:, j])) for j in _parts(0, q))
    return sum(map(float, products))


def product(x: Float[Tensor, "rows p"], y: Float[Tensor, "rows q"]) -> Float[Tensor, "p q"]:
    """xᵀy in the higher precision of the two; a narrow one in float64, which costs little."""
    kind = torch.promote_types(x.dtype, y.dtype)
    kind = torch.float64 if min(x.shape[1], y.shape[1]) <= NARROW else kind
    return x.to(kind).T @ y.to(kind)


def _parts(start: int, stop: int) -> list[slice]:
    return [slice(i, min(i + WIDEST, stop)) for i in range(start, stop, WIDEST)]


def _halves(start: int, stop: int) -> Iterator[tuple[slice, slice, int]]:
    """Blocks on and above the diagonal, as large as possible, and how often each counts."""
    if stop - start <= BLOCK:
        yield slice(start, stop), slice(start, stop), 1
        return
    middle = (start + stop) // 2
    yield from _halves(start, middle)
    yield from _halves(middle, stop)
    yield from ((a, b, 2) for a in _parts(start, middle) for b in _parts(middle, stop))


def _square(x: Tensor) -> Tensor:
    """Sum of squares: along rows in the precision of the product, then in float64."""
    return torch.linalg.vector_norm(x, dim=1).double().square().sum()


def _compare(name: str, biased: bool, center: bool, a: Centred, b: Centred) -> Result:
    if a.dead or b.dead:
        return constant_result(name, a.dead, b.dead, *([] if center else [ZERO]))
    for which, side in (("x", a), ("y", b)):
        if side.own <= side.noise:
            return degenerate(name, f"{which} {FLAT}")
    value = a.own if a is b else _inner(a.x, b.x, a.lengths, b.lengths, biased)
    return Result(name, value / sqrt(a.own * b.own))


def _linear(name: str, biased: bool, about: str, reference: str, needs: int, center: bool = True) -> Measure:
    invariances = ROTATIONS if center else ROTATIONS - {"translation"}
    return Measure(
        name, "similarity", (0.0 if biased else -1.0, 1.0), 1.0, invariances, reference, about,
        lambda x: centred(x, biased, center), lambda a, b: _compare(name, biased, center, a, b), needs,
        permute_with=lambda a, order: replace(a, x=a.x[order], lengths=a.lengths[order]), memory=FEATURES,
    )  # fmt: skip


@register
def linear_cka() -> Measure:
    """Debiased linear CKA."""
    return _linear("linear_cka", False, "debiased linear CKA, HSIC₁ of linear kernels", REFERENCE, 4)


@register
def linear_cka_biased() -> Measure:
    """Biased linear CKA, as in the first paper."""
    return _linear("linear_cka_biased", True, "biased linear CKA; near 1 for few samples", "Kornblith et al. 2019", 2)


@register
def rv() -> Measure:
    """The RV coefficient, the older name of biased linear CKA."""
    return _linear("rv", True, "RV coefficient, equal to biased linear CKA", "Robert and Escoufier 1976", 2)


@register
def kernel_alignment() -> Measure:
    """Kernel alignment ⟨K, L⟩/(‖K‖‖L‖) of K = XXᵀ and L = YYᵀ, not centred; centred it is `rv`.

    A common mean counts as agreement, so non-negative features always score high.

    Example:
        >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        >>> found = kernel_alignment()
        >>> round(found(x, -2 * x.flip(1)).value, 5), found(x, x + 10).value < 0.9
        (1.0, True)
    """
    about = "alignment of linear kernels without centring; a common mean counts"
    return _linear("kernel_alignment", True, about, "Cristianini et al. 2001", 2, center=False)
