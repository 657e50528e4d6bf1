"""Kind "folding": its settings, accuracy against parameters left, and barriers of swaps (Chen et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from intertwine.data.batchnorm import batch_norms, reset_statistics
from intertwine.errors import InputError, unknown_name
from intertwine.figures import legend_below, panels_in_rows
from intertwine.fold.budget import fold_to
from intertwine.fold.complexity import DEAD
from intertwine.fold.fold import fold
from intertwine.fold.options import PAPER_CODE, PRINTED
from intertwine.fold.prune import prune
from intertwine.fold.result import Fold
from intertwine.fold.swaps import KINDS, swap_barrier
from intertwine.lab.papers.plan import ExperimentPlan, Numbers, Row, gathered, grouped
from intertwine.lab.papers.work import Work
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.stitch.result import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Name → options of `intertwine.fold`. All of them keep counts; resetting these to 1 after every merge, as in print, is
#: never exact. "as printed" sums rows before it compares them; "as published" sums BatchNorm too, which is
#: not exact; "corrected" compares means; "this library" compares by the change of the layers behind.
RULES: Mapping[str, Mapping[str, Any]] = {
    "as printed": PRINTED,
    "as published": PAPER_CODE,
    "corrected": {**PRINTED, "rows": "mean"},
    "this library": {},
}
MEASURE_NAMES = ("curves", "distances", "swaps", "complexity", "groups", "seconds")


@dataclass(frozen=True)
class FoldingSettings:
    """The table [folding]; a measure reads the entries that it needs.

    Attributes:
        measure: "curves" accuracy against parameters, "distances" between features, "swaps" of equivalent features,
            "complexity" per layer, "groups" saliency maps of groups, "seconds" per sweep. form: a selection of rows.
        architectures: each has networks of its own; by default that of [networks].
        rules, betas: names in `RULES`, and the grid. methods: names in `OTHERS`. shares: of parameters left by these.
        at: percent of parameters at which curves are read off. within: accepted loss of accuracy in points.
        seen: training images for re-estimated BatchNorm statistics. points, seeds: of swaps.
        layer, classes, images, groups: the layer of the groups, the classes and number of images, number of groups.
        sweeps: over all layers, timed. options: of the timed architectures.
    """

    measure: str
    form: str = ""
    architectures: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=lambda: list(RULES))
    betas: list[float] = field(default_factory=lambda: [0.01, 0.03, 0.05, 0.07, 0.1, 0.12, 0.14, 0.15, 0.18, 0.2])
    shares: list[float] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    within: float = 2.0
    seen: int = 5000
    points: int = 11
    seeds: int = 3
    layer: str = ""
    classes: list[str] = field(default_factory=list)
    images: int = 3
    groups: int = 3
    sweeps: int = 100
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, plan: ExperimentPlan, where: str) -> None:
        """Refuse unknown names."""
        names = [("measure", self.measure, MEASURE_NAMES), *(("rule", rule, RULES) for rule in self.rules)]
        for what, name, known in [*names, *(("method", method, OTHERS) for method in self.methods)]:
            if name not in known:
                raise InputError(f"{where}: [folding] {unknown_name(what, name, known)}")


def network_of(row: Row) -> str:
    """The name of the network of a row: its architecture, and the value of the option that varies."""
    group = row.get("front_group")
    return row["network"] + ("" if group is None else f" ×{group:g}")


# -- Accuracy against parameters left --
#
# Chen et al. choose β on the test images that they report. Here β is also chosen on the first half of the test images,
# with the accuracy of the second half.


Make = Callable[[nn.Module, Tensor, float], Fold]
#: Methods that take the share of parameters to leave.
OTHERS: Mapping[str, Make] = {
    "fold_to": lambda model, x, share: fold_to(model, x, parameters=share),
    "prune, L1": lambda model, x, share: prune(model, x, widths=share, across=True),
    "prune, random": lambda model, x, share: prune(model, x, widths=share, score="random", across=True),
}
WHOLE = "whole"
#: The least share of the accuracy before merging that the paper accepts.
ENOUGH = 0.95
RESET = ", statistics reset"
#: Parameters left, in per cent, that are nearly all.
NEAR = 95.0


def curve_rows(work: Work, model: nn.Module, settings: FoldingSettings) -> Iterator[Row]:
    """One row for the whole network, and one per method and value."""
    example = torch.zeros(1, *work.data.shape)
    yield {"method": WHOLE, "value": None, "left": 100.0, "flops": 100.0} | scored(model, work, settings.seen)
    makes: list[tuple[str, float, Make]] = [
        (rule, beta, lambda model, x, beta, rule=rule: fold(model, x, beta=beta, **RULES[rule]))
        for rule in settings.rules
        for beta in settings.betas
    ]
    makes += [(method, share, OTHERS[method]) for method in settings.methods for share in settings.shares]
    for method, value, make in makes:
        folded = make(model.cpu(), example, value)
        sizes = {"left": 100 * folded.parameters.share, "flops": 100 * folded.flops.share}
        yield {"method": method, "value": value} | sizes | scored(folded.model, work, settings.seen)


def scored(model: nn.Module, work: Work, seen: int) -> Row:
    """Accuracy in percent: on all test images, on each half, and after BatchNorm statistics are re-estimated."""
    placed = model.to(work.device).eval()
    right = answers(placed, work.placed)
    half = len(right) // 2
    parts = {"accuracy": right, "first": right[:half], "second": right[half:]}
    found = {name: 100 * float(part.mean()) for name, part in parts.items()}
    if batch_norms(placed):
        data = work.placed.subset(train=min(seen, len(work.data.labels)))
        again = reset_statistics(placed, data.batches("train", min(500, seen)))
        found["accuracy_reset"] = 100 * float(answers(again.eval(), work.placed).mean())
    return found


@torch.no_grad()
def answers(model: nn.Module, data: Dataset) -> Tensor:
    """Which test images are classified correctly."""
    return torch.cat([(model(x).argmax(1) == y).double() for x, y in data.batches("test")]).cpu()


def curve_numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series "network: method" → "whole", "23.03 % left", "left within 2 points", "left, chosen on test images" …"""
    found: Numbers = {}
    settings = plan["settings"]
    for (network, _), own in grouped(rows, lambda row: (network_of(row), row["pair"])).items():
        (whole,) = [row for row in own if row["method"] == WHOLE]
        for method, some in _methods(own).items():
            for suffix, key in (("", "accuracy"), (RESET, "accuracy_reset")):
                if key in whole:
                    series = found.setdefault(f"{network}: {method}{suffix}", {})
                    for label, value in _read(whole, some, key, settings):
                        series.setdefault(label, []).append(value)
            for label, value in _chosen(whole, some):
                found[f"{network}: {method}"].setdefault(label, []).append(value)
    return found


