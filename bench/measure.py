"""Benchmarks of similarity measures: time against their necessary matrix products, and against peers.

    python bench/measure.py                            # intertwine only
    python bench/measure.py --peers PYTHON             # also pytorch-cka, run by an interpreter that has it
    python bench/measure.py layers --peers PYTHON      # all layers of two ResNet-18 on 10,000 CIFAR-10 images
    python bench/measure.py page                       # the table of all results

Results are stored in bench/results/measure.json. The published loop of G_ReLU-CKA is repeated here, one row of the
kernel at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import intertwine as it
from intertwine.lab.zoo.group import initial
from intertwine.lab.zoo.networks.registry import build, relu_paths

sys.path.insert(0, str(Path(__file__).parent))
from machine import stamped, write_results

RESULTS = Path(__file__).parent / "results" / "measure.json"
PEER = """
import json, sys, time, torch
from cka import cka_from_features
data = torch.load(sys.argv[1], weights_only=True)
times = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    value = float(cka_from_features(data["x"], data["y"]))
    times.append(time.perf_counter() - start)
print(json.dumps({"seconds": min(times), "value": value}))
"""


def timed(call: Callable[[], Any], times: int = 2) -> tuple[float, Any]:
    """The shortest time of some runs, and the result."""
    seconds, value = [], None
    for _ in range(times):
        start = time.perf_counter()
        value = call()
        seconds.append(time.perf_counter() - start)
    return min(seconds), value


def linear_cka(samples: int, width: int, peers: str | None) -> dict[str, Any]:
    """Debiased linear CKA against its three matrix products, and against pytorch-cka."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(samples, width, generator=g)
    y = x + torch.randn(samples, width, generator=g)
    floor, _ = timed(lambda: (x.T @ x, x.T @ y, y.T @ y))
    ours, result = timed(lambda: it.measure(x, y))
    exact = it.measure(x[:, :256].double(), y[:, :256].double()).value
    single = it.measure(x[:, :256], y[:, :256]).value
    row = {
        "what": f"linear_cka, {samples:,} × {width:,}", "seconds": ours, "floor": "three products", "floor_s": floor,
        "value": result.value, "off_float64": abs(exact - single),
    }  # fmt: skip
    return row | (_peer(peers, x, y) if peers else {})


