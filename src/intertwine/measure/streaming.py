"""Measures that need products of features only, in one pass over batches: linear CKA, CCA, R², Procrustes and soft
matching. Memory depends on the width of layers only, and the value is that of all samples at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import frexp, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError, MismatchError
from intertwine.measure.cka import FLAT, product
from intertwine.measure.measure import (
    CONSTANT_TOLERANCE,
    Measure,
    PreparedRepresentation,
    Representation,
    Result,
    check_pair,
    degenerate,
    represent,
    too_few_samples,
)

#: Entries that are larger than those of the first batch by this factor are multiplied in float64, to avoid overflow.
LARGE = 2.0**20
ROWS = 1024  # of a matrix of products, at a time

Layers = Tensor | Mapping[str, Tensor]


class CkaForm(NamedTuple):
    """Which alignment: debiased or biased, of centred features or, biased only, of features as they are."""

    biased: bool
    center: bool


class StreamingCKA:
    """Linear CKA of layers of two networks, batch by batch.

    It sums products of features, and small sums in float64 from which the terms of debiased CKA follow. Features are
    shifted by the mean of the first batch, so that subtracting the true means at the end loses little precision.

    Args:
        pairs: the layers to compare, as pairs of names; all of the first with all of the second by default.

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
        self._sides: tuple[dict[str, _CkaLayer], dict[str, _CkaLayer]] = {}, {}
        self._pairs: dict[tuple[str, str], _CkaSums] = {}

    def update(self, xs: Layers, ys: Layers) -> None:
        """Add a batch: the features of the same samples in both networks, by the names of layers.

        A tensor alone is a layer named "x" or "y". Axes after the first are features. If this raises, nothing is added.

        Raises:
            InputError: a batch is not a tensor of finite numbers, or a pair names an unknown layer.
            MismatchError: numbers of samples differ, or layers are not those of the batches before.
        """
        first, second = _read(xs, "x"), _read(ys, "y")
        count = self._check(first, second)
        for side, batch in zip(self._sides, (first, second), strict=True):
            for name in [name for name in batch if name not in side]:
                side[name] = _CkaLayer(batch[name])
        batches = [
            {name: side[name].add(x) for name, x in batch.items()}
            for side, batch in zip(self._sides, (first, second), strict=True)
        ]
        if not self.samples:
            names = [(a, b) for a in first for b in second] if self._wanted is None else self._wanted
            self._pairs = {(a, b): _CkaSums(self._sides[0][a].shift, self._sides[1][b].shift) for a, b in names}
        self._add(*batches)
        self.samples += count

    def _add(self, first: dict[str, ScaledBatch], second: dict[str, ScaledBatch]) -> None:
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
            raise InputError(f"The layers {x!r} and {y!r} are not compared. The pairs that are: {known}.")
        form = CkaForm(biased or not center, center)
        name, needs = ("linear_cka_biased", 2) if form.biased else ("linear_cka", 4)
        name = name if center else "kernel_alignment"
        if self.samples < needs:
            return too_few_samples(name, needs, self.samples)
        a, b = self._sides[0][x], self._sides[1][y]
        for which, layer in (("x", a), ("y", b)):
            if reason := layer.problem(form):
                return degenerate(name, f"{which} {reason}")
        inner, _ = self._pairs[x, y].inner(a, b, form)
        return Result(name, inner / (sqrt(a.own(form)[0]) * sqrt(b.own(form)[0])))

    def results(self, *, biased: bool = False) -> dict[tuple[str, str], Result]:
        """CKA of every pair of layers, by their names."""
        return {(a, b): self.result(a, b, biased=biased) for a, b in self._pairs}

    def _check(self, first: dict[str, Representation], second: dict[str, Representation]) -> int:
        """Refuse a batch that does not fit the previous ones, before any part of it is added."""
        counts = {f"{n!r} of {s}": x.samples for s, side in (("xs", first), ("ys", second)) for n, x in side.items()}
        if len(set(counts.values())) != 1:
            found = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no layer at all"
            raise MismatchError(f"All layers of a batch must have the same samples; found {found}.")
        for known, batch in zip(self._sides, (first, second), strict=True):
            widths = {name: layer.width for name, layer in known.items()}
            found = {name: x.flat.shape[1] for name, x in batch.items()}
            if known and widths != found:
                raise MismatchError(
                    f"The previous batches have layers of these widths: {widths}; this one has {found}. "
                    "Start another StreamingCKA for other layers."
                )
        for a, b in self._wanted or ():
            if a not in first or b not in second:
                raise InputError(f"Unknown pair {(a, b)}: the layers are {[*first]} and {[*second]}.")
        return next(iter(counts.values()))


