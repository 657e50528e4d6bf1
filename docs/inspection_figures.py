"""Draw the figures of docs/inspection.md again: the trend from the kept rows of figures 3 and 19, the others
from one network for drawn pictures and one for digits, trained here in some minutes. Needs `plot` and `data`.

python docs/inspection_figures.py                 # trains into a temporary folder
python docs/inspection_figures.py --zoo DIR       # keeps the network, and takes it from there the next time
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import scipy.linalg
import torch
from torch import nn

mpl.use("svg")
from figures import IMAGES, STEADY, save_figure
from inspection_tables import RESULTS, read_rows

import intertwine as it
from intertwine.figures import new_figure, wrapped_title
from intertwine.inspect.dissection import Dissection
from intertwine.inspect.images import draw_images, scaled_image, scaled_map
from intertwine.inspect.rotation import haar, planes
from intertwine.inspect.rotation_penalty import rotation_penalty
from intertwine.inspect.rotation_scan import rotation_scan
from intertwine.inspect.top_images import draw_units, top_images
from intertwine.lab.papers.experiments import read_result
from intertwine.lab.papers.rotations import WITH, WITHOUT
from intertwine.lab.zoo.datasets.concepts import ConceptImages, concept_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARM, COOL, GREY = "#c05621", "#2b6cb0", "0.55"
INSIDE = "layer3.2.relu1"


def save(figure: Figure, folder: Path, name: str) -> None:
    save_figure(figure, folder / f"inspection_{name}.svg")


# -- rotations ---------------------------------------------------------------------------------------------------------


def published_power(q: np.ndarray, alpha: float) -> np.ndarray:
    """The published code's Q^α: angles are the arccos of every second entry on the diagonal of a Schur form."""
    form, basis = scipy.linalg.schur(q, output="real")
    blocks = []
    for angle in alpha * np.arccos(np.clip(np.diag(form)[::2], -1, 1)):
        blocks.append([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return basis @ scipy.linalg.block_diag(*blocks) @ basis.T


def rotation(folder: Path) -> None:
    """Q^α as matrices, and how far it is from Q: ours, and read off a Schur form as published."""
    figure = new_figure(8.4, 2.7)
    grid: Any = figure.subplots(1, 5, width_ratios=[1, 1, 1, 1, 1.9])
    for axes, alpha in zip(grid, (0, 0.25, 0.5, 1), strict=False):
        axes.imshow(it.rotation(16, alpha, seed=0).numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set_title(f"$Q^{{{alpha:g}}}$", fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    turn, alphas = planes(haar(64, 0)), np.linspace(0, 1, 21)
    q, length = turn.matrix.numpy(), float(turn.matrix.norm())
    away = {
        "planes and signed angles": [np.linalg.norm(turn.power(float(a)).numpy() - q) / length for a in alphas],
        "published reading": [np.linalg.norm(published_power(q, float(a)) - q) / length for a in alphas],
    }
    for (name, values), colour in zip(away.items(), (COOL, WARM), strict=True):
        grid[4].plot(alphas, values, label=name, color=colour)
    grid[4].set(xlabel="α", ylim=(0, None))
    grid[4].set_title("distance of $Q^α$ from Q, n = 64", fontsize=9)
    grid[4].legend(fontsize=7, frameon=False)
    grid[4].spines[["top", "right"]].set_visible(False)
    save(figure, folder, "rotation")


# -- dissection --------------------------------------------------------------------------------------------------------


def against_chance(found: Mapping[str, Dissection], folder: Path) -> None:
    """Best overlaps of units, largest first, with the right masks and with those of other images."""
    figure = new_figure(8.4, 2.9)
    grid: Any = figure.subplots(1, len(found), sharey=True)
    for axes, (name, one) in zip(grid, found.items(), strict=True):
        assert one.null is not None
        best = np.sort([unit.iou for unit in one.units])[::-1]
        chance = np.sort(one.null.values.flatten().numpy())[::-1]
        places = np.arange(len(best))
        axes.bar(places, best, 0.8, color=[COOL if value > one.level else "#a0c4e8" for value in best])
        axes.plot(np.linspace(0, len(best) - 1, len(chance)), chance, color=WARM, linewidth=1.5, label="by chance")
        axes.axhline(one.level, color=GREY, linestyle="--", linewidth=1)
        axes.text(len(best) - 0.5, one.level, f"{one.level:g}", ha="right", va="bottom", fontsize=8, color="0.35")
        axes.set_title(f"{name}: {len(one.interpretable)} of {len(best)} above", fontsize=9)
        axes.set_xlabel("units, best first", fontsize=8)
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("overlap with the best concept", fontsize=8)
    save(figure, folder, "chance")


def trend(found: list[dict[str, Any]], folder: Path) -> None:
    """Fractions against α behind the sum and inside the block: networks one by one (over rotations), and their mean."""
    figure = new_figure(8.4, 3.2)
    grid: Any = figure.subplots(1, 2, sharey=True)
    for axes, (place, title) in zip(
        grid, (("layer3", "behind the residual sum"), (INSIDE, "inside the block")), strict=True
    ):
        for kind, colour in zip((WITH, WITHOUT), (COOL, WARM), strict=True):
            rows = [row for row in found if (row["at"], row["kind"]) == (place, kind)]
            for network in sorted({row["network"] for row in rows}):
                _line(axes, [row for row in rows if row["network"] == network], color=colour, alpha=0.35, linewidth=0.9)
            _line(axes, rows, color=colour, linewidth=2.2, marker="o", markersize=4, label=kind)
        axes.set(ylim=(0, 1), xlabel="α, the power of the rotation")
        axes.set_title(f"{title}, {place}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("fraction of interpretable units")
    grid[0].legend(fontsize=8, frameon=False, loc="lower left")
    save(figure, folder, "trend")


def _line(axes: Any, rows: list[dict[str, Any]], **style: Any) -> None:
    alphas = sorted({row["alpha"] for row in rows})
    axes.plot(alphas, [mean(row["fraction"] for row in rows if row["alpha"] == a) for a in alphas], **style)


# -- what a feature sees -----------------------------------------------------------------------------------------------


def guided(model: nn.Module, pictures: ConceptImages, folder: Path) -> None:
    """Images a feature answers to most: guided maps of it, of the group that folding puts it in, of as many others."""
    x = pictures.inputs()
    groups = _merged(model, x[:1])
    group = max(groups, key=len)
    unit = group[0]
    best = top_images(model, INSIDE, x, unit, count=8).indices[0]
    width = sum(len(one) for one in groups)
    others = [i for i in range(width) if i not in group]
    others = others[:: max(1, len(others) // len(group))][: len(group)]  # spread over all
    alone, together, control = (
        it.guided_backprop(model, INSIDE, some, x[best]).maps for some in ([unit], group, others)
    )
    rows = [[scaled_image(image) for image in x[best]]]
    rows += [[scaled_map(image) for image in maps] for maps in (alone, together, control)]
    near = [
        float(nn.functional.cosine_similarity(alone.flatten(1), maps.flatten(1)).mean()) for maps in (together, control)
    ]
    print(f"cosine of guided maps: the group {near[0]:.3f}, others {near[1]:.3f}")
    names = ["image", f"feature {unit}", f"its group\n(cosine {near[0]:.3f})", f"{len(others)} others\n({near[1]:.3f})"]
    save(draw_images(rows, names, title=f"{INSIDE}, features {', '.join(map(str, group))}"), folder, "guided")


def _merged(model: nn.Module, example: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """The first groups, one of them of three or more features, that folding makes as its threshold rises."""
    for beta in np.arange(0.02, 1, 0.01):
        groups = it.fold(model, example, beta={"layer3.2.conv1": float(beta)}).groups["layer3.2.conv1"]
        if max(map(len, groups)) >= 3:
            return groups
    raise SystemExit("No three features of the layer are merged at any threshold.")


def digits_network(train: list[tuple[torch.Tensor, torch.Tensor]]) -> nn.Sequential:
    """Two convolutions for digits, the second so narrow that a rotation before its ReLU loses something for good."""
    torch.manual_seed(0)
    front = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*front, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(20):
        for inputs, targets in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model.eval()


def penalty(folder: Path) -> None:
    """What transforms of the layers of a small network cost once the layers behind are trained again."""
    data = it.zoo.data("digits")
    train, test = (list(data.batches(split, 100)) for split in ("train", "test"))
    found = rotation_penalty(digits_network(train), ["0", "3"], train, test, seeds=range(10), epochs=30, rate=1e-2)
    print(found)
    figure = found.plot()
    figure.axes[0].set_xticklabels(["first convolution", "second convolution"])
    wrapped_title(figure, "What a transform costs once the layers behind it are trained again")
    save(figure, folder, "penalty")


def draw(folder: Path, zoo: Path) -> None:
    """All figures, from the rows of the experiment and a network trained as its first."""
    plan = read_result(RESULTS[0]).plan
    networks, wanted = plan["networks"], plan["settings"]
    learn, seen = (
        concept_images(wanted[many], wanted[seed], wanted["size"], wanted["task"])
        for many, seed in (("pictures", "seed"), ("seen", "seen_seed"))
    )
    trained = it.zoo.train(
        networks["architecture"], seeds=[0], data=learn.dataset(wanted["test"]), out=zoo, recipe=networks["recipe"],
        device="cpu", options={**networks["options"], "residual_relu": True}, **networks["changes"],
    )  # fmt: skip
    model, x = trained[0].eval(), seen.inputs()
    with mpl.rc_context(STEADY):
        rotation(folder)
        trend(read_rows(), folder)
        own, turned = rotation_scan(model, "layer3", x, seen.concepts, [0, 1]).dissections.values()
        against_chance({"own basis": own, "rotated, α = 1": turned}, folder)
        best = [unit.unit for unit in own.interpretable]
        save(draw_units(model, x, own, units=best[:: max(1, len(best) // 5)][:5]), folder, "units")
        guided(model, seen, folder)
        penalty(folder)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--zoo", type=Path, help="where the network is kept")
    chosen = options.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        draw(IMAGES, chosen.zoo or Path(place))


if __name__ == "__main__":
    main()
