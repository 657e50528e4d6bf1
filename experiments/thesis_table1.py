"""The experiment of the NodeSort thesis: distances of many trained networks before and after sorting their nodes.

Trains the networks of the plan on MNIST (stacked, so a thousand take minutes on a GPU), measures Table 1 and what the
thesis only proposes (averages of sorted networks), and adds what it lacks: controls, matching, stability. Trained
networks are kept in the work folder in chunks; a run that was stopped goes on from there.

    python experiments/thesis_table1.py --data DIR                            # plan: experiments/thesis_table1.toml
    python experiments/thesis_table1.py --data DIR --nets 6 --out out/six.json
    python experiments/thesis_table1.py --plot FILE.svg                       # only the picture, from the result file
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from stacked_mlp import Stack
from stacked_order import UNSORTED
from thesis_averages import averages, curves
from thesis_distances import Numbers, all_distances, control, pair_distances, stability, start_distances
from thesis_plot import draw
from thesis_store import Images, Plan, read_images, read_plan, trained

from intertwine.errors import InputError
from intertwine.files import write_json

HERE = Path(__file__).parent
RESULT = HERE / "results" / "thesis_table1.json"
#: Networks trained at once. A GPU wants many; on a CPU small chunks cost nothing and lose less when stopped.
CHUNKS = {"cuda": 250, "cpu": 2}


def measure(stack: Stack, plan: Plan, images: Images, report: Callable[[str], None]) -> Numbers:
    """Everything that is measured, in the order of the result file."""
    some = images.train_x[: plan.matching_images]
    tasks: dict[str, Callable[[], Numbers]] = {
        "start": lambda: start_distances(plan),
        "all_pairs": lambda: all_distances(stack, plan, some),
        "some_pairs": lambda: pair_distances(stack, plan, some),
        "control": lambda: control(stack, plan, some),
        "accuracy": lambda: averages(stack, plan, images),
        "curves": lambda: curves(stack, plan, images),
        "stability": lambda: stability(stack, plan, some),
    }
    results = {}
    for name, task in tasks.items():
        report(f"measuring {name}")
        results[name] = task()
    return results


def run(plan: Plan, images: Images, work: Path, chunk: int, report: Callable[[str], None] = print) -> Numbers:
    """Train what is not yet trained, measure, and give the whole result with its manifest."""
    start = time.perf_counter()
    stack, new = trained(plan, images, work, chunk, report)
    after_training = time.perf_counter()
    results = measure(stack, plan, images, report)
    return {
        "manifest": {
            "plan": asdict(plan),
            "seeds": [plan.first_seed, plan.first_seed + plan.nets - 1],
            "epochs": plan.recipe.epochs,
            "networks_trained_in_this_run": new,
            "chunk": chunk,
            "images_crc32": images.checksum,
            **_machine(images.train_x.device),
            "training_seconds": round(after_training - start, 1),
            "measuring_seconds": round(time.perf_counter() - after_training, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        **results,
    }


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def table(result: Numbers) -> str:
    """The lines a person wants to see first."""
    printed = result["manifest"]["plan"]["printed"]
    lines = [f"{'mean distance':28s}{'W1':>9s} {'change':>10s}  {'W2':>9s} {'change':>10s}"]
    rows = {f"{name} (all pairs)": entry for name, entry in result["all_pairs"].items()}
    rows |= {name: entry for name, entry in result["some_pairs"].items() if name not in result["all_pairs"]}
    for name, entry in rows.items():
        numbers = "  ".join(f"{entry[w]['mean']:9.4f} {entry[w]['change']:+10.3%}" for w in ("w1", "w2"))
        lines.append(f"{name:28s}{numbers}")
    if printed:
        changes = (printed[w]["sorted"]["mean"] / printed[w][UNSORTED]["mean"] - 1 for w in ("w1", "w2"))
        means = (printed[w]["sorted"]["mean"] for w in ("w1", "w2"))
        numbers = "  ".join(f"{mean:9.4f} {change:+10.3%}" for mean, change in zip(means, changes, strict=True))
        lines.append(f"{'printed, sorted':28s}{numbers}")
    for size, entry in result["accuracy"].items():
        lines.append(
            f"accuracy, {size}: " + ", ".join(f"{name} {numbers['mean']:.4f}" for name, numbers in entry.items())
        )
    return "\n".join(lines)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, default=HERE / "thesis_table1.toml")
    parser.add_argument("--data", type=Path, help="folder with MNIST (or the environment variable INTERTWINE_DATA)")
    parser.add_argument("--no-check", dest="check", action="store_false", help="take other images in MNIST's files")
    parser.add_argument("--nets", type=int, help="number of networks, instead of the plan's")
    parser.add_argument("--epochs", type=int, help="passes over the images, instead of the plan's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--chunk", type=int, help="networks trained at once")
    parser.add_argument("--work", type=Path, default=Path("out/thesis_table1"), help="folder of trained networks")
    parser.add_argument("--out", type=Path, default=RESULT, help="the result file")
    parser.add_argument("--plot", type=Path, help="only draw this picture from the result file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    try:
        if options.plot:
            draw(options.out, options.plot)
            return 0
        plan = read_plan(options.plan, nets=options.nets, epochs=options.epochs)
        images = read_images(options.data, options.device, options.check)
        chunk = options.chunk or CHUNKS.get(torch.device(options.device).type, CHUNKS["cpu"])
        result = run(plan, images, options.work, chunk, lambda line: print(line, flush=True))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_json(options.out, result)
    print(table(result), f"wrote {options.out}", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
