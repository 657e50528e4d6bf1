"""Benchmarks of folding: speed against the printed algorithm, and accuracy against parameters, compared with pruning.

    python bench/fold.py speed                                  # VGG-16 and a torchvision ResNet-50
    python bench/fold.py train --out zoos/fold                  # the networks of the curves (one GPU, minutes)
    python bench/fold.py curves vgg16_bn --zoo zoos/fold/vgg16_bn-5e-4 --peers PYTHON       # one network, all methods
    python bench/fold.py curves tiny10 --test 1000              # a published Tiny-10 network
    python bench/fold.py page                                   # the tables of all results

PYTHON is an interpreter of another environment with torch-pruning. Rows are stored at once in bench/results/fold.json,
and `curves` skips those that are there. Data is read from INTERTWINE_DATA.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fold_curves import BETAS, METHODS, SHARES, measure, opened, settings
from fold_speed import measure_large, measure_printed
from machine import stamped, write_results

import intertwine as it
from intertwine.lab.zoo.recipe import recipe, seeds

RESULTS = Path(__file__).parent / "results" / "fold.json"
#: The key of a row: a new row replaces an old one with the same key.
SAME = {
    "speed": ("what", "schedule", "options", "beta", "threads"),
    "curves": ("architecture", "recipe", "weight_decay", "epochs", "seed", "test", "seen", "method", "value"),
    "train": ("architecture", "weight_decay", "epochs", "device"),
}
#: Architecture, weight decay, epochs: trained by one GPU in under ten minutes. The paper prints 1e-4.
TRAINED = (("vgg16_bn", 1e-4, 100), ("vgg16_bn", 5e-4, 100), ("resnet18", 5e-4, 60))
#: Shares of the parameters at which methods are compared, and the tolerance above a share.
COLUMNS, ROUNDED = (1.0, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1), 0.005
#: The relative accuracy that the paper allows folding to lose (Chen et al. 2024).
ENOUGH = 0.95


# -- parts -------------------------------------------------------------------------------------------------------------


def measure_speed(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Folding against the printed algorithm, and large networks of torchvision."""
    model, name = None, "vgg16_bn"
    if options.zoo:
        zoo = it.zoo.load(options.zoo)
        model, name = zoo[0], f"{zoo.manifest.plan.architecture['name']}, trained"
    said = {"threads": torch.get_num_threads(), "torch": torch.__version__.split("+")[0]}
    yield said | measure_printed(options.beta, options.every, model, name)
    for large in options.large.split(",") if options.large else ():
        yield from (said | row for row in measure_large(large, options.beta))


def measure_curves(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per method and setting without a stored row."""
    case = opened(
        options.name, options.zoo, options.network, options.seen, options.test, options.device, options.peers
    )  # fmt: skip
    case = replace(case, reset=not options.no_reset)
    known = [] if options.again else [_key("curves", row) for row in read(options.results).get("curves", [])]
    for method, value in settings(options.methods.split(","), options.betas, options.shares):
        if _key("curves", case.about | {"method": method, "value": value}) not in known:
            yield measure(case, method, value)


def train(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train the networks of the curves that their folders do not hold; a killed run resumes."""
    data: Any = it.zoo.data(options.data)
    if options.train or options.test:
        data = data.subset(options.train, options.test)
    for name, decay, epochs in TRAINED:
        if (options.names and name not in options.names.split(",")) or options.decay not in (None, decay):
            continue
        length = options.epochs or epochs
        how = recipe(
            "chen", epochs=length, batch=options.batch, rate=options.rate, weight_decay=decay, normalise="data",
            schedule="one-cycle", warmup=0.1 * length, nesterov=True,
        )  # fmt: skip
        zoo = it.zoo.train(
            name, seeds=seeds(options.seeds), data=data, device=options.device, score_every=options.score_every,
            recipe=replace(how, name="chen-one-cycle", source="Chen et al. 2024, its rate in one short cycle"),
            out=Path(options.out) / f"{name}-{decay:.0e}".replace("e-0", "e-"),
            progress=lambda p: print(f"\r{p.done:6.1%} {p.left or 0:5.0f} s left", end="", flush=True),
        )  # fmt: skip
        yield {
            "architecture": name, "weight_decay": decay, "epochs": zoo.manifest.plan.recipe["epochs"],
            "accuracies": [r.accuracy for r in zoo.records], "seconds": sum(r.seconds for r in zoo.records),
            "device": zoo.records[0].device,
        }  # fmt: skip


# -- results -----------------------------------------------------------------------------------------------------------


def read(results: Path) -> dict[str, Any]:
    """All stored results."""
    return json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}


