"""Verdicts: our numbers beside the printed ones, and what the papers say in words, checked on our numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from intertwine.errors import InputError
from intertwine.reproduce.kinds.registry import Kept, Numbers


@dataclass(frozen=True)
class Line:
    """One printed number and ours. `spread`: one deviation over pairs.

    They agree when they lie no further apart than two deviations, those of both taken together, and what the printed
    number was rounded by. `verdict`: "agrees", "differs", "no value", or "no interval" where neither has a deviation,
    so that nobody can say how far apart is too far.
    """

    series: str
    label: str
    printed: float
    printed_spread: float | None
    mean: float | None
    spread: float | None
    count: int

    @property
    def difference(self) -> float | None:
        return None if self.mean is None else self.mean - self.printed

    @property
    def sigma(self) -> float:
        """Of the difference of one pair of ours and one of theirs."""
        return sqrt((self.spread or 0.0) ** 2 + (self.printed_spread or 0.0) ** 2)

    @property
    def rounding(self) -> float:
        """Half a unit of the last printed digit.

        >>> Line("G_ReLU", "3", 98.4, None, 98.4375, 0.0, 2).rounding
        0.05
        """
        exponent = Decimal(str(self.printed)).as_tuple().exponent
        return 0.5 * 10.0**exponent if isinstance(exponent, int) else 0.0

    @property
    def verdict(self) -> str:
        if self.difference is None:
            return "no value"
        if abs(self.difference) <= 2 * self.sigma + self.rounding:
            return "agrees"
        return "differs" if self.spread is not None or self.printed_spread is not None else "no interval"


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, whether it holds for our numbers (None: they cannot tell), and what was seen."""

    says: str
    holds: bool | None
    seen: str


def lines(plan: Mapping[str, Any], numbers: Numbers) -> list[Line]:
    """Every printed number beside ours.

    >>> plan = {"labels": ["3"], "printed": {"full": [1.0]}, "spread": {}}
    >>> [(line.mean, line.verdict) for line in lines(plan, {"full": {"3": [1.5, 2.5]}})]
    [(2.0, 'agrees')]
    """
    found = []
    for series, values in plan["printed"].items():
        spreads = plan["spread"].get(series, [None] * len(values))
        for label, value, spread in zip(plan["labels"], values, spreads, strict=True):
            if value is not None:
                ours = numbers.get(series, {}).get(label, [])
                found.append(Line(series, label, value, spread, *summary(ours), count(ours)))
    return found


def summary(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and deviation; of one value no deviation, of none no mean."""
    if isinstance(values, Kept):
        return values[0], values.deviation
    return (fmean(values) if values else None), (stdev(values) if len(values) > 1 else None)


def count(values: Sequence[float]) -> int:
    """How many values there are, or were.

    >>> count([1.0, 2.0]), count(Kept(1.5, 0.7, 20))
    (2, 20)
    """
    return values.many if isinstance(values, Kept) else len(values)


def claims(plan: Mapping[str, Any], numbers: Numbers) -> list[Claim]:
    """What the plan's claims come to.

    A claim has `says` and one test of the means: `rising` (series in this order), or a `series` and what it lies
    `below` or `above`, a number or another series; at all labels, or at those of `labels`. `most`: how many may fail.

    >>> numbers = {"full": {"3": [1.0], "6": [2.0]}, "rank 1": {"3": [40.0], "6": [1.0]}}
    >>> claims({"claims": [{"says": "order", "rising": ["full", "rank 1"]}]}, numbers)
    [Claim(says='order', holds=False, seen='at 1 of 2 places (not at 6)')]
    """
    return [_claim(claim, numbers) for claim in plan["claims"]]


def _claim(claim: Mapping[str, Any], numbers: Numbers) -> Claim:
    tests = dict(_tests(claim, numbers))
    if not tests:
        return Claim(claim["says"], None, f"no numbers to test it on{_lacking(claim, numbers)}")
    failed = [label for label, held in tests.items() if not held]
    but = f" (not at {', '.join(failed)})" if failed else ""
    seen = f"at {len(tests) - len(failed)} of {len(tests)} places{but}"
    return Claim(claim["says"], len(failed) <= claim.get("most", 0), seen)


def _tests(claim: Mapping[str, Any], numbers: Numbers) -> Iterator[tuple[str, bool]]:
    bound = claim.get("below", claim.get("above"))
    if "rising" not in claim and ("series" not in claim or bound is None):
        raise InputError(f"The claim {claim['says']!r} says neither what rises nor what is below or above what.")
    series = _compared(claim)
    means = {name: {label: fmean(some) for label, some in numbers.get(name, {}).items() if some} for name in series}
    shared = [label for label in means[series[0]] if all(label in one for one in means.values())]
    for label in shared:
        if label in claim.get("labels", shared):
            yield label, _holds(claim, [means[name][label] for name in series], bound)


def _compared(claim: Mapping[str, Any]) -> list[str]:
    """The series that a claim is about."""
    bound = claim.get("below", claim.get("above"))
    return list(claim.get("rising") or [claim["series"], *([bound] if isinstance(bound, str) else [])])


def _lacking(claim: Mapping[str, Any], numbers: Numbers) -> str:
    """The series that have nothing where the claim looks.

    >>> _lacking({"rising": ["a", "b"], "labels": ["3"]}, {"a": {"3": [1.0]}, "b": {"4": [1.0]}})
    ': b has none there'
    """

    def there(name: str) -> bool:
        found = numbers.get(name, {})
        return any(found[label] for label in claim.get("labels", found) if label in found)

    lacks = [name for name in _compared(claim) if not there(name)]
    return f": {' and '.join(lacks)} {'has' if len(lacks) == 1 else 'have'} none there" if lacks else ""


def _holds(claim: Mapping[str, Any], values: Sequence[float], bound: float | int | str | None) -> bool:
    if "rising" in claim:
        return all(a < b for a, b in pairwise(values))
    edge = values[1] if bound is None or isinstance(bound, str) else float(bound)
    return values[0] < edge if "below" in claim else values[0] > edge
