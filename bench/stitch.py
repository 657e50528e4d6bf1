"""Benchmarks of stitching: direct fits against two forward passes, a figure in one run, G_ReLU direct and trained.

    python bench/stitch.py direct                      # all layers of a ResNet-18 pair in one pass, and the forwards
    python bench/stitch.py column --zoo zoos/myrtle    # 4 layers × 5 families of a Myrtle pair, 20 epochs (one GPU)
    python bench/stitch.py relu --zoo zoos/myrtle      # G_ReLU: direct, trained as printed, trained by us (one GPU)
    python bench/stitch.py tiny10                      # least squares and task loss on the published Tiny-10 networks
    python bench/stitch.py cka                         # their CKA, with positions or images as samples
    python bench/stitch.py moved                       # theorem 4.2: a network and its moved copy, every architecture
    python bench/stitch.py page                        # the tables of all results

Zoos are made by `intertwine zoo train myrtle --recipe godfrey --seeds 0:8 --out zoos/myrtle`. Results are stored in
bench/results/stitch.json. Data is read from INTERTWINE_DATA.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import stamped, write_results
from stitch_page import RESULTS, page
from torch import nn

import intertwine as it
from intertwine.data.batches import on_device_of
from intertwine.lab.papers.work import PublishedNetworks
from intertwine.lab.zoo.augment import TrainingBatches
from intertwine.lab.zoo.networks.registry import architecture, architectures, build, relu_paths
from intertwine.lab.zoo.recipe import RECIPES
from intertwine.measure.measure import find
from intertwine.stitch.families.names import family_of, find_family
from intertwine.stitch.fitting import moments_of
from intertwine.stitch.scores import feature_similarities
from intertwine.stitch.split import SplitPair

#: The normalisation of the published Tiny-10 networks.
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh)
COLUMN = ("linear", "lowrank:1", "lowrank:2", "lowrank:4", "relu:birkhoff")


def device_name(device: str) -> str:
    """The name of the device in results."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU cores"


def shown(doing: str, part: float) -> None:
    """Progress on one line."""
    print(f"\r{part:6.1%} {doing:60}", end="", file=sys.stderr, flush=True)


# -- direct fits beside the forwards ----------------------------------------------------------------------------------


