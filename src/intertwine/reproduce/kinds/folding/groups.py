"""Groups: what groups of equivalent features see in images, by guided backpropagation (figures 5b, 7 and 8).

The paper shows groups of its choice. Here they are those that respond most to some classes against all others, and how
alike the maps of single features are is measured: inside a group, and with features outside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.features.features import features
from intertwine.features.pictures import new_figure
from intertwine.fold.fold import fold
from intertwine.inspect.grids import draw_images, scaled_image, scaled_map
from intertwine.inspect.guided import guided_backprop
from intertwine.reproduce.kinds.folding.packed import pack, unpack
from intertwine.reproduce.kinds.folding.settings import RULES, Settings, network_of
from intertwine.reproduce.kinds.registry import Numbers, Row
from intertwine.reproduce.work import Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Features of a group whose maps are compared one with another.
MOST_COMPARED = 4


def find(work: Work, model: nn.Module, settings: Settings) -> Iterator[Row]:
    """Per rule and β: a row per group and image with the picture of its map, and one with how alike maps are."""
    placed = model.to(work.device)
    responses, labels = _responses(placed, work, settings.layer)
    wanted = _classes(work, settings)
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
                    pictures = {"image": pack(scaled_image(image)), "map": pack(scaled_map(map_))}
                    yield about | {"group": number, "features": len(group), "class": name} | pictures


def _responses(model: nn.Module, work: Work, layer: str) -> tuple[Tensor, Tensor]:
    """Test images × features, means over positions; and the classes."""
    data = work.placed.batches("test")
    parts = [batch[layer].flatten(2).mean(2).double().cpu() for batch in features(model, data, [layer])]
    return torch.cat(parts), work.data.test_labels.cpu()


def _classes(work: Work, settings: Settings) -> list[int]:
    known = list(work.data.classes)
    for name in settings.classes:
        if name not in known:
            raise InputError(f"{work.plan.name} looks at images of {name!r}; there are {', '.join(known)}.")
    return [known.index(name) for name in settings.classes]


def _groups(model: nn.Module, work: Work, settings: Settings, rule: str, beta: float) -> list[list[int]]:
    """Groups of two features and more, of the wire that ends in the layer."""
    folded = fold(model.cpu(), torch.zeros(1, *work.data.shape), beta=beta, **RULES[rule])
    paths = list(dict(model.named_modules()))
    before = [name for name in folded.groups if paths.index(name) <= paths.index(settings.layer)]
    return [list(group) for group in folded.groups[before[-1]] if len(group) > 1]


def _chosen(found: Sequence[list[int]], responses: Tensor, inside: Tensor, most: int) -> list[list[int]]:
    """The groups that respond most to some images against all others."""

    def contrast(group: list[int]) -> float:
        own = responses[:, group].mean(1)
        scale = float(own.mean())
        return (float(own[inside].mean()) - float(own[~inside].mean())) / scale if scale > 0 else -np.inf

    return sorted((group for group in found if contrast(group) > -np.inf), key=contrast, reverse=True)[:most]


def _images(work: Work, responses: Tensor, wanted: Sequence[int], settings: Settings) -> tuple[Tensor, list[str]]:
    """The images of each class to which the groups respond most."""
    labels, total = work.data.test_labels.cpu(), responses.mean(1)
    rows, names = [], []
    for label in wanted:
        own = (labels == label).nonzero().flatten()
        best = own[total[own].argsort(descending=True)[: settings.images]]
        rows.append(best)
        names += [work.data.classes[label]] * len(best)
    return work.placed.inputs(work.placed.test_images[torch.cat(rows).to(work.device)]), names


def _alike(model: nn.Module, layer: str, chosen: Sequence[list[int]], responses: Tensor, images: Tensor) -> Row:
    """Mean correlation of the maps of two features on the same image: of one group, and with one outside, at random."""
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
    return {"same": _mean(same), "other": _mean(other)}


def _correlation(a: Tensor, b: Tensor) -> list[float]:
    """Of two sets of maps, image by image; maps that are constant have none."""
    a, b = (x - x.mean(1, keepdim=True) for x in (a, b))
    sizes = a.norm(dim=1) * b.norm(dim=1)
    live = sizes > 0
    return ((a * b).sum(1)[live] / sizes[live]).tolist()


def _mean(values: Sequence[list[float]]) -> float | None:
    flat = [value for some in values for value in some]
    return sum(flat) / len(flat) if flat else None


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series "network: maps of one group" and "… of any two features" → rule and β → mean correlation."""
    found: Numbers = {}
    for row in rows:
        for key, words in (("same", "maps of one group"), ("other", "maps of any two features")):
            if row.get(key) is not None:
                series = found.setdefault(f"{network_of(row)}: {words}", {})
                series.setdefault(f"{row['rule']}, β = {row['beta']:g}", []).append(row[key])
    return found


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """The images, and below them the maps of one group per row, by the first rule and β that has groups."""
    pictured = [row for row in rows if "map" in row]
    if not pictured:
        return new_figure(4, 1)  # no two features were near enough: there is nothing to show but the title
    first = pictured[0]
    same = [row for row in pictured if all(row[k] == first[k] for k in ("network", "pair", "rule", "beta"))]
    groups = {number: [row for row in same if row["group"] == number] for number in {row["group"] for row in same}}
    shown = [[torch.from_numpy(unpack(row["image"])) for row in groups[0]]]
    shown += [[torch.from_numpy(unpack(row["map"])) for row in group] for group in groups.values()]
    captions = [[row["class"] for row in groups[0]], *([""] * len(group) for group in groups.values())]
    names = ["image", *(f"{group[0]['features']} features" for group in groups.values())]
    return draw_images(shown, names, captions)
