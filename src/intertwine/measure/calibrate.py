"""`calibrate`: what a value means. The value of unrelated features, a p-value, and a confidence interval.

Raw values grow with width and depth. A permutation of the samples of one side makes the two representations independent
and leaves everything else unchanged: the values under permutations are the null, their mean the baseline, and the score
runs from 0 at the baseline to 1 at identity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

import torch
from torch import Generator, Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError, unknown_name
from intertwine.measure.measure import Measure, Result, check_pair, find, represent

INTERVALS = ("half-samples", "bootstrap")


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A value compared with chance.

    Attributes:
        baseline: the mean of the null, which is the value of an independent pair. null: all of its values.
        p_value: the probability of a value at least as close under the null; never below 1 / (draws + 1).
        score: 0 at the baseline, 1 at identity; below 0 if two representations agree less than by chance.
        interval: the 95 % confidence interval over samples; NaN if too few resamples have a value, as a note of the
            result then says.
    """

    result: Result
    baseline: float
    null: Float[Tensor, " draws"]
    p_value: float
    score: float
    interval: tuple[float, float]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the null's values."""
        own = {"baseline": self.baseline, "p_value": self.p_value, "score": self.score, "interval": self.interval}
        return self.result.to_dict() | own

    def __repr__(self) -> str:
        if self.result.degenerate:
            return f"Calibrated({self.result.measure}: degenerate, {self.result.degenerate})"
        low, high = self.interval
        spread = "without an interval" if isnan(low) else f"in [{low:.4f}, {high:.4f}]"
        tail = f", {'; '.join(self.result.notes)}" if self.result.notes else ""
        return (
            f"Calibrated({self.result.measure}: {self.result.value:.4f} {spread}, baseline "
            f"{self.baseline:.4f}, score {self.score:.4f}, p = {self.p_value:.2g}{tail})"
        )


def calibrate(
    x: Tensor,
    y: Tensor,
    name: str | Measure = "linear_cka",
    draws: int = 200,
    resamples: int = 200,
    interval: str = "half-samples",
    seed: int = 0,
    **options: Any,
) -> Calibrated:
    """A value with its permutation null, baseline, p-value, calibrated score and interval.

    Args:
        x, y, name, options: as for `intertwine.measure`; instead of the name also a `Measure` of your own.
        draws: permutations of the null. resamples: for the interval. seed: of both.
        interval: "half-samples" draws random halves of the samples without replacement; the spread of their values is
            that of the whole. "bootstrap" draws with replacement, which repeats samples and so raises measures of pairs
            of samples.

    Example:
        >>> import torch
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(60, 30, generator=g)
        >>> found = calibrate(x, torch.randn(60, 30, generator=g), "linear_cka_biased", draws=99)
        >>> found.result.value > 0.2, abs(found.score) < 0.1, found.p_value > 0.05
        (True, True, True)
    """
    if interval not in INTERVALS:
        raise InputError(unknown_name("interval", interval, INTERVALS))
    if draws < 1 or resamples < 2:
        raise InputError(f"draws must be at least 1 and resamples at least 2, but are {draws} and {resamples}.")
    measure = find(name, **options) if isinstance(name, str) else name
    measure = replace(measure, baseline=False)  # the mean of the null is better than one order of the samples
    check_pair(represent(x, "x"), represent(y, "y"))
    a, b = measure.prepare(x), measure.prepare(y)
    result = measure.compare(a, b)
    if result.degenerate:
        return Calibrated(result, nan, torch.zeros(0), nan, nan, (nan, nan))
    g = Generator().manual_seed(seed)
    orders = (torch.randperm(b.samples, generator=g) for _ in range(draws))
    values = [measure.compare(a, measure.permuted(b, order)).value for order in orders]
    null = torch.tensor(values, dtype=torch.float64)
    baseline = float(null.nanmean())
    closer = null >= result.value if measure.kind == "similarity" else null <= result.value
    p_value = (1 + int(closer.sum())) / (1 + draws)
    score = (result.value - baseline) / (measure.at_identity - baseline)
    spread, notes = _interval(measure, x, y, result.value, resamples, interval == "bootstrap", seed)
    result = replace(result, notes=result.notes + notes)
    return Calibrated(result, baseline, null, p_value, score, spread)


def _interval(
    measure: Measure, x: Tensor, y: Tensor, value: float, resamples: int, repeat: bool, seed: int
) -> tuple[tuple[float, float], tuple[str, ...]]:
    """The value plus and minus 1.96 standard errors, within the range of the measure; quantiles for the bootstrap.

    Also a note if resamples have no value.
    """
    g, n = Generator().manual_seed(seed + 1), len(x)
    results = []
    for _ in range(resamples):
        rows = torch.randint(n, (n,), generator=g) if repeat else torch.randperm(n, generator=g)[: n // 2]
        results.append(measure(x[rows], y[rows]))
    found = torch.tensor([result.value for result in results], dtype=torch.float64)
    found = found[found.isfinite()]
    notes: tuple[str, ...] = ()
    if len(found) < resamples:
        why = next((result.degenerate for result in results if result.degenerate), "the value is not finite")
        what = "no interval" if len(found) < 2 else f"the interval is of {len(found)} of {resamples} resamples"
        notes = (f"{what}: of {n if repeat else n // 2} samples there may be no value ({why})",)
    if len(found) < 2:
        return (nan, nan), notes
    if repeat:
        low, high = torch.quantile(found, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return (low, high), notes
    error = 1.96 * float(found.std())
    return (max(measure.range[0], value - error), min(measure.range[1], value + error)), notes
