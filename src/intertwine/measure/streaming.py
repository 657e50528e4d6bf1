"""Measures that need products of features only, in one pass over batches: linear CKA, CCA, R², Procrustes and soft
matching.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
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
)

# ----------------------------------------------------------------------------------------------------
# Exact linear CKA and kernel alignment in one pass over batches, in memory that depends on the width of layers only.
#
# What is summed: products of features, and small sums in float64 from which the terms of debiased CKA follow, diagonals
# included. Features are shifted by the mean of the first batch, so that little is lost when the true means are subtracted
# at the end. The value is the one that all samples at once would give, not a mean over batches.


#: Entries so many times larger than those of the first batch are multiplied in float64, where they cannot overflow.
LARGE = 2.0**20
ROWS = 1024  # of a matrix of products, at a time

Layers = Tensor | Mapping[str, Tensor]


class CkaForm(NamedTuple):
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
        self._sides: tuple[dict[str, _Layer_streaming], dict[str, _Layer_streaming]] = {}, {}
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
            raise InputError(f"The layers {x!r} and {y!r} were asked for. The pairs that are compared: {known}.")
        form = CkaForm(biased or not center, center)
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


def _layer(side: dict[str, _Layer_streaming], name: str, x: Representation) -> _Layer_streaming:
    if name not in side:
        side[name] = _Layer_streaming(x)
    return side[name]


class ScaledBatch(NamedTuple):
    """A batch of a layer, shifted and scaled: its features with the squared lengths of rows beside them, and these."""

    wide: Tensor
    lengths: Tensor


class _Layer_streaming:
    """What belongs to one layer: its shift and scale, sums over samples, and its products with itself."""

    def __init__(self, x: Representation) -> None:
        self.shift = x.flat.mean(0, dtype=torch.float64).to(x.values.dtype)
        self.width, self.eps, self.scale, self.count = len(self.shift), x.eps, 0.0, 0
        self.features, self.lengths = torch.zeros_like(self.shift, dtype=torch.float64), 0.0
        self.low = self.high = self.size = torch.zeros_like(self.shift)
        self.products = _Sums(self.shift, self.shift)
        self._own: dict[CkaForm, tuple[float, float]] = {}

    def take(self, given: Representation) -> ScaledBatch:
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
        return ScaledBatch(wide, lengths)

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

    def own(self, form: CkaForm) -> tuple[float, float]:
        """The inner product with itself, and its first term."""
        if form not in self._own:
            self._own[form] = self.products.inner(self, self, form)
        return self._own[form]

    def fault(self, form: CkaForm) -> str | None:
        """Why there is nothing to align with, in words that follow the name of the layer."""
        if not form.center:
            return None if self.size.any() else "is zero everywhere"
        if (self.high - self.low <= CONSTANT_TOLERANCE * self.eps * self.size).all():
            return "is constant: no feature varies over the samples"
        own, total = self.own(form)
        if (
            own <= CONSTANT_TOLERANCE * torch.finfo(self.shift.dtype).eps * sqrt(self.count) * total
        ):  # rounding and no more
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

    def inner(self, x: _Layer_streaming, y: _Layer_streaming, form: CkaForm) -> tuple[float, float]:
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


# ----------------------------------------------------------------------------------------------------
# CCA, R², Procrustes and soft matching in one pass over batches, in memory that depends on the width of layers only.
#
# These measures see nothing of the samples but products of features. What is summed, in float64: the centred products of
# every layer with itself and of every pair. Batches are centred on their own means and joined by the differences of
# means, so that nothing cancels. At the end a few rows with exactly these products stand for all samples, and the measure
# itself compares them: no measure is written twice.
#
# Products square the size of a direction. In float64 they still show every direction that stands above the rounding of
# float32 features; of float64 features one below about 1e-7 of the largest is lost, and a note says where that can be.


DOUBLE_EPS = float(torch.finfo(torch.float64).eps)
#: Times √width, what rounding makes of products that are zero, as a multiple of float64's precision.
BLUR = 4.0
#: Features that are more precise than this hold directions which their products cannot show.
VISIBLE = 1e-8


@dataclass(frozen=True, eq=False)
class Summary(Representation):
    """A few rows that have the means and products of many samples: centred rows, and at last √count times the mean."""

    count: int

    @property
    def samples(self) -> int:
        return self.count

    @cached_property
    def centred(self) -> Float[Tensor, "samples features"]:
        return torch.cat([self.values[:-1], torch.zeros_like(self.values[-1:])])


class StreamingMoments:
    """Measures that need products of features only, batch by batch.

    Args:
        pairs: which layers are compared, as pairs of names. baseline: whether what unrelated features score is wanted
            as well; samples then change places within batches, in one cycle through all of them.

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
        self._sides: tuple[dict[str, _Layer], dict[str, _Layer]] = {}, {}
        self._pairs = {pair: _Products() for pair in pairs}
        self._shuffled = {pair: _Products() for pair in pairs} if baseline else {}
        self._chance = torch.Generator().manual_seed(0)

    def update(self, xs: Mapping[str, Tensor], ys: Mapping[str, Tensor]) -> None:
        """Take in a batch: the features of the same samples in both networks, by the names of layers.

        Raises:
            InputError: a batch is no tensor of finite numbers.
            MismatchError: numbers of samples differ, or widths are not those of the batches before.
        """
        batches = [{name: represent(x, name) for name, x in side.items()} for side in (xs, ys)]
        every = [x for batch in batches for x in batch.values()]
        for x in every:
            check_pair(every[0], x)
        rows = [
            {name: known.setdefault(name, _Layer(name, x)).take(x) for name, x in batch.items()}
            for known, batch in zip(self._sides, batches, strict=True)
        ]
        for (a, b), products in self._pairs.items():
            products.take(rows[0][a], rows[1][b])
        if self._shuffled:
            self._shuffle(*rows)
        self.samples += every[0].samples

    def _shuffle(self, left: dict[str, _Rows], right: dict[str, _Rows]) -> None:
        """Every sample of x meets the next one of y, in a random order; the last one waits for the next batch."""
        count = len(next(iter(left.values())).raw)
        order = torch.randperm(count, generator=self._chance)
        xs = {name: _Rows(self._sides[0][name].chain(x.raw[order.to(x.raw.device)])) for name, x in left.items()}
        ys = {name: _Rows(self._sides[1][name].begun(y.raw[order.to(y.raw.device)])) for name, y in right.items()}
        for (a, b), products in self._shuffled.items():
            products.take(xs[a], ys[b])

    def results(self, measures: Iterable[Measure], x: str, y: str) -> list[Result]:
        """What each measure says of one pair of layers, over all samples so far.

        Raises:
            InputError: the pair is not one of those that are compared.
        """
        if (x, y) not in self._pairs or not self.samples:
            known = ", ".join(map(str, self._pairs)) if self.samples else "none before the first batch"
            raise InputError(f"The layers {x!r} and {y!r} were asked for. The pairs that are compared: {known}.")
        a, b = self._sides[0][x], self._sides[1][y]
        sides, others = _summaries(a, b, self._pairs[x, y].sums), None
        if self._shuffled and self.samples > 1:
            others = _summaries(a, b, self._shuffled[x, y].closed(a.waiting, b.first))
        blurred = _blurred(a, b)
        found: list[Result] = []
        for measure in measures:
            plain = replace(measure, baseline=False)  # its own would reorder rows that are no samples
            result = _compared(plain, *sides)
            if measure.baseline and others is not None and not result.degenerate:
                result = replace(result, baseline=_compared(plain, *others).value)
            found.append(result if result.degenerate else replace(result, notes=result.notes + blurred))
        return found


