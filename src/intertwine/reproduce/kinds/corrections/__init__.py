"""Corrections: errors in print, each as one number computed the printed way and the corrected way, over a few seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError
from intertwine.features.pictures import panels_in_rows
from intertwine.reproduce.claims import summary
from intertwine.reproduce.kinds.corrections.checks import CHECKS
from intertwine.reproduce.kinds.registry import Kind, Numbers, Row
from intertwine.reproduce.work import Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = ("as printed", "corrected")


@dataclass(frozen=True)
class Settings:
    """`checks`: which, by name; all where none is named. `seeds`: how many draws of each."""

    checks: list[str] = field(default_factory=lambda: list(CHECKS))
    seeds: int = 5

    def check(self, plan: Any, where: str) -> None:
        unknown = sorted(set(self.checks) - set(CHECKS))
        if unknown:
            raise InputError(f"{where}: there are no checks {', '.join(unknown)}; there are {', '.join(CHECKS)}.")


def run(work: Work) -> list[Row]:
    """One row per check, seed and way."""
    settings, rows = work.plan.settings, []
    for name in settings.checks:
        work.tell(f"checking {name}: {CHECKS[name].what}")
        for seed in range(settings.seeds):
            for way, value in zip(WAYS, CHECKS[name].values(seed), strict=True):
                rows.append({"check": name, "what": CHECKS[name].what, "seed": seed, "way": way, "value": value})
    return rows


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Way → check → one value per seed."""
    found: Numbers = {way: {} for way in WAYS}
    for row in rows:
        found[row["way"]].setdefault(row["check"], []).append(row["value"])
    return found


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """One panel per check, two bars each: they measure different things."""
    found = numbers(plan, rows)
    checks = list(found[WAYS[0]])
    what = {row["check"]: row["what"] for row in rows}
    figure, grid = panels_in_rows(len(checks), 2.4, 2.6)
    for axes, name in zip(grid, checks, strict=True):
        for i, way in enumerate(WAYS):
            mean, spread = summary(found[way][name])
            axes.bar(i, mean or 0.0, yerr=spread or 0.0, color=f"C{i}", capsize=3)
        axes.set_xticks(range(len(WAYS)), WAYS, fontsize=7, rotation=20)
        axes.set_title("\n".join(wrap(f"{name}: {what[name]}", 36)), fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
    return figure


KIND = Kind(Settings, run, numbers, draw)