def _methods(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Method → its rows, without those of the whole network."""
    return grouped([row for row in rows if row["method"] != WHOLE], lambda row: row["method"])


def _read(whole: Row, some: Sequence[Row], key: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The accuracy of the whole network and at some shares of its parameters, and the least share within the limit."""
    yield WHOLE, whole["accuracy"]
    points = sorted((row["left"], row[key]) for row in [*some, whole])
    for share in settings["at"]:
        value = between(points, share)
        if value is not None:
            yield f"{share:g} % left", value
    good = [left for left, accuracy in points if accuracy >= whole["accuracy"] - settings["within"]]
    yield f"left within {settings['within']:g} points", min(good, default=100.0)


def between(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The height at x of the line through points that are sorted; None beyond them.

    >>> between([(20.0, 80.0), (40.0, 90.0)], 25.0)
    82.5
    """
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            return low if left == right else low + (high - low) * (x - left) / (right - left)
    return None


def _chosen(whole: Row, some: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """The choice of the rule "the largest value that keeps 95 %": on the test images, and on half of them."""
    for where, key, reported in (("test images", "accuracy", "accuracy"), ("half of them", "first", "second")):
        good = [row for row in some if row[key] > ENOUGH * whole[key]]
        row = min(good, key=lambda row: row["left"], default=whole)
        yield f"left, chosen on {where}", row["left"]
        yield f"accuracy, chosen on {where}", row[reported]


def draw_curves(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Accuracy against parameters left, one panel per network; dashed with re-estimated statistics; stars: printed.

    A second panel enlarges the end if several methods leave nearly all parameters.
    """
    networks = grouped(rows, network_of)
    shown = [(network, end) for network, own in networks.items() for end in (False, True) if not end or _crowded(own)]
    figure, panels = panels_in_rows(len(shown), 3.6 if len(shown) < 3 else 2.8, 3.2)
    for axes, (network, end) in zip(panels, shown, strict=True):
        _curves(axes, networks[network])
        _stars(axes, plan, network)
        axes.set(xlabel="parameters left, %", title=f"{network}, {NEAR:g} % and more left" if end else network)
        if axes is not panels[0]:
            axes.sharey(panels[0])
        axes.spines[["top", "right"]].set_visible(False)
        if end:
            axes.set_xlim(NEAR, 100.2)
    panels[0].set_ylabel("right answers, %")
    if any("accuracy_reset" in row for row in rows):
        panels[0].plot([], [], "--", color="0.4", linewidth=1, label="dashed: statistics reset")
    legend_below(figure)
    return figure


def _crowded(rows: Sequence[Row]) -> bool:
    """Whether two methods or more leave nearly all parameters at all their settings."""
    return sum(all(row["left"] >= NEAR for row in some) for some in _methods(rows).values()) > 1


def _curves(axes: Axes, rows: Sequence[Row]) -> None:
    """A line per method of one network, from the whole network on."""
    whole = [row for row in rows if row["method"] == WHOLE]
    for i, (method, some) in enumerate(_methods(rows).items()):
        for key, style in (("accuracy", "o-"), ("accuracy_reset", "--")):
            points = _means([*whole, *some], key)
            axes.plot(
                *zip(*points, strict=True), style, color=f"C{i}", markersize=3, linewidth=1,
                label=method if key == "accuracy" else None,
            ) if points else None  # fmt: skip


def _means(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """Points of a line, means over networks."""
    groups = grouped([row for row in rows if key in row], lambda row: row["value"]).values()
    return sorted((summary([r["left"] for r in some])[0], summary([r[key] for r in some])[0]) for some in groups)


def _stars(axes: Any, plan: Mapping[str, Any], network: str) -> None:
    """Printed accuracies at shares of the parameters, and printed shares that can be left."""
    for series, values in plan["printed"].items():
        for label, value in zip(plan["labels"], values, strict=True):
            if series.startswith(f"{network}:") and label.endswith("% left"):
                axes.plot(float(label.split()[0]), value, "k*", markersize=9, label="printed")
            elif series.startswith(f"{network}:") and label.startswith("left"):
                axes.axvline(value, color="k", linestyle=":", linewidth=1, label=f"printed: {value:g} % can be left")


# -- Swaps of equivalent features --


#: Features that may be swapped: all, as in the paper, or only live ones, since swapping dead ones proves nothing.
FEATURES: Mapping[str, float | None] = {"all": None, "live": DEAD}


def swap_rows(work: Work, model: nn.Module, settings: FoldingSettings) -> Iterator[Row]:
    """One row per rule, β, choice of features, kind of swap, seed and point."""
    placed, test = model.to(work.device), list(work.placed.batches("test"))
    example = torch.zeros(1, *work.data.shape, device=work.device)
    for rule in settings.rules:
        for beta in settings.betas:
            folded = fold(placed, example, beta=beta, **RULES[rule])
            for features, dead in FEATURES.items():
                about = {"rule": rule, "beta": beta, "features": features}
                try:
                    found = swap_barrier(folded, test, settings.points, seeds=range(settings.seeds), dead=dead)
                except InputError:  # no two features are near enough to swap
                    yield about | {"pairs": 0}
                    continue
                about["pairs"] = sum(found.pairs.values())
                for kind in KINDS:
                    for seed, line in zip(found.seeds, getattr(found, kind), strict=True):
                        for t, error in zip(line.ts, line.error or (), strict=True):
                            yield about | {"kind": kind, "seed": seed, "t": t, "accuracy": 100 * (1 - error)}


def swap_numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series "network: equivalent, rule, all features" → β → points of accuracy lost at most on the way."""

    def drop(line: Sequence[Row]) -> float:
        return line[0]["accuracy"] - min(row["accuracy"] for row in line)

    def key(row: Row) -> tuple[str, str, int]:
        series = f"{network_of(row)}: {row['kind']}, {row['rule']}, {row['features']} features"
        return series, f"β = {row['beta']:g}", row["pair"]

    pairs = grouped([row for row in rows if "kind" in row], key)
    return gathered(
        (series, label, [fmean(map(drop, grouped(own, lambda row: row["seed"]).values()))])
        for (series, label, _), own in pairs.items()
    )


def draw_swaps(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Accuracy along the way, one panel per rule and choice of features: solid equivalent, dashed random swaps."""
    kept = [row for row in rows if "kind" in row]
    panels = list(dict.fromkeys((row["rule"], row["features"]) for row in rows))
    betas = sorted({row["beta"] for row in kept})
    figure, grid = panels_in_rows(len(panels), 2.6, 2.6, 3)
    for axes, (rule, features) in zip(grid, panels, strict=True):
        own = [row for row in kept if (row["rule"], row["features"]) == (rule, features)]
        for kind, style in (("equivalent", "-"), ("random", "--")):
            for i, beta in enumerate(betas):
                some = [row for row in own if (row["kind"], row["beta"]) == (kind, beta)]
                points = grouped(some, lambda row: row["t"])
                means = [fmean(row["accuracy"] for row in rows) for rows in points.values()]
                axes.plot(list(points), means, style, color=f"C{i}", label=f"β = {beta:g}, {kind}")
        axes.set(title=f"{rule}, {features} features", xlabel="λ")
        if axes is not grid[0]:
            axes.sharey(grid[0])
    for axes in grid[::3]:
        axes.set_ylabel("right answers, %")
    legend_below(figure)
    return figure