def _peer(python: str, x: Tensor, y: Tensor) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/data.pt"  # the environment of the peers may lack safetensors
        torch.save({"x": x, "y": y}, file)
        done = subprocess.run([python, "-c", PEER, file, "2"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"peer": "pytorch-cka", "peer_s": found["seconds"], "peer_value": found["value"]}


LAYERS_PEER = """
import json, sys, time, torch
from cka import compute_cka
data = torch.load(sys.argv[1], weights_only=False)
models = []
for state in data["states"]:
    model = data["build"]("resnet18")
    model.load_state_dict(state)
    models.append(model.eval())
start = time.perf_counter()
matrix = compute_cka(*models, [data["batches"]], layers=data["layers"], progress=False)[0]
print(json.dumps({"seconds": time.perf_counter() - start, "matrix": matrix.tolist()}))
"""


def layer_matrix(images: int, batch: int, peers: str | None) -> list[dict[str, Any]]:
    """Linear CKA of 18 layers of a ResNet-18 with 18 of another, with the forward passes as the floor."""
    data = it.zoo.data("cifar10")
    pixels = data.inputs(data.test_images[:images]).contiguous()
    batches = list(zip(pixels.split(batch), data.test_labels[:images].split(batch), strict=True))
    models = [initial(lambda: build("resnet18"), seed).eval() for seed in range(2)]
    layers = [*relu_paths(models[0]), "fc"]
    with torch.inference_mode():
        floor, _ = timed(lambda: [model(x) for x, _ in batches for model in models], 1)
    rows = []
    for policy in ("pool", "channels"):
        seconds, found = timed(
            lambda how=policy: it.compare(models[0], models[1], batches, layers=layers, policy=how), 1
        )
        matrix = found.matrix("linear_cka")
        rows.append({
            "what": f"18 × 18 layers, {images:,} images, {policy}", "seconds": seconds, "floor": "forward passes",
            "floor_s": floor, "value": float(matrix.diagonal().mean()),
        })  # fmt: skip
    if peers:
        found = _layers_peer(peers, models, batches, layers)
        peer = {"peer": "pytorch-cka (mean over batches)", "peer_s": found["seconds"]}
        rows = [row | peer for row in rows]
    return rows


def _layers_peer(
    python: str, models: list[Any], batches: list[tuple[Tensor, Tensor]], layers: list[str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        states = [model.state_dict() for model in models]
        torch.save({"states": states, "build": build, "batches": batches, "layers": layers}, f"{folder}/data.pt")
        source = os.fspath(Path(__file__).parents[1] / "src")  # for the definition of the network
        done = subprocess.run(
            [python, "-c", LAYERS_PEER, f"{folder}/data.pt"], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": source},
        )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def relu_cka(samples: int, channels: int, positions: int) -> dict[str, Any]:
    """G_ReLU-CKA against the loop over rows of the kernel."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(samples, channels, positions, generator=g) for _ in range(2))
    ours, result = timed(lambda: it.measure(x, y, "relu_cka"))
    part = 20
    loop, _ = timed(lambda: [_row_by_row(z, part) for z in (x, y)], 1)
    return {
        "what": f"relu_cka, {samples:,} × {channels} × {positions}", "seconds": ours, "value": result.value,
        "peer": f"loop over rows ({part} of {samples:,} timed)", "peer_s": loop * samples / part,
    }  # fmt: skip


def _row_by_row(x: Tensor, rows: int) -> Tensor:
    """Rows of the max kernel with all channels of all samples at once, as in the published code."""
    x = x - x.mean((0, 2), keepdim=True)
    x = x / x.square().sum((0, 2), keepdim=True).sqrt()
    return torch.stack([(x[i] * x).sum(-1).amax(1) for i in range(rows)])


def procrustes(samples: int, width: int) -> dict[str, Any]:
    """Orthogonal Procrustes with fewer samples than features, against the singular values of the feature product."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(samples, width, generator=g, dtype=torch.float64) for _ in range(2))
    ours, result = timed(lambda: it.measure(x, y, "orthogonal_procrustes", baseline=False))
    wide, _ = timed(lambda: torch.linalg.svdvals(x.T @ y), 1)
    what = f"orthogonal_procrustes, {samples} × {width:,}"
    return {"what": what, "seconds": ours, "value": result.value, "peer": "SVD of d × d", "peer_s": wide}


def page(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = ["| what | ours | floor | ratio | peer | its time | faster |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        floor = f"{r['floor']} {r['floor_s']:.2f} s | {r['seconds'] / r['floor_s']:.2f}" if "floor" in r else " | "
        peer = f"{r['peer']} | {r['peer_s']:.2f} s | {r['peer_s'] / r['seconds']:.1f}×" if "peer" in r else " | | "
        lines.append(f"| {r['what']} | {r['seconds']:.2f} s | {floor} | {peer} |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("part", nargs="?", default="pairs", choices=("pairs", "layers", "page"))
    options.add_argument("--images", type=int, default=10_000)
    options.add_argument("--peers", metavar="PYTHON", help="an interpreter with pytorch-cka")
    options.add_argument("--results", type=Path, default=RESULTS)
    chosen = options.parse_args()
    results = json.loads(chosen.results.read_text(encoding="utf-8")) if chosen.results.exists() else {}
    about = {"torch": torch.__version__.split("+")[0], "threads": torch.get_num_threads()}
    if chosen.part == "pairs":
        results["rows"] = [linear_cka(10_000, 4096, chosen.peers), relu_cka(1000, 64, 64), procrustes(300, 3000)]
    elif chosen.part == "layers":
        results["layers"] = layer_matrix(chosen.images, 250, chosen.peers)
    if chosen.part != "page":
        write_results(chosen.results, stamped(results | about, chosen.part))
    print(page([*results.get("rows", []), *results.get("layers", [])]))


if __name__ == "__main__":
    main()
