"""HSIC from Gram matrices: centred once per representation, then one inner product per pair.

The unbiased estimator HSIC₁ (Song et al. 2012) is the inner product of U-centred Gram matrices over n(n − 3), so that
of a matrix with itself is never negative, whatever the kernel, and CKA made of it lies in [-1, 1]. Gram matrices are
walked through by blocks of rows; differences and sums are taken in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.measure.measure import degenerate
from intertwine.measure.representation import STILL
from intertwine.measure.result import Result
from intertwine.shapes import Float

#: Entries that are held in float64 at once.
HELD = 1 << 22

CONSTANT = "is constant: no feature varies over the samples"
FLAT = "has no similarity between different samples to align: it is the same for all pairs"


@dataclass(frozen=True, eq=False)
class CentredGram:
    """A centred Gram matrix, or the reason why there is none to align with.

    Attributes:
        entries: the largest is 1 or -1. scale: what they were divided by. own: the inner product with itself.
        reason: what is wrong, in words that follow the name of the representation.
    """

    entries: Float[Tensor, "samples samples"] | None
    scale: float
    own: float
    reason: str | None = None
    note: str | None = None


def nothing(reason: str) -> CentredGram:
    """What is kept of a representation that has no Gram matrix worth centring."""
    return CentredGram(None, 0.0, 0.0, reason)


def centred_gram(
    gram: Float[Tensor, "samples samples"],
    biased: bool = False,
    dtype: torch.dtype | None = None,
    note: str | None = None,
) -> CentredGram:
    """Centre a symmetric Gram matrix, which is overwritten, and keep it in `dtype`.

    Unbiased, the diagonal is left out and the matrix is U-centred: every row sums to zero without it. Biased, rows and
    columns sum to zero. What is left of a matrix whose entries are all the same is rounding, and so not kept.
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
    if scale <= STILL * torch.finfo(dtype).eps * before:
        return nothing(FLAT)
    entries = gram.div_(scale).to(dtype)
    return CentredGram(entries, scale, _inner(entries, entries), note=note)


def reordered(gram: CentredGram, order: Tensor) -> CentredGram:
    """The same with its samples in another order."""
    return gram if gram.entries is None else replace(gram, entries=gram.entries[order][:, order])


def largest(gram: Tensor) -> float:
    """The largest absolute value, without a copy."""
    return max(float(gram.max()), -float(gram.min()))


def _blocks(n: int) -> Iterator[slice]:
    rows = max(1, HELD // n)
    return (slice(i, i + rows) for i in range(0, n, rows))


def _inner(a: Tensor, b: Tensor) -> float:
    return sum(float((a[part].double() * b[part]).sum()) for part in _blocks(len(a)))


def align(name: str, a: CentredGram, b: CentredGram) -> Result:
    """Centred kernel alignment: the cosine between two centred Gram matrices."""
    notes = tuple(f"{which}: {side.note}" for which, side in (("x", a), ("y", b)) if side.note)
    if a.entries is None or b.entries is None:
        which, reason = ("x", a.reason) if a.entries is None else ("y", b.reason)
        return degenerate(name, f"{which} {reason}", notes)
    value = a.own if a is b else _inner(a.entries, b.entries)
    return Result(name, value / (sqrt(a.own) * sqrt(b.own)), notes=notes)


def hsic(k: Float[Tensor, "n n"], l: Float[Tensor, "m m"], biased: bool = False) -> float:  # noqa: E741
    """The Hilbert-Schmidt independence criterion of two Gram matrices: zero in the mean for independent samples.

    Args:
        k, l: symmetric Gram matrices of the same samples under two kernels; they stay as they are.
        biased: the first, biased estimator tr(KHLH)/(n − 1)² instead of HSIC₁.

    >>> import torch
    >>> x = torch.tensor([[0.0], [1.0], [3.0], [4.0], [7.0]])
    >>> round(hsic(x @ x.T, x @ x.T), 6)
    38.5

    Raises:
        InputError: there are fewer than four samples (two for the biased estimator), or matrices are not square.
        MismatchError: the matrices have different sizes.
    """
    if k.shape != l.shape:
        raise MismatchError(f"HSIC compares the same samples, but k is {tuple(k.shape)} and l {tuple(l.shape)}.")
    n, needs = len(k), 2 if biased else 4
    if n < needs:
        raise InputError(f"HSIC needs at least {needs} samples, and there are {n}. Give more of them.")
    a, b = (centred_gram(gram.to(torch.float64, copy=True), biased) for gram in (k, l))
    if a.entries is None or b.entries is None:
        return 0.0
    return _inner(a.entries, b.entries) * a.scale * b.scale / ((n - 1) ** 2 if biased else n * (n - 3))
