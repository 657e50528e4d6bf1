"""Baselines: what a traced similarity is over many stitches, to compare single ones with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from intertwine.errors import InputError
from intertwine.stitch.outcome import Stitch
from intertwine.stitch.pictures import summary


@dataclass(frozen=True)
class Baseline:
    """Mean and standard deviation (n − 1) of a similarity over so many stitches."""

    measure: str
    mean: float
    deviation: float
    count: int

    def __repr__(self) -> str:
        return f"Baseline({self.measure} {self.mean:.3f} ± {self.deviation:.3f} over {self.count} stitches)"


def baseline(stitches: Iterable[Stitch], measure: str = "linear_cka_biased") -> Baseline:
    """How similar stitched features and the back network's own are, over all pairs and layers given.

    Reads the last traced value of every history; the papers compare with it what a similarity is worth.

    Raises:
        InputError: a stitch without that measure in its history.
    """
    values = [_last(stitch, measure) for stitch in stitches]
    if not values:
        raise InputError("A baseline was asked for over no stitches. Give at least one.")
    return Baseline(measure, *summary(values), len(values))


def _last(stitch: Stitch, measure: str) -> float:
    found = [record[measure] for record in stitch.history if isfinite(record.get(measure) or float("nan"))]
    if not found:
        known = sorted({name for record in stitch.history for name in record}) or ["nothing"]
        raise InputError(
            f"A baseline of {measure!r} was asked for, but the history of {stitch!r} has {', '.join(known)}. Fit the "
            "stitches with trace_every=1 or more."
        )
    return found[-1]
