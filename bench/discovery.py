"""The time of discovery and its growth: chains of 100 to 3,000 calls and real networks, after export.

Discovery is everything between the captured program and the symmetry: rules, dependent axes, scales. Its time should be
linear in the number of calls; the last column is the time per call relative to the shortest chain. The floor is one
walk over the calls of the same program that only resolves their arguments.

    python bench/discovery.py [--out FILE.json]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import stamped, write_results

RESULTS = Path(__file__).parent / "results" / "discovery.json"


def chain(calls: int) -> Any:
    """A residual perceptron with about `calls` calls: linear, relu, linear and add per block."""
    import torch
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(torch.relu(self.a(x)))

    return nn.Sequential(nn.Linear(3, 6), *(Block() for _ in range(max(calls // 7, 1))), nn.Linear(6, 2))


def best_of(repeats: int, task: Callable[[], Any]) -> float:
    """Shortest time of a few runs, without the garbage collector, as in timeit."""
    times = []
    for _ in range(repeats):
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        task()
        times.append(time.perf_counter() - start)
        gc.enable()
    return min(times)


def measure(name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], repeats: int) -> dict[str, Any]:
    from intertwine.graph.capture import capture
    from intertwine.symmetry.symmetry import from_program

    start = time.perf_counter()
    program = capture(model, args, kwargs)
    captured = time.perf_counter() - start
    floor = best_of(repeats, lambda: [call.reads for call in program.calls])
    seconds = best_of(repeats, lambda: from_program(program))
    return {"name": name, "calls": len(program), "capture_s": captured, "discovery_s": seconds, "floor_s": floor}


def page(results: Mapping[str, Any]) -> str:
    """The table of docs/engine.md.

    >>> row = {"name": "a", "calls": 10, "capture_s": 1.0, "discovery_s": 0.5, "floor_s": 0.1}
    >>> print(page({"rows": [row]}).splitlines()[-1])
    | a | 10 | 1.00 | 0.500 | 50.000 | 5 | 1.00 |
    """
    heads = ("program", "calls", "capture s", "discovery s", "ms per call", "× floor", "× first")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    rows = results["rows"]
    first = rows[0]["discovery_s"] / rows[0]["calls"]
    for row in rows:
        seconds = row["discovery_s"]
        each = seconds / row["calls"]
        numbers = (f"{row['capture_s']:.2f}", f"{seconds:.3f}", f"{1000 * each:.3f}")
        ratios = (f"{seconds / row['floor_s']:.0f}", f"{each / first:.2f}")
        lines.append(f"| {' | '.join((row['name'], str(row['calls']), *numbers, *ratios))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--most", type=int, default=3000, help="calls in the longest chain")
    options = parser.parse_args()
    import torch
    from catalogue import entries

    torch.set_num_threads(1)
    rows = []
    for calls in (100, 300, 1000, 3000):
        if calls <= options.most:
            rows.append(measure(f"chain of {calls}", chain(calls), (torch.zeros(2, 3),), {}, repeats=3))
    for source, name in (("torchvision", "resnet50"), ("torchvision", "densenet201"), ("timm", "nasnetalarge")):
        entry = next(e for e in entries(source) if e.name == name)
        model, args, kwargs = entry.build()
        rows.append(measure(f"{source}/{name}", model, args, kwargs, repeats=3))
    results = stamped({"rows": rows}, "discovery")
    print(page(results))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_results(options.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
