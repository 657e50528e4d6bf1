"""Invented records of a study, with the columns of a result store."""

import hashlib
import json
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

from finished_tasks import records_of

from intertwine.lab.study.records import FinishedTask, ResultRow

LAYERS = ("conv1", "conv2", "layer1.0.relu", "layer1.1.relu", "layer2.0.relu", "layer2.1.relu", "pool", "fc")
MEASURES = ("linear_cka", "orthogonal_procrustes", "mutual_knn")
PAIRS = (("cnn-0", "cnn-1"), ("cnn-0", "cnn-2"))
CONSTANT = "the second network's features are constant"
PLAN = {"name": "digits", "zoos": ["cnn"], "verbs": ["compare", "barrier", "stitch"], "repeats": 3}


def task(
    verb: str,
    rows: Iterable[ResultRow],
    a: str = "cnn-0",
    b: str | None = None,
    repeat: int = 0,
    layer: str | None = None,
    **options: Any,
) -> FinishedTask:
    """One finished task, with a command."""
    about = {"verb": verb, "zoo": "cnn", "a": a, "b": b, "layer": layer, "options": options, "repeat": repeat}
    flags = "".join(f" --{name} {value}" for name, value in options.items())
    at = f" --at {layer}" if layer else ""
    command = f"intertwine {verb} zoo:cnn/{a}" + (f" zoo:cnn/{b}" if b else "") + f"{at}{flags} --seed {repeat}"
    made = {
        "version": "0.1.0", "torch": "2.13.0", "python": "3.12.3", "git": "006d543",
        "command": command, "made_at": f"2026-01-0{repeat + 1}T10:00:00",
    }  # fmt: skip
    key = hashlib.sha256(json.dumps([verb, a, b, layer, repeat, options]).encode()).hexdigest()
    return FinishedTask(key, about, tuple(rows), 1.5, 210.0, made)


def compared(noise: random.Random, layers: tuple[str, ...] = LAYERS) -> Iterator[ResultRow]:
    """Nearby layers are similar; the last layer of the second network has constant features."""
    for measure in MEASURES:
        for i, first in enumerate(layers):
            for j, second in enumerate(layers):
                if second == layers[-1] and measure == "mutual_knn":
                    yield ResultRow(measure, None, layer=first, other_layer=second, note=CONSTANT)
                    continue
                near = math.exp(-abs(i - j) / 3) * 0.96 + noise.uniform(-0.03, 0.03)
                value = 1.3 * (1 - near) if "procrustes" in measure else near
                yield ResultRow(measure, value, layer=first, other_layer=second)


def between(noise: random.Random, height: float) -> Iterator[ResultRow]:
    """Error and loss between two networks, with and without re-estimated statistics."""
    for way, kept in (("", 1.0), ("_reset", 0.4)):
        for kind, scale in (("error", 1.0), ("loss", 4.0)):
            for step in range(11):
                alpha = step / 10
                hill = height * kept * math.sin(math.pi * alpha) ** 2
                yield ResultRow(f"{kind}{way}", scale * (0.04 + hill + noise.uniform(0, 0.005)), index=alpha)
            yield ResultRow(f"{kind}{way}_barrier", scale * height * kept)


def finished() -> Iterator[FinishedTask]:
    """Tasks of all verbs."""
    noise = random.Random(0)
    for a, b in PAIRS:
        yield task("compare", compared(noise), a, b)
        for repeat in range(3):
            yield task("barrier", between(noise, 0.62), a, b, repeat, method="none")
            yield task("barrier", between(noise, 0.11), a, b, repeat, method="weights")
        for method, height in (("none", 0.4), ("weights", 0.06)):
            rows = [
                ResultRow("llfc", height * (i + 1) / 8 * (1 - abs(alpha - 0.5)), layer=layer, index=alpha)
                for alpha in (0.25, 0.5, 0.75)
                for i, layer in enumerate(LAYERS)
            ]
            yield task("connectivity", rows, a, b, method=method)
        for family, most in (("linear", 0.02), ("permutation", 0.3), ("orthogonal", 0.12)):
            for i, layer in enumerate(LAYERS):
                value = most * (i + 1) / 8
                bad = family == "permutation" and layer == "fc"
                row = ResultRow("penalty", None, layer=layer, note="the layers differ in width") if bad else ResultRow(
                    "penalty", value, value - 0.015, value + 0.02, layer=layer
                )  # fmt: skip
                yield task("stitch", [row], a, b, layer=layer, family=family)
    for a in ("cnn-0", "cnn-1"):
        for method, fall in (("weights", 0.5), ("kmeans", 0.8), ("pruning", 1.4)):
            rows = [ResultRow("accuracy", 0.96 - fall * (1 - x / 10) ** 4, index=x / 10) for x in range(2, 11)]
            yield task("fold", rows, a, method=method)
        for beta in (0.05, 0.1):
            rows = [ResultRow("classes", 32 * (i + 1) * (1 - beta), layer=layer) for i, layer in enumerate(LAYERS)]
            rows += [ResultRow("width", 32.0 * (i + 1), layer=layer) for i, layer in enumerate(LAYERS)]
            yield task("complexity", rows, a, beta=beta)
        found = {"stroke, upright": 14, "loop": 9, "corner": 5, "edge": 3}
        yield task("dissect", [ResultRow("units", float(n), layer="conv2", note=name) for name, n in found.items()], a)


def records() -> list[dict[str, Any]]:
    """A small study of all verbs."""
    return [record for one in finished() for record in records_of(one, "digits")]


def failure() -> dict[str, Any]:
    """A failed task, as in `Store.errors`."""
    about = {"key": "k", "verb": "stitch", "zoo": "cnn", "a": "cnn-0", "b": "cnn-9", "layer": "fc", "options": "{}"}
    return about | {"seconds": 0.2, "error": "Traceback …\nMismatchError: 64 units meet 10"}


def many(rows: int) -> list[dict[str, Any]]:
    """A large study: half of the rows are cells of heat maps, the other half are tasks of one row each."""
    noise = random.Random(1)
    layers = tuple(f"features.{i // 4}.block.{i % 4}.relu" for i in range(20))
    made: list[dict[str, Any]] = []
    pair = 0
    while len(made) < rows // 2:
        made += records_of(task("compare", compared(noise, layers), "cnn-0", f"cnn-{pair}"), "large")
        pair += 1
    made = made[: rows // 2]
    for i in range(rows - len(made)):
        row = ResultRow("penalty", noise.random(), noise.random() / 2, 0.5 + noise.random() / 2, layer=layers[i % 20])
        networks = f"cnn-{i // 400}", f"cnn-{i // 400 + 1}"
        one = task("stitch", [row], *networks, i // 20 % 5, layers[i % 20], family=f"family-{i // 100 % 4}")
        made += records_of(one, "large")
    return made
