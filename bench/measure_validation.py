"""Validation of every similarity measure with `intertwine.testing.benchmark_measure`.

    python bench/measure_validation.py --skip soft_matching     # minutes; networks go to the user's cache folder

Soft matching solves a transport problem for each of some 4,400 comparisons and takes longer than all others.

Results are stored in bench/results/measure_validation.json; docs/measures.py writes them into docs/measures.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from machine import stamped, write_results

import intertwine as it
from intertwine.lab.measure_benchmark.benchmark import score_measure
from intertwine.lab.measure_benchmark.networks import benchmark_networks

RESULTS = Path(__file__).parent / "results" / "measure_validation.json"
#: Columns of the table: heading, test, statistic.
COLUMNS = (
    ("sensitivity ρ", "sensitivity", "spearman"), ("τ", "sensitivity", "kendall"),
    ("specificity ρ", "specificity", "spearman"), ("τ", "specificity", "kendall"),
    ("layers, one network", "layers within", "conformity"), ("layers, two seeds", "layers across", "conformity"),
    ("random labels", "random labels", "conformity"), ("AUPRC", "random labels", "AUPRC"),
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """One row per measure, and one of chance."""
    lines = [f"| measure | {' | '.join(name for name, _, _ in COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        scores = {(s["test"], s["statistic"]): s for s in row["scores"]}
        cells = [_cell(scores[test, statistic]["value"]) for _, test, statistic in COLUMNS]
        lines.append(f"| `{row['measure']}` | {' | '.join(cells)} |")
    chances = {(s["test"], s["statistic"]): s["chance"] for s in rows[0]["scores"]}
    lines.append(f"| chance | {' | '.join(_cell(chances[test, statistic]) for _, test, statistic in COLUMNS)} |")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def main() -> None:
    """Train once, score every measure, write and print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--networks", type=int, default=10)
    options.add_argument("--folder", type=Path, help="folder of the networks (default: the user's cache folder)")
    options.add_argument("--skip", action="append", default=[], metavar="MEASURE", help="skip a slow measure")
    options.add_argument("--results", type=Path, default=RESULTS)
    chosen = options.parse_args()
    on = benchmark_networks(chosen.folder, chosen.networks, None)
    rows: list[dict[str, Any]] = []
    about = {"torch": torch.__version__.split("+")[0], "threads": torch.get_num_threads()}
    for measure in (m for m in it.measures() if m.name not in chosen.skip):
        start = time.perf_counter()
        found = score_measure(measure, on)
        rows.append(found.to_dict() | {"seconds": round(time.perf_counter() - start, 2)})
        print(json.dumps({"measure": measure.name, "seconds": rows[-1]["seconds"]}), flush=True)
        write_results(chosen.results, stamped({"rows": rows, **about}, "validation"))
    print(table(rows))


if __name__ == "__main__":
    main()
