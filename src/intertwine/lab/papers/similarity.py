"""Kind "similarity": Procrustes and CKA between layers of equally trained networks (Godfrey et al. 2022, section 5).

Procrustes as printed (definition 5.2, section D.7.1 and the published code): features are not centred; channels that
are zero on all images stay in the divisor of G_ReLU-Procrustes and raise it; the orthogonal one divides by one number
where the other divides every channel by its length, so that the two have different scales. Corrected: centred,
without dead channels, and both with channels of length 1, so that the orthogonal value is the larger one, as the
paper says.

CKA as printed (definition 5.3, section D.7.2 and the published code): every channel is centred over images and
positions and divided by its length, also for the "orthogonal" CKA, which is then not invariant to rotations. G_ReLU
takes the maximum over channels, where a dead channel is a zero. Corrected: dead channels are left out of the maximum,
and the orthogonal one is linear CKA of unscaled channels. All use HSIC₁, which is unbiased.

Numbers of Procrustes: series → layer → one value per pair, and "…, unrelated" beside each. Numbers of CKA: "SERIES,
ROW" → column → values; "SERIES, diagonal"; "SERIES, other layers" (the mean of a row without its diagonal); and
"SERIES, whole matrix" with the largest and the smallest of the mean over pairs. "…, around" is, at a layer inside a
residual block, the mean of the layers before and behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from intertwine.data.features import features
from intertwine.data.layouts import arrange
from intertwine.errors import InputError, unknown_name
from intertwine.figures import PAGE_WIDTH, legend_below, new_figure, panels_in_rows, write_cells
from intertwine.lab.papers.plan import ExperimentKind, Numbers, Row, gathered
from intertwine.lab.papers.work import Work
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.measure.cka import CentredGram, centred_alignment, centred_gram
from intertwine.measure.kernel_cka import relu_cka, unit_channels
from intertwine.measure.measure import Measure, Representation, represent
from intertwine.measure.procrustes import columns, orthogonal_procrustes, relu_procrustes
from intertwine.measure.streaming import StreamingMoments
from intertwine.stitch.result import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: "procrustes": each layer with the same layer of the other network. "cka": every layer with every layer.
FAMILIES = ("procrustes", "cka")


@dataclass(frozen=True)
class SimilaritySettings:
    """The table [similarity].

    Attributes:
        family: of `FAMILIES`. at: the layers, the paper's name of each → its module path; those inside residual blocks
            have a star. images: the number of test images, by default all of them. batch: images per batch.
    """

    family: str
    at: dict[str, str]
    images: int | None = None
    batch: int = 250

    def check(self, plan: Any, where: str) -> None:
        """Refuse an unknown family."""
        if self.family not in FAMILIES:
            raise InputError(f"{where}: {unknown_name('family', self.family, FAMILIES)}")


# -- Measurements --


def unit_orthogonal() -> Measure:
    """Orthogonal Procrustes similarity of centred channels of length 1; constant ones are left out.

    Example:
        >>> x = torch.randn(50, 3).relu()
        >>> scaled = x * torch.tensor([1.0, 10.0, 100.0])
        >>> round(unit_orthogonal()(x, scaled).value, 5), orthogonal_procrustes()(x, scaled).value < 0.9
        (1.0, True)
    """
    plain = orthogonal_procrustes(center=False)

    def prepare(x: Representation) -> object:
        unit = columns(x, center=True, each=True)
        live = unit.x[:, unit.live] if len(unit.live) else unit.x
        return plain.prepare_with(Representation(live, x.eps))

    return replace(plain, prepare_with=prepare)


#: Series → the measure behind it.
MEASURES: dict[str, Callable[[], Measure]] = {
    "G_ReLU, as printed": lambda: relu_procrustes(center=False, dead="paper"),
    "G_ReLU, without dead channels": lambda: relu_procrustes(center=False),
    "G_ReLU, corrected": relu_procrustes,
    "orthogonal, as printed": lambda: orthogonal_procrustes(center=False),
    "orthogonal, corrected": unit_orthogonal,
}


def procrustes_rows(front: nn.Module, back: nn.Module, data: Dataset, settings: SimilaritySettings) -> list[Row]:
    """One row per layer: `values` and `unrelated` by series, and the share of `dead` channels in each network.

    `unrelated`: the similarity after the rows of one network are shuffled.
    """
    streams = {at: StreamingMoments([(at, at)], baseline=True) for at in settings.at.values()}
    ends = [features(model, data.batches("test", settings.batch), settings.at.values()) for model in (front, back)]
    alive: list[dict[str, Tensor]] = [{}, {}]
    for batch in zip(*ends, strict=True):
        for layer in ends[0].layers:
            x, y = (arrange(side[layer.name], "channels", layer.layout) for side in batch)
            streams[layer.name].update({layer.name: x}, {layer.name: y})
            for known, rows in zip(alive, (x, y), strict=True):
                known[layer.name] = (rows != 0).any(0) | known.get(layer.name, torch.tensor(False))
    return [
        {"label": label, "dead": [1 - float(side[at].double().mean()) for side in alive], **_values(streams[at], at)}
        for label, at in settings.at.items()
    ]


def _values(stream: StreamingMoments, at: str) -> Row:
    found = dict(zip(MEASURES, stream.results([make() for make in MEASURES.values()], at, at), strict=True))

    def known(value: float | None) -> float | None:  # layers that are zero everywhere have no value
        return value if value is not None and isfinite(value) else None

    values = {series: known(result.value) for series, result in found.items()}
    return {"values": values, "unrelated": {series: known(result.baseline) for series, result in found.items()}}


#: Bytes of Gram matrices in memory; those of one network serve all its pairs.
KEPT = 8e9
#: Of one network: (series, layer) → Gram matrix, and layer → share of channels that are zero on all images.
Shown = tuple[dict[tuple[str, str], CentredGram], dict[str, float]]


def _linear(x: Tensor) -> CentredGram:
    flat = x.flatten(1)
    return centred_gram(flat @ flat.T)


#: Series → function from a layer (images, channels, positions) to its Gram matrix.
KERNELS: dict[str, Callable[[Representation], CentredGram]] = {
    "G_ReLU, as printed": relu_cka(dead="zero").prepare_with,
    "G_ReLU, corrected": relu_cka().prepare_with,
    "orthogonal, as printed": lambda x: _linear(unit_channels(x)[0].transpose(0, 1)),
    "orthogonal, corrected": lambda x: _linear(x.centred),
}


def gram_matrices(model: nn.Module, data: Dataset, settings: SimilaritySettings) -> Shown:
    """The Gram matrices and dead channels of one network."""
    held = features(model, data.batches("test", settings.batch), settings.at.values()).collect("structured")
    grams: dict[tuple[str, str], CentredGram] = {}
    dead = {}
    for at in settings.at.values():
        x = held[at]
        dead[at] = 1 - float((x != 0).any(2).any(0).double().mean())
        seen = represent(x)
        grams |= {(series, at): kernel(seen) for series, kernel in KERNELS.items()}
    return grams, dead


def cka_rows(first: Shown, second: Shown, settings: SimilaritySettings) -> list[Row]:
    """One row per kernel: its `matrix`, the first network's layers from top to bottom; and one of `dead` channels."""
    (a, dead), (b, others), places = first, second, settings.at.values()
    rows: list[Row] = []
    for series in KERNELS:
        table = [[centred_alignment(series, a[series, x], b[series, y]).value for y in places] for x in places]
        rows.append({"series": series, "matrix": [[_value(value) for value in line] for line in table]})
    return [*rows, {"series": "dead channels", "dead": [[dead[at], others[at]] for at in places]}]


