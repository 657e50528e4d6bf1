"""Benchmarks of inspection: powers of a large rotation, and dissection of many units, in seconds and bytes.

    python bench/inspection.py rotation                       # Q and Q^α for n = 2048
    python bench/inspection.py dissect                        # 512 units × 1,000 images × 100 concepts at 112×112
    python bench/inspection.py dissect --images 100           # a part, extrapolated to the whole
    python bench/inspection.py page                           # the table of all results

Results are stored in bench/results/inspection.json. The file is not called inspect.py, which would hide the module of
the standard library. `--threads 1` measures on one core, which is more reliable on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from machine import stamped, write_results
from torch import Tensor, nn

from intertwine.inspect.concepts import ConceptData
from intertwine.inspect.dissect import dissect
from intertwine.inspect.rotation import haar, planes

RESULTS = Path(__file__).parent / "results" / "inspection.json"
#: The case that the limits in the table apply to.
FULL, UNITS, CONCEPTS, SIZE = 1000, 512, 100, 112
BARS = {"rotation": 15.0, "dissect": 300.0}


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall-clock seconds, CPU seconds, and the result of a call."""
    start, used = time.perf_counter(), time.process_time()
    value = call()
    return time.perf_counter() - start, time.process_time() - used, value


def rotation_rows(n: int) -> list[dict[str, Any]]:
    """Draw Q, decompose it, one power; and the error of Q^½ · Q^½ against Q."""
    drawing, first, q = timed(lambda: haar(n, 0))
    apart, second, turn = timed(lambda: planes(q))
    power, third, half = timed(lambda: turn.power(0.5))
    return [{
        "what": f"Q and Q^0.5, n = {n:,}", "seconds": drawing + apart + power, "processor": first + second + third,
        "bar": BARS["rotation"] if n == 2048 else None,
        "parts": f"draw {drawing:.1f}, take apart {apart:.1f}, each power {power:.1f}",
        "error": (half @ half - q).abs().max().item(),
    }]  # fmt: skip


class Scene:
    """Masks of blocks of pixels, every concept in a share of the images, computed on iteration."""

    def __init__(self, images: int, concepts: int, size: int, share: float) -> None:
        self.images, self.concepts, self.size, self.share = images, concepts, size, share

    def __iter__(self) -> Iterator[Tensor]:
        g = torch.Generator().manual_seed(0)
        for _ in range(self.images):
            coarse = torch.rand(1, self.concepts, 14, 14, generator=g) < 0.05
            coarse &= torch.rand(1, self.concepts, 1, 1, generator=g) < self.share
            yield nn.functional.interpolate(coarse.float(), (self.size, self.size)).bool()


def dissect_row(images: int, units: int, maps: int, share: float, memory: int) -> dict[str, Any]:
    """Dissect a layer that costs little itself, so that the time is that of the dissection."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(images, 3, maps, maps, generator=g)
    model = nn.Sequential(nn.Conv2d(3, units, 3, padding=1), nn.ReLU())
    names = tuple(f"concept {i}" for i in range(CONCEPTS))
    reading, _, _ = timed(lambda: sum(1 for _ in Scene(images, CONCEPTS, SIZE, share)))
    concepts = ConceptData(names, ("all",) * CONCEPTS, Scene(images, CONCEPTS, SIZE, share))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, used, _ = timed(lambda: dissect(model, "1", x, concepts, memory=memory))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "what": f"{units} units × {images:,} images × {CONCEPTS} concepts in {share:.0%} of them, maps {maps}×{maps}",
        "seconds": wall, "processor": used, "whole": wall * FULL / images,
        "bar": BARS["dissect"] if units == UNITS else None,
        "parts": f"making the masks (twice) {2 * reading:.1f} of it, kept {memory / 2**20:.0f} MiB at most",
        "grown_mib": grown / 1024,
    }  # fmt: skip


def page(results: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "| what | threads | seconds | 1,000 images | bar | of it | memory grown | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in (*results.get("rotation", []), *results.get("dissect", [])):
        whole = f"{r['whole']:.0f} s" if "whole" in r else ""
        grown = f"{r['grown_mib']:.0f} MiB" if "grown_mib" in r else ""
        error = f"{r['error']:.1e}" if "error" in r else ""
        bar = f"{r['bar']:.0f} s" if r.get("bar") else ""
        cells = (r["what"], r["threads"], f"{r['seconds']:.1f} s", whole, bar, r["parts"], grown, error)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("part", choices=("rotation", "dissect", "page"))
    options.add_argument("--n", type=int, default=2048)
    options.add_argument("--images", type=int, default=FULL)
    options.add_argument("--units", type=int, default=UNITS)
    options.add_argument("--maps", type=int, nargs="*", default=[14, 28], help="sizes of the units' maps")
    options.add_argument("--share", type=float, default=0.1, help="share of the images that a concept is in")
    options.add_argument("--memory", type=int, default=256, help="MiB of activations to keep")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--results", type=Path, default=RESULTS)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    results = json.loads(chosen.results.read_text(encoding="utf-8")) if chosen.results.exists() else {}
    rows: list[dict[str, Any]] = []
    if chosen.part == "rotation":
        rows = rotation_rows(chosen.n)
    elif chosen.part == "dissect":
        memory = chosen.memory * 2**20
        rows = [dissect_row(chosen.images, chosen.units, maps, chosen.share, memory) for maps in chosen.maps]
    if rows:
        new = [row | {"threads": chosen.threads, "torch": torch.__version__.split("+")[0]} for row in rows]
        same = {(row["what"], row["threads"]) for row in new}
        kept = [row for row in results.get(chosen.part, []) if (row["what"], row["threads"]) not in same]
        results = stamped(results | {chosen.part: [*kept, *new]}, chosen.part)
        write_results(chosen.results, results)
    print(page(results))


if __name__ == "__main__":
    main()
