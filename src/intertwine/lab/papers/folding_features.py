"""Kind "folding": distances of features, complexity per layer, and saliency maps of groups (Chen et al. 2024)."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor, nn

from intertwine.data.features import features
from intertwine.errors import InputError, unknown_name
from intertwine.figures import MAX_COLUMNS, legend_below, new_figure, panels_in_rows
from intertwine.fold.complexity import complexity, dead_features, distance_maps
from intertwine.fold.fold import fold
from intertwine.fold.prepare import prepare
from intertwine.inspect.guided import guided_backprop
from intertwine.inspect.images import draw_images, scaled_image, scaled_map
from intertwine.lab.papers.folding_curves import RULES, FoldingSettings, answers, network_of
from intertwine.lab.papers.plan import Numbers, Row, gathered, grouped
from intertwine.lab.papers.work import Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# -- Pictures inside rows: bytes from 0 to 255 as text, so that a figure needs the result file alone --


def pack(values: Tensor | NDArray[Any]) -> dict[str, Any]:
    """An array of numbers from 0 to 1, rounded to 256 levels.

    >>> unpack(pack(np.array([[0.0, 1.0], [0.5, 2.0]]))).tolist()
    [[0.0, 1.0], [0.50..., 1.0]]
    """
    table = np.asarray(torch.as_tensor(values).detach().cpu(), np.float64)
    levels = np.round(255 * table.clip(0, 1)).astype(np.uint8)
    return {"shape": list(levels.shape), "bytes": b64encode(levels.tobytes()).decode()}


def unpack(packed: dict[str, Any]) -> NDArray[np.float64]:
    """The array again."""
    return np.frombuffer(b64decode(packed["bytes"]), np.uint8).reshape(packed["shape"]) / 255


def coarse(table: NDArray[np.float64], most: int = 48) -> NDArray[np.float64]:
    """A square table with at most so many rows: means of blocks where it has more.

    >>> coarse(np.arange(16.0).reshape(4, 4), 2).tolist()
    [[2.5, 4.5], [10.5, 12.5]]
    """
    if len(table) <= most:
        return table
    edges = np.linspace(0, len(table), most + 1).astype(int)[:-1]
    sizes = np.diff([*edges, len(table)])
    return np.add.reduceat(np.add.reduceat(table, edges, 0), edges, 1) / np.outer(sizes, sizes)


# -- Distances between the features of every layer (figures 1a and 6) --


#: Name → options of `distance_maps`: Eq. 6 as printed and in the paper's code; corrected: rows alone, with BatchNorm.
DISTANCES: Mapping[str, Mapping[str, Any]] = {
    "as printed": {"terms": "in+out", "bias": False, "norm": "sum"},
    "corrected": {},
}
#: A feature is near-dead if its rows or columns are shorter than this share of the longest. Such features are counted,
#: since the paper's smallest distance of 2e-15 may be that of two of them.
NEAR_DEAD = (0.001, 0.01, 0.1)
SHOWN = 12


def distance_rows(work: Work, model: nn.Module, settings: FoldingSettings) -> Iterator[Row]:
    """One row per rule and layer."""
    example = torch.zeros(1, *work.data.shape)
    wires = prepare(model.cpu(), ((example,), {})).wires
    near = {w.name: {f"dead_{x:g}": float(dead_features(w, x).double().mean()) for x in NEAR_DEAD} for w in wires}
    for rule, options in DISTANCES.items():
        maps = distance_maps(model, example, **options).wires
        for number, wire in enumerate(maps):
            table = wire.table[np.ix_(wire.order, wire.order)] / (wire.largest or 1.0)
            yield {
                "rule": rule, "layer": wire.name, "number": number + 1, "last": number + 1 == len(maps),
                "features": len(table), "smallest": wire.smallest / (wire.largest or 1.0), "below": wire.below(0.1),
                "picture": pack(coarse(table)),
            } | near[wire.name]  # fmt: skip


def shown_layers(rows: Sequence[Row], form: str) -> list[Row]:
    """The last layer (figure 1a) or the first twelve (figure 6)."""
    return [row for row in rows if (row["last"] if form == "last" else row["number"] <= SHOWN)]


def distance_numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series "network: rule" → "smallest distance" …; with several layers, each has its own labels."""

    def points() -> Iterator[tuple[str, str, list[float]]]:
        for row in rows:
            layer = "" if plan["settings"]["form"] == "last" else f", layer {row['number']}"
            values = {"smallest distance": row["smallest"], "pairs below 0.1, %": 100 * row["below"]}
            values |= {f"features shorter than {x:g} of the longest, %": 100 * row[f"dead_{x:g}"] for x in NEAR_DEAD}
            yield from ((f"{network_of(row)}: {row['rule']}", label + layer, [v]) for label, v in values.items())

    return gathered(points())


