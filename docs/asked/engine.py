"""What was asked of symmetry, canonical forms, zoos and measures. Part of docs/benchmarks.py."""

from __future__ import annotations

import statistics
from typing import Any

from asked.row import Asked, Read, only, pick, spread
from coverage import MUST_COVER, verdict

# -- symmetry ----------------------------------------------------------------------------------------------------------


def _certified(results: Any) -> list[dict[str, Any]]:
    return [row for row in results["models"].values() if verdict(row) == "certified"]


def _least_coverage(results: Any) -> float:
    """Of the architectures that must be covered almost whole."""
    models = results["models"]
    return min(row["coverage"] for key, row in models.items() for start in MUST_COVER if key.startswith(start))


def _per_call(results: Any) -> list[float]:
    """Milliseconds per call of the chains, from short to long."""
    chains = [row for row in results["rows"] if row["name"].startswith("chain")]
    return [1e3 * row["discovery_s"] / row["calls"] for row in chains]


def _discovery(name: str) -> tuple[Read, Read]:
    """Seconds, and the floor: one bare walk over the calls."""

    def seconds(results: Any) -> float:
        return only(results["rows"], name=name)["discovery_s"]

    return seconds, lambda results: f"a bare walk over the calls {only(results['rows'], name=name)['floor_s']:.4f} s"


def _resnet50() -> Asked:
    seconds, floor = _discovery("torchvision/resnet50")
    return Asked("finding the symmetry of ResNet-50 after export", "≤ 1 s", "discovery", seconds, 1.0,
                 shown="{:.3f} s", beside=floor)  # fmt: skip


def _largest() -> Asked:
    seconds, floor = _discovery("timm/nasnetalarge")
    return Asked("finding the symmetry of the largest graph (nasnetalarge)", "≤ 10 s", "discovery", seconds, 10.0,
                 shown="{:.2f} s", beside=floor)  # fmt: skip


SYMMETRY = (
    Asked(
        "real models certified to 1e-9 with coverage ≥ 0.5", "≥ 90 %", "coverage",
        lambda r: 100 * len(_certified(r)) / len(r["models"]), 90.0, "least",
        shown=lambda r: f"{len(_certified(r))} of {len(r['models'])}, "
        f"largest error {max(row['error'] for row in _certified(r)):.0e}",
    ),
    Asked(
        "real models on which the engine is wrong", "none without saying so", "coverage",
        lambda r: sum(verdict(row) == "wrong, and said so" for row in r["models"].values()), 0, shown="{}",
    ),
    Asked(
        "coverage of ResNet, VGG, ConvNeXt, MobileNet, DenseNet, ViT, GPT-2, Llama", "≥ 0.95 each", "coverage",
        _least_coverage, 0.95, "least", shown="{:.4f} at the least",
    ),
    _resnet50(),
    _largest(),
    Asked(
        "discovery time per call, chains of 100 to 3,000 calls", "linear growth (last ≤ 1.5 × first)", "discovery",
        lambda r: _per_call(r)[-1] / _per_call(r)[0], 1.5,
        shown=lambda r: f"{', '.join(f'{ms:.3f}' for ms in _per_call(r))} ms",
    ),
    Asked(
        "random networks on which the engine is silently wrong", "none of 2,000", "fuzz",
        lambda r: r["silently_wrong"] + r["crashed"] + max(0, 2000 - r["cases"]), 0,
        shown=lambda r: f"{r['silently_wrong']} wrong, {r['crashed']} crashed, {r['right']} right of {r['cases']:,}",
        beside=lambda r: f"control, one parameter put back: seen in {r['control_changed']} of {r['control_tried']}",
    ),
    Asked(
        "certificates with model and element on a GPU", "≤ 1e-9", "gpu", lambda r: max(x["error"] for x in r["rows"]),
        1e-9, shown=lambda r: f"{max(x['error'] for x in pick(r['rows'], device='cuda')):.0e}, "
        f"{len(pick(r['rows'], device='cuda'))} models",
        beside=lambda r: f"CPU {max(x['error'] for x in pick(r['rows'], device='cpu')):.0e}",
    ),
)  # fmt: skip

# -- canonical forms ---------------------------------------------------------------------------------------------------


def _canonical(what: str, model: str) -> Asked:
    return Asked(
        f"canonical form of {what}", "≤ 3 × one numpy sort of its weights", "canonical",
        lambda r: only(r["times"], model=model)["ratio"], 3.0,
        shown=lambda r: f"{only(r['times'], model=model)['ratio']:.2f} × "
        f"({only(r['times'], model=model)['canonical_s']:.2f} s)",
        beside=lambda r: f"numpy.sort {only(r['times'], model=model)['numpy_sort_s']:.2f} s",
        why="numpy's sort is many times as fast on processors with AVX-512 as on those the bar was set on; ours, which "
        "reads and writes all weights several times to bring their scales to one form, is as fast as before.",
    )  # fmt: skip