def _read(layers: Layers, name: str) -> dict[str, Representation]:
    named = {name: layers} if isinstance(layers, Tensor) else layers
    flat = {key: x.flatten(1) if isinstance(x, Tensor) and x.dim() > 2 else x for key, x in named.items()}
    return {key: represent(x, key) for key, x in flat.items()}


class ScaledBatch(NamedTuple):
    """A batch of a layer, shifted and scaled: features with the squared lengths of rows as last column; the lengths."""

    wide: Tensor
    lengths: Tensor


class _CkaLayer:
    """One layer: its shift and scale, sums over samples, and its products with itself."""

    def __init__(self, x: Representation) -> None:
        self.shift = x.flat.mean(0, dtype=torch.float64).to(x.values.dtype)
        self.width, self.eps, self.scale, self.count = len(self.shift), x.eps, 0.0, 0
        self.features, self.lengths = torch.zeros_like(self.shift, dtype=torch.float64), 0.0
        self.low = self.high = self.size = torch.zeros_like(self.shift)
        self.products = _CkaSums(self.shift, self.shift)
        self._own: dict[CkaForm, tuple[float, float]] = {}

    def add(self, given: Representation) -> ScaledBatch:
        """Add a batch."""
        wide = self._scaled(given)
        x = wide[:, :-1]
        lengths = torch.linalg.vector_norm(x, dim=1).double().square()
        wide[:, -1] = lengths
        self.count += len(x)
        self.features += x.sum(0).double()
        self.lengths += float(lengths.sum())
        self.products.add(product(wide, wide), lengths, lengths)
        self._own.clear()
        return ScaledBatch(wide, lengths)

    def _scaled(self, given: Representation) -> Tensor:
        """Shifted and scaled, with room for one more column, in few passes over the samples."""
        values = given.flat.to(self.shift.dtype)
        wide = values.new_empty(len(values), self.width + 1)
        x = torch.sub(values, self.shift, out=wide[:, :-1])
        low, high = x.amin(0), x.amax(0)
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        self.size = torch.maximum(self.size, torch.maximum((low + self.shift).abs(), (high + self.shift).abs()))
        largest = float(torch.maximum(-low, high).amax())
        if not self.scale and largest:  # all sums are zero until something varies
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
        """The true mean, in the scale of the sums."""
        return self.mean + self.shift.double() / (self.scale or 1.0)

    def own(self, form: CkaForm) -> tuple[float, float]:
        """The inner product with itself, and its first term."""
        if form not in self._own:
            self._own[form] = self.products.inner(self, self, form)
        return self._own[form]

    def problem(self, form: CkaForm) -> str | None:
        """Why the layer has no similarities to align, in words that follow its name."""
        if not form.center:
            return None if self.size.any() else "is zero everywhere"
        if (self.high - self.low <= CONSTANT_TOLERANCE * self.eps * self.size).all():
            return "is constant: no feature varies over the samples"
        own, total = self.own(form)
        rounding = CONSTANT_TOLERANCE * torch.finfo(self.shift.dtype).eps * sqrt(self.count) * total
        return FLAT if own <= rounding else None


