"""Benchmarks of alignment: planted elements, speed against peers, barriers of trained networks.

    python bench/align.py planted                           # is a planted element recovered? (full-size networks)
    python bench/align.py speed --peers PYTHON              # weight matching against rebasin and the usual loop
    python bench/align.py quality myrtle --recipe godfrey --seeds 0:8 --zoo zoos/myrtle      # barriers (one GPU)
    python bench/align.py quality mlp --data mnist --option widths=[784,512,512,512,10] --seeds 0:4 --zoo zoos/mnist
    python bench/align.py tiny10                            # barriers of the published Tiny-10 checkpoints
    python bench/align.py page                              # the tables of all results

`quality` trains the networks unless the folder holds them. PYTHON is an interpreter of another environment with
rebasin. Results are stored in bench/results/align.json. Data is read from INTERTWINE_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from align_planted import measure_planted
from align_quality import METHODS, Setting, measure_pair, pairs_of, with_unit_lengths
from align_speed import measure_speed
from machine import stamped, write_results

import intertwine as it
from intertwine.cli.arguments import parse_option
from intertwine.lab.papers.work import PublishedNetworks
from intertwine.lab.zoo.recipe import seeds

RESULTS = Path(__file__).parent / "results" / "align.json"
#: The key of a row of barriers: a new row replaces an old one with the same key.
SAME = ("architecture", "options", "data", "recipe", "spawn", "rescaled", "pair", "method")


def measure_quality(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per pair and method."""
    zoo = networks(options)
    data = zoo.dataset()
    example = (torch.zeros(2, *data.shape),)
    symmetry = it.symmetry(zoo[0], *example)
    setting = Setting(
        tuple(options.methods.split(",")), options.points, options.test, options.seen, options.device, options.llfc
    )
    about = {
        "architecture": options.name, "options": options.option, "data": options.data, "device": device_name(options),
        "recipe": zoo.manifest.plan.recipe["name"], "epochs": zoo.manifest.plan.recipe["epochs"],
        "spawn": options.spawn, "rescaled": options.rescaled,
        "accuracy": statistics.mean(r.accuracy for r in zoo.records),
        "points": options.points, "seen": options.seen, "test": min(options.test, len(data.test_labels)),
    }  # fmt: skip
    chosen = pairs_of(len(zoo), options.pairs)
    for i, j in chosen[options.first :]:
        second = with_unit_lengths(symmetry, zoo[j]) if options.rescaled else zoo[j]
        for row in measure_pair(zoo[i], second, data, example, symmetry, setting):
            yield about | {"pair": [zoo.seeds[i], zoo.seeds[j]]} | row


