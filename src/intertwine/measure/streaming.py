"""Exact linear CKA and kernel alignment in one pass over batches, in memory that depends on the width of layers only.

What is summed: products of features, and small sums in float64 from which the terms of debiased CKA follow, diagonals
included. Features are shifted by the mean of the first batch, so that little is lost when the true means are subtracted
at the end. The value is the one that all samples at once would give, not a mean over batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import frexp, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.measure.cka import product
from intertwine.measure.hsic import FLAT
from intertwine.measure.measure import degenerate
from intertwine.measure.representation import STILL, Representation, represent
from intertwine.measure.result import Result
from intertwine.shapes import Float

#: Entries so many times larger than those of the first batch are multiplied in float64, where they cannot overflow.
LARGE = 2.0**20
ROWS = 1024  # of a matrix of products, at a time

Layers = Tensor | Mapping[str, Tensor]


class Form(NamedTuple):
    """Which alignment: debiased or biased, of centred features or, biased only, of features as they are."""

    biased: bool
    center: bool


class StreamingCKA:
    """Linear CKA of layers of two networks, batch by batch.

    Args:
        pairs: which layers are compared, as pairs of names; all of the first with all of the second unless given.

    >>> generator = torch.Generator().manual_seed(0)
    >>> stream = StreamingCKA()
    >>> for _ in range(5):
    ...     x = torch.randn(20, 8, generator=generator)
    ...     stream.update(x, {"head": 2 * x + 1, "tail": x[:, :4]})
    >>> stream.samples
    100
    >>> {pair: round(float(result), 4) for pair, result in stream.results().items()}
    {('x', 'head'): 1.0, ('x', 'tail'): 0.6942}
    """

    def __init__(self, pairs: Collection[tuple[str, str]] | None = None) -> None:
        self.samples = 0
        self._wanted = None if pairs is None else tuple(pairs)
        self._sides: tuple[dict[str, _Layer], dict[str, _Layer]] = {}, {}
        self._pairs: dict[tuple[str, str], _Sums] = {}

    def update(self, xs: Layers, ys: Layers) -> None:
        """Take in a batch: the features of the same samples in both networks, by the names of layers.

        A tensor alone is a layer named "x" or "y". Axes behind the first are features. Nothing is taken in if this
        raises.

        Raises:
            InputError: a batch is no tensor of finite numbers, or a pair names a layer that is not there.
            MismatchError: numbers of samples differ, or layers are not those of the batches before.
        """
        first, second = _read(xs, "x"), _read(ys, "y")
        count = self._check(first, second)
        batches = [
            {name: _layer(side, name, x).take(x) for name, x in batch.items()}
            for side, batch in zip(self._sides, (first, second), strict=True)
        ]
        if not self.samples:
            names = [(a, b) for a in first for b in second] if self._wanted is None else self._wanted
            self._pairs = {(a, b): _Sums(self._sides[0][a].shift, self._sides[1][b].shift) for a, b in names}
        self._add(*batches)
        self.samples += count

    def _add(self, first: dict[str, Taken], second: dict[str, Taken]) -> None:
        """Each layer with all its partners in one product: many small ones would take several times as long."""
        partners: dict[str, tuple[str, ...]] = {}
        for a, b in self._pairs:
            partners[a] = (*partners.get(a, ()), b)
        joined = {names: torch.cat([second[b].wide for b in names], 1) for names in set(partners.values())}
        for a, names in partners.items():
            products = product(first[a].wide, joined[names]).split([second[b].wide.shape[1] for b in names], 1)
            for b, part in zip(names, products, strict=True):
                self._pairs[a, b].add(part, first[a].lengths, second[b].lengths)

    def result(self, x: str = "x", y: str = "y", *, biased: bool = False, center: bool = True) -> Result:
        """CKA of one pair of layers over all samples so far; kernel alignment without centring.

        Raises:
            InputError: the pair is not one of those that are compared.
        """
        if (x, y) not in self._pairs:
            known = ", ".join(map(str, self._pairs)) or "none before the first batch"
            raise InputError(f"The layers {x!r} and {y!r} were asked for. The pairs that are compared: {known}.")
        form = Form(biased or not center, center)
        name, needs = ("linear_cka_biased", 2) if form.biased else ("linear_cka", 4)
        name = name if center else "kernel_alignment"
        if self.samples < needs:
            return degenerate(name, f"it needs at least {needs} samples, and there are {self.samples}")
        a, b = self._sides[0][x], self._sides[1][y]
        for which, layer in (("x", a), ("y", b)):
            if reason := layer.fault(form):
                return degenerate(name, f"{which} {reason}")
        inner, _ = self._pairs[x, y].inner(a, b, form)
        return Result(name, inner / (sqrt(a.own(form)[0]) * sqrt(b.own(form)[0])))

    def results(self, *, biased: bool = False) -> dict[tuple[str, str], Result]:
        """CKA of every pair of layers, by their names."""
        return {(a, b): self.result(a, b, biased=biased) for a, b in self._pairs}

    def _check(self, first: dict[str, Representation], second: dict[str, Representation]) -> int:
        """Refuse what does not belong to the batches before, so that no batch is taken in by half."""
        counts = {f"{n!r} of {s}": x.samples for s, side in (("xs", first), ("ys", second)) for n, x in side.items()}
        if len(set(counts.values())) != 1:
            found = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no layer at all"
            raise MismatchError(f"All layers of a batch must have the same samples; found {found}.")
        for known, batch in zip(self._sides, (first, second), strict=True):
            widths = {name: layer.width for name, layer in known.items()}
            found = {name: x.flat.shape[1] for name, x in batch.items()}
            if known and widths != found:
                raise MismatchError(
                    f"The batches before had layers of these widths: {widths}; this one has {found}. "
                    "Start another StreamingCKA for other layers."
                )
        for a, b in self._wanted or ():
            if a not in first or b not in second:
                raise InputError(f"The pair {(a, b)} was asked for; the layers are {[*first]} and {[*second]}.")
        return next(iter(counts.values()))


def _read(layers: Layers, name: str) -> dict[str, Representation]:
    named = {name: layers} if isinstance(layers, Tensor) else layers
    flat = {key: x.flatten(1) if isinstance(x, Tensor) and x.dim() > 2 else x for key, x in named.items()}
    return {key: represent(x, key) for key, x in flat.items()}


def _layer(side: dict[str, _Layer], name: str, x: Representation) -> _Layer:
    if name not in side:
        side[name] = _Layer(x)
    return side[name]


class Taken(NamedTuple):
    """A batch of a layer, shifted and scaled: its features with the squared lengths of rows beside them, and these."""

    wide: Tensor
    lengths: Tensor


class _Layer:
    """What belongs to one layer: its shift and scale, sums over samples, and its products with itself."""

    def __init__(self, x: Representation) -> None:
        self.shift = x.flat.mean(0, dtype=torch.float64).to(x.values.dtype)
        self.width, self.eps, self.scale, self.count = len(self.shift), x.eps, 0.0, 0
        self.features, self.lengths = torch.zeros_like(self.shift, dtype=torch.float64), 0.0
        self.low = self.high = self.size = torch.zeros_like(self.shift)
        self.products = _Sums(self.shift, self.shift)
        self._own: dict[Form, tuple[float, float]] = {}

    def take(self, given: Representation) -> Taken:
        """Add a batch."""
        wide = self._scaled(given)
        x = wide[:, :-1]
        lengths = torch.linalg.vector_norm(x, dim=1).double().square()
        wide[:, -1] = lengths
        self.count += len(x)
        self.features += x.sum(0).double()  # shifted, so that little is lost
        self.lengths += float(lengths.sum())
        self.products.add(product(wide, wide), lengths, lengths)
        self._own.clear()
        return Taken(wide, lengths)

    def _scaled(self, given: Representation) -> Tensor:
        """Shifted and scaled, with room for a column more: each pass over the samples counts."""
        values = given.flat.to(self.shift.dtype)
        wide = values.new_empty(len(values), self.width + 1)
        x = torch.sub(values, self.shift, out=wide[:, :-1])
        low, high = x.amin(0), x.amax(0)
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        self.size = torch.maximum(self.size, torch.maximum((low + self.shift).abs(), (high + self.shift).abs()))
        largest = float(torch.maximum(-low, high).amax())
        if not self.scale and largest:  # until something varies, all sums are zero in any scale
            self.scale = 2.0 ** frexp(largest)[1]
        if largest > LARGE * self.scale:
            wide = wide.double()
        if self.scale:
            wide[:, :-1] /= self.scale
        return wide

    @property
    def mean(self) -> Float[Tensor, " features"]:
        return self.features / self.count

    @property
    def offset(self) -> Float[Tensor, " features"]:
        """The true mean, in the scale of what is summed up."""
        return self.mean + self.shift.double() / (self.scale or 1.0)

    def own(self, form: Form) -> tuple[float, float]:
        """The inner product with itself, and its first term."""
        if form not in self._own:
            self._own[form] = self.products.inner(self, self, form)
        return self._own[form]

    def fault(self, form: Form) -> str | None:
        """Why there is nothing to align with, in words that follow the name of the layer."""
        if not form.center:
            return None if self.size.any() else "is zero everywhere"
        if (self.high - self.low <= STILL * self.eps * self.size).all():
            return "is constant: no feature varies over the samples"
        own, total = self.own(form)
        if own <= STILL * torch.finfo(self.shift.dtype).eps * sqrt(self.count) * total:  # rounding and no more
            return FLAT
        return None


class _Sums:
    """What belongs to a pair of layers x and y, with squared lengths a and b of rows: Σ xyᵀ, Σ ab, Σ ay, Σ bx."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.ay, self.bx = (torch.zeros_like(shift, dtype=torch.float64) for shift in (y, x))
        self.xy, self.ab = self.bx.new_zeros(len(x), len(y)), 0.0

    def add(self, products: Tensor, a: Tensor, b: Tensor) -> None:
        """A batch: the product of [x a] and [y b]."""
        self.xy += products[:-1, :-1]
        self.ay += products[-1, :-1]
        self.bx += products[:-1, -1]
        self.ab += float(a @ b)

    def inner(self, x: _Layer, y: _Layer, form: Form) -> tuple[float, float]:
        """HSIC of the two layers, up to the factor that cancels, and the size of its first term.

        With means μ and ν and k = ‖x − μ‖², l = ‖y − ν‖² per sample, Σ kl is multiplied out into sums that are here.
        """
        n, mu, nu = x.count, x.mean, y.mean
        back = (x.offset, y.offset) if not form.center else (torch.zeros_like(mu), torch.zeros_like(nu))
        total = sum(
            float((rows + n * (o[:, None] * back[1] - m[:, None] * nu)).square().sum())  # what was shifted away is back
            for rows, m, o in _by_rows(self.xy, mu, back[0])
        )
        if form.biased:
            return total, total
        c, d = float(mu @ mu), float(nu @ nu)
        kl = self.ab - 2 * float(nu @ self.ay) - 2 * float(mu @ self.bx) + 4 * float(mu @ self.xy @ nu)
        kl += d * x.lengths + c * y.lengths - 3 * n * c * d
        both = (x.lengths - n * c) * (y.lengths - n * d)
        return total - n / (n - 2) * kl + both / ((n - 1) * (n - 2)), total


def _by_rows(x: Tensor, *along: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows at a time, so that no second matrix of that size is made."""
    return zip(x.split(ROWS), *(part.split(ROWS) for part in along), strict=True)