class _CkaSums:
    """A pair of layers x and y, with squared lengths a and b of rows: Σ xyᵀ, Σ ab, Σ ay, Σ bx."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.ay, self.bx = (torch.zeros_like(shift, dtype=torch.float64) for shift in (y, x))
        self.xy, self.ab = self.bx.new_zeros(len(x), len(y)), 0.0

    def add(self, products: Tensor, a: Tensor, b: Tensor) -> None:
        """Add a batch: the product of [x a] and [y b]."""
        self.xy += products[:-1, :-1]
        self.ay += products[-1, :-1]
        self.bx += products[:-1, -1]
        self.ab += float(a @ b)

    def inner(self, x: _CkaLayer, y: _CkaLayer, form: CkaForm) -> tuple[float, float]:
        """HSIC of the two layers, up to the factor that cancels, and the size of its first term.

        With means μ and ν and k = ‖x − μ‖², l = ‖y − ν‖² per sample, Σ kl is expanded into these sums.
        """
        n, mu, nu = x.count, x.mean, y.mean
        back = (x.offset, y.offset) if not form.center else (torch.zeros_like(mu), torch.zeros_like(nu))
        total = sum(
            float((rows + n * (o[:, None] * back[1] - m[:, None] * nu)).square().sum())
            for rows, m, o in zip(*(part.split(ROWS) for part in (self.xy, mu, back[0])), strict=True)
        )
        if form.biased:
            return total, total
        c, d = float(mu @ mu), float(nu @ nu)
        kl = self.ab - 2 * float(nu @ self.ay) - 2 * float(mu @ self.bx) + 4 * float(mu @ self.xy @ nu)
        kl += d * x.lengths + c * y.lengths - 3 * n * c * d
        both = (x.lengths - n * c) * (y.lengths - n * d)
        return total - n / (n - 2) * kl + both / ((n - 1) * (n - 2)), total


# -- CCA, R², Procrustes and soft matching -----------------------------------------------------------------------------

DOUBLE_EPS = float(torch.finfo(torch.float64).eps)
#: Times √width and the precision of float64, the rounding error of products that are zero.
BLUR = 4.0
#: Features more precise than this have directions that their products cannot resolve.
VISIBLE = 1e-8


@dataclass(frozen=True, eq=False)
class Summary(Representation):
    """A few rows with the means and products of many samples: centred rows, and √count times the mean as last row."""

    count: int

    @property
    def samples(self) -> int:
        return self.count

    @cached_property
    def centred(self) -> Float[Tensor, "samples features"]:
        return torch.cat([self.values[:-1], torch.zeros_like(self.values[-1:])])


class StreamingMoments:
    """Measures that need products of features only, batch by batch.

    It sums, in float64, the centred products of every layer with itself and of every pair. Batches are centred on their
    own means and joined by the differences of means, without cancellation. At the end a few rows with exactly these
    products replace all samples, and the measures themselves compare them.

    Products square the size of a direction. In float64 they resolve every direction above the rounding of float32
    features; directions of float64 features below about 1e-7 of the largest are lost, and a note says so.

    Args:
        pairs: the layers to compare, as pairs of names. baseline: whether to compute the value of unrelated features
            as well, with the samples of y permuted by one cycle through all of them.

    >>> from intertwine.measure.measure import find
    >>> generator = torch.Generator().manual_seed(0)
    >>> stream = StreamingMoments([("x", "y")])
    >>> for _ in range(5):
    ...     x = torch.randn(20, 8, generator=generator)
    ...     stream.update({"x": x}, {"y": 2 * x[:, :4] + 1})
    >>> [round(result.value, 4) for result in stream.results([find("cca"), find("r2")], "x", "y")]
    [1.0, 1.0]
    """

    def __init__(self, pairs: Collection[tuple[str, str]], baseline: bool = False) -> None:
        self.samples = 0
        self._sides: tuple[dict[str, _MomentLayer], dict[str, _MomentLayer]] = {}, {}
        self._pairs = {pair: _CentredProducts() for pair in pairs}
        self._shuffled = {pair: _CentredProducts() for pair in pairs} if baseline else {}
        self._chance = torch.Generator().manual_seed(0)

    def update(self, xs: Mapping[str, Tensor], ys: Mapping[str, Tensor]) -> None:
        """Add a batch: the features of the same samples in both networks, by the names of layers.

        Raises:
            InputError: a batch is not a tensor of finite numbers.
            MismatchError: numbers of samples differ, or widths are not those of the batches before.
        """
        batches = [{name: represent(x, name) for name, x in side.items()} for side in (xs, ys)]
        every = [x for batch in batches for x in batch.values()]
        for x in every:
            check_pair(every[0], x)
        rows = [
            {name: known.setdefault(name, _MomentLayer(name, x)).add(x) for name, x in batch.items()}
            for known, batch in zip(self._sides, batches, strict=True)
        ]
        for (a, b), products in self._pairs.items():
            products.add(rows[0][a], rows[1][b])
        if self._shuffled:
            self._shuffle(*rows)
        self.samples += every[0].samples

    def _shuffle(self, left: dict[str, _Rows], right: dict[str, _Rows]) -> None:
        """Pair every sample of x with the next one of y, in a random order; the last one waits for the next batch."""
        count = len(next(iter(left.values())).raw)
        order = torch.randperm(count, generator=self._chance)
        xs = {name: _Rows(self._sides[0][name].without_last(x.raw[order.to(x.raw.device)])) for name, x in left.items()}
        ys = {
            name: _Rows(self._sides[1][name].without_first(y.raw[order.to(y.raw.device)])) for name, y in right.items()
        }
        for (a, b), products in self._shuffled.items():
            products.add(xs[a], ys[b])

    def results(self, measures: Iterable[Measure], x: str, y: str) -> list[Result]:
        """The result of each measure for one pair of layers, over all samples so far.

        Raises:
            InputError: the pair is not one of those that are compared.
        """
        if (x, y) not in self._pairs or not self.samples:
            known = ", ".join(map(str, self._pairs)) if self.samples else "none before the first batch"
            raise InputError(f"The layers {x!r} and {y!r} are not compared. The pairs that are: {known}.")
        a, b = self._sides[0][x], self._sides[1][y]
        sides, unrelated = _summaries(a, b, self._pairs[x, y].sums), None
        if self._shuffled and self.samples > 1:
            unrelated = _summaries(a, b, self._shuffled[x, y].closed(a.waiting, b.first))
        blurred = [side for side, layer in (("x", a), ("y", b)) if layer.eps < VISIBLE and layer.deficient]
        note = f"one pass: directions of {' and '.join(blurred)} below about 1e-7 of the largest are not seen"
        found: list[Result] = []
        for measure in measures:
            plain = replace(measure, baseline=False)  # it would reorder rows that are not samples
            result = _compared(plain, *sides)
            if measure.baseline and unrelated is not None and not result.degenerate:
                result = replace(result, baseline=_compared(plain, *unrelated).value)
            if blurred and not result.degenerate:
                result = replace(result, notes=(*result.notes, note))
            found.append(result)
        return found


def _compared(measure: Measure, x: Summary, y: Summary) -> Result:
    enough = x.samples >= measure.needs
    a, b = (
        PreparedRepresentation(measure.name, s.samples, s, measure.prepare_with(s) if enough else None) for s in (x, y)
    )
    return measure.compare(a, b)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of a layer, centred once for all its pairs."""

    raw: Float[Tensor, "rows features"]

    @cached_property
    def mean(self) -> Float[Tensor, " features"]:
        return self.raw.mean(0)

    @cached_property
    def centred(self) -> Float[Tensor, "rows features"]:
        return self.raw - self.mean