def _key(part: str, row: dict[str, Any]) -> list[Any]:
    return [row.get(name) for name in SAME[part]]


def keep(results: Path, part: str, row: dict[str, Any]) -> None:
    """Store a row in the file, in place of one with the same key."""
    held = read(results)
    held[part] = [old for old in held.get(part, []) if _key(part, old) != _key(part, row)] + [row]
    write_results(results, stamped(held, f"curves {_network(row)}" if part == "curves" else part))


def page(results: dict[str, Any]) -> str:
    """The tables of all results."""
    tables = (_printed_table, _large_table, _train_table, _curves_table, _least_table)
    return "\n".join(line for table in tables for line in table(results))


def _printed_table(results: dict[str, Any]) -> Iterator[str]:
    rows = [r for r in results.get("speed", []) if "printed" in r]
    if rows:
        yield (
            "| network | β | merges | the same | merging | whole fold | as printed | of its tables measured | ratio "
            "| of the whole fold | bar |"
        )
        yield "|---|---|---|---|---|---|---|---|---|---|---|"
        for r in rows:
            share = "all" if not r["extrapolated"] else f"{r['measured_tables']} of {r['tables']}: extrapolated"
            times = f"{r['merging']:.2f} s | {r['whole']:.1f} s | {r['printed']:.0f} s | {share}"
            ratios = f"{r['ratio']:.0f}× | {r['ratio_whole']:.0f}× | {r['bar']:.0f}×"
            same = "yes" if r["same_merges"] else "NO"
            yield f"| {r['what']} | {r['beta']} | {r['merges']} of {r['features']} | {same} | {times} | {ratios} |"
        yield ""


def _large_table(results: dict[str, Any]) -> Iterator[str]:
    rows = results.get("speed", [])
    if rows:
        yield "| network | options | schedule | β | merges | reading | merging | a Gram matrix per wire | whole | bar |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for r in rows:
            bar = f"{r['bar']:.0f} s" if r["bar"] and "printed" not in r else ""
            times = f"{r['reading']:.1f} s | {r['merging']:.2f} s | {r['floor']:.2f} s ({r['over_floor']:.1f}×)"
            head = f"{r['what']} | {r['options']} | {r['schedule']} | {r['beta']} | {r['merges']} of {r['features']}"
            yield f"| {head} | {times} | {r['whole']:.1f} s | {bar} |"
        yield ""


def _train_table(results: dict[str, Any]) -> Iterator[str]:
    if results.get("train"):
        yield "| network | weight decay | epochs | accuracy, % | seconds each |"
        yield "|---|---|---|---|---|"
        for r in results["train"]:
            found = ", ".join(f"{100 * a:.2f}" for a in r["accuracies"])
            each = r["seconds"] / len(r["accuracies"])
            yield f"| {r['architecture']} | {r['weight_decay']:g} | {r['epochs']} | {found} | {each:.0f} |"
        yield ""


def _network(row: dict[str, Any]) -> str:
    return f"{row['architecture']} ({row['recipe']}, weight decay {row['weight_decay']:g}), seed {row['seed']}"