def _value(found: float) -> float | None:
    """Six decimals; None where there is no value, as of constant layers."""
    return round(found, 6) if isfinite(found) else None


def kept(images: int, layers: int) -> int:
    """The number of networks whose Gram matrices fit in memory, at least two.

    >>> kept(2000, 19), kept(10000, 19)
    (6, 2)
    """
    return max(2, int(KEPT // (len(KERNELS) * layers * images**2 * 4)))


# -- Numbers --


Matrix = list[list[float | None]]
DEAD = "dead channels"


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series → label → one value per pair."""
    procrustes = plan["settings"]["family"] == "procrustes"
    found = _procrustes(rows) if procrustes else _cka(plan, rows)
    along = [series for series in found if (series in MEASURES if procrustes else series.endswith(", diagonal"))]
    around = {f"{series}, around": _around(found[series], list(plan["settings"]["at"])) for series in along}
    return found | {series: values for series, values in around.items() if values}


def _around(values: Mapping[str, Sequence[float]], labels: Sequence[str]) -> dict[str, list[float]]:
    """At each layer with a star, the mean of its neighbours, per pair."""
    inside = [(i, label) for i, label in enumerate(labels) if label.endswith("*") and 0 < i < len(labels) - 1]
    return {
        label: [fmean(two) for two in zip(values.get(labels[i - 1], []), values.get(labels[i + 1], []), strict=False)]
        for i, label in inside
    }


def _procrustes(rows: Sequence[Row]) -> Numbers:
    def values(row: Row) -> dict[str, float | None]:
        unrelated = {f"{series}, unrelated": value for series, value in row["unrelated"].items()}
        return row["values"] | unrelated | {DEAD: fmean(row["dead"])}

    every = ((series, row["label"], value) for row in rows for series, value in values(row).items())
    return gathered((series, label, [value]) for series, label, value in every if value is not None)


def _cka(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    labels = list(plan["settings"]["at"])

    def points() -> Iterator[tuple[str, str, float | None]]:
        for row in rows:
            if "matrix" not in row:
                yield from ((DEAD, label, fmean(shares)) for label, shares in zip(labels, row["dead"], strict=True))
                continue
            for i, (label, line) in enumerate(zip(labels, row["matrix"], strict=True)):
                yield from ((f"{row['series']}, {label}", column, v) for column, v in zip(labels, line, strict=True))
                yield f"{row['series']}, diagonal", label, line[i]
                yield f"{row['series']}, other layers", label, _mean([*line[:i], *line[i + 1 :]])
        for series, mean in means(rows).items():
            known = [value for line in mean for value in line if value is not None]
            yield f"{series}, whole matrix", "largest", max(known, default=None)
            yield f"{series}, whole matrix", "smallest", min(known, default=None)

    return gathered((series, label, [value]) for series, label, value in points() if value is not None)


def means(rows: Sequence[Row]) -> dict[str, Matrix]:
    """Series → the mean of its matrices over pairs; None where no pair has a value.

    >>> means([{"series": "a", "matrix": [[1.0, None]]}, {"series": "a", "matrix": [[2.0, None]]}])
    {'a': [[1.5, None]]}
    """
    held: dict[str, list[Matrix]] = {}
    for row in rows:
        if "matrix" in row:
            held.setdefault(row["series"], []).append(row["matrix"])
    return {
        series: [[_mean(cell) for cell in zip(*lines, strict=True)] for lines in zip(*some, strict=True)]
        for series, some in held.items()
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# -- Figure --


NAN = float("nan")
#: Maps of fewer layers have numbers in their cells.
SMALL = 8


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """The figure of a plan."""
    return _lines(plan, rows) if plan["settings"]["family"] == "procrustes" else _heat_maps(plan, rows)


def _lines(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Above as printed, with the printed values dotted; below corrected; pale the values of unrelated features."""
    labels, found = list(plan["settings"]["at"]), numbers(plan, rows)
    figure = new_figure(min(PAGE_WIDTH, 5.1 + 0.26 * max(5, len(labels))), 5.2)
    above, below = figure.subplots(2, 1, sharex=True, sharey=True)
    for i, series in enumerate(MEASURES):
        axes = above if series.endswith("as printed") else below
        _line(axes, labels, found.get(series, {}), color=f"C{i}", label=series)
        _line(axes, labels, found.get(f"{series}, unrelated", {}), color=f"C{i}", alpha=0.35, linestyle="--")
        if series in plan["printed"]:
            name = f"{series}: the paper's"
            above.plot(range(len(labels)), plan["printed"][series], "x:", color=f"C{i}", markersize=4, label=name)
    shares = [summary(found.get(DEAD, {}).get(label, [0.0]))[0] for label in labels]
    below.bar(range(len(labels)), shares, color="0.85", zorder=0, label="share of dead channels")
    below.set_xticks(range(len(labels)), labels, fontsize=8)
    below.set_xlabel("layer" + (", * inside a residual block" if any("*" in label for label in labels) else ""))
    above.plot([], [], "o--", color="0.4", alpha=0.5, markersize=3, label="pale: unrelated features")
    for axes in (above, below):
        axes.set_ylabel("similarity")
    legend_below(figure)
    return figure


def _line(axes: Axes, labels: Sequence[str], values: Mapping[str, Sequence[float]], **style: Any) -> None:
    held = [(i, summary(values[label])) for i, label in enumerate(labels) if values.get(label)]
    axes.errorbar(
        [i for i, _ in held], [mean for _, (mean, _) in held], [spread for _, (_, spread) in held], marker="o",
        markersize=3, capsize=2, linewidth=1.2, **style,
    )  # fmt: skip


def _heat_maps(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """One map per kernel, on the scale from 0 to 1; below, the printed ones. Maps of many layers are two a row."""
    labels = list(plan["settings"]["at"])
    printed = {series: _printed(plan, series, labels) for series in KERNELS}
    found = means(rows)
    shown: list[tuple[str, Any]] = [(series, found.get(series, [])) for series in KERNELS]
    if any(printed.values()):
        shown += [(f"{series}: the paper's", printed[series]) for series in KERNELS]
    across, size = (len(KERNELS), 2.0) if len(labels) < SMALL else (2, 3.8)
    figure, panels = panels_in_rows(len(shown), size, size, across)
    for axes, (title, matrix) in zip(panels, shown, strict=True):
        _heat_map(axes, matrix, labels, title)
    figure.colorbar(panels[0].images[0], ax=panels, shrink=0.8, label="CKA")
    return figure


def _printed(plan: Mapping[str, Any], series: str, labels: Sequence[str]) -> list[list[float | None]]:
    held = [plan["printed"].get(f"{series}, {label}") for label in labels]
    return [] if any(line is None for line in held) else [line for line in held if line is not None]


def _heat_map(axes: Axes, matrix: Sequence[Sequence[float | None]], labels: Sequence[str], title: str) -> None:
    if not matrix:
        axes.axis("off")
        return
    axes.imshow([[NAN if v is None else v for v in line] for line in matrix], vmin=0, vmax=1, cmap="viridis")
    axes.set_title(title, fontsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(len(labels)), labels, fontsize=7)
    axes.set_xlabel("layer", fontsize=7)
    if len(labels) < SMALL:
        write_cells(axes)
    else:
        axes.tick_params(axis="x", rotation=90)


def run(work: Work) -> list[Row]:
    """The rows of all pairs."""
    settings: SimilaritySettings = work.plan.settings
    data = work.placed if settings.images is None else work.data.subset(test=settings.images).to(work.device)

    @lru_cache(maxsize=kept(len(data.test_labels), len(settings.at)))
    def grams(end: tuple[int, int]) -> Shown:
        return gram_matrices(work.network(end), data, settings)

    if settings.family == "cka":
        return work.per_pair(lambda pair, folder: cka_rows(grams(pair.front), grams(pair.back), settings))
    return work.per_pair(
        lambda pair, folder: procrustes_rows(work.network(pair.front), work.network(pair.back), data, settings)
    )


SIMILARITY = ExperimentKind(SimilaritySettings, run, numbers, draw)