class _MomentLayer:
    """One layer: its products with itself, its range, and two rows for the cycle of samples."""

    def __init__(self, name: str, x: Representation) -> None:
        self.name, self.eps, self.width, self.scale = name, x.eps, x.flat.shape[1], 0.0
        self.own = _CentredProducts()
        self.low = self.high = x.flat[0].double()
        self.first = self.waiting = self.low.new_zeros(0, self.width)

    def add(self, x: Representation) -> _Rows:
        """Add a batch; returns its rows in float64, scaled so that no square over- or underflows."""
        if x.flat.shape[1] != self.width:
            raise MismatchError(
                f"The layer {self.name!r} has {x.flat.shape[1]} features in this batch, but {self.width} in the "
                'previous ones. Give inputs of one size, or use a policy that has one width, such as "pool".'
            )
        rows = x.flat.double()
        low, high = rows.amin(0), rows.amax(0)  # `aminmax` along an axis is far slower
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        if not self.scale:  # while all entries are zero, any scale fits
            self.scale = 2.0 ** frexp(float(torch.maximum(high, -low).max()))[1] if rows.any() else 0.0
        scaled = _Rows(rows / (self.scale or 1.0))
        self.own.add(scaled, scaled)
        return scaled

    def without_last(self, rows: Tensor) -> Tensor:
        """The waiting row and these without the last, which waits; at the end it is paired with `first`."""
        found, self.waiting = torch.cat([self.waiting, rows[:-1]]), rows[-1:].clone()
        return found

    def without_first(self, rows: Tensor) -> Tensor:
        """The rows without the very first of all, which is kept."""
        if len(self.first):
            return rows
        self.first = rows[:1].clone()
        return rows[1:]

    @property
    def means(self) -> Float[Tensor, " features"]:
        return self.own.x

    @property
    def lengths(self) -> Float[Tensor, " features"]:
        """Of centred features; zero if only rounding of the input varies."""
        means = self.means * (self.scale or 1.0)
        spread, size = torch.maximum(self.high - means, means - self.low), torch.maximum(self.high, -self.low)
        lengths = self.own.sums.diagonal().clamp(min=0).sqrt()
        return torch.where(spread <= CONSTANT_TOLERANCE * self.eps * size, 0.0, lengths)

    @property
    def deficient(self) -> bool:
        """Whether fewer directions are resolved than features and samples allow."""
        lengths = self.lengths
        values = torch.linalg.eigvalsh(_correlations(self.own.sums, lengths, lengths))
        return int((values > _floor(values)).sum()) < min(self.own.count - 1, int((lengths > 0).sum()))


