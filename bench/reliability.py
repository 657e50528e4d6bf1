"""Reliability trials: hostile files, full disks, killed processes, odd models.

    python bench/reliability.py                      # everything, some minutes on two cores
    python bench/reliability.py --only code,disk     # the trials whose names begin with these
    python bench/reliability.py --times 1000         # number of turns of random trials
    python bench/reliability.py --page               # docs/reliability.md from the stored results

The result of each trial is stored in bench/results/reliability.json, and docs/reliability.md is written from that file.
The exit code is 1 if a trial went badly.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import reliability_checkpoints
import reliability_files
import reliability_luck
import reliability_models
import torch
from machine import header, made_on, write_results
from reliability_trial import Trial, tried

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
#: Imported before trials are forked: a trial that drops its privileges may not read packages.
LOADED = ("torch.export", "sympy", "rich.progress", "rich.live", "colorsys", "intertwine.cli.inspect")
PREFACE = """\
# Reliability

What happens when somebody means harm, or when things go wrong. Everything below is done for real by
`python bench/reliability.py`: files with code in them are opened, disks are filled, processes are killed. Each turn
runs in a process of its own. The page is written from `bench/results/reliability.json`; no number is typed.

*Refused* means: exit code 2 of the command, or an `IntertwineError`, with words that say what was found and what to
do. Anything else that is not an answer that holds (a traceback, a crash, code that ran, a half-written file, a wrong
result) counts as bad. A bit turned over inside a weight makes another weight, which no reader can tell from the right
one; where a checksum is kept, as by zoos and elements, it is told.
"""


def trials() -> Iterator[Trial]:
    """All trials, in the order of the page."""
    for module in (reliability_checkpoints, reliability_files, reliability_models, reliability_luck):
        yield from module.trials()


def begins(name: str, starts: Sequence[str]) -> bool:
    """Whether a trial is selected.

    >>> begins("cut-zip", ["cut"]), begins("cut-zip", []), begins("cut-zip", ["flip"])
    (True, True, False)
    """
    return not starts or any(name.startswith(start) for start in starts)


def kept() -> dict[str, Any]:
    """The stored results."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": []}


def keep(row: Mapping[str, Any], names: Sequence[str]) -> None:
    """Store the row of a trial; rows of former trials are removed."""
    results = kept()
    rows = {one["name"]: one for one in [*results["rows"], {**row, "made": header()}]}
    results = {"rows": [rows[name] for name in names if name in rows]}
    write_results(RESULTS, results)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(results: Mapping[str, Any]) -> str:
    """docs/reliability.md.

    >>> made = {"machine": {"processor": "Z80", "cores": 1}, "date": "2026-01-01"}
    >>> row = {"topic": "A", "what": "a pipe | a link", "times": 2, "happened": {"refused": 2}, "said": {}, "bad": 0}
    >>> row["made"] = made | {"version": {"version": "1", "torch": "2"}}
    >>> print(page({"rows": [row]}).splitlines()[-1])
    | A | a pipe \\| a link | 2 | 2 refused | |
    """
    rows = results["rows"]
    turns, bad = sum(row["times"] for row in rows), sum(row["bad"] for row in rows)
    lines = [
        PREFACE,
        f"{len(rows)} things were tried, {turns:,} times in all; {bad or 'none'} of these went badly. "
        f"({'; '.join(dict.fromkeys(made_on(row['made']) for row in rows))})",
        "",
        "| where | tried | times | what happened | for example |",
        "|---|---|---|---|---|",
        *map(_row, rows),
    ]
    return "\n".join(lines) + "\n"


def _row(row: Mapping[str, Any]) -> str:
    happened = ", ".join(f"{count:,} {kind}" for kind, count in row["happened"].items())
    mark = f"**{row['bad']} bad**: " if row["bad"] else ""
    example = next(iter(row["said"].values()), "")
    cells = (row["topic"], row["what"], f"{row['times']:,}", mark + happened, _quoted(example))
    return f"| {' | '.join(_plain(cell) for cell in cells)} |".replace("|  |", "| |")


def _quoted(said: str) -> str:
    """The first one or two sentences of a message."""
    if len(said) <= 160:
        return said
    whole = said[:160].rpartition(". ")[0]
    return f"{whole}. …" if len(whole) > 60 else f"{said[:157].rstrip()} …"


def _plain(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\\*\\*", "**")


# -- the command -------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", metavar="NAME,…", default="", help="trials whose names begin with these")
    asked.add_argument("--times", metavar="N", type=int, help="turns of each random trial")
    asked.add_argument("--page", action="store_true", help="write docs/reliability.md and run nothing")
    return asked


def main() -> int:
    """Run the selected trials, store the results, write the page."""
    asked = parser().parse_args()
    good = True
    if not asked.page:
        torch.set_num_threads(1)  # threads do not survive a fork, which would wait for them for ever
        for name in LOADED:
            import_module(name)
        every = list(trials())
        starts = [start for start in asked.only.split(",") if start]
        chosen = [trial for trial in every if begins(trial.name, starts)]
        for number, trial in enumerate(chosen, 1):
            start = time.monotonic()
            row = tried(trial, asked.times)
            keep(row, [one.name for one in every])
            seconds = time.monotonic() - start
            print(f"{number}/{len(chosen)} {trial.name}: {row['happened']} in {seconds:.0f} s", flush=True)
            for example in row["examples"]:
                print(f"   BAD {example}", flush=True)
            good &= row["good"]
    PAGE.write_text(page(kept()), encoding="utf-8")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
