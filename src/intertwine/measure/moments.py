"""CCA, R², Procrustes and soft matching in one pass over batches, in memory that depends on the width of layers only.

These measures see nothing of the samples but products of features. What is summed, in float64: the centred products of
every layer with itself and of every pair. Batches are centred on their own means and joined by the differences of
means, so that nothing cancels. At the end a few rows with exactly these products stand for all samples, and the measure
itself compares them: no measure is written twice.

Products square the size of a direction. In float64 they still show every direction that stands above the rounding of
float32 features; of float64 features one below about 1e-7 of the largest is lost, and a note says where that can be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import frexp, sqrt

import torch
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.measure.measure import Measure, Prepared
from intertwine.measure.representation import STILL, Representation, check_pair, represent
from intertwine.measure.result import Result
from intertwine.shapes import Float

DOUBLE_EPS = float(torch.finfo(torch.float64).eps)
#: Times √width, what rounding makes of products that are zero, as a multiple of float64's precision.
BLUR = 4.0
#: Features that are more precise than this hold directions which their products cannot show.
SEEN = 1e-8


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
    a, b = (Prepared(measure.name, s.samples, s, measure.prepare_with(s) if enough else None) for s in (x, y))
    return measure.compare(a, b)


def _blurred(a: _Layer, b: _Layer) -> tuple[str, ...]:
    """A note where features are so precise that small directions may be missing."""
    sides = [side for side, layer in (("x", a), ("y", b)) if layer.eps < SEEN and layer.deficient]
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
        return torch.where(spread <= STILL * self.eps * size, 0.0, self.own.sums.diagonal().clamp(min=0).sqrt())

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
