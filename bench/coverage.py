"""The coverage benchmark: which real networks does the engine read, and is what it finds true?

For the smallest model of every timm family, every torchvision classification model and small versions of the main
transformers architectures it asks: is the joint certificate at most 1e-9 (relative, float64)? Is at least half of the
parameters moved? How long did it take, and what is frozen? Results are kept one by one, so a run that was stopped goes
on where it was; the table in docs/coverage.md is made from them and from nothing else.

    python bench/coverage.py                      # everything (an hour or two on two cores)
    python bench/coverage.py --source timm --only resnet,vit
    python bench/coverage.py --page               # only write docs/coverage.md from the results at hand
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

TOLERANCE = 1e-9
CHUNK = 6  # models per process
#: Models whose float64 copies need most of the memory of a 24 GiB machine: they run one at a time, last.
HEAVY = {"regnet_y_128gf", "vit_h_14", "vit_l_16", "vit_l_32", "convnext_large"}
#: Architectures the engine must cover almost whole: name starts → least coverage.
MUST_COVER = {
    "torchvision/resnet18": 0.95, "torchvision/resnet50": 0.95, "torchvision/vgg": 0.95, "torchvision/convnext": 0.95,
    "torchvision/mobilenet": 0.95, "torchvision/densenet": 0.95, "torchvision/vit_": 0.95, "transformers/vit": 0.95,
    "transformers/gpt2": 0.95, "transformers/llama": 0.95,
}  # fmt: skip


def measure(source: str, name: str) -> dict[str, Any]:
    """One row: build, capture, discover, certify."""
    import torch
    from catalogue import entries

    from intertwine.errors import IntertwineError
    from intertwine.graph.capture import capture
    from intertwine.symmetry.symmetry import from_program

    torch.set_num_threads(1)
    entry = next(e for e in entries(source) if e.name == name)
    row: dict[str, Any] = {"source": source, "name": name}
    model, args, kwargs = entry.build()
    row["parameters"] = sum(p.numel() for p in model.parameters())
    try:
        start = time.perf_counter()
        program = capture(model, args, kwargs)
        captured = time.perf_counter()
        sym = from_program(program)
        found = time.perf_counter()
        certificate = sym.certify(model, *args, trials=1, **kwargs)
        end = time.perf_counter()
    except (IntertwineError, RuntimeError) as error:
        return row | {"stopped": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    held = certificate.symmetry
    reasons = Counter(f.reason.split(" (")[0].split(" at ")[0] for f in held.frozen)
    return row | {
        "calls": len(program),
        "wires": len(held.wires),
        "log_order": held.log_order,
        "dimension": held.dimension,
        "error": certificate.max_error,
        "hidden_error": max(certificate.per_wire.values(), default=0.0),
        "vacuous": certificate.vacuous,
        "broken": [f"{b.op} ({b.place})" for b in certificate.broken],
        "unsupported": sorted({op for op, _ in held.unsupported}),
        "coverage": held.coverage(model),
        "capture_s": captured - start,
        "discover_s": found - captured,
        "certify_s": end - found,
        "frozen": dict(reasons.most_common(6)),
    }


def verdict(row: dict[str, Any]) -> str:
    """In a word: certified, low coverage, wrong but said so, silently wrong, or stopped with a reason."""
    if "stopped" in row:
        return "stopped, with a reason"
    if row["error"] > TOLERANCE:
        return "wrong, and said so"
    if row["vacuous"]:
        return "vacuous"
    return "certified" if row["coverage"] >= 0.5 else "low coverage"


def run(todo: list[tuple[str, str]], results: dict[str, dict[str, Any]], path: Path, workers: int) -> None:
    """Measure what is left to do, keeping every row as soon as it is there.

    Models are measured in processes of their own, a few in each, so that one that dies takes nothing with it.
    """
    start, done, lock = time.perf_counter(), 0, threading.Lock()

    def keep(source: str, name: str, row: dict[str, Any]) -> None:
        nonlocal done
        with lock:
            results[f"{source}/{name}"] = row
            path.write_text(json.dumps(results, indent=1, ensure_ascii=False))
            done += 1
            left = (time.perf_counter() - start) / done * (len(todo) - done)
            print(f"[{done}/{len(todo)}, about {left / 60:.0f} min left] {source}/{name}: {verdict(row)}", flush=True)

    def work(tasks: list[tuple[str, str]]) -> None:
        command = [sys.executable, __file__, "--worker", *(f"{source}/{name}" for source, name in tasks)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    row = json.loads(line)
                    keep(row["source"], row["name"], row)
        missing = [t for t in tasks if "/".join(t) not in results]
        if missing:
            source, name = missing[0]
            why = f"the measuring process ended with code {process.returncode} (−9: out of memory)"
            keep(source, name, {"source": source, "name": name, "stopped": why})
            if missing[1:]:
                work(missing[1:])

    for phase, count in (([t for t in todo if t[1] not in HEAVY], workers), ([t for t in todo if t[1] in HEAVY], 1)):
        chunks = [phase[i : i + CHUNK] for i in range(0, len(phase), CHUNK)]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(work, chunks))


def page(results: dict[str, dict[str, Any]]) -> str:
    """docs/coverage.md."""
    rows = sorted(results.values(), key=lambda r: (r["source"], r["name"]))
    verdicts = Counter(verdict(r) for r in rows)
    good = verdicts["certified"]
    slowest = max((r for r in rows if "calls" in r), key=lambda r: r["discover_s"], default=None)
    largest = max((r for r in rows if "calls" in r), key=lambda r: r["calls"], default=None)
    lines = [
        "# Coverage",
        "",
        "Which networks the engine reads, generated by `python bench/coverage.py`; do not edit by hand. One "
        "model of every",
        "timm family, every torchvision classification model, and the main transformers architectures built "
        "small. *Error* is",
        "the largest relative change of an output, in float64, when a random element of the whole group acts "
        "(one trial, batch",
        "statistics and constant parameters drawn at random); *hidden* is the largest deviation of any hidden "
        "tensor from the",
        "predicted one. *Coverage* is the share of parameters that some wire moves. Times are seconds on one core of a",
        f"two-core machine ({platform.machine()}) that was busy with other work.",
        "",
        "| | |",
        "|---|---|",
        f"| models | {len(rows)} |",
        f"| certified (error ≤ 1e-9) with coverage ≥ 0.5 | {good} ({100 * good / max(len(rows), 1):.1f} %) |",
        f"| certified, coverage < 0.5 | {verdicts['low coverage']} |",
        f"| stopped with a reason | {verdicts['stopped, with a reason']} |",
        f"| wrong, and the certificate says so | {verdicts['wrong, and said so']} |",
        f"| ops frozen by the certificate after failing | {sum(len(r.get('broken', ())) for r in rows)} |",
        f"| certificate vacuous (output independent of the weights) | {verdicts['vacuous']} |",
    ]
    if slowest is not None and largest is not None:
        lines += [
            f"| slowest discovery after export | {slowest['discover_s']:.2f} s "
            f"({slowest['source']}/{slowest['name']}) |",
            f"| largest graph | {largest['calls']} calls, discovery {largest['discover_s']:.2f} s "
            f"({largest['source']}/{largest['name']}) |",
        ]
    lines += [
        "",
        "## Architectures that must be covered almost whole",
        "",
        "| models | asked | least coverage found |",
        "|---|---|---|",
    ]
    for start, asked in MUST_COVER.items():
        found = [r for key, r in results.items() if key.startswith(start) and "coverage" in r]
        if found:
            worst = min(found, key=lambda r: r["coverage"])
            lines.append(f"| {start}… ({len(found)}) | {asked} | {worst['coverage']:.3f} ({worst['name']}) |")
    lines += [
        "",
        "## All models",
        "",
        "| model | parameters | calls | wires | error | hidden | coverage | capture s | discovery s | "
        "certificate s | note |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(r) for r in rows]
    return "\n".join(lines) + "\n"


def _row(r: dict[str, Any]) -> str:
    name = f"{r['source']}/{r['name']}"
    if "stopped" in r:
        return f"| {name} | {r.get('parameters', 0):,} | | | | | | | | | {r['stopped'].replace('|', '/')} |"
    notes = [
        *(f"frozen: {k} (×{v})" for k, v in r["frozen"].items() if r["coverage"] < 0.95),
        *(f"no rule: {op}" for op in r["unsupported"]),
        *(f"failed and frozen: {b}" for b in r["broken"]),
    ]
    return (
        f"| {name} | {r['parameters']:,} | {r['calls']} | {r['wires']} | {r['error']:.0e} | "
        f"{r['hidden_error']:.0e} | {r['coverage']:.3f} "
        f"| {r['capture_s']:.1f} | {r['discover_s']:.2f} | {r['certify_s']:.1f} | {'; '.join(notes[:3])} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=["timm", "torchvision", "transformers"])
    parser.add_argument("--only", help="comma-separated parts of model names")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "coverage.json")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure also what has a result already")
    parser.add_argument("--page", action="store_true", help="only write docs/coverage.md")
    parser.add_argument(
        "--worker", nargs="+", metavar="SOURCE/MODEL", help="measure these and print a row of JSON each"
    )
    options = parser.parse_args()
    if options.worker:
        for task in options.worker:
            print(json.dumps(measure(*task.split("/", 1)), ensure_ascii=False), flush=True)
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    if not options.page:
        from catalogue import entries

        parts = options.only.split(",") if options.only else [""]
        todo = [(e.source, e.name) for e in entries(options.source) if any(p in e.name for p in parts)]
        todo = [(s, n) for s, n in todo if options.again or f"{s}/{n}" not in results]
        run(todo, results, options.out, options.workers)
    (HERE.parent / "docs").mkdir(exist_ok=True)
    (HERE.parent / "docs" / "coverage.md").write_text(page(results))
    summary = Counter(verdict(r) for r in results.values())
    print(", ".join(f"{k}: {v}" for k, v in summary.most_common()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
