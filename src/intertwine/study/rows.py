"""Rows: what a task of a study finds, and what is kept of the task beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data.

        >>> Finished.from_dict(Finished("k", {"verb": "fold"}, (Row("penalty", 0.5),), 1.0).to_dict()).rows[0].value
        0.5
        """
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finished:
        """What `to_dict` gave."""
        fields = dict(data) | {"rows": tuple(Row(**row) for row in data["rows"])}
        return cls(**fields)

    def records(self, study: str) -> list[dict[str, Any]]:
        """One record per row, as the columns of the table name it.

        >>> found = Finished("k", {"verb": "fold", "options": {"beta": 0.1}}, (Row("penalty", 0.5),), 1.0)
        >>> record = found.records("mine")[0]
        >>> record["quantity"], record["value"], record["options"]
        ('penalty', 0.5, '{"beta": 0.1}')
        """
        about = {name: self.task.get(name) for name in ("verb", "zoo", "a", "b", "layer", "repeat")}
        about |= {"study": study, "key": self.key, "seconds": self.seconds, "peak_mib": self.peak_mib, **self.made}
        about["options"] = json.dumps(self.task.get("options") or {}, sort_keys=True)
        found = []
        for row in self.rows:
            own = {name: value for name, value in asdict(row).items() if value is not None}
            record = about | own
            found.append({name: record.get(name) for name in COLUMNS})
        return found