class _CentredProducts:
    """Σ (x − mean of x)(y − mean of y)ᵀ over pairs of rows."""

    def __init__(self) -> None:
        self.count, self.sums, self.x, self.y = 0, torch.zeros(0), torch.zeros(0), torch.zeros(0)

    def add(self, x: _Rows, y: _Rows) -> None:
        rows = len(x.raw)
        if not rows:
            return
        if not self.count:
            self.x, self.y = torch.zeros_like(x.mean), torch.zeros_like(y.mean)
            self.sums = self.x.new_zeros(len(self.x), len(self.y))
        self.sums.addmm_(x.centred.T, y.centred)
        share = rows / (self.count + rows)
        moved = x.mean - self.x, y.mean - self.y
        self.sums.addr_(*moved, alpha=self.count * share)
        self.x, self.y = self.x + moved[0] * share, self.y + moved[1] * share
        self.count += rows

    def closed(self, x: Float[Tensor, "1 first"], y: Float[Tensor, "1 second"]) -> Float[Tensor, "first second"]:
        """What the sums would be with one more pair of rows."""
        return self.sums.addr(x[0] - self.x, y[0] - self.y, alpha=self.count / (self.count + 1))


def _correlations(sums: Tensor, first: Tensor, second: Tensor) -> Tensor:
    a, b = (torch.where(lengths > 0, 1 / lengths, 0.0) for lengths in (first, second))
    return sums * a[:, None] * b


def _floor(values: Tensor) -> float:
    """The rounding error of eigenvalues that are zero."""
    return BLUR * sqrt(len(values)) * DOUBLE_EPS * float(values.max())


def _summaries(a: _MomentLayer, b: _MomentLayer, cross: Float[Tensor, "first second"]) -> tuple[Summary, Summary]:
    """Rows of both layers with the same products: √Λ Vᵀ of the correlations V Λ Vᵀ of all features.

    If there are fewer samples than features, there are as many rows as samples, because measures handle that case
    differently. Features are scaled to length 1, so the smallest is as exact as the largest.
    """
    lengths = a.lengths, b.lengths
    mixed = _correlations(cross, *lengths)
    own = [_correlations(layer.own.sums, long, long) for layer, long in zip((a, b), lengths, strict=True)]
    joint = torch.cat([torch.cat([own[0], mixed], 1), torch.cat([mixed.T, own[1]], 1)])
    del mixed, own
    values, vectors = torch.linalg.eigh(joint)
    count = a.own.count
    rows = min(count - 1, len(values))
    values = torch.where(values > _floor(values), values, 0.0)
    centred = (vectors * values.sqrt()).T[len(values) - rows :]  # the largest stand last
    first, second = (
        Summary(layer.scale * torch.cat([part * long, sqrt(count) * layer.means[None]]), layer.eps, count)
        for layer, long, part in zip((a, b), lengths, centred.split([a.width, b.width], 1), strict=True)
    )
    return first, second