def _networks(results: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    rows = results.get("curves", [])
    for name in dict.fromkeys((_network(r), r["test"]) for r in rows):
        yield f"{name[0]}, {name[1]:,} test images", [r for r in rows if (_network(r), r["test"]) == name]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _curves_table(results: dict[str, Any]) -> Iterator[str]:
    """Per network, the best result of every method within some shares of the parameters."""
    for name, rows in _networks(results):
        yield f"{name}: highest accuracy, % (after statistics reset) with at most so many of the parameters:"
        yield ""
        yield f"| method | {' | '.join(f'{share:.0%}' for share in COLUMNS)} |"
        yield "|---" * (len(COLUMNS) + 1) + "|"
        for method in ("none", *METHODS):
            of = [r for r in rows if r["method"] == method and "failed" not in r]
            if of:
                yield f"| {method} | {' | '.join(_best(of, share) for share in COLUMNS)} |"
        yield ""
        for r in rows:
            if "failed" in r:
                yield f"- {r['method']} with {r['knob']} {r['value']:g} failed: {r['failed'][:80]}"
        if any("failed" in r for r in rows):
            yield ""


def _best(rows: list[dict[str, Any]], share: float) -> str:
    """The best accuracy, without and with re-estimated statistics, of the rows that are small enough."""
    small = [r for r in rows if r["parameters_share"] <= share + ROUNDED]
    if not small:
        return ""
    reset = max((r["accuracy_reset"] or 0.0 for r in small), default=0.0)
    return _percent(max(r["accuracy"] for r in small)) + (f" ({_percent(reset)})" if reset else "")


def _least_table(results: dict[str, Any]) -> Iterator[str]:
    """The fewest parameters that keep almost all of the accuracy, as in Chen et al. (2024)."""
    for name, rows in _networks(results):
        whole = next((r["accuracy"] for r in rows if r["method"] == "none"), None)
        if whole is None:
            continue
        yield f"{name}: fewest parameters (%) at {ENOUGH:.0%} of {100 * whole:.1f} %, chosen on the test images:"
        yield ""
        yield "| method | as it is | after statistics reset |"
        yield "|---|---|---|"
        for method in METHODS:
            cells = []
            for key in ("accuracy", "accuracy_reset"):
                good = [r for r in rows if r["method"] == method and (r.get(key) or 0) >= ENOUGH * whole]
                cells.append(_percent(min((r["parameters_share"] for r in good), default=None)))
            if any(cells):
                yield f"| {method} | {' | '.join(cells)} |"
        yield ""


# -- command line ------------------------------------------------------------------------------------------------------

PARTS = {"speed": measure_speed, "curves": measure_curves, "train": train}


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--results", type=Path, default=RESULTS, help="the result file")
    parts = top.add_subparsers(dest="part", required=True)
    speed = parts.add_parser("speed")
    speed.add_argument("--beta", type=float, default=0.1)
    speed.add_argument(
        "--every", type=int, default=1, help="recompute distances of the printed algorithm before every n-th merge only"
    )
    speed.add_argument("--large", default="resnet50", metavar="NAME,…", help="networks of torchvision; '' for none")
    speed.add_argument("--zoo", metavar="FOLDER", help="folder of a trained VGG instead of an untrained one")
    curves = parts.add_parser("curves")
    curves.add_argument("name", help="an architecture of the zoo")
    curves.add_argument("--zoo", metavar="FOLDER", help="folder of trained networks; optional for tiny10")
    curves.add_argument("--network", type=int, default=0, help="seed of the network in the zoo")
    curves.add_argument("--methods", default=",".join(METHODS), metavar="NAME,…")
    curves.add_argument("--betas", type=_numbers, default=BETAS, metavar="β,…")
    curves.add_argument("--shares", type=_numbers, default=SHARES, metavar="SHARE,…")
    curves.add_argument("--seen", type=int, default=10_000, help="training images for statistics")
    curves.add_argument("--test", type=int, default=10_000, help="test images")
    curves.add_argument("--peers", metavar="PYTHON", help="an interpreter with torch-pruning")
    curves.add_argument("--no-reset", action="store_true", help="skip accuracies with re-estimated statistics")
    curves.add_argument("--again", action="store_true", help="repeat rows that have a result")
    training = parts.add_parser("train")
    training.add_argument("--out", required=True, metavar="FOLDER", help="folder with one folder per network")
    training.add_argument("--names", metavar="NAME,…", help="architectures (default: all)")
    training.add_argument("--decay", type=float, help="only networks of one weight decay")
    training.add_argument("--seeds", default="0:1", help="seeds, trained together")
    training.add_argument("--data", default="cifar10")
    training.add_argument("--epochs", type=int)
    training.add_argument("--batch", type=int, default=128)
    training.add_argument("--rate", type=float, default=0.1)
    training.add_argument("--score-every", type=int, default=10)
    training.add_argument("--train", type=int, help="training images (default: all)")
    training.add_argument("--test", type=int, help="test images (default: all)")
    for part in (curves, training):
        part.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parts.add_parser("page")
    return top


def main() -> None:
    """Measure one part, store its rows, print the tables."""
    options = parser().parse_args()
    if options.part != "page":
        for row in PARTS[options.part](options):
            print(json.dumps(row), flush=True)
            keep(options.results, options.part, row)
    print(page(read(options.results)))


if __name__ == "__main__":
    main()
