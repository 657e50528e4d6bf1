"""Run the engine on thousands of random networks and count how often it is right, caught, refused, crashed or wrong.

    python bench/fuzz.py --cases 2000 --seed 0 --out bench/results/fuzz.json

Case k is the network of seed `--seed` + k, so each can be repeated on its own. A failure is printed at once, with
`--shrink` as the smallest network that fails in the same way. The exit status is 1 if one is silently wrong or crashed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from machine import stamped, write_results

LOW_COVERAGE = 0.2
BAD = ("crashed", "silently wrong")


@dataclass
class Tally:
    """The counts so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    coverages: list[float] = field(default_factory=list)
    hazards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    controls: list[bool] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, seed: int, network: Any, verdict: Any) -> None:
        self.outcomes[verdict.outcome] += 1
        if verdict.outcome in ("right", "caught"):
            self.coverages.append(verdict.coverage)
            for name in network.hazards:
                self.hazards[name].append(verdict.coverage)
        if verdict.control is not None:
            self.controls.append(verdict.control)
        if verdict.outcome != "right":
            self.failures.append(
                {"seed": seed, "outcome": verdict.outcome, "detail": verdict.detail, "network": repr(network)}
            )

    def summary(self, seconds: float) -> dict[str, Any]:
        from fuzz_check import OUTCOMES

        return {
            "cases": sum(self.outcomes.values()),
            **{outcome.replace(" ", "_"): self.outcomes[outcome] for outcome in OUTCOMES},
            "mean_coverage": _mean(self.coverages),
            "control_changed": sum(self.controls),
            "control_tried": len(self.controls),
            "seconds": round(seconds, 1),
            "hazards": {
                name: {
                    "networks": len(found),
                    "mean_coverage": _mean(found),
                    "low_coverage": sum(c < LOW_COVERAGE for c in found),
                }
                for name, found in sorted(self.hazards.items())
            },
            "failures": self.failures,
        }


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def main() -> int:
    arguments = _arguments()
    warnings.simplefilter("ignore")
    import torch
    from fuzz_check import check
    from fuzz_networks import random_network

    torch.set_num_threads(arguments.threads)
    tally, start = Tally(), time.monotonic()
    for k in range(arguments.cases):
        seed = arguments.seed + k
        network = random_network(seed)
        verdict = check(network, control=k % arguments.control_every == 0)
        tally.add(seed, network, verdict)
        if verdict.outcome != "right":
            _report(seed, network, verdict, arguments.shrink)
        _progress(k + 1, arguments.cases, time.monotonic() - start, tally)
    summary = tally.summary(time.monotonic() - start)
    _print(summary)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_results(arguments.out, stamped(summary, "fuzz"))
    return int(any(tally.outcomes[outcome] for outcome in BAD))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="number of networks (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first network (default 0)")
    parser.add_argument("--out", type=Path, help="write the summary as JSON to this file")
    parser.add_argument("--shrink", action="store_true", help="shrink each failure to the smallest network")
    parser.add_argument(
        "--control-every",
        type=int,
        default=4,
        help="restore a moved parameter in every n-th case, which must be detected (default 4)",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    return parser.parse_args()


def _report(seed: int, network: Any, verdict: Any, small: bool) -> None:
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{clear}{verdict.outcome} (seed {seed}): {verdict.detail[:300]}\n  {network!r}")
    if small:
        from fuzz_check import shrink

        print(f"  smallest like it: {shrink(network)!r}")


def _progress(done: int, cases: int, seconds: float, tally: Tally) -> None:
    """One line, rewritten in place on a terminal and printed every hundred cases elsewhere."""
    left = seconds / done * (cases - done)
    line = f"{done}/{cases}, {tally.outcomes['right']} right, {int(left // 60)} min {int(left % 60)} s left"
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="" if done < cases else "\n", flush=True)
    elif done % 100 == 0 or done == cases:
        print(line, flush=True)


def _print(summary: dict[str, Any]) -> None:
    print()
    for name, value in summary.items():
        if not isinstance(value, (dict, list)):
            print(f"{name.replace('_', ' '):<18}{value:>10}")
    print(f"\n{'hazard':<18}{'networks':>10}{'mean coverage':>16}{f'coverage < {LOW_COVERAGE}':>18}")
    for name, row in sorted(summary["hazards"].items(), key=lambda item: item[1]["mean_coverage"]):
        print(f"{name:<18}{row['networks']:>10}{row['mean_coverage']:>16.2f}{row['low_coverage']:>18}")


if __name__ == "__main__":
    sys.exit(main())
