"""The measured tables of docs/inspection.md, from the committed result files alone; docs/results.py puts them there."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from intertwine.lab.papers.experiments import read_result

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "docs")]
#: Behind the residual sum, and inside the block.
RESULTS = [ROOT / "experiments" / "results" / f"godfrey-{name}.gpu.json" for name in ("fig3", "fig19")]


def read_rows() -> list[dict[str, Any]]:
    """One row per network, place and rotation."""
    return [row for file in RESULTS for row in read_result(file).rows]


def trend_table(rows: list[dict[str, Any]]) -> str:
    """Mean fractions of interpretable units per α, and by how much they change for each network."""
    alphas = sorted({row["alpha"] for row in rows})
    heads = ["place", "networks", "accuracy", *(f"α = {alpha:g}" for alpha in alphas), "change, network by network"]
    lines = [f"| {' | '.join([*heads, 'by chance'])} |", "|---" * (len(heads) + 1) + "|"]
    for at in dict.fromkeys(row["at"] for row in rows):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            some = [row for row in rows if (row["at"], row["kind"]) == (at, kind)]
            cells = [f"`{at}`", kind, f"{mean(row['accuracy'] for row in some):.1%}"]
            cells += [f"{_fraction(some, alpha):.1%}" for alpha in alphas]
            cells += [", ".join(_changes(some, alphas)), f"{mean(row['chance'] for row in some):.1%}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _changes(rows: list[dict[str, Any]], alphas: list[float]) -> list[str]:
    """Points from the first α to the last, one text per network."""
    found = []
    for network in sorted({row["network"] for row in rows}):
        own = [row for row in rows if row["network"] == network]
        found.append(f"{100 * (_fraction(own, alphas[-1]) - _fraction(own, alphas[0])):+.1f}")
    return found


def _fraction(rows: list[dict[str, Any]], alpha: float) -> float:
    return mean(row["fraction"] for row in rows if row["alpha"] == alpha)


def written(page: str) -> str:
    """The page with its tables."""
    import inspection
    from results import or_words, put, read

    page = put(page, "trend", trend_table(read_rows()))
    results = read(inspection.RESULTS)
    return put(page, "bench", or_words(results, inspection.page(results), "inspection.py rotation"))
