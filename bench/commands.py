"""Waiting times of a user: the help of every command, the demo, and the size of its report.

    python bench/commands.py                 # a minute or two
    python bench/commands.py --rounds 5      # the number of runs of each help; the slowest counts

The demo runs as in `make demo`, without the installation. Results are stored in bench/results/commands.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from machine import stamped, write_results

RESULTS = Path(__file__).parent / "results" / "commands.json"
INTERTWINE = (sys.executable, "-m", "intertwine.cli")


def command_names() -> list[str]:
    """Every command, from the parser; "" is the program itself."""
    from intertwine.cli import parser

    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return ["", *commands.choices]


def seconds_of(words: Sequence[str]) -> float:
    """The time of a call of the program; a failure ends the benchmark."""
    start = time.perf_counter()
    subprocess.run([*INTERTWINE, *words], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "100"})
    return time.perf_counter() - start


def measure_help(rounds: int) -> Iterator[dict[str, Any]]:
    """A row per command, and one for an empty interpreter, the floor."""
    for name in command_names():
        words = [*([name] if name else []), "--help"]
        seconds_of(words)  # a warm-up run, which reads the files from the disk
        yield {"command": " ".join(["intertwine", *words]), "slowest_s": max(seconds_of(words) for _ in range(rounds))}


def bare_start(rounds: int) -> float:
    """Seconds in which an empty Python starts and ends."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", ""], check=True)
        times.append(time.perf_counter() - start)
    return min(times)


def measure_demo() -> dict[str, Any]:
    """The demo in an empty folder: its time, and the size of its report."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = seconds_of(["demo", "--out", folder])
        report = Path(folder) / "report.html"
        return {"seconds": seconds, "report_mb": report.stat().st_size / 1e6}


def main() -> None:
    """Measure, store and print."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=3, help="number of runs of each help (default: %(default)s)")
    asked.add_argument("--results", type=Path, default=RESULTS)
    chosen = asked.parse_args()

    helps = []
    for row in measure_help(chosen.rounds):
        print(f"{row['command']:40} {row['slowest_s']:.3f} s", flush=True)
        helps.append(row)
    results = {"help": helps, "bare_start_s": bare_start(chosen.rounds), "demo": measure_demo()}
    write_results(chosen.results, stamped(results, "commands"))
    print(f"demo {results['demo']['seconds']:.0f} s, its report {results['demo']['report_mb']:.1f} MB")


if __name__ == "__main__":
    main()
