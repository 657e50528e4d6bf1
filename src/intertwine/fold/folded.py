"""Fold: the result of folding, a smaller network and the account of how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from intertwine.errors import InputError
from intertwine.fold.costs import Change, seconds
from intertwine.fold.crosstalk import Example
from intertwine.fold.sites import RULES, Skipped
from intertwine.frames import frame

Groups = Mapping[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, eq=False)
class Fold:
    """A folded network. See `intertwine.fold`.

    `model`: a smaller module of the same classes. `groups`: wire → the old features behind each new one.
    `rules`: wire → "sum" (rows summed, columns averaged) or "mean" (rows averaged, columns summed).
    `parameters`, `flops`: before and after, each with `.share`. `skipped`: what was not folded, and why.
    `cut_error`: how far the small module is from the merged network at full width, on the example in double precision.
    `betas`: wire → the β at which it was stopped, where `fold_to` chose one for each.
    """

    model: nn.Module
    groups: Groups
    rules: Mapping[str, str]
    parameters: Change
    flops: Change
    skipped: tuple[Skipped, ...]
    cut_error: float
    _original: nn.Module = field(repr=False)
    _example: Example = field(repr=False)
    betas: Mapping[str, float] = field(default_factory=dict)

    @property
    def widths(self) -> dict[str, Change]:
        """Wire → its number of features before and after."""
        return {name: Change(sum(map(len, groups)), len(groups)) for name, groups in self.groups.items()}

    @property
    def removed(self) -> int:
        """How many features were merged into others."""
        return sum(int(w.before - w.after) for w in self.widths.values())

    def latency(self, repeats: int = 10) -> Change:
        """Seconds for a forward on the example, before and after: the median of some repeats."""
        if repeats < 1:
            raise InputError(f"The time of {repeats} forwards was asked for. Ask for one or more.")
        return Change(*(seconds(m, self._example, repeats) for m in (self._original, self.model)))

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per wire that can be folded, as plain data."""
        return [
            {"wire": name, "before": int(w.before), "after": int(w.after), "share": w.share, "rule": self.rules[name]}
            | {"beta": self.betas.get(name)}
            for name, w in self.widths.items()
        ]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return frame(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        return {
            "groups": {name: [list(g) for g in groups] for name, groups in self.groups.items()},
            "widths": {name: change.to_dict() for name, change in self.widths.items()},
            "rules": dict(self.rules),
            "parameters": self.parameters.to_dict(),
            "flops": self.flops.to_dict(),
            "skipped": [{"what": s.what, "reason": s.reason} for s in self.skipped],
            "cut_error": self.cut_error,
            "betas": dict(self.betas),
        }

    def __repr__(self) -> str:
        if not self.groups:
            why = self.skipped[0] if self.skipped else None
            return f"Fold(nothing to fold{f': {why.what}: {why.reason}' if why else ''})"
        if not self.removed:
            count = f"{len(self.groups)} wire{'s' * (len(self.groups) != 1)}"
            return f"Fold(nothing was merged in {count}: no two features are near enough)"
        lines = [f"Fold(parameters {self.parameters}, FLOPs {self.flops})"]
        long = max(map(len, self.groups))
        for name, width in self.widths.items():
            lines.append(f"  {name:<{long}}  {width.before:>5} → {width.after:<5}  {RULES[self.rules[name]]}")
        lines += [f"  {s.what}: not folded: {s.reason}" for s in self.skipped]
        return "\n".join(lines)
