"""Kind "connectivity": pairs of networks layer by layer and on the line between them (Zhou et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intertwine.align.align import SOLVERS, align
from intertwine.connect.barrier import Barrier, barrier
from intertwine.connect.connectivity import connectivity
from intertwine.data.batchnorm import batch_norms
from intertwine.errors import InputError
from intertwine.figures import MAX_COLUMNS, legend_below, name_ticks, new_figure
from intertwine.lab.papers.plan import ExperimentKind, ExperimentPlan, Numbers, Row
from intertwine.lab.papers.work import NetworkPair, NetworkSource, Work, networks_of, trained
from intertwine.stitch.result import summary
from intertwine.symmetry.symmetry import Symmetry, symmetry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ----------------------------------------------------------------------------------------------------
# Pictures of connectivity: distances layer by layer, one panel per way, and the line between the networks.


#: Form → what of a layer → its words and how its line looks.
LINES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "features": {"llfc": ("mix", "o-"), "baseline": ("the two networks", "k--")},
    "conditions": {
        "additivity": ("weak additivity, 1 − cos", "o-"),
        "commutativity": ("commutativity, residual", "s-"),
        "sign_agreement": ("same sign", "^:"),
    },
    "factors": {
        "weights_apart": ("W_A − W_B", "o-"),
        "inputs_apart": ("H_A − H_B", "s-"),
        "commutativity": ("their product", "k^-"),
    },
}
#: What belongs to the pair alone, whatever α is.
WHOLE = ("baseline", "commutativity", "sign_agreement", "weights_apart", "inputs_apart")


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """One panel per way over the layers, means over pairs; with the form "features" the line of errors below each."""
    form, ways = plan["settings"]["form"], list(dict.fromkeys((row["way"], row["statistics"]) for row in rows))
    high, across = 2 if form == "features" else 1, max(2, min(MAX_COLUMNS, len(ways)))
    deep = high * ceil(len(ways) / across)
    figure = new_figure(2.1 * across, 2 * deep)
    grid = figure.subplots(deep, across, squeeze=False)
    for spare in grid.flat:
        spare.set_visible(False)
    for number, (way, statistics) in enumerate(ways):
        own = [row for row in rows if (row["way"], row["statistics"]) == (way, statistics)]
        place, column = high * (number // across), number % across
        upper = _shown(grid[place, column], beside=grid[0, 0])
        _layers(upper, form, [row for row in own if "layer" in row])
        upper.set_title(f"{way}{', statistics reset' if statistics == 'reset' else ''}", fontsize=8)
        upper.set_ylabel("" if column else "1 − cos" if form == "features" else "relative size")
        if high > 1:
            lower = _shown(grid[place + 1, column], beside=grid[1, 0])
            _line_connectivity_pictures(lower, [row for row in own if "t" in row])
            lower.set_ylabel("" if column else "error, %")
    legend_below(figure, [grid[0, 0]])
    return figure


def _shown(axes: Axes, beside: Axes) -> Axes:
    """A panel that is used, on the scale of the first of its kind."""
    axes.set_visible(True)
    if axes is not beside:
        axes.sharey(beside)
    return axes


def _layers(axes: Axes, form: str, rows: Sequence[Row]) -> None:
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    alphas = sorted({row["alpha"] for row in rows})
    for name, (words, style) in LINES[form].items():
        for alpha in alphas[:1] if name in WHOLE else alphas:
            values: dict[int, list[float]] = {}
            for row in rows:
                if row["alpha"] == alpha and name in row:
                    values.setdefault(layers.index(row["layer"]), []).append(row[name])
            points = {x: summary(some)[0] for x, some in values.items()}
            label = words if name in WHOLE else f"{words}, α = {alpha:g}"
            axes.plot(list(points), list(points.values()), style, markersize=3, linewidth=1, label=label)
    name_ticks(axes, layers)
    axes.set_xlabel("layer", fontsize=7)


def _line_connectivity_pictures(axes: Axes, rows: Sequence[Row]) -> None:
    """The error along the line, every pair."""
    for pair in dict.fromkeys(row["pair"] for row in rows):
        own = [row for row in rows if row["pair"] == pair]
        axes.plot([row["t"] for row in own], [100 * row["error"] for row in own], "-", color="C0", linewidth=1)
    axes.set_xlabel("from network A to network B", fontsize=7)


# ----------------------------------------------------------------------------------------------------
# Connectivity: pairs of networks layer by layer and along the line between them (Zhou et al. 2023).
#
# Each pair is looked at in several ways: two networks that were spawned from one, two that were trained apart, and those
# two again after the second was moved onto the first. With BatchNorm everything is measured twice: with the statistics as
# they are mixed, which is what the paper's code does, and with statistics estimated again.


#: How the two networks of a pair came to be where they are; the others are names of ways to align.
SPAWNED, INDEPENDENT = "spawned", "independent"
#: Part of a paper's argument → what of a layer belongs to it.
FORMS: Mapping[str, tuple[str, ...]] = {
    "features": ("llfc", "baseline", "c", "c_std"),
    "conditions": ("additivity", "sign_agreement", "commutativity"),
    "factors": ("weights_apart", "inputs_apart", "commutativity"),
}
#: What of a layer → its name in series.
NAMES: Mapping[str, str] = {
    "llfc": "mix",
    "baseline": "networks",
    "additivity": "weak additivity",
    "sign_agreement": "sign agreement",
    "commutativity": "commutativity",
    "weights_apart": "weights apart",
    "inputs_apart": "inputs apart",
}
PERCENT = 100.0


@dataclass(frozen=True)
class ConnectivitySettings:
    """The table [connectivity].

    Attributes:
        form: which part of the argument is told (`FORMS`); all parts are measured. ways: "spawned", "independent", or a
            method of `intertwine.align` that is applied to the independent pair.
        independent: recipe and changes of the networks that share nothing. layers: classes of the modules that are
            looked at. alphas: weights of the first network in the mix.
        samples: test images that features are compared on; the line is taken on all. seen: training images for methods
            and statistics that need data. points: on the line.
    """

    form: str
    ways: list[str] = field(default_factory=lambda: [SPAWNED, INDEPENDENT, "weights", "activations"])
    independent: Mapping[str, Any] = field(default_factory=lambda: {"recipe": "zhou-independent"})
    layers: list[str] = field(default_factory=lambda: ["Conv2d", "Linear", "ReLU"])
    alphas: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.75])
    samples: int = 10_000
    seen: int = 10_000
    points: int = 25

    def check(self, plan: ExperimentPlan, where: str) -> None:
        """Refuse words that nothing is known of."""
        for word, known in [(self.form, FORMS), *((way, (SPAWNED, INDEPENDENT, *SOLVERS)) for way in self.ways)]:
            if word not in known:
                raise InputError(f"{where}: [connectivity] says {word!r}; it may say {', '.join(known)}.")
        unknown = sorted(set(self.independent) - {"recipe", "changes"})
        if unknown:
            raise InputError(f"{where}: [connectivity] independent has {unknown[0]!r}; it has recipe and changes.")


# -- rows --------------------------------------------------------------------------------------------------------------


def run(work: Work) -> list[Row]:
    """Rows of layers and rows of points on the line, those that the form of the plan needs."""
    sources = {SPAWNED: work.sources}
    if set(work.plan.settings.ways) != {SPAWNED}:
        sources[INDEPENDENT] = trained(_apart(work.plan), work.data, work.folder, work.device, work.tell)
    rows = work.per_pair(lambda pair, _: _pair(work, pair, sources))
    return [kept for row in rows if (kept := _of_form(row, work.plan.settings.form))]


def _apart(plan: ExperimentPlan) -> ExperimentPlan:
    """The plan of the networks that share nothing."""
    networks, changes = networks_of(plan), plan.settings.independent
    return replace(plan, networks=replace(networks, name=f"{networks.name}-independent", **changes))


def _of_form(row: Row, form: str) -> Row | None:
    """What a part of the argument needs of a row: results hold nothing else."""
    if "t" in row:
        return row if form == "features" else None
    values = {name: row[name] for name in FORMS[form] if row.get(name) is not None}
    own = set(row) - set(NAMES) - {"c", "c_mean", "c_std", "additivity_residual", "notes"}
    return {name: row[name] for name in row if name in own} | values if values else None


def _pair(work: Work, pair: NetworkPair, sources: Mapping[str, Sequence[NetworkSource]]) -> Iterator[Row]:
    settings, data = work.plan.settings, work.data
    seen = _batches(work, "train", min(settings.seen, len(data.labels)))
    test = _batches(work, "test", len(data.test_labels))
    compared = _batches(work, "test", min(settings.samples, len(data.test_labels)))
    known: Symmetry | None = None
    for way in settings.ways:
        places = sources[SPAWNED if way == SPAWNED else INDEPENDENT]
        a, b = (places[place].seed(seed) for place, seed in (pair.front, pair.back))
        if way in SOLVERS:
            known = known or symmetry(a, torch.zeros(1, *data.shape))
            a, b = _aligned(a, b, way, seen, known, work)
        a, b = a.to(work.device), b.to(work.device)
        layers = [path for path, module in a.named_modules() if type(module).__name__ in settings.layers]
        for statistics, reset in [("mixed", None), *([("reset", seen)] if batch_norms(a) else [])]:
            about = {"way": way, "statistics": statistics}
            found = connectivity(a, b, compared, settings.alphas, layers, reset_statistics=reset)
            yield from (about | row for row in found.to_rows())
        line = barrier(a, b, test, settings.points, seen if batch_norms(a) else None)
        yield from _line(way, line)


def _batches(work: Work, split: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first images of a part, in batches on the device."""
    data = work.data.subset(**{split: count}).to(work.device)
    return list(data.batches(split, min(500, count)))


