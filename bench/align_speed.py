"""Time of weight matching, against rebasin from PyPI and the usual coordinate-descent loop.

All three align the same two networks in one run and are compared by the sum of squared distances. rebasin runs as a
process in its own environment (`bench/align_peer.py`), timed from the loaded models to the end.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import intertwine as it
from intertwine.align.state import MatchingState, counted_weights
from intertwine.lab.zoo.networks.registry import architecture, build
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.geometry import WireAxis
from intertwine.symmetry.symmetry import Symmetry

PEER = Path(__file__).with_name("align_peer.py")
Axes = dict[int, list[tuple[str, int]]]  # wire → the parameters and axes that its permutation acts on


def networks(name: str) -> tuple[nn.Module, nn.Module, Any]:
    """Two untrained networks of different seeds and an example input."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(build(name).eval())
    return models[0], models[1], architecture(name).example()


def distance(symmetry: Symmetry, a: nn.Module, b: nn.Module) -> float:
    """The objective of `align` between two networks."""
    weights = [counted_weights(symmetry, m, weights_of(symmetry, m), buffers=False) for m in (a, b)]
    return MatchingState(symmetry, weights[0], weights[1], range(len(symmetry.wires))).objective


# -- the usual loop ----------------------------------------------------------------------------------------------------


def axes_of(symmetry: Symmetry, names: list[str]) -> Axes:
    """The axes of every permutation, as in hand-written lists; only for networks whose axes are whole wires."""
    found: Axes = {}
    for name in names:
        for axis, tree in enumerate(symmetry.layouts[name].axes):
            if isinstance(tree, WireAxis):
                found.setdefault(tree.wire, []).append((name, axis))
    return found


def plain_loop(
    axes: Axes, a: dict[str, np.ndarray], b: dict[str, np.ndarray], seed: int = 0, sweeps: int = 100
) -> dict[int, np.ndarray]:
    """The usual weight matching: permute b for each wire and solve one assignment, until no wire improves."""
    draw = np.random.default_rng(seed)
    order = {p: np.arange(b[places[0][0]].shape[places[0][1]]) for p, places in axes.items()}

    def permuted(name: str, without: int) -> np.ndarray:
        x = b[name]
        for p, places in axes.items():
            for place, axis in places:
                if place == name and axis != without:
                    x = np.take(x, order[p], axis)
        return x

    for _ in range(sweeps):
        gained = False
        for p in draw.permutation(list(axes)):
            fit = np.zeros((len(order[p]), len(order[p])))
            for name, axis in axes[p]:
                left = np.moveaxis(a[name], axis, 0).reshape(len(order[p]), -1)
                right = np.moveaxis(permuted(name, axis), axis, 0).reshape(len(order[p]), -1)
                fit += left @ right.T
            best = linear_sum_assignment(fit, maximize=True)[1]
            rows = np.arange(len(best))
            gained |= bool(fit[rows, best].sum() > fit[rows, order[p]].sum() + 1e-6)
            order[p] = best
        if not gained:
            break
    return order


def measure_plain(symmetry: Symmetry, a: nn.Module, b: nn.Module) -> tuple[float, float]:
    """(seconds, objective) of the usual loop."""
    names = list(counted_weights(symmetry, a, weights_of(symmetry, a), buffers=False))
    axes = axes_of(symmetry, names)
    left, right = ({n: t.numpy() for n, t in weights_of(symmetry, m).items() if n in names} for m in (a, b))
    start = time.perf_counter()
    order = plain_loop(axes, left, right)
    seconds = time.perf_counter() - start
    total = 0.0
    for name in names:
        x: Tensor = torch.from_numpy(right[name])
        for p, places in axes.items():
            for place, axis in places:
                if place == name:
                    x = x.index_select(axis, torch.from_numpy(order[p]))
        total += float((torch.from_numpy(left[name]) - x).double().square().sum())
    return seconds, total


# -- rebasin -----------------------------------------------------------------------------------------------------------


def measure_peer(python: str, name: str, symmetry: Symmetry, a: nn.Module, b: nn.Module) -> tuple[float, float]:
    """(seconds, objective) of rebasin in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{x}.safetensors" for x in ("a", "b", "moved")]
        for model, file in zip((a, b), files, strict=False):
            save_file({n: t.contiguous() for n, t in model.state_dict().items()}, str(file))
        done = subprocess.run([python, str(PEER), name, *map(str, files)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"rebasin failed under {python}:\n{done.stderr[-2000:]}")
        seconds = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
        moved = build(name).eval()
        moved.load_state_dict(load_file(str(files[2])))
    return seconds, distance(symmetry, a, moved)


def measure_speed(name: str, peers: str | None, starts: tuple[int, ...] = (1, 3)) -> list[dict[str, Any]]:
    """One row per method."""
    a, b, example = networks(name)
    symmetry = it.symmetry(a, example)
    before = distance(symmetry, a, b)
    rows = []
    for count in starts:
        start = time.perf_counter()
        found = it.align(a, b, example, starts=count, symmetry=symmetry)
        rows.append(
            {"who": f"intertwine, starts={count}", "seconds": time.perf_counter() - start, "after": found.after}
        )
    start = time.perf_counter()
    found = it.align(a, b, example)
    rows.append({"who": "intertwine, as called", "seconds": time.perf_counter() - start, "after": found.after})
    seconds, after = measure_plain(symmetry, a, b)
    rows.append({"who": "the usual loop", "seconds": seconds, "after": after})
    if peers:
        seconds, after = measure_peer(peers, name, symmetry, a, b)
        rows.append({"who": "rebasin", "seconds": seconds, "after": after})
    return [{"architecture": name, "before": before} | row for row in rows]
