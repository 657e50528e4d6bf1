"""Benchmarks of studies: overhead of a task, speed-up of two workers, a million rows, and killed studies.

    python bench/study.py                  # everything, about twenty minutes
    python bench/study.py overhead         # 1,000 tasks of 10 ms on every executor
    python bench/study.py speedup          # two workers against one: a loop, and a study of real verbs
    python bench/study.py rows             # 1,000,000 rows written, read and aggregated
    python bench/study.py kills            # 50 kills of studies of 200 tasks, and a few under Ray
    python bench/study.py page             # the table of all results

Rows are stored at once in bench/results/study.json and replace the earlier ones of that part. Times need an idle
machine with two cores; `load` in the file is its load average.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import header, write_results

# torch is imported inside functions: every worker process imports this file, and its time would count as overhead.

RESULTS = Path(__file__).parent / "results" / "study.json"
PARTS = ("overhead", "speedup", "rows", "kills")


def overhead(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The overhead of a task."""
    from study_executors import measure_overhead

    return measure_overhead()


def speedup(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two workers against one."""
    import study_speedup
    from study_executors import measure_speedup

    yield from measure_speedup()
    yield from study_speedup.measure()


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result store."""
    import study_store

    measured = study_store.measure()
    print(study_store.table(measured) + "\n")
    return study_store.rows(measured)


def kills(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Killed studies against an undisturbed one."""
    import study_kills

    return study_kills.measure({"processes": asked.kills, "ray": asked.ray_kills}, asked.tasks, asked.seed)


# -- results -----------------------------------------------------------------------------------------------------------


def judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with `ok`, and with its `ratio` to the floor if it has one.

    >>> judged({"what": "two workers", "value": 1.9, "bar": 1.8, "at": "least", "floor": 2.0, "unit": "×"})["ok"]
    True
    """
    value, bar = row["value"], row.get("bar")
    ok = bar is None or (value >= bar if row["at"] == "least" else value < bar or value == bar == 0)
    return {**row, "bar": bar, **({"ratio": value / row["floor"]} if "floor" in row else {}), "ok": ok}


def about(load: float) -> dict[str, Any]:
    """The header of a part, with the versions of the packages of studies; `load` is the load average before it."""
    made = header(load)
    return made | {"version": made["version"] | {name: version(name) for name in ("polars", "ray", "numpy")}}


def kept(results: Path, part: str, found: list[dict[str, Any]], made: Mapping[str, Any]) -> dict[str, Any]:
    """Store the rows of a part, and return all results."""

    held = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {"rows": [], "made": {}}
    others = [row for row in held["rows"] if row["part"] != part]
    all_rows = sorted([*others, *({"part": part} | row for row in found)], key=lambda row: PARTS.index(row["part"]))
    whole = {"rows": all_rows, "made": held["made"] | {part: made}}
    write_results(results, whole)
    return whole


def page(results: Mapping[str, Any]) -> str:
    """The table of all results, with the machine."""
    lines = ["| what | asked | measured | ratio to floor | good |", "|---|---|---|---|---|"]
    lines += [line(row) for row in results.get("rows", [])]
    lines += [told(row) for row in results.get("rows", []) if row["part"] == "kills"]
    return "\n".join([*lines, *_machines(results.get("made", {}))])


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    bar = row["bar"]
    sign = "≥" if row.get("at") == "least" else "<" if bar else ""
    asked = "" if bar is None else f"{sign} {bar:g} {row['unit']}".strip()
    value = f"{row['value']:.2f}" if isinstance(row["value"], float) else row["value"]
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
    good = "" if bar is None else "yes" if row["ok"] else "no"
    return f"| {row['what']} | {asked} | {value} {row['unit']} | {ratio} | {good} |"


def told(row: Mapping[str, Any]) -> str:
    """The kills of a row, in words."""
    who = " and ".join(f"{count} of a {name}" for name, count in sorted(row["kills"].items()))
    when = ", ".join(f"{count} while {name}" for name, count in sorted(row["while"].items()))
    wrong = ", ".join(f"{row[name]} {name}" for name in ("lost", "added", "changed", "twice"))
    return (
        f"\n{row['what']}: {who} ({when}), over {row['starts']} starts of {row['studies']} studies. Of "
        f"{row['compared']:,} tasks compared bit by bit: {wrong}."
    )


def _machines(made: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for all parts with the same machine and versions."""
    parts: dict[str, list[str]] = {}
    for part, how in made.items():
        machine, of = how["machine"], how["version"]
        sentence = (
            f"{machine['processor']}, {machine['cores']} cores; Python {of['python']}, torch {of['torch']}, "
            f"polars {of['polars']}, Ray {of['ray']}"
        )
        parts.setdefault(sentence, []).append(f"`{part}` (load {machine['load']:.1f} before it)")
    for sentence, names in parts.items():
        yield f"\nMeasured on: {sentence}: {', '.join(names)}. `python bench/study.py` does it."


# -- the command -------------------------------------------------------------------------------------------------------


def tasks_of(text: str) -> int:
    """A number of tasks that the plan allows."""
    from study_plans import EACH

    if not text.isdigit() or int(text) < EACH or int(text) % EACH:
        raise argparse.ArgumentTypeError(f"the plan has tasks by the {EACH}; give a multiple of that, not {text}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("part", nargs="?", default="all", choices=(*PARTS, "all", "page"))
    asked.add_argument("--kills", type=int, default=50, help="kills of studies on processes (default: %(default)s)")
    asked.add_argument("--ray-kills", type=int, default=5, help="kills of studies on Ray (default: %(default)s)")
    asked.add_argument("--tasks", type=tasks_of, default=200, help="tasks of a killed study (default: %(default)s)")
    asked.add_argument("--seed", type=int, default=0, help="seed of the kills (default: %(default)s)")
    asked.add_argument("--out", type=Path, default=RESULTS, help="the result file")
    return asked


def main() -> None:
    """Measure, store and print."""
    asked = parser().parse_args()
    measures = {"overhead": overhead, "speedup": speedup, "rows": rows, "kills": kills}
    for part in PARTS if asked.part == "all" else [asked.part] if asked.part != "page" else []:
        load = os.getloadavg()[0]
        found = []
        for row in map(judged, measures[part](asked)):
            print(line(row), flush=True)
            found.append(row)
            kept(asked.out, part, found, about(load))  # now: the next row may take many minutes
    print("\n" + page(json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}))


if __name__ == "__main__":
    main()
