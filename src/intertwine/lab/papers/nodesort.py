"""Kind "distances": distances and averages of MLPs after sorting or matching hidden nodes (Sorensen 2020, table 1).

The kind trains many small networks at once and measures table 1 and the averages of sorted networks, which the thesis
only proposes. It adds controls (networks at initialisation, permuted copies, whose distance must be 0), matching and
stability under noise. The functions that measure return one row per method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from intertwine.figures import new_figure
from intertwine.lab.papers.nodesort_networks import (
    LEXICOGRAPHIC,
    MATCHINGS,
    UNSORTED,
    WEIGHT_MATCHING,
    DistancesSettings,
    FlatImages,
    MLPStack,
    concatenated,
    fresh,
    order_of,
    orders,
    pairwise_distances,
    parts,
    permuted,
    read_images,
    recipe_of,
    reordered,
    score,
    stack_distances,
    trained,
)
from intertwine.lab.papers.plan import ExperimentKind, Numbers, Row, SummaryValue
from intertwine.lab.papers.work import Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Pairs in memory at once; a pair of thesis-sized networks and its score matrix take about 5 MiB.
PAIRS_AT_ONCE = 50
#: Two networks coincide if their distance is at most this share of the mean. Gram matrices resolve about 1e-7.
SAME = 1e-4


def summary(values: Tensor) -> dict[str, Any]:
    """Minimum, maximum, mean, deviation (None of one value) and count.

    >>> summary(torch.tensor([1.0, 2.0, 3.0]))
    {'min': 1.0, 'max': 3.0, 'mean': 2.0, 'deviation': 1.0, 'count': 3}
    """
    found = {name: float(getattr(values, name)()) for name in ("min", "max", "mean")}
    return found | {"deviation": float(values.std()) if values.numel() > 1 else None, "count": values.numel()}


def methods(plan: DistancesSettings) -> list[str]:
    """All compared methods, the unsorted networks first."""
    return [*orders(plan.bases), *MATCHINGS]


def picked_pairs(nets: int, count: int, seed: int) -> Tensor:
    """Up to `count` distinct random pairs, (pairs, 2)."""
    pairs = torch.triu_indices(nets, nets, offset=1).T
    return pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:count]]


def all_distances(stack: MLPStack, plan: DistancesSettings, images: Tensor) -> list[Row]:
    """Distances of all pairs, unsorted and after each order, as in table 1; and pairs that coincide."""
    rows = []
    for method in orders(plan.bases):
        now = reordered(method, stack, stack, images)
        found = {"w1": pairwise_distances(now.w1), "w2": pairwise_distances(now.w2)}
        same = {name: values <= SAME * values.mean() for name, values in found.items()}
        row: Row = {"method": method} | {name: summary(values) for name, values in found.items()}
        rows.append(row | {"coinciding_pairs": int((same["w1"] & same["w2"]).sum())})
    return _with_changes(rows)


def pair_distances(stack: MLPStack, plan: DistancesSettings, images: Tensor) -> list[Row]:
    """Distances of some pairs after every method; matching works pair by pair, so not all pairs are measured."""
    pairs = picked_pairs(len(stack), plan.matched_pairs, plan.seed)
    found: dict[str, list[dict[str, Tensor]]] = {method: [] for method in methods(plan)}
    for block in pairs.split(PAIRS_AT_ONCE):
        a, b = stack[block[:, 0]], stack[block[:, 1]]
        for method, blocks in found.items():
            blocks.append(stack_distances(reordered(method, a, a, images), reordered(method, b, a, images)))
    names = ("w1", "w2", "all")
    return _with_changes([
        {"method": method} | {name: summary(torch.cat([block[name] for block in blocks])) for name in names}
        for method, blocks in found.items()
    ])  # fmt: skip


def _with_changes(rows: list[Row]) -> list[Row]:
    """Add the relative change of each mean from the first row, that of the unsorted networks."""
    for row in rows:
        for name, numbers in row.items():
            if isinstance(numbers, dict):
                numbers["change"] = numbers["mean"] / rows[0][name]["mean"] - 1
    return rows


def start_distances(plan: DistancesSettings, images: FlatImages) -> list[Row]:
    """Mean distances before training, of a few networks."""
    seeds = range(plan.first_seed, plan.first_seed + min(plan.nets, 20))
    stack = fresh(recipe_of(plan, images), [torch.Generator().manual_seed(seed) for seed in seeds])
    return [
        {"method": UNSORTED, "w1": summary(pairwise_distances(stack.w1)), "w2": summary(pairwise_distances(stack.w2))}
    ]


def control(stack: MLPStack, plan: DistancesSettings, images: Tensor) -> list[Row]:
    """Permuted copies: at distance 0 after every order and after weight matching.

    Activation matching may leave a distance, since it cannot distinguish nodes that are dead on all its images.
    """
    some = stack[: plan.control_nets]
    generator = torch.Generator().manual_seed(plan.seed)
    shuffles = torch.stack([torch.randperm(some.b1.shape[1], generator=generator) for _ in range(len(some))])
    copies = permuted(some, shuffles.to(some.b1.device))
    rows = []
    for method in methods(plan):
        left = stack_distances(reordered(method, some, some, images), reordered(method, copies, some, images))["all"]
        rows.append({"method": method, "distance": float(left.max())})
    return rows


def stability(stack: MLPStack, plan: DistancesSettings, images: Tensor) -> list[Row]:
    """Whether each method gives the same order after a little noise, and the distance of the results.

    Noise of level r adds to every tensor a normal one with r times its norm. `growth`: the distance after a method over
    that without sorting; 1 for a stable method.
    """
    some = stack[: plan.noise_nets].each(Tensor.double)  # float32 would round the smallest noise away
    generator = torch.Generator().manual_seed(plan.seed)

    def noisy(tensor: Tensor, level: float) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
        size, noise_size = (x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1)) for x in (tensor, noise))
        return tensor + level * size / noise_size * noise

    rows: list[Row] = []
    for level in plan.noise:
        other = some.each(partial(noisy, level=level))
        rows += [{"noise": level} | row for row in _under_noise(some, other, plan, images)]
    return rows


def _under_noise(some: MLPStack, noisy: MLPStack, plan: DistancesSettings, images: Tensor) -> Iterator[Row]:
    before = stack_distances(some, noisy)["all"]
    yield {"method": UNSORTED, "distance": summary(before)}
    for method in [*orders(plan.bases)[1:], WEIGHT_MATCHING]:
        old, new = (order_of(method, stack, some, images) for stack in (some, noisy))
        after = stack_distances(permuted(some, old), permuted(noisy, new))["all"]
        changed = old != new
        yield {
            "method": method, "order_changed": float(changed.any(1).double().mean()),
            "nodes_moved": float(changed.double().mean()), "distance": summary(after),
            "growth": summary(after / before),
        }  # fmt: skip


# -- Averages --


def picked_groups(nets: int, size: int, count: int, seed: int) -> Tensor:
    """Random groups (count, size) of distinct networks: pairs as above, larger groups disjoint."""
    if size == 2:
        return picked_pairs(nets, count, seed)
    shuffled = torch.randperm(nets, generator=torch.Generator().manual_seed(seed))
    return shuffled[: nets // size * size].reshape(-1, size)[:count]


def averages(stack: MLPStack, plan: DistancesSettings, images: FlatImages) -> list[Row]:
    """Test accuracy of single networks, of the mean of several after each method, and of their mean prediction."""
    rows: list[Row] = [{"networks": 1, "method": "single"} | summary(score(stack, images.test_x, images.test_y)[0])]
    some = images.train_x[: plan.matching_images]
    for size in sorted({min(size, len(stack)) for size in plan.average_sizes}):
        groups = picked_groups(len(stack), size, plan.average_groups, plan.seed)
        for method in methods(plan):
            means = concatenated([averaged(method, stack[group], some) for group in groups])
            accuracy = score(means, images.test_x, images.test_y)[0]
            rows.append({"networks": size, "method": method} | summary(accuracy))
        together = torch.stack([ensemble(stack[group], images) for group in groups])
        rows.append({"networks": size, "method": "ensemble"} | summary(together))
    return rows


def averaged(method: str, group: MLPStack, images: Tensor) -> MLPStack:
    """One network: the mean of the group after a method; matchings match every network to the first."""
    first = group[torch.zeros(len(group), dtype=torch.int64)]
    return reordered(method, group, first, images).each(lambda tensor: tensor.mean(0, keepdim=True))


@torch.no_grad()
def ensemble(group: MLPStack, images: FlatImages) -> Tensor:
    """Accuracy of the mean of the predicted probabilities."""
    sums = [part(images.test_x).softmax(-1).sum(0) for part in parts(group, len(images.test_x))]
    return (torch.stack(sums).sum(0).argmax(-1) == images.test_y).double().mean().cpu()


def curves(stack: MLPStack, plan: DistancesSettings, images: FlatImages) -> list[Row]:
    """Accuracy and loss on the straight line between two networks after each method, over some pairs."""
    pairs = picked_pairs(len(stack), plan.curve_pairs, plan.seed)
    a, b = stack[pairs[:, 0]], stack[pairs[:, 1]]
    steps = torch.linspace(0, 1, plan.curve_points, dtype=torch.float64).tolist()
    some = images.train_x[: plan.matching_images]

    def band(values: Tensor) -> dict[str, list[float]]:
        return {"mean": values.mean(1).tolist(), "min": values.amin(1).tolist(), "max": values.amax(1).tolist()}

    rows = []
    for method in methods(plan):
        ends = reordered(method, a, a, some), reordered(method, b, a, some)
        scores = [score(between(*ends, t), images.test_x, images.test_y) for t in steps]
        accuracy, loss = (torch.stack(values) for values in zip(*scores, strict=True))
        rows.append(
            {
                "method": method, "t": steps, "pairs": len(pairs), "accuracy": band(accuracy), "loss": band(loss),
                "loss_barrier": summary(_height(loss)), "error_barrier": summary(_height(1 - accuracy)),
            }
        )  # fmt: skip
    return rows


def between(a: MLPStack, b: MLPStack, t: float) -> MLPStack:
    """The networks (1 − t) a + t b."""
    mixed = (torch.lerp(x, y, t) for x, y in zip(a.tensors.values(), b.tensors.values(), strict=True))
    return MLPStack(*mixed, activation=a.activation)


def _height(values: Tensor) -> Tensor:
    """The barrier of a curve (points, pairs): its largest height above the chord between its ends."""
    t = torch.linspace(0, 1, len(values), dtype=values.dtype)[:, None]
    return (values - (1 - t) * values[0] - t * values[-1]).amax(0)


# -- Numbers --


LAYERS = {"w1": "W₁", "w2": "W₂"}
COINCIDING = "pairs that coincide"


def by_method(rows: Sequence[Row], measured: str, **where: Any) -> dict[str, Row]:
    """Method → its row of one measurement; `where` picks among several, such as `networks=2`.

    >>> rows = [{"measured": "accuracy", "networks": n, "method": "unsorted", "mean": n / 10} for n in (1, 2)]
    >>> by_method(rows, "accuracy", networks=2)["unsorted"]["mean"]
    0.2
    """
    wanted = {"measured": measured} | where
    return {row["method"]: row for row in rows if all(row.get(name) == value for name, value in wanted.items())}


def series(method: str) -> str:
    """The name of a method among the printed numbers.

    >>> series("nodesort 1.1"), series("weight matching")
    ('sorted, p = 1.1', 'weight matching')
    """
    return "sorted, lexicographic" if method == LEXICOGRAPHIC else method.replace("nodesort ", "sorted, p = ")


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Method → distances of both layers over pairs, pairs that coincide, and accuracies of averages in percent.

    Distances are over all pairs if a method needs no second network, else over the matched pairs.
    """
    found: Numbers = {}
    for method, row in (by_method(rows, "some_pairs") | by_method(rows, "all_pairs")).items():
        own = found.setdefault(series(method), {})
        for layer, name in LAYERS.items():
            own |= {f"{name} {what}": _kept(row[layer], what) for what in ("min", "max", "mean")}
        if "coinciding_pairs" in row:
            own[COINCIDING] = [float(row["coinciding_pairs"])]
    for row in rows:
        if row["measured"] == "accuracy":
            label = f"average of {row['networks']}, %"
            found.setdefault(series(row["method"]), {})[label] = _kept(row, "mean", 100.0)
    return found


