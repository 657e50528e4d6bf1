"""Comparison: every layer of one network against every layer of another, by one or several measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from intertwine.errors import InputError, did_you_mean
from intertwine.features.fingerprint import Fingerprint
from intertwine.features.pictures import new_figure
from intertwine.frames import frame
from intertwine.measure.measure import find
from intertwine.measure.result import Result
from intertwine.shapes import Float

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` found.

    Attributes:
        first, second: the layers of both networks. measures: by name. policy: how positions and tokens were treated.
        results: (measure, layer of the first, layer of the second) → `Result`.
        fingerprint: of the data both networks saw.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    measures: tuple[str, ...]
    policy: str
    results: Mapping[tuple[str, str, str], Result] = field(repr=False)
    fingerprint: Fingerprint

    def result(self, first: str, second: str, measure: str | None = None) -> Result:
        """The result of one pair of layers."""
        key = (self._measure(measure), first, second)
        if key not in self.results:
            known = [*self.first, *self.second]
            wrong = first if first not in self.first else second
            raise InputError(
                f"The layer {wrong!r} was not compared. {did_you_mean(wrong, known)}See .first and .second."
            )
        return self.results[key]

    def matrix(self, measure: str | None = None) -> Float[Tensor, "first second"]:
        """The values of one measure; not a number where a pair has none."""
        name = self._measure(measure)
        rows = [[self.results[name, a, b].value for b in self.second] for a in self.first]
        return torch.tensor(rows, dtype=torch.float64)

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per measure and pair of layers, as plain data."""
        return list(self._rows())

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with None where a pair has no value: JSON knows no NaN."""
        rows = [row | {"value": None if math.isnan(row["value"]) else row["value"]} for row in self._rows()]
        return {"first": list(self.first), "second": list(self.second), "policy": self.policy, "results": rows}

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return frame(self.to_rows())

    def plot(
        self, measure: str | None = None, names: tuple[str, str] = ("the first network", "the second network")
    ) -> Figure:
        """A heat map of one measure, the first network's layers from top to bottom."""
        name, values = self._measure(measure), self.matrix(measure)
        low, high = find(name).range
        figure = new_figure(2.4 + 0.32 * len(self.second), 1.8 + 0.28 * len(self.first))
        axes = figure.subplots()
        bounds = (low if low > -torch.inf else None, high if high < torch.inf else None)
        picture = axes.imshow(values.numpy(), vmin=max(0.0, bounds[0] or 0.0), vmax=bounds[1], cmap="viridis")
        axes.set_xticks(range(len(self.second)), self.second, rotation=90, fontsize=7)
        axes.set_yticks(range(len(self.first)), self.first, fontsize=7)
        axes.set_ylabel(f"layers of {names[0]}", fontsize=8)
        axes.set_xlabel(f"layers of {names[1]}", fontsize=8)
        axes.set_title(f"{name}, {self.fingerprint.samples:,} samples, {self.policy}{self._chance(name)}", fontsize=9)
        figure.colorbar(picture, ax=axes, shrink=0.8)
        return figure

    def words(self) -> str:
        """What was compared, in words."""
        size = f"{len(self.first)} × {len(self.second)} layers"
        return f"{size} by {', '.join(self.measures)}, {self.fingerprint.samples:,} samples, {self.policy}"

    def __repr__(self) -> str:
        return f"Comparison({self.words()})"

    def _chance(self, measure: str) -> str:
        """What unrelated features score, where the measure says so."""
        known = [r.baseline for (name, *_), r in self.results.items() if name == measure and r.baseline is not None]
        return f"\nunrelated features: {min(known):.2f} to {max(known):.2f}" if known else ""

    def _measure(self, name: str | None) -> str:
        chosen = name or self.measures[0]
        if chosen not in self.measures:
            raise InputError(f"The measure {chosen!r} was not taken; these were: {', '.join(self.measures)}.")
        return chosen

    def _rows(self) -> Iterator[dict[str, Any]]:
        for (measure, a, b), result in self.results.items():
            yield {
                "measure": measure, "first": a, "second": b, "value": result.value, "degenerate": result.degenerate,
                "baseline": result.baseline, "notes": "; ".join(result.notes), "policy": self.policy,
                "samples": self.fingerprint.samples, "data": self.fingerprint.digest,
            }  # fmt: skip