def draw_distances(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """A heat map per layer of the first network, one block of rows per rule."""
    own = [row for row in rows if (row["network"], row["pair"]) == (rows[0]["network"], rows[0]["pair"])]
    rules = list(dict.fromkeys(row["rule"] for row in own))
    most = max(sum(row["rule"] == rule for row in own) for rule in rules)
    columns = min(MAX_COLUMNS, most)
    lines = ceil(most / columns)
    figure = new_figure(1.85 * columns + 1, 2 * lines * len(rules) + 0.4)
    grid = figure.subplots(lines * len(rules), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for i, rule in enumerate(rules):
        for k, row in enumerate([row for row in own if row["rule"] == rule]):
            axes = grid[i * lines + k // columns, k % columns]
            axes.imshow(unpack(row["picture"]), vmin=0, vmax=1, cmap="viridis", interpolation="none")
            axes.set_title(f"{row['layer']}, {rule}", fontsize=8)
    figure.colorbar(grid[0, 0].images[0], ax=grid.ravel().tolist(), shrink=0.8, label="distance / the largest")
    return figure


# -- Complexity: the number of different features of every layer, for several β --


#: The least number of networks of one kind for a correlation.
LEAST_NETWORKS = 3


def complexity_rows(work: Work, model: nn.Module, settings: FoldingSettings) -> Iterator[Row]:
    """One row per rule, β and layer; each has the accuracy of the network."""
    accuracy = 100 * float(answers(model.to(work.device), work.placed).mean())
    example = torch.zeros(1, *work.data.shape)
    for rule in settings.rules:
        for beta in settings.betas:
            found = complexity(model.cpu(), example, beta=beta, **RULES[rule])
            for number, layer in enumerate(found.layers):
                yield {
                    "rule": rule, "beta": beta, "layer": layer.name, "number": number + 1, "width": layer.width,
                    "classes": layer.classes, "dead": layer.dead, "left": layer.left, "accuracy": accuracy,
                }  # fmt: skip


def complexity_numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series "network: rule, β = 0.1" → number of the layer → features left, and "all layers, %"; then what follows.

    "place of the largest": 0 is the first layer and 1 the last. "features left against accuracy": rank correlation over
    networks that differ in their seed alone.
    """
    found: Numbers = {}
    lefts: dict[str, list[float]] = {}
    accuracies: dict[str, list[float]] = {}
    for series, some in grouped(rows, _series).items():
        for line in grouped(some, lambda row: row["pair"]).values():
            for row in line:
                found.setdefault(series, {}).setdefault(str(row["number"]), []).append(float(row["left"]))
            left = [row["left"] for row in line]
            whole = 100 * sum(left) / sum(row["width"] for row in line)
            found[series].setdefault("all layers, %", []).append(whole)
            place = left.index(max(left)) / max(1, len(left) - 1)
            found.setdefault("place of the largest", {}).setdefault(series, []).append(place)
            lefts.setdefault(series, []).append(whole)
            accuracies.setdefault(series, []).append(line[0]["accuracy"])
    for series, values in lefts.items():
        if len(set(values)) >= LEAST_NETWORKS and len(set(accuracies[series])) >= LEAST_NETWORKS:
            value = float(spearmanr(values, accuracies[series])[0])
            found.setdefault("features left against accuracy", {})[series] = [value]
    return found


def _series(row: Row) -> str:
    return f"{network_of(row)}: {row['rule']}, β = {row['beta']:g}"


def draw_complexity(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Features left per layer, means over networks: a panel per rule and β, a line per network."""
    from matplotlib.ticker import MaxNLocator

    rules, betas = (list(dict.fromkeys(row[key] for row in rows)) for key in ("rule", "beta"))
    figure, panels = panels_in_rows(len(rules) * len(betas), 2.6, 2.0, min(3, len(betas)))
    for series, some in grouped(rows, _series).items():
        axes = panels[len(betas) * rules.index(some[0]["rule"]) + betas.index(some[0]["beta"])]
        means = [fmean(row["left"] for row in layer) for layer in grouped(some, lambda row: row["number"]).values()]
        axes.plot(range(1, len(means) + 1), means, "o-", markersize=3, label=series.partition(":")[0])
        axes.set_title(series.partition(": ")[2], fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for i, axes in enumerate(panels):
        axes.set_ylabel("" if i % min(3, len(betas)) else "features left")
        axes.set_xlabel("layer")
    legend_below(figure)
    return figure


# -- Saliency maps of groups of equivalent features, by guided backpropagation (figures 5b, 7 and 8) --
#
# The paper selects its groups by hand. Here they are those that respond most to some classes against all others. The
# similarity of maps of single features is measured within a group and with features outside it.


#: Features of a group whose maps are compared.
MOST_COMPARED = 4


def group_rows(work: Work, model: nn.Module, settings: FoldingSettings) -> Iterator[Row]:
    """Per rule and β: a row per group and image, and one with the similarity of maps.

    Only the pictures of the figure are kept in rows: maps of the first rule and β with groups, and their images.
    """
    drawn: dict[str, Any] | None = None
    placed = model.to(work.device)
    layer, labels = settings.layer, work.data.test_labels.cpu()
    batches = features(placed, work.placed.batches("test"), [layer])
    responses = torch.cat([batch[layer].flatten(2).mean(2).double().cpu() for batch in batches])
    wanted = class_numbers(work, settings)
    for rule in settings.rules:
        for beta in settings.betas:
            about = {"rule": rule, "beta": beta}
            found = _groups(model, work, settings, rule, beta)
            placed = model.to(work.device)
            chosen = _chosen(found, responses, torch.isin(labels, torch.tensor(wanted)), settings.groups)
            if not chosen:
                yield about | {"groups": 0}
                continue
            images, names = _images(work, responses[:, [unit for group in chosen for unit in group]], wanted, settings)
            yield about | {"groups": len(found)} | _alike(placed, settings.layer, chosen, responses, images)
            for number, group in enumerate(chosen):
                maps = guided_backprop(placed, settings.layer, group, images).maps
                for image, name, map_ in zip(images, names, maps, strict=True):
                    pictures = {"map": pack(scaled_map(map_))} if drawn in (None, about) else {}
                    pictures |= {"image": pack(scaled_image(image))} if pictures and number == 0 else {}
                    yield about | {"group": number, "features": len(group), "class": name} | pictures
            drawn = drawn or about


def _groups(model: nn.Module, work: Work, settings: FoldingSettings, rule: str, beta: float) -> list[list[int]]:
    """Groups of two features and more, of the wire that ends in the layer."""
    folded = fold(model.cpu(), torch.zeros(1, *work.data.shape), beta=beta, **RULES[rule])
    paths = list(dict(model.named_modules()))
    before = [name for name in folded.groups if paths.index(name) <= paths.index(settings.layer)]
    return [list(group) for group in folded.groups[before[-1]] if len(group) > 1]


def class_numbers(work: Work, settings: FoldingSettings) -> list[int]:
    """The classes of a plan as numbers; an `InputError` for unknown names."""
    known = list(work.data.classes)
    for name in settings.classes:
        if name not in known:
            raise InputError(f"{work.plan.name}: {unknown_name('class', name, known)}")
    return [known.index(name) for name in settings.classes]


def _chosen(found: Sequence[list[int]], responses: Tensor, inside: Tensor, most: int) -> list[list[int]]:
    """The groups with the largest response to some images relative to all others."""

    def contrast(group: list[int]) -> float:
        own = responses[:, group].mean(1)
        scale = float(own.mean())
        return (float(own[inside].mean()) - float(own[~inside].mean())) / scale if scale > 0 else -np.inf

    return sorted((group for group in found if contrast(group) > -np.inf), key=contrast, reverse=True)[:most]


def _images(
    work: Work, responses: Tensor, wanted: Sequence[int], settings: FoldingSettings
) -> tuple[Tensor, list[str]]:
    """The images of each class with the largest response of the groups."""
    labels, total = work.data.test_labels.cpu(), responses.mean(1)
    rows, names = [], []
    for label in wanted:
        own = (labels == label).nonzero().flatten()
        best = own[total[own].argsort(descending=True)[: settings.images]]
        rows.append(best)
        names += [work.data.classes[label]] * len(best)
    return work.placed.inputs(work.placed.test_images[torch.cat(rows).to(work.device)]), names


def _alike(model: nn.Module, layer: str, chosen: Sequence[list[int]], responses: Tensor, images: Tensor) -> Row:
    """Mean correlation of the maps of two features on one image: within a group, and with random other features."""
    chance, live = torch.Generator().manual_seed(0), (responses.mean(0) > 0).nonzero().flatten()

    def maps(units: Sequence[int]) -> list[Tensor]:
        return [guided_backprop(model, layer, unit, images).maps.flatten(1).double().cpu() for unit in units]

    same, other = [], []
    for group in chosen:
        outside = live[~torch.isin(live, torch.tensor(group))]
        drawn = outside[torch.randperm(len(outside), generator=chance)[:MOST_COMPARED]].tolist()
        inside = maps(group[:MOST_COMPARED])
        same += [_correlation(a, b) for a, b in combinations(inside, 2)]
        other += [_correlation(a, b) for a in inside for b in maps(drawn)]

    def mean(values: Sequence[list[float]]) -> float | None:
        flat = [value for some in values for value in some]
        return sum(flat) / len(flat) if flat else None

    return {"same": mean(same), "other": mean(other)}


def _correlation(a: Tensor, b: Tensor) -> list[float]:
    """The correlation of two sets of maps, image by image, without constant maps."""
    a, b = (x - x.mean(1, keepdim=True) for x in (a, b))
    sizes = a.norm(dim=1) * b.norm(dim=1)
    live = sizes > 0
    return ((a * b).sum(1)[live] / sizes[live]).tolist()


def group_numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series "network: maps of one group" and "… of any two features" → rule and β → mean correlation."""
    return gathered(
        (f"{network_of(row)}: {words}", f"{row['rule']}, β = {row['beta']:g}", [row[key]])
        for row in rows
        for key, words in (("same", "maps of one group"), ("other", "maps of any two features"))
        if row.get(key) is not None
    )


def draw_groups(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """The images, and below them the maps of one group per row, by the first rule and β that has groups."""
    pictured = [row for row in rows if "map" in row]
    if not pictured:
        return new_figure(4, 1)  # no two features were near enough: only the title
    first = pictured[0]
    same = [row for row in pictured if all(row[k] == first[k] for k in ("network", "pair", "rule", "beta"))]
    groups = {number: [row for row in same if row["group"] == number] for number in {row["group"] for row in same}}
    shown = [[torch.from_numpy(unpack(row["image"])) for row in groups[0]]]
    shown += [[torch.from_numpy(unpack(row["map"])) for row in group] for group in groups.values()]
    captions = [[row["class"] for row in groups[0]], *([""] * len(group) for group in groups.values())]
    names = ["image", *(f"{group[0]['features']} features" for group in groups.values())]
    return draw_images(shown, names, captions)