def _kept(summary: Mapping[str, Any], what: str, unit: float = 1.0) -> list[float]:
    """An entry of a summary with its deviation and count."""
    return SummaryValue(unit * summary[what], unit * deviation(summary), summary["count"])


def deviation(summary: Mapping[str, Any]) -> float:
    """The deviation in a summary; estimated from the extremes of normal values (Blom 1958) if it has none.

    >>> round(deviation({"min": -1.87, "max": 1.87, "count": 20}), 3)
    1.0
    """
    count = summary["count"]
    if summary.get("deviation") is not None or count < 2:
        return summary.get("deviation") or 0.0
    return (summary["max"] - summary["min"]) / (2 * NormalDist().inv_cdf((count - 0.375) / (count + 0.25)))


# -- Figure --


#: Label, colour, and offset of the bar in its row.
BARS = {"w1": ("first layer, W₁", "#3b6fb6", -0.19), "w2": ("second layer, W₂", "#d1742f", 0.19)}
CURVES = {
    UNSORTED: ("as trained", "#7f7f7f", "o"),
    "nodesort 10": ("NodeSort, p = 10", "#8c5fb0", "s"),
    WEIGHT_MATCHING: ("weight matching", "#2e8b57", "D"),
}


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Distances on the left, those of the paper as hollow bars; lines between two networks on the right."""
    figure = new_figure(10.5, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _distances(left, plan, rows)
    _lines(right, rows)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _distances(axes: Axes, plan: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Mean distance of each method relative to unsorted, with a thin line from the smallest to the largest."""
    found = by_method(rows, "some_pairs")
    names = [name for name in found if name != UNSORTED]
    for layer, (label, colour, offset) in BARS.items():
        one = found[UNSORTED][layer]["mean"]
        for place, name in enumerate(names):
            mean, least, most = (found[name][layer][number] / one for number in ("mean", "min", "max"))
            axes.barh(place + offset, mean, height=0.36, color=colour, label=None if place else label)
            axes.plot([least, most], [place + offset] * 2, color="black", linewidth=1)
            _change(axes, mean, most, place + offset)
    first = ["thesis, Table 1"] if _printed(axes, plan) else []
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    labels = [series(name).removeprefix("sorted, ").replace("p =", "NodeSort, p =") for name in names]
    axes.set_yticks(range(-len(first), len(names)), [*first, *labels])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18)
    axes.set_xlabel("mean distance between two networks (1 = unsorted)")
    axes.set_title(f"Distances of trained networks ({found[UNSORTED]['w1']['count']} pairs)", loc="left", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.99), ncols=2, frameon=False, fontsize=9, borderaxespad=0.2)


