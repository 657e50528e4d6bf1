"""Rows: what a task of a study finds, and what is kept of the task beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The columns of a table of results, in their order.
COLUMNS = (
    "study", "key", "verb", "zoo", "a", "b", "layer", "other_layer", "options", "repeat", "quantity", "index", "value",
    "low", "high", "note", "seconds", "peak_mib", "version", "torch", "python", "git", "command", "made_at",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One number that a verb found, or the reason why there is none.

    Attributes:
        quantity: what it is, such as "linear_cka". value: None where `note` says why.
        low, high: an interval around it. index: its place along a curve, such as α, or the share of parameters left.
        layer, other_layer: of the first and of the second network.
    """

    quantity: str
    value: float | None
    low: float | None = None
    high: float | None = None
    index: float | None = None
    layer: str | None = None
    other_layer: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Finished:
    """A task that has run: its rows, what it cost, and what made it. `error`: why it has none."""

    key: str
    task: Mapping[str, Any]
    rows: tuple[Row, ...]
    seconds: float
    peak_mib: float | None = None
    made: Mapping[str, str | None] = field(default_factory=dict)
    error: str | None = None