def measure_tiny10(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same for the published Tiny-10 checkpoints, with the normalisation of their training."""
    published = PublishedNetworks("tiny10")
    models = [published.seed(seed) for seed in published.files]
    data = published.normalised(it.zoo.data("cifar10"))
    example = (torch.zeros(2, *data.shape),)
    symmetry = it.symmetry(models[0], *example)
    setting = Setting(METHODS, options.points, options.test, options.seen, options.device)
    about = {
        "architecture": "tiny10", "options": ["published"], "data": "cifar10", "device": device_name(options),
        "recipe": "published", "spawn": 0, "rescaled": False, "points": options.points,
        "seen": options.seen, "test": options.test,
    }  # fmt: skip
    for i, j in pairs_of(len(models), options.pairs):
        for row in measure_pair(models[i], models[j], data, example, symmetry, setting):
            yield about | {"pair": [i, j], "accuracy": 1 - statistics.mean((row["error"][0], row["error"][-1]))} | row


def networks(options: argparse.Namespace) -> it.zoo.Zoo:
    """The zoo in the folder if it holds all seeds; otherwise it is trained."""
    wanted = seeds(options.seeds)
    if (Path(options.zoo) / "manifest.json").exists():
        stored = it.zoo.load(options.zoo)
        if set(wanted) <= set(stored.seeds):
            return stored
    changes = {name: getattr(options, name) for name in ("epochs", "spawn") if getattr(options, name)}
    return it.zoo.train(
        options.name, seeds=wanted, data=options.data, out=options.zoo, recipe=options.recipe,
        options=dict(map(parse_option, options.option)), device=options.device, score_every=1000, **changes,
    )  # fmt: skip


def device_name(options: argparse.Namespace) -> str:
    """The name of the device."""
    return torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{os.cpu_count()} CPU cores"


# -- results -----------------------------------------------------------------------------------------------------------


def keep(results: Path, part: str, rows: list[dict[str, Any]], same: tuple[str, ...], made: str = "") -> None:
    """Store rows in place of those with equal `same` entries; `made` names the run, by default the part."""
    held = json.loads(results.read_text()) if results.exists() else {}
    new = [[row.get(key) for key in same] for row in rows]
    held[part] = [row for row in held.get(part, []) if [row.get(key) for key in same] not in new] + rows
    write_results(results, stamped(held, made or part))


def page(results: dict[str, Any]) -> str:
    """The tables of all results."""
    tables = (_planted_table, _speed_table, _quality_table, _llfc_table)
    return "\n".join(line for table in tables for line in table(results))


def _planted_table(results: dict[str, Any]) -> Iterator[str]:
    if "planted" in results:
        yield "| network | permutations back, exactly | slowest | with scales, to 1e-5 | slowest |"
        yield "|---|---|---|---|---|"
        for r in results["planted"]:
            exact = f"{r['permutations']} of {r['seeds']} | {r['permutations_seconds']:.1f} s"
            yield f"| {r['network']} | {exact} | {r['scales']} of {r['seeds']} | {r['scales_seconds']:.1f} s |"
        yield ""


def _speed_table(results: dict[str, Any]) -> Iterator[str]:
    if "speed" in results:
        yield "| pair | who | seconds | squared distance before → after | time over ours |"
        yield "|---|---|---|---|---|"
        first = {}
        for r in results["speed"]:
            ours = first.setdefault(r["architecture"], r["seconds"])
            ratio = f"{r['seconds'] / ours:.1f}×"
            change = f"{r['before']:.1f} → {r['after']:.1f}"
            yield f"| {r['architecture']} | {r['who']} | {r['seconds']:.2f} | {change} | {ratio} |"
        yield ""


def _named(row: dict[str, Any]) -> str:
    """The networks of a row, in words."""
    words = [row["architecture"], *row["options"]]
    more = [f"spawned after {row['spawn']}"] if row["spawn"] else []
    return ", ".join([" ".join(words), *more, *(["second with unit lengths"] if row.get("rescaled") else [])])


def _groups(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(networks, method, rows of all pairs)."""
    keys = dict.fromkeys((_named(r), r["method"]) for r in rows)
    for name, method in keys:
        yield name, method, [r for r in rows if (_named(r), r["method"]) == (name, method)]


def _points(rows: list[dict[str, Any]], key: str) -> str:
    """Mean ± standard deviation of a fraction over pairs, in percentage points."""
    values = [100 * r[key] for r in rows if r[key] is not None]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _quality_table(results: dict[str, Any]) -> Iterator[str]:
    if "quality" in results:
        yield (
            "| networks | accuracy, % | pairs | method | error barrier, points | scales corrected | reset "
            "| loss barrier | scales corrected | reset |"
        )
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for name, method, rows in _groups(results["quality"]):
            kinds = ("", "_scales", "_reset")
            losses = " | ".join(_mean(rows, f"loss_barrier{kind}") for kind in kinds)
            errors = " | ".join(_points(rows, f"error_barrier{kind}") for kind in kinds)
            head = f"{name} ({rows[0]['data']}) | {100 * rows[0]['accuracy']:.1f} | {len(rows)}"
            yield f"| {head} | {method} | {errors} | {losses} |"
        yield ""


def _mean(rows: list[dict[str, Any]], key: str) -> str:
    values = [r[key] for r in rows if r[key] is not None]
    return f"{statistics.mean(values):.3f}" if values else ""


def _llfc_table(results: dict[str, Any]) -> Iterator[str]:
    rows = [r for r in results.get("quality", []) if "llfc_worst" in r]
    if rows:
        yield "| networks | method | 1 − cos of the mix, worst layer | logits | of the two networks, worst | logits |"
        yield "|---|---|---|---|---|---|"
        for name, method, group in _groups(rows):
            keys = ("llfc_worst", "llfc_logits", "baseline_worst", "baseline_logits")
            cells = " | ".join(f"{statistics.mean(r[key] for r in group):.2g}" for key in keys)
            yield f"| {name} | {method} | {cells} |"
        yield ""


# -- command line ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--results", type=Path, default=RESULTS, help="the result file")
    parts = top.add_subparsers(dest="part", required=True)
    planted = parts.add_parser("planted")
    planted.add_argument("--elements", type=int, default=10, help="planted elements per network")
    speed = parts.add_parser("speed")
    speed.add_argument("--peers", metavar="PYTHON", help="an interpreter with rebasin")
    speed.add_argument("--networks", default="resnet18,resnet50")
    quality = parts.add_parser("quality")
    quality.add_argument("name", help="an architecture of the zoo")
    quality.add_argument("--option", action="append", default=[], help="of the architecture, such as width=4")
    quality.add_argument("--data", default="cifar10")
    quality.add_argument("--recipe")
    quality.add_argument("--epochs", type=int)
    quality.add_argument("--spawn", type=int, default=0, help="number of shared first epochs")
    quality.add_argument(
        "--rescaled", action="store_true", help="first rescale the units of the second network to length one"
    )
    quality.add_argument("--seeds", default="0:2")
    quality.add_argument("--zoo", required=True, metavar="FOLDER", help="folder of the networks")
    quality.add_argument("--first", type=int, default=0, help="the first pair to measure")
    quality.add_argument("--methods", default=",".join(METHODS))
    quality.add_argument("--llfc", type=int, default=0, metavar="IMAGES", help="also compare features layer by layer")
    tiny = parts.add_parser("tiny10")
    for part in (quality, tiny):
        part.add_argument("--pairs", type=int, default=4)
        part.add_argument("--points", type=int, default=25)
        part.add_argument("--test", type=int, default=10_000, help="test images")
        part.add_argument("--seen", type=int, default=10_000, help="training images for data and statistics")
        part.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parts.add_parser("page")
    return top


def main() -> None:
    """Measure one part, store its rows, print the tables."""
    options = parser().parse_args()
    if options.part == "planted":
        for row in measure_planted(options.elements):
            print(json.dumps(row), flush=True)
            keep(options.results, "planted", [row], ("network",))
    elif options.part == "speed":
        for name in options.networks.split(","):
            rows = measure_speed(name, options.peers if name == "resnet18" else None)
            keep(options.results, "speed", rows, ("architecture", "who"))
    elif options.part in ("quality", "tiny10"):
        for row in (measure_quality if options.part == "quality" else measure_tiny10)(options):
            print(json.dumps(row), flush=True)
            keep(options.results, "quality", [row], SAME, _named(row))
    print(page(json.loads(options.results.read_text()) if options.results.exists() else {}))


if __name__ == "__main__":
    main()