def _compared(measure: Measure, x: Summary, y: Summary) -> Result:
    enough = x.samples >= measure.needs
    a, b = (
        PreparedRepresentation(measure.name, s.samples, s, measure.prepare_with(s) if enough else None) for s in (x, y)
    )
    return measure.compare(a, b)


def _blurred(a: _Layer, b: _Layer) -> tuple[str, ...]:
    """A note where features are so precise that small directions may be missing."""
    sides = [side for side, layer in (("x", a), ("y", b)) if layer.eps < VISIBLE and layer.deficient]
    if not sides:
        return ()
    return (f"one pass: directions of {' and '.join(sides)} below about 1e-7 of the largest are not seen",)


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


class _Layer:
    """What is known of one layer: its products with itself, its range, and two rows for the cycle of samples."""

    def __init__(self, name: str, x: Representation) -> None:
        self.name, self.eps, self.width, self.scale = name, x.eps, x.flat.shape[1], 0.0
        self.own = _Products()
        self.low = self.high = x.flat[0].double()
        self.first = self.waiting = self.low.new_zeros(0, self.width)

    def take(self, x: Representation) -> _Rows:
        """Add a batch; gives its rows in float64, by a scale in which no square over- or underflows."""
        if x.flat.shape[1] != self.width:
            raise MismatchError(
                f"The layer {self.name!r} had {self.width} features in the batches before, and has {x.flat.shape[1]} "
                'in this one. Give inputs of one size, or use a policy that has one width, such as "pool".'
            )
        rows = x.flat.double()
        low, high = rows.amin(0), rows.amax(0)  # `aminmax` along an axis is far slower
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        if not self.scale:  # as long as all is zero, any scale will do
            self.scale = 2.0 ** frexp(float(torch.maximum(high, -low).max()))[1] if rows.any() else 0.0
        scaled = _Rows(rows / (self.scale or 1.0))
        self.own.take(scaled, scaled)
        return scaled

    def chain(self, rows: Tensor) -> Tensor:
        """The row that waited and these, but for the last, which waits; it meets `first` when all are through."""
        found, self.waiting = torch.cat([self.waiting, rows[:-1]]), rows[-1:].clone()
        return found

    def begun(self, rows: Tensor) -> Tensor:
        """The rows, but for the very first of all, which is kept."""
        if len(self.first):
            return rows
        self.first = rows[:1].clone()
        return rows[1:]

    @property
    def means(self) -> Float[Tensor, " features"]:
        return self.own.x

    @property
    def lengths(self) -> Float[Tensor, " features"]:
        """Of centred features; zero where what varies is rounding of the input."""
        means = self.means * (self.scale or 1.0)
        spread, size = torch.maximum(self.high - means, means - self.low), torch.maximum(self.high, -self.low)
        return torch.where(
            spread <= CONSTANT_TOLERANCE * self.eps * size, 0.0, self.own.sums.diagonal().clamp(min=0).sqrt()
        )

    @property
    def deficient(self) -> bool:
        """Whether fewer directions are seen than features vary, and samples allow."""
        lengths = self.lengths
        values = torch.linalg.eigvalsh(_correlations(self.own.sums, lengths, lengths))
        return int((values > _floor(values)).sum()) < min(self.own.count - 1, int((lengths > 0).sum()))


