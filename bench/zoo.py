"""Benchmarks of training many networks at once: speed, against its floor and plain loops, and accuracy by recipes.

    python bench/zoo.py cpu          # 8 digit perceptrons at once, and one after another
    python bench/zoo.py kernels      # each GPU kernel, in TFLOP/s or TB/s (one GPU)
    python bench/zoo.py speed        # Myrtle CNN, 32 networks at once, seconds per network and epoch (one GPU)
    python bench/zoo.py accuracy myrtle --recipe godfrey --seeds 0:8 --out zoos/myrtle      # CIFAR-10 (one GPU)
    python bench/zoo.py page         # the tables of all results

Results are stored in bench/results/zoo.json. Data is read from INTERTWINE_DATA; `speed` also runs on random images.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import stamped, write_results
from zoo_cpu import measure_cpu
from zoo_gpu import measure_kernels, measure_speed

from intertwine.cli.arguments import parse_option
from intertwine.lab.zoo.recipe import recipe, seeds
from intertwine.lab.zoo.training import train

RESULTS = Path(__file__).parent / "results" / "zoo.json"


def measure_accuracy(options: argparse.Namespace) -> dict[str, Any]:
    """Networks by a recipe on CIFAR-10."""
    start = time.perf_counter()
    changes = {"epochs": options.epochs} if options.epochs else {}

    def show(progress: Any) -> None:
        if progress.epoch % 10 == 0 and progress.accuracy is not None:
            print(f"epoch {progress.epoch}, accuracy {progress.accuracy:.4f}, {progress.left:.0f} s left", flush=True)

    zoo = train(
        options.name, seeds=seeds(options.seeds), data=options.data, out=options.out, recipe=options.recipe,
        options=dict(map(parse_option, options.option)), progress=show, score_every=options.score_every, **changes,
    )  # fmt: skip
    accuracies, best = [r.accuracy for r in zoo.records], [r.best_accuracy for r in zoo.records]
    row = {
        "architecture": options.name, "options": options.option, "recipe": options.recipe, "data": options.data,
        "epochs": zoo.manifest.plan.recipe["epochs"], "recipe_epochs": recipe(options.recipe).epochs,
        "networks": len(zoo), "accuracies": accuracies, "best_accuracies": best,
        "seconds": time.perf_counter() - start, "device": zoo.records[0].device, "versions": zoo.records[0].versions,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


#: Results in the papers: mean accuracy in percent, and its spread.
PRINTED = {
    ("myrtle", "godfrey", ""): "91.3 ± 0.2", ("myrtle", "godfrey", "norm=False"): "≈ 87",
    ("resnet20", "godfrey", ""): "89.9 ± 0.2", ("resnet18", "godfrey", ""): "92.9 ± 0.2",
    ("vgg16_bn", "chen", ""): "93.5", ("tiny10", "csiszarik", ""): "86.2 to 87.1 (the published weights)",
}  # fmt: skip


def page(results: dict[str, Any]) -> str:
    """The tables of all results."""
    return "\n".join([*_cpu_table(results), *_speed_table(results), *_kernel_table(results), *_accuracy_table(results)])


def _cpu_table(results: dict[str, Any]) -> Iterator[str]:
    if "cpu" in results:
        yield "| perceptron | batch | at once | one after another | plain loop | speed-up | over the plain loop |"
        yield "|---|---|---|---|---|---|---|"
        for r in results["cpu"]["rows"]:
            times = f"{r['at_once_s']:.2f} s | {r['same_trainer_s']:.2f} s | {r['plain_loop_s']:.2f} s"
            ratios = f"{r['same_trainer_s'] / r['at_once_s']:.1f}× | {r['plain_loop_s'] / r['at_once_s']:.1f}×"
            yield f"| {'-'.join(map(str, r['widths']))} | {r['batch']} | {times} | {ratios} |"
        yield ""


def _speed_table(results: dict[str, Any]) -> Iterator[str]:
    if "speed" in results:
        yield "| architecture | networks | s per network and epoch | TFLOP/s | of the card | floor | one, plain loop |"
        yield "|---|---|---|---|---|---|---|"
        for r in results["speed"]:
            floor = r["tflop_per_epoch"] / r["peak_tflops"]
            ours = f"{r['seconds']:.3f} | {r['tflops']:.0f} | {r['of_peak']:.0%}"
            yield f"| {r['architecture']} | {r['networks']} | {ours} | {floor:.3f} | {r['plain_s']:.2f} |"
        yield ""


def _kernel_table(results: dict[str, Any]) -> Iterator[str]:
    if "kernels" in results:
        yield "| layer | kernel | ms | TFLOP/s | TB/s |"
        yield "|---|---|---|---|---|"
        for r in results["kernels"]:
            rates = (f"{r['tflops']:.0f}" if r["tflops"] else "", f"{r['tb_s']:.2f}" if r["tb_s"] else "")
            yield f"| {r['layer']} | {r['kernel']} | {r['ms']:.3f} | {' | '.join(rates)} |"
        yield ""


def _accuracy_table(results: dict[str, Any]) -> Iterator[str]:
    if "accuracy" in results:
        yield "| architecture | recipe | epochs | networks | accuracy, % | best epoch | printed | time |"
        yield "|---|---|---|---|---|---|---|---|"
        for r in results["accuracy"]:
            name = " ".join([r["architecture"], *r["options"]])
            epochs = str(r["epochs"]) if r["epochs"] == r["recipe_epochs"] else f"{r['epochs']} of {r['recipe_epochs']}"
            printed = PRINTED.get((r["architecture"], r["recipe"], " ".join(r["options"])), "")
            numbers = f"{_spread(r['accuracies'])} | {_spread(r['best_accuracies'])} | {printed}"
            yield f"| {name} | {r['recipe']} | {epochs} | {r['networks']} | {numbers} | {r['seconds']:.0f} s |"
        yield ""


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.2f}{spread}"


def _keep(results: dict[str, Any], part: str, row: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Store a row in a part of the results, in place of one with the same keys."""
    others = [r for r in results.get(part, []) if any(r[key] != row[key] for key in keys)]
    results[part] = [*others, row]


