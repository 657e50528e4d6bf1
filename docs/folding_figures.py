"""Draw the figures of docs/folding.md again: from perceptrons trained on MNIST in minutes, and from what was measured.

Needs `plot`, and MNIST. The picture of VGG-16 and ResNet-18 is drawn from bench/results/fold.json.

python docs/folding_figures.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

mpl.use("svg")
import matplotlib.pyplot as plt
from figures import IMAGES, STEADY, save_figure

import intertwine as it
from intertwine.fold.clustering import fold_kmeans
from intertwine.fold.complexity import complexity_curves, distance_maps
from intertwine.fold.prune import prune
from intertwine.fold.result import Fold
from intertwine.fold.swaps import swap_barrier

HIDDEN = 5
WIDTHS, DECAYS = (64, 128, 256), (5e-4, 5e-3, 1e-2)
BETAS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
#: Shares of the largest distance, which is what the paper's β is.
OF_LARGEST = (1e-3, 0.003, 0.01, 0.02, 0.05, 0.07, 0.1, 0.2)
#: Width and weight decay of the network that most pictures show, and the beta they show it under.
SHOWN, BETA = (128, 1e-2), 0.1
#: Of parameters, or of the features of every layer where a method takes those.
SHARES = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05)
#: Training images that absorbing looks at where it looks at any.
SEEN = 1000
RESULTS = Path(__file__).parents[1] / "bench" / "results" / "fold.json"
#: Method of bench/fold.py → its name here, colour and line.
MEASURED = {
    "fold-to-seen": ("fold_to, 2,000 images seen", "#1a365d", "o-"),
    "fold-to": ("fold_to, without data", "#2b6cb0", "o-"),
    "fold-to-merge": ('fold_to, how="merge"', "#63b3ed", "o-"),
    "fold": ("fold", "#2f855a", "s-"),
    "fold-paper-code": ("fold as the paper's code", "#b7791f", "s-"),
    "fold-printed": ("fold as printed", "#ecc94b", "s-"),
    "prune-gamma-across": ("prune, BatchNorm γ", "#c2410c", "^--"),
    "prune-l1": ("prune, L1", "#a0aec0", "^--"),
}
#: Where the axis of right answers begins, in percent.
LEAST = 60
#: What the paper prints for VGG-16: parameters left and accuracy, in percent.
PRINTED = (23.03, 91.78)


def trained(width: int, decay: float, data: Any, epochs: int = 10) -> torch.nn.Module:
    """A perceptron of five hidden layers."""
    widths = (data.images[0].numel(), *[width] * HIDDEN, 10)
    with tempfile.TemporaryDirectory() as place:
        settings = {"options": {"widths": widths}, "epochs": epochs, "weight_decay": decay, "score_every": epochs}
        return it.zoo.train("mlp", seeds=[0], data=data, out=place, **settings)[0].eval()


def draw(folder: Path, data: Any, epochs: int = 10) -> None:
    """All pictures, from five networks."""
    kinds = {*((width, SHOWN[1]) for width in WIDTHS), *((SHOWN[0], decay) for decay in DECAYS)}
    models = {kind: trained(*kind, data, epochs) for kind in sorted(kinds)}
    test, x = data.batches("test"), torch.zeros(1, *data.shape)
    with mpl.rc_context(STEADY):
        compared = {f"Weight decay {decay:g}": models[SHOWN[0], decay] for decay in (DECAYS[0], DECAYS[-1])}
        save(folder, "methods", methods(compared, data, x))
        save(folder, "accuracy", accuracies(models, test, x))
        sizes = {f"width {width}": it.complexity(models[width, SHOWN[1]], x, beta=BETA) for width in WIDTHS}
        save(folder, "complexity", complexity_curves(sizes))
        before = distance_maps(models[SHOWN], x)
        folded = it.fold(models[SHOWN], x, beta=BETA)
        save(folder, "heatmaps", before.plot(before.merged(folded.groups)))
        save(folder, "swaps", swap_barrier(folded, test, points=11).plot())


def methods(models: Mapping[str, torch.nn.Module], data: Any, x: torch.Tensor) -> Any:
    """Accuracy against the share of parameters left, a line per method; nothing is trained and no label is seen."""
    seen, test = list(islice(data.batches("train", SEEN // 2), 2)), data.batches("test")
    lines: dict[str, tuple[str, str, Callable[..., Fold], str, tuple[float, ...]]] = {
        f"fold_to, {SEEN:,} images seen": ("#1a365d", "o-", partial(it.fold_to, data=seen), "parameters", SHARES),
        "fold_to, without data": ("#2b6cb0", "o-", it.fold_to, "parameters", SHARES),
        'fold_to, how="merge"': ("#63b3ed", "o-", partial(it.fold_to, how="merge"), "parameters", SHARES),
        "fold": ("#2f855a", "s-", it.fold, "beta", BETAS),
        'fold, maximum="fixed"': ("#b7791f", "s-", partial(it.fold, maximum="fixed"), "beta", OF_LARGEST),
        "fold_kmeans": ("#9ae6b4", "s-", fold_kmeans, "widths", SHARES),
        "prune, L1": ("#c2410c", "^--", prune, "widths", SHARES),
        "prune, random": ("#a0aec0", "^--", partial(prune, score="random"), "widths", SHARES),
    }
    figure, panels = plt.subplots(1, len(models), figsize=(9.6, 4.4), sharey=True)
    for axes, (title, model) in zip(panels, models.items(), strict=True):
        whole = (100.0, 100 * right_answers(model, test))
        for label, (colour, style, smaller, knob, values) in lines.items():
            points = sorted([whole, *(_point(smaller(model, x, **{knob: value}), test) for value in values)])
            # rings, so that the methods under it are seen, and it above them
            ring: dict[str, Any] = {"markersize": 7, "markerfacecolor": "none", "zorder": 4} if label == "fold" else {}
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, **({"markersize": 3.5} | ring))
        axes.set(xlabel="parameters left, %", xlim=(0, 102), ylim=(0, 100))
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("right answers, %")
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, ncols=4, loc="lower center", fontsize=9)
    plt.close(figure)
    return figure


def measured(rows: list[dict[str, Any]]) -> Any:
    """Accuracy against parameters of the networks that bench/fold.py measured, a panel each."""
    kinds = list(dict.fromkeys((row["architecture"], row["weight_decay"]) for row in rows))
    figure, panels = plt.subplots(1, len(kinds), figsize=(9.6, 4.2), sharey=True, squeeze=False)
    low = {m for m in MEASURED if all(100 * r["accuracy"] < LEAST for r in rows if r["method"] == m)}
    for axes, kind in zip(panels[0], kinds, strict=True):
        of = [row for row in rows if (row["architecture"], row["weight_decay"]) == kind and "failed" not in row]
        for method, (label, colour, style) in MEASURED.items():
            points = sorted((100 * r["parameters_share"], 100 * r["accuracy"]) for r in of if r["method"] == method)
            across, up = zip(*points, strict=True) if points else ((), ())
            name = f"{label}: below {LEAST} % everywhere" if method in low else label
            axes.plot(across, up, style, markersize=3, color=colour, label=name)
        if kind[0].startswith("vgg16"):
            axes.plot(*PRINTED, "*", color="black", markersize=11, label="printed for VGG-16")
        whole = 100 * next(r["accuracy"] for r in of if r["method"] == "none")
        axes.axhline(whole, color="0.6", linewidth=0.8, label="the whole network")
        axes.set(xlabel="parameters left, %", xlim=(0, 100), ylim=(LEAST, 96))
        axes.set_title(f"{kind[0]}, weight decay {kind[1]:g}", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("right answers, %")
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    figure.legend(*panels[0][0].get_legend_handles_labels(), frameon=False, ncols=3, loc="lower center", fontsize=9)
    plt.close(figure)
    return figure


def _point(folded: Fold, test: Any) -> tuple[float, float]:
    return 100 * folded.parameters.share, 100 * right_answers(folded.model, test)


def accuracies(models: Mapping[tuple[int, float], torch.nn.Module], test: Any, x: torch.Tensor) -> Any:
    """Accuracy against the share of parameters left, by width and by weight decay, far beyond what is free."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), sharey=True)
    panels = (
        (left, {f"width {w}": (w, SHOWN[1]) for w in WIDTHS}, f"Weight decay {SHOWN[1]:g}"),
        (right, {f"weight decay {d:g}": (SHOWN[0], d) for d in DECAYS}, f"Width {SHOWN[0]}"),
    )
    for axes, lines, title in panels:
        for i, (label, kind) in enumerate(lines.items()):
            points = [(100.0, 100 * right_answers(models[kind], test))]
            points += [_point(it.fold(models[kind], x, beta=beta, maximum="fixed"), test) for beta in OF_LARGEST]
            colour = plt.get_cmap("viridis")(0.85 - 0.8 * i / (len(lines) - 1))
            axes.plot(*zip(*points, strict=True), "o-", markersize=4, color=colour, label=label)
        axes.set(xlabel="parameters left, %", xlim=(0, 102), ylim=(0, 100))
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
    left.set_ylabel("right answers, %")
    figure.tight_layout()
    plt.close(figure)
    return figure


def right_answers(model: torch.nn.Module, test: Any) -> float:
    """The share of test images that a network has right."""
    with torch.no_grad():
        found = [(model(images).argmax(1) == labels).double() for images, labels in test]
    return float(torch.cat(found).mean())


def save(folder: Path, name: str, figure: Any) -> None:
    save_figure(figure, folder / f"folding_{name}.svg")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    with mpl.rc_context(STEADY):
        save(IMAGES, "measured", measured(json.loads(RESULTS.read_text(encoding="utf-8"))["curves"]))
    draw(IMAGES, it.zoo.data("mnist").subset(10_000, 2_000))