def _printed(axes: Axes, plan: Mapping[str, Any]) -> bool:
    """Draw the printed distances above the measured bars; whether there are any."""
    ordered = next((name for name in plan["printed"] if name.startswith("sorted")), None)
    if ordered is None:
        return False
    before, after = (dict(zip(plan["labels"], plan["printed"][name], strict=True)) for name in (UNSORTED, ordered))
    for layer, (_, colour, offset) in BARS.items():
        ratio = after[f"{LAYERS[layer]} mean"] / before[f"{LAYERS[layer]} mean"]
        axes.barh(offset - 1, ratio, height=0.36, facecolor="none", edgecolor=colour, hatch="////")
        _change(axes, ratio, ratio, offset - 1)
    return True


def _change(axes: Axes, mean: float, end: float, height: float) -> None:
    """Write the change in percent behind a bar, or behind the line at 1 if they would overlap."""
    place = end if end < 0.85 else max(end, 1.0)
    axes.text(place + 0.012, height, f"{mean - 1:+.1%}".replace("-", "−"), va="center", fontsize=8.5)


def _lines(axes: Axes, rows: Sequence[Row]) -> None:
    """Accuracy on the straight line between two networks: the mean over pairs, and all pairs as a band."""
    found = by_method(rows, "curves")
    for name, (label, colour, marker) in CURVES.items():
        if name in found:
            row = found[name]
            band = {end: [100 * value for value in row["accuracy"][end]] for end in ("mean", "min", "max")}
            axes.fill_between(row["t"], band["min"], band["max"], color=colour, alpha=0.15, linewidth=0)
            axes.plot(row["t"], band["mean"], color=colour, marker=marker, markersize=4, label=label)
    axes.set_xlim(0, 1)
    axes.set_xlabel("position on the straight line from network A (0) to B (1)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"On the line between two networks ({found[UNSORTED]['pairs']} pairs)", loc="left", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.99), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)


def run(work: Work) -> list[Row]:
    """Train missing networks and measure everything: one row per measurement and method."""
    plan: DistancesSettings = work.plan.settings
    images = read_images(work.data, work.device)
    stack = trained(plan, images, work.folder / "distances", work.progress)
    some = images.train_x[: plan.matching_images]
    measurements: dict[str, Callable[[], list[Row]]] = {
        "start": lambda: start_distances(plan, images),
        "all_pairs": lambda: all_distances(stack, plan, some),
        "some_pairs": lambda: pair_distances(stack, plan, some),
        "control": lambda: control(stack, plan, some),
        "accuracy": lambda: averages(stack, plan, images),
        "curves": lambda: curves(stack, plan, images),
        "stability": lambda: stability(stack, plan, some),
    }
    rows = []
    for name, measure in measurements.items():
        work.progress(f"measuring {name}")
        rows += [{"measured": name} | row for row in measure()]
    return rows


DISTANCES = ExperimentKind(DistancesSettings, run, numbers, draw)