def _aligned(
    a: nn.Module, b: nn.Module, method: str, seen: Any, known: Symmetry, work: Work
) -> tuple[nn.Module, nn.Module]:
    """The first network, and the second moved onto it."""
    # descent is many small steps, which a CPU does sooner; what looks at data runs where the networks run
    place = work.device if SOLVERS[method].needs_data else torch.device("cpu")
    data = seen if SOLVERS[method].needs_data else None
    found = align(a.to(place), b.to(place), method=method, data=data, symmetry=known)
    return found.reference, found.model


def _line(way: str, found: Barrier) -> Iterator[Row]:
    lines = {"mixed": found.without_reset or found} | ({"reset": found} if found.without_reset else {})
    for statistics, line in lines.items():
        for row in line.to_rows():
            yield {"way": way, "statistics": statistics} | {name: row[name] for name in ("t", "loss", "error")}


# -- numbers -----------------------------------------------------------------------------------------------------------


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series such as "spawned: mix" → layer → one value per pair; the largest over α where there are several."""
    found: Numbers = {}
    shown = [name for name in FORMS[plan["settings"]["form"]] if name in NAMES]
    largest: dict[tuple[str, str, int], float] = {}
    for row in rows:
        for name in shown if "layer" in row else ():
            if name in row:
                key = (f"{_way(row)}: {NAMES[name]}", row["layer"], row["pair"])
                largest[key] = max(row[name], largest.get(key, row[name]))
    for (series, layer, _), value in largest.items():
        found.setdefault(series, {}).setdefault(layer, []).append(value)
    _add_ratios(found)
    _add_lines(found, [row for row in rows if "t" in row])
    return found


def _way(row: Row) -> str:
    return row["way"] + (", statistics reset" if row["statistics"] == "reset" else "")


def _add_ratios(found: Numbers) -> None:
    """How far the mix is from the mix of features, in units of how far the networks are from each other."""
    for series in [name for name in found if name.endswith(": mix")]:
        apart = found[series.removesuffix("mix") + "networks"]
        found[f"{series} / networks"] = {
            layer: [mix / whole for mix, whole in zip(values, apart[layer], strict=True) if whole > 0]
            for layer, values in found[series].items()
            if layer in apart
        }


def _add_lines(found: Numbers, rows: Sequence[Row]) -> None:
    """Barriers in points, and how far the error lies above the sum of those of the ends (the lemma LLFC ⇒ LMC)."""
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        lines.setdefault((_way(row), row["pair"]), []).append(row)
    for (way, _), line in lines.items():
        first, last = line[0], line[-1]
        for name, unit in (("error", PERCENT), ("loss", 1.0)):
            excess = [row[name] - (1 - row["t"]) * first[name] - row["t"] * last[name] for row in line[1:-1]]
            found.setdefault(f"{way}: barrier", {}).setdefault(name, []).append(unit * max(excess))
        bound = first["error"] + last["error"]
        over = PERCENT * max(row["error"] - bound for row in line)
        found.setdefault(f"{way}: error above Err_A + Err_B", {}).setdefault("largest", []).append(over)


CONNECTIVITY = ExperimentKind(ConnectivitySettings, run, numbers, draw)
