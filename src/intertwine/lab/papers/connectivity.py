"""Kind "connectivity": pairs of networks layer by layer and on the line between them (Zhou et al. 2023).

A pair is measured in several ways: two networks spawned from one, two trained independently, and these two after the
second was aligned to the first. With BatchNorm everything is measured twice: with mixed statistics, as in the paper's
code, and with re-estimated ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

import torch

from intertwine.align.align import SOLVERS, align
from intertwine.connect.barrier import barrier
from intertwine.connect.connectivity import connectivity
from intertwine.data.batchnorm import batch_norms
from intertwine.errors import InputError, unknown_name
from intertwine.figures import MAX_COLUMNS, legend_below, name_ticks, new_figure
from intertwine.lab.papers.plan import ExperimentKind, ExperimentPlan, Numbers, Row, gathered, grouped
from intertwine.lab.papers.work import NetworkPair, NetworkSource, Work, networks_of, trained
from intertwine.stitch.result import summary
from intertwine.symmetry.symmetry import Symmetry, symmetry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Form → entry of a row → its label and line style.
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
#: Entries that do not depend on α.
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
            for line in grouped([row for row in own if "t" in row], lambda row: row["pair"]).values():
                lower.plot([row["t"] for row in line], [100 * row["error"] for row in line], color="C0", linewidth=1)
            lower.set_xlabel("from network A to network B", fontsize=7)
            lower.set_ylabel("" if column else "error, %")
    legend_below(figure, [grid[0, 0]])
    return figure


def _shown(axes: Axes, beside: Axes) -> Axes:
    """Show a panel, on the scale of the first of its kind."""
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


#: Origins of the two networks of a pair; all other ways are alignment methods.
SPAWNED, INDEPENDENT = "spawned", "independent"
#: Part of the paper's argument → its entries.
FORMS: Mapping[str, tuple[str, ...]] = {
    "features": ("llfc", "baseline", "c", "c_std"),
    "conditions": ("additivity", "sign_agreement", "commutativity"),
    "factors": ("weights_apart", "inputs_apart", "commutativity"),
}
#: Entry → its name in series.
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
        form: the part of the argument in the rows (`FORMS`); all parts are measured. ways: "spawned", "independent", or
            a method of `intertwine.align` for the independent pair.
        independent: recipe and changes of the independent networks. layers: classes of the compared modules.
        alphas: weights of the first network in the mix. samples: test images for features; the line uses all of them.
        seen: training images for methods and statistics that need data. points: on the line.
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
        """Refuse unknown names."""
        ways = (SPAWNED, INDEPENDENT, *SOLVERS)
        for what, name, known in [("form", self.form, FORMS), *(("way", way, ways) for way in self.ways)]:
            if name not in known:
                raise InputError(f"{where}: [connectivity] {unknown_name(what, name, known)}")
        unknown = sorted(set(self.independent) - {"recipe", "changes"})
        if unknown:
            raise InputError(
                f"{where}: [connectivity] independent: {unknown_name('entry', unknown[0], ('recipe', 'changes'))}"
            )


# -- rows --------------------------------------------------------------------------------------------------------------


def run(work: Work) -> list[Row]:
    """Rows of layers and rows of points on the line, as the form of the plan needs them."""
    sources, settings = {SPAWNED: work.sources}, work.plan.settings
    if set(settings.ways) != {SPAWNED}:
        sources[INDEPENDENT] = trained(independent(work.plan), work.data, work.folder, work.device, work.progress)
    rows = work.per_pair(lambda pair, _: _pair(work, pair, sources))
    return [kept for row in rows if (kept := _of_form(row, settings.form))]


def independent(plan: ExperimentPlan) -> ExperimentPlan:
    """The plan of the independent networks."""
    networks = networks_of(plan)
    other = replace(networks, name=f"{networks.name}-independent", **plan.settings.independent)
    return replace(plan, networks=other)


def _of_form(row: Row, form: str) -> Row | None:
    """The entries of a row that a part of the argument needs."""
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
            # descent is many small steps, which a CPU does sooner; methods that need data run where the networks run
            needs_data = SOLVERS[way].needs_data
            place = work.device if needs_data else torch.device("cpu")
            found = align(a.to(place), b.to(place), method=way, data=seen if needs_data else None, symmetry=known)
            a, b = found.reference, found.model
        a, b = a.to(work.device), b.to(work.device)
        layers = [path for path, module in a.named_modules() if type(module).__name__ in settings.layers]
        for statistics, reset in [("mixed", None), *([("reset", seen)] if batch_norms(a) else [])]:
            about = {"way": way, "statistics": statistics}
            rows = connectivity(a, b, compared, settings.alphas, layers, reset_statistics=reset).to_rows()
            yield from (about | row for row in rows)
        whole = barrier(a, b, test, settings.points, seen if batch_norms(a) else None)
        lines = {"mixed": whole.without_reset, "reset": whole} if whole.without_reset else {"mixed": whole}
        for statistics, line in lines.items():
            for row in line.to_rows():
                yield {"way": way, "statistics": statistics} | {name: row[name] for name in ("t", "loss", "error")}


def _batches(work: Work, split: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first images of a part, in batches on the device."""
    data = work.data.subset(**{split: count}).to(work.device)
    return list(data.batches(split, min(500, count)))


# -- numbers -----------------------------------------------------------------------------------------------------------


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series such as "spawned: mix" → layer → one value per pair; the largest over α where there are several."""
    shown = [name for name in FORMS[plan["settings"]["form"]] if name in NAMES]
    largest: dict[tuple[str, str, int], float] = {}
    for row in rows:
        for name in shown if "layer" in row else ():
            if name in row:
                key = (f"{_way(row)}: {NAMES[name]}", row["layer"], row["pair"])
                largest[key] = max(row[name], largest.get(key, row[name]))
    found = gathered((series, layer, [value]) for (series, layer, _), value in largest.items())
    for series in [name for name in found if name.endswith(": mix")]:
        apart = found[series.removesuffix("mix") + "networks"]
        found[f"{series} / networks"] = {  # distance from the mix relative to the distance of the networks
            layer: [mix / whole for mix, whole in zip(values, apart[layer], strict=True) if whole > 0]
            for layer, values in found[series].items()
            if layer in apart
        }
    return found | gathered(_on_lines([row for row in rows if "t" in row]))


def _way(row: Row) -> str:
    return row["way"] + (", statistics reset" if row["statistics"] == "reset" else "")


def _on_lines(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[float]]]:
    """Barriers in points, and how far the error exceeds the sum of those of the ends (the lemma LLFC ⇒ LMC)."""
    for (way, _), line in grouped(rows, lambda row: (_way(row), row["pair"])).items():
        first, last = line[0], line[-1]
        for name, unit in (("error", PERCENT), ("loss", 1.0)):
            excess = [row[name] - (1 - row["t"]) * first[name] - row["t"] * last[name] for row in line[1:-1]]
            yield f"{way}: barrier", name, [unit * max(excess)]
        over = max(row["error"] - first["error"] - last["error"] for row in line)
        yield f"{way}: error above Err_A + Err_B", "largest", [PERCENT * over]


CONNECTIVITY = ExperimentKind(ConnectivitySettings, run, numbers, draw)