def _made(chosen: argparse.Namespace) -> str:
    """The name of a run among the headers of the file."""
    return " ".join(["accuracy", chosen.name, *chosen.option]) if chosen.part == "accuracy" else chosen.part


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("part", choices=("cpu", "kernels", "speed", "accuracy", "page"))
    options.add_argument("name", nargs="?", default="myrtle")
    options.add_argument("--networks", type=int, default=32)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--recipe", default="godfrey")
    options.add_argument("--data", default="cifar10")
    options.add_argument("--seeds", default="0:8")
    options.add_argument("--epochs", type=int)
    options.add_argument("--score-every", type=int, default=1)
    options.add_argument("--option", action="append", default=[])
    options.add_argument("--out", type=Path, default=Path("scratch/zoo"))
    options.add_argument("--results", type=Path, default=RESULTS)
    chosen = options.parse_args()
    results = json.loads(chosen.results.read_text(encoding="utf-8")) if chosen.results.exists() else {}
    match chosen.part:
        case "cpu":
            results["cpu"] = measure_cpu()
        case "kernels":
            results["kernels"] = measure_kernels(chosen.networks, chosen.batch)
        case "speed":
            row = measure_speed(chosen.name, chosen.networks, chosen.batch, chosen.recipe)
            _keep(results, "speed", row, ("architecture", "networks", "batch"))
        case "accuracy":
            _keep(results, "accuracy", measure_accuracy(chosen), ("architecture", "options", "recipe"))
    if chosen.part != "page":
        results = stamped(results, _made(chosen))
        write_results(chosen.results, results)
    print(page(results))


if __name__ == "__main__":
    main()
