"""Run every benchmark once at full size, the cheap ones first; then write docs/benchmarks.md from all results.

    python bench/all.py --list                        # the benchmarks and their times
    python bench/all.py                               # all that this machine can run: hours
    python bench/all.py --only discovery,fuzz         # some of them
    python bench/all.py --peers PYTHON                # also comparisons with peers: PYTHON has pytorch-cka,
                                                      # rebasin, torch-pruning and safetensors

A benchmark that fails or takes far too long is reported, and the others go on; its earlier results stay. Benchmarks
that need a missing GPU, data or peers are skipped, and the table at the end says so. The exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benches import BENCHES, ON_A_GPU, Bench

ROOT = Path(__file__).parents[1]
#: A benchmark is stopped after this multiple of its minutes, but not before `LEAST` minutes.
PATIENCE, LEAST = 4.0, 10.0


@dataclass(frozen=True)
class Outcome:
    """How one benchmark ended; `good` is None if it was skipped."""

    name: str
    minutes: float
    words: str
    good: bool | None


def missing(bench: Bench, peers: str | None, gpu: bool) -> list[str]:
    """What a benchmark needs and this machine lacks.

    >>> missing(Bench("a", "a.py", 1, "a.json", "a", ("gpu", "peers")), None, gpu=False)
    ['a GPU', 'peers (give --peers PYTHON)']
    """
    there = {"gpu": gpu, "data": bool(os.environ.get("INTERTWINE_DATA")), "peers": bool(peers)}
    words = {"gpu": "a GPU", "data": "data (set INTERTWINE_DATA)", "peers": "peers (give --peers PYTHON)"}
    return [words[need] for need in bench.needs if not there[need]]


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


def line_of(bench: Bench, peers: str | None) -> list[str]:
    """The command as a list of arguments."""
    script, *words = shlex.split(bench.words)
    return [
        sys.executable,
        str(ROOT / "bench" / script),
        *(peers or word if word == "PEERS" else word for word in words),
    ]


def run(bench: Bench, peers: str | None, limit: float) -> Outcome:
    """Run a benchmark with a time limit, in its own process group, so that its workers end with it."""
    start = time.monotonic()
    process = subprocess.Popen(line_of(bench, peers), cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(60 * limit)
        words = "done" if code == 0 else f"failed with code {code}"
    except subprocess.TimeoutExpired:
        words = f"stopped: longer than {limit:g} minutes"
    finally:
        _end(process)
    return Outcome(bench.name, (time.monotonic() - start) / 60, words, words == "done")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole process group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(
    chosen: Iterable[Bench], peers: str | None, gpu: bool, runner: Callable[..., Outcome] = run
) -> list[Outcome]:
    """Run all of them, one after another; a failure does not stop the others."""
    outcomes = []
    for bench in chosen:
        lacks = missing(bench, peers, gpu)
        if lacks:
            outcomes.append(Outcome(bench.name, 0.0, f"left out: needs {' and '.join(lacks)}", None))
            continue
        print(f"\n== {bench.name}: {bench.command} (about {bench.minutes:g} min)", flush=True)
        outcomes.append(runner(bench, peers, max(LEAST, PATIENCE * bench.minutes)))
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """Minutes and outcome of each.

    >>> print(table([Outcome("fuzz", 6.2, "done", True)]))
    fuzz                          6.2 min  done
    """
    return "\n".join(f"{one.name:<26}{one.minutes:>7.1f} min  {one.words}" for one in outcomes)


def listing() -> str:
    """The list of benchmarks."""
    lines = []
    for bench in BENCHES.values():
        needs = f"  (needs {', '.join(bench.needs)})" if bench.needs else ""
        lines.append(f"{bench.name:<26}{bench.minutes:>5g} min  {bench.command}{needs}")
    gpu = sum(bench.minutes for bench in ON_A_GPU)
    cpu = sum(bench.minutes for bench in BENCHES.values()) - gpu
    return "\n".join([*lines, f"\nabout {cpu:.0f} minutes on two cores, {gpu:.0f} on a GPU"])


def names(text: str) -> list[Bench]:
    """The benchmarks that a list of names asks for."""
    unknown = [name for name in text.split(",") if name not in BENCHES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no benchmark is called {', '.join(unknown)}; --list shows them all")
    return [BENCHES[name] for name in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--list", action="store_true", help="list the benchmarks and run nothing")
    asked.add_argument(
        "--only", type=names, metavar="NAME,…", default=list(BENCHES.values()), help="names, separated by commas"
    )
    asked.add_argument(
        "--peers", metavar="PYTHON", help="an interpreter with pytorch-cka, rebasin, torch-pruning and safetensors"
    )
    return asked


def main() -> int:
    """Run the benchmarks, write the page, print the table."""
    asked = parser().parse_args()
    if asked.list:
        print(listing())
        return 0
    outcomes = run_all(asked.only, asked.peers, has_gpu())
    page = subprocess.run([sys.executable, str(ROOT / "docs" / "benchmarks.py")], check=False).returncode
    outcomes.append(Outcome("docs/benchmarks.md", 0.0, "written" if page == 0 else "NOT written", page == 0))
    print(f"\n{table(outcomes)}\n\n`make docs` writes the tables of the other pages from the new results.")
    return int(any(one.good is False for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