class _Products:
    """Σ (x − mean of x)(y − mean of y)ᵀ over pairs of rows."""

    def __init__(self) -> None:
        self.count, self.sums, self.x, self.y = 0, torch.zeros(0), torch.zeros(0), torch.zeros(0)

    def take(self, x: _Rows, y: _Rows) -> None:
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
        """The sums with one more pair of rows, as they would be."""
        return self.sums.addr(x[0] - self.x, y[0] - self.y, alpha=self.count / (self.count + 1))


def _correlations(sums: Tensor, first: Tensor, second: Tensor) -> Tensor:
    a, b = (torch.where(lengths > 0, 1 / lengths, 0.0) for lengths in (first, second))
    return sums * a[:, None] * b


def _floor(values: Tensor) -> float:
    """What rounding makes of eigenvalues that are zero."""
    return BLUR * sqrt(len(values)) * DOUBLE_EPS * float(values.max())


def _summaries(a: _Layer, b: _Layer, cross: Float[Tensor, "first second"]) -> tuple[Summary, Summary]:
    """Rows of both layers that have their products: √Λ Vᵀ of the correlations V Λ Vᵀ of all features.

    There are as many rows as samples where that is fewer than features, so that measures which then do otherwise see
    it. Features of length 1 are decomposed: the smallest is as exact as the largest.
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