def _planted(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many were found again with and without noise, and of how many that could be read."""
    able = [row for row in rows if "stopped" not in row]
    return sum(row["found"] and row["found_noisy"] for row in able), len(able)


CANONICAL = (
    _canonical("a 3 × 4096 perceptron, ReLU", "MLP 784-4096-4096-4096-10, ReLU"),
    _canonical("a 3 × 4096 perceptron, GELU", "MLP 784-4096-4096-4096-10, GELU"),
    _canonical("ResNet-50", "ResNet-50"),
    Asked(
        "1,000 fingerprints of Tiny-10's size", "< 30 s", "canonical", lambda r: r["fingerprints"]["seconds"], 30.0,
        shown=lambda r: f"{r['fingerprints']['seconds']:.1f} s; {r['fingerprints']['pairs_found']} of "
        f"{r['fingerprints']['pairs']} moved pairs share theirs",
    ),
    Asked(
        "planted element found, also with noise of 1e-6, on every certified model", "all", "canonical-planted",
        lambda r: _planted(r["planted"])[1] - _planted(r["planted"])[0], 0,
        shown=lambda r: "{} of {}".format(*_planted(r["planted"])),
    ),
    Asked(
        "planted element found, also with noise, on the ten Tiny-10 checkpoints", "all", "canonical",
        lambda r: len(r["tiny10"]) - _planted(r["tiny10"])[0], 0,
        shown=lambda r: "{} of {}".format(*_planted(r["tiny10"])),
    ),
)  # fmt: skip

# -- zoos --------------------------------------------------------------------------------------------------------------


def _at_once(row: dict[str, Any]) -> float:
    return row["same_trainer_s"] / row["at_once_s"]


def _digits(widths: list[int], batch: int, why: str = "") -> Asked:
    def row(results: Any) -> dict[str, Any]:
        return only(results["cpu"]["rows"], widths=widths, batch=batch)

    return Asked(
        f"8 digit perceptrons at once, {'-'.join(map(str, widths))}, batch {batch}", "≥ 3 × one after another",
        "zoo-cpu", lambda r: _at_once(row(r)), 3.0, "least", shown="{:.1f} ×",
        beside=lambda r: f"plain torch loop {row(r)['plain_loop_s']:.2f} s, ours {row(r)['at_once_s']:.2f} s", why=why,
    )  # fmt: skip


def _best_epoch(row: dict[str, Any]) -> str:
    best = [100 * x for x in row["best_accuracies"]]
    return f"best epoch on the test images {spread(best, 2)} %" if best else ""


def _accuracy(name: str, what: str, asked: str, bar: float | tuple[float, float], bench: str, why: str = "",
              options: tuple[str, ...] = ()) -> Asked:  # fmt: skip
    def row(results: Any) -> dict[str, Any]:
        return only(results["accuracy"], architecture=name, options=list(options))

    def shown(results: Any) -> str:
        found = row(results)
        accuracy = spread([100 * x for x in found["accuracies"]], 2)
        return f"{accuracy} % ({found['networks']} networks, {found['epochs']} of {found['recipe_epochs']} epochs)"

    return Asked(
        f"accuracy of {what} on CIFAR-10", asked, bench, lambda r: 100 * statistics.mean(row(r)["accuracies"]), bar,
        "within" if isinstance(bar, tuple) else "least", shown, lambda r: _best_epoch(row(r)), why,
    )  # fmt: skip


def _published(results: Any) -> list[float]:
    """Accuracies of the networks that were stitched, in percent."""
    rows = pick(results["rows"], part="tiny10")
    found = {row["pair"][i]: 100 * row[side] for row in rows for i, side in enumerate(("front", "back"))}
    return sorted(found.values())


ZOO = (
    Asked(
        "Myrtle CNN, 32 networks at once, batch 32, per network and epoch", "≤ 0.35 s on one H200", "zoo-speed",
        lambda r: only(r["speed"], architecture="myrtle", networks=32, batch=32)["seconds"], 0.35,
        shown=lambda r: f"{r['speed'][0]['seconds']:.3f} s, {r['speed'][0]['tflops']:.0f} TFLOP/s "
        f"({r['speed'][0]['of_peak']:.0%} of a large product)",
        beside=lambda r: f"arithmetic alone {r['speed'][0]['tflop_per_epoch'] / r['speed'][0]['peak_tflops']:.3f} s; "
        f"one network in a plain loop {r['speed'][0]['plain_s']:.2f} s",
    ),
    _digits([64, 128, 10], 32),
    _digits([64, 32, 10], 32),
    _digits([64, 512, 10], 32),
    _digits([64, 512, 10], 128, "Arithmetic, not overhead, is the limit there."),
    _accuracy("myrtle", "Myrtle", "91.3 ± 0.2 %", (91.1, 91.5), "zoo-myrtle"),
    _accuracy("myrtle", "Myrtle without BatchNorm", "≈ 87 %", 87.0, "zoo-myrtle-no-norm", options=("norm=False",)),
    _accuracy("resnet20", "ResNet-20", "89.9 ± 0.2 %", (89.7, 90.1), "zoo-resnet20",
              "Ours is the last epoch; the paper keeps the best epoch on the test images."),
    _accuracy("resnet18", "ResNet-18", "92.9 ± 0.2 %", (92.7, 93.1), "zoo-resnet18",
              "The run was stopped before the last halving of the rate."),
    _accuracy("vgg16_bn", "VGG-16 by its paper's recipe", "93.5 %", 93.5, "zoo-vgg16",
              "Not told apart yet: bfloat16 features, initialisation. With one short cycle of the rate, as under "
              "folding, the same network reaches it."),
    Asked("accuracy of Tiny-10 by its paper's recipe", "86.2 to 87.1 %", "zoo-tiny10", None, (86.2, 87.1), "within",
          why="The 300 epochs of its recipe were never run to the end; the published networks are used instead."),
    Asked(
        "accuracy of the published Tiny-10 networks, read and run here", "86.2 to 87.1 %", "stitch-tiny10",
        lambda r: statistics.mean(_published(r)), (86.2, 87.1), "within",
        shown=lambda r: f"{min(_published(r)):.1f} to {max(_published(r)):.1f} % ({len(_published(r))} networks)",
    ),
)  # fmt: skip

# -- measures ----------------------------------------------------------------------------------------------------------


def _over(results: Any, what: str, part: str = "rows") -> dict[str, Any]:
    return pick([row | {"found": row["what"].startswith(what)} for row in results[part]], found=True)[0]


def _faster(what: str, asked: str, begin: str, bar: float, bench: str = "measure", part: str = "rows",
            why: str = "") -> Asked:  # fmt: skip
    def ratio(results: Any) -> float:
        return _over(results, begin, part)["peer_s"] / _over(results, begin, part)["seconds"]

    def beside(results: Any) -> str:
        row = _over(results, begin, part)
        floor = f"; {row['floor']} {row['floor_s']:.1f} s" if "floor" in row else ""
        return f"{row['peer']} {row['peer_s']:.2f} s{floor}"

    return Asked(what, asked, bench, ratio, bar, "least", beside=beside, why=why,
                 shown=lambda r: f"{ratio(r):.1f} × ({_over(r, begin, part)['seconds']:.2f} s)")  # fmt: skip


def _fused(channels: int, side: int, bar: float) -> Asked:
    return Asked(
        f"fused kernel of G_ReLU-CKA, N = 10,000, {channels} × {side}×{side}, TF32", f"≥ {bar:g} TFLOP/s on one H200",
        "measure-gpu", lambda r: only(r["rows"], channels=channels)["tf32"]["tflops_done"], bar, "least",
        shown="{:.0f} TFLOP/s carried out",
        beside=lambda r: f"torch's own products {only(r['rows'], channels=channels)['torch_tf32']['tflops_whole']:.0f}"
        " TFLOP/s",
    )  # fmt: skip


MEASURES = (
    Asked(
        "debiased linear CKA, 10,000 × 4,096", "≤ 1.15 × its three products", "measure",
        lambda r: _over(r, "linear_cka")["seconds"] / _over(r, "linear_cka")["floor_s"], 1.15, shown="{:.2f} ×",
        beside=lambda r: f"three products {_over(r, 'linear_cka')['floor_s']:.2f} s",
    ),
    _faster("debiased linear CKA beside pytorch-cka", "≥ 2 × faster", "linear_cka", 2.0),
    _faster("18 × 18 layers of ResNet-18, 10,000 images, pooled", "faster than pytorch-cka, exact",
            "18 × 18 layers, 10,000 images, pool", 1.0, "measure-layers", "layers"),
    _faster("18 × 18 layers of ResNet-18, 10,000 images, every position a sample", "faster than pytorch-cka, exact",
            "18 × 18 layers, 10,000 images, channels", 1.0, "measure-layers", "layers",
            "Every position of every image counts, many times the samples of the peer, which flattens and averages "
            "over batches."),
    _faster("G_ReLU-CKA, 1,000 × 64 × 8×8", "≥ 15 × the published loop", "relu_cka", 15.0,
            why="Both times scatter by a fifth from run to run on two cores, and the loop is timed on a few of its "
            "rows; runs on a quiet machine have reached it and missed it."),
    _faster("Procrustes, 300 × 3,000, by the N × N form", "≥ 20 × the d × d form", "orthogonal_procrustes", 20.0,
            why="The singular values of d × d take a quarter of the time on some machines that they take on others."),
    _fused(64, 32, 250.0),
    _fused(512, 8, 200.0),
    Asked(
        "error of the final value in TF32", "≤ 2e-4 of float64", "measure-gpu",
        lambda r: max(row["tf32"]["error"] for row in pick(r["rows"])), 2e-4, shown="{:.0e}",
    ),
)  # fmt: skip

ROOMS = {"Symmetry": SYMMETRY, "Canonical forms": CANONICAL, "Zoos": ZOO, "Measures": MEASURES}