def measure_direct(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Moments and direct fits of all ReLUs of an untrained ResNet-18 pair, and two forward passes of its images."""
    torch.manual_seed(0)
    a, b = build("resnet18").eval(), build("resnet18").eval()
    data = it.zoo.data("cifar10").subset(options.images, 1).batches("train", options.batch)
    paths = relu_paths(a)
    with torch.no_grad():
        first = next(iter(data))[0]
        a(first), b(first)
        start = time.perf_counter()
        for inputs, _ in data:
            a(inputs), b(inputs)
        forwards = time.perf_counter() - start
    split = SplitPair(a, b, list(paths), on_device_of(((first,), {}), b))
    start = time.perf_counter()
    moments = moments_of(split, data)
    streamed = time.perf_counter() - start
    for family in ("affine", "orthogonal", "lowrank:4", "permutation", "relu"):
        start = time.perf_counter()
        for one in moments:
            find_family(family).direct(one)
        yield {
            "part": "direct", "images": options.images, "layers": len(paths), "family": family,
            "device": device_name("cpu"), "forwards": forwards, "streamed": streamed,
            "solved": time.perf_counter() - start,
        }  # fmt: skip


# -- real Myrtle pairs ------------------------------------------------------------------------------------------------


def _pair(options: argparse.Namespace, first: int) -> tuple[nn.Module, nn.Module, Any, Any, Any]:
    """Two networks of a zoo, augmented and plain training batches, and test batches."""
    zoo = it.zoo.load(options.zoo)
    data = zoo.dataset()
    if options.train:
        data = data.subset(options.train, options.test)
    data = data.to(options.device)
    recipe = replace(RECIPES["godfrey"], batch=options.batch)
    a, b = (zoo[first + i].to(options.device) for i in (0, 1))
    if options.device == "cuda":
        a, b = (model.to(memory_format=torch.channels_last) for model in (a, b))
    augmented = TrainingBatches(data, recipe, seed=first)
    return a, b, augmented, data.batches("train", 500), data.batches("test", 500)


def measure_column(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A column of figure 1: every ReLU of one pair with five families in one run, trained as in the paper."""
    a, b, augmented, still, test = _pair(options, 0)
    start = time.perf_counter()
    found = it.stitches(
        a, b, list(relu_paths(a)), COLUMN, data=augmented, direct_data=still, test=test, recipe="godfrey",
        epochs=options.epochs, score_every=0, precision=options.precision, progress=shown,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    for one in found:
        yield _row("column", options, one) | {"seconds": seconds, "stitches": len(found)}


def measure_relu(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """G_ReLU on some pairs: one assignment, trained as printed, and trained by us from the assignment."""
    for first in range(2 * options.first, 2 * options.pairs, 2):
        a, b, augmented, still, test = _pair(options, first)
        shared = {"data": augmented, "direct_data": still, "test": test, "norm": "adapt", "progress": shown,
                  "precision": options.precision, "epochs": options.epochs}  # fmt: skip
        paths = list(relu_paths(a))
        printed = it.stitches(a, b, paths, "relu:birkhoff", fit="task", recipe="godfrey", score_every=0, **shared)
        ours = it.stitches(a, b, paths, ["relu", "relu:annealed"], fit=("direct", "task"), rate=options.rate, **shared)
        seen: set[tuple[str, str]] = set()
        for one in (*printed, *ours):
            name = "relu" if one.fit == "direct" else one.family
            if (one.point.back, f"{name} {one.fit}") not in seen:
                seen.add((one.point.back, f"{name} {one.fit}"))
                yield _row("relu", options, one) | {"family": name, "pair": [first, first + 1], "rate": options.rate}


def _row(part: str, options: argparse.Namespace, one: Any) -> dict[str, Any]:
    return {
        "part": part, "device": device_name(options.device), "at": one.point.back, "family": one.family, "fit": one.fit,
        "epochs": options.epochs if one.fit == "task" else 0, "batch": options.batch, "precision": options.precision,
        "accuracy": one.accuracy, "penalty": one.penalty, "front": one.front_accuracy, "back": one.back_accuracy,
        "relative": one.relative_accuracy, "cross_entropy": one.cross_entropy, "diverged": one.diverged,
        "pair": [0, 1],
    }  # fmt: skip


# -- published networks -----------------------------------------------------------------------------------------------


def measure_tiny10(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Figure 2 of Csiszárik et al. (2021) on their networks: least squares and task loss before every ReLU."""
    networks, data = _published(options)
    for first in range(2 * options.first, 2 * options.pairs, 2):
        found = it.stitches(
            networks[first], networks[first + 1], [f"bn{i}" for i in range(1, 9)], ["identity", "affine"],
            data=TrainingBatches(data, replace(RECIPES["godfrey"], batch=128, shift=0, crop=0, flip=False), first),
            test=data.batches("test", 500), fit=("direct", "task"), recipe="csiszarik", epochs=options.epochs,
            progress=shown,
        )  # fmt: skip
        for one in found:
            if (one.family, one.fit) != ("identity", "task"):
                yield _row("tiny10", options, one) | {"batch": 128, "pair": [first, first + 1], "cka": _cka(one, data)}


def measure_cka(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """CKA of transformed and original features (Csiszárik et al. 2021), on both sides of every ReLU."""
    networks, data = _published(options)
    for first in range(0, 2 * options.pairs, 2):
        for side in ("bn", "relu"):
            found = it.stitches(
                networks[first], networks[first + 1], [f"{side}{i}" for i in range(1, 9)], ["identity", "affine"],
                data=data.batches("train", 500), test=data.batches("test", 500), fit="direct", progress=shown,
            )  # fmt: skip
            for one in found:
                kinds = {"cka": _cka(one, data), "cka_images": _cka(one, data, images=True)}
                yield _row("cka", options, one) | {"pair": [first, first + 1], "images": options.train} | kinds


def _published(options: argparse.Namespace) -> tuple[list[nn.Module], Any]:
    """The published Tiny-10 networks, and CIFAR-10 with their normalisation."""
    published = PublishedNetworks("tiny10")
    networks = [published.seed(seed).to(options.device) for seed in list(published.files)[: 2 * options.pairs]]
    return networks, published.normalised(it.zoo.data("cifar10")).subset(options.train, options.test).to(options.device)


def _cka(one: Any, data: Any, *, images: bool = False) -> float:
    """Linear CKA of the transformed features of the front and the features of the back, on the first test batch.

    Samples are positions of images, or whole images with all channels and positions as features.
    """
    split, point = one.model.split, one.model.index
    call = (next(iter(data.batches("test", 500)))[0],), {}
    with split.running(), torch.no_grad():
        moved, own = one.map(split.front(call)[point].rows), split.targets(call)[point]
    if images:
        return find("linear_cka_biased")(moved.flatten(1), own.flatten(1)).value
    return feature_similarities(own, moved)["linear_cka_biased"]


# -- theorem 4.2 ------------------------------------------------------------------------------------------------------


def measure_moved(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every architecture of the zoo, stitched to a copy that is moved by a random element, in float64."""
    for name in options.architectures.split(",") if options.architectures else architectures():
        torch.manual_seed(0)
        model, example = build(name).double().eval(), architecture(name).example()
        symmetry = it.symmetry(model, example.double() if example.is_floating_point() else example)
        moved = symmetry.act(symmetry.random(seed=1), model)
        inputs = _inputs(example, options.samples)
        with torch.no_grad():
            own = model(inputs)
        data = [(inputs, own.argmax(-1))]
        for family, paths in _cuts(model).items():
            for skip in (None, "back"):
                found = it.stitches(moved, model, paths, family, fit="direct", data=data, skip=skip)
                for one in found:
                    if skip is not None and one.point.skip == "none":
                        continue  # no skip connection at the stitch, so there is no choice
                    with torch.no_grad():
                        gap = float((one.model(inputs) - own).abs().max() / own.abs().max())
                    yield {
                        "part": "moved", "architecture": name, "at": one.point.back, "family": one.family, "gap": gap,
                        "penalty": one.penalty, "skip": one.point.skip,
                    }  # fmt: skip


def _cuts(model: nn.Module) -> dict[Any, list[str]]:
    """Family → stitch points: every activation with its group, and the ends of transformer blocks."""
    found: dict[Any, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, ACTIVATIONS):
            found.setdefault(family_of(module), []).append(path)
        elif path.rpartition(".")[0] == "blocks":
            found.setdefault(find_family("permutation"), []).append(path)
    return found


def _inputs(example: Any, samples: int) -> Any:
    """Random inputs like the example: numbers, or token ids up to its largest."""
    shape = (samples, *example.shape[1:])
    chance = torch.Generator().manual_seed(0)
    if example.is_floating_point():
        return torch.randn(shape, generator=chance, dtype=torch.float64)
    return torch.randint(0, 64, shape, generator=chance)


def keep(results: Path, rows: list[dict[str, Any]]) -> None:
    """Store rows in the file, in place of those with the same key."""
    same = ("part", "device", "architecture", "at", "family", "fit", "pair", "epochs", "skip")
    held = json.loads(results.read_text()) if results.exists() else {"rows": []}
    new = [[row.get(key) for key in same] for row in rows]
    held["rows"] = [row for row in held["rows"] if [row.get(key) for key in same] not in new] + rows
    write_results(results, stamped(held, rows[0]["part"]))


# -- command line -----------------------------------------------------------------------------------------------------

PARTS = {
    "direct": measure_direct,
    "column": measure_column,
    "relu": measure_relu,
    "tiny10": measure_tiny10,
    "cka": measure_cka,
    "moved": measure_moved,
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("part", choices=[*PARTS, "page"])
    top.add_argument("--results", type=Path, default=RESULTS, help="the result file")
    top.add_argument("--zoo", metavar="FOLDER", help="folder of the trained networks")
    top.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    top.add_argument("--images", type=int, default=10_000, help="of direct")
    top.add_argument("--train", type=int, help="training images (default: all)")
    top.add_argument("--test", type=int, help="test images (default: all)")
    top.add_argument("--batch", type=int, default=100)
    top.add_argument("--epochs", type=int, default=20)
    top.add_argument("--pairs", type=int, default=1)
    top.add_argument("--first", type=int, default=0, help="the first pair of relu and tiny10")
    top.add_argument("--rate", type=float, default=1e-3, help="of our own training of G_ReLU")
    top.add_argument("--precision", default="float32")
    top.add_argument("--architectures", metavar="NAME,…", help="of moved; all of the zoo where not given")
    top.add_argument("--samples", type=int, default=32, help="of moved")
    return top


def main() -> None:
    """Measure one part, store its rows, print the tables."""
    options = parser().parse_args()
    if options.part != "page":
        for row in PARTS[options.part](options):
            keep(options.results, [row])
    print(page(json.loads(options.results.read_text())["rows"] if options.results.exists() else []))


if __name__ == "__main__":
    main()
