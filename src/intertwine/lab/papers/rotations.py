"""Kinds "rotation" and "dissection": accuracy lost and interpretable units left in rotated bases of the features
(Godfrey et al. 2022, figures 3, 4, 18, 19).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError, unknown_name
from intertwine.figures import legend_below, new_figure
from intertwine.inspect.dissection import draw_fractions
from intertwine.inspect.rotation_penalty import draw_bars, rotation_penalty
from intertwine.inspect.rotation_scan import rotation_scan
from intertwine.lab.papers.plan import ExperimentKind, ExperimentPlan, Numbers, Row, check_single_networks, gathered
from intertwine.lab.papers.work import NetworkPair, Work, groups
from intertwine.lab.zoo.augment import TrainingBatches
from intertwine.lab.zoo.datasets.concepts import ConceptImages, concept_images
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.folder import Zoo
from intertwine.lab.zoo.recipe import recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Kind of transform → its name in the paper. "control": training on without a transform.
TRANSFORM_NAMES = {"relu": "G_ReLU", "orthogonal": "orthogonal", "identity": "control"}
#: Suffix of series → entry of a row: the penalty at the best epoch on the test images, and at the last epoch.
PENALTY_FORMS = {"as printed": "best_penalty", "corrected": "penalty"}


@dataclass(frozen=True)
class RotationSettings:
    """The table [rotation].

    Attributes:
        at: convolutions, the paper's name of each → its module path. trials: transforms of each kind per network.
        epochs, rate: of the training of the layers behind. batches: the recipe of its batches and augmentation.
        batch: images per batch, by default those of the recipe.
    """

    at: dict[str, str]
    trials: int = 1
    epochs: int = 50
    rate: float = 1e-3
    batches: str = "godfrey"
    batch: int | None = None

    def check(self, plan: ExperimentPlan, where: str) -> None:
        """Refuse pairs of different networks."""
        check_single_networks(plan, where)


def run_rotation(work: Work) -> list[Row]:
    """One row per network, layer, kind of transform and trial; the control has one trial per network and layer."""

    def find(pair: NetworkPair, folder: Path) -> Iterator[Row]:
        settings: RotationSettings = work.plan.settings
        network, how = work.network(pair.front), recipe(settings.batches, batch=settings.batch)
        names = {place: label for label, place in settings.at.items()}
        seeds = [pair.number * settings.trials + trial for trial in range(settings.trials)]
        for kinds, some in ((("identity",), seeds[:1]), (("relu", "orthogonal"), seeds)):
            found = rotation_penalty(
                network, list(names), TrainingBatches(work.placed, how), work.placed.batches("test"), kind=kinds,
                seeds=some, epochs=settings.epochs, rate=settings.rate, out=folder / kinds[0],
            )  # fmt: skip
            yield from ({"label": names[trial.at]} | trial.to_dict() for trial in found.trials)

    return work.per_pair(find)


def rotation_numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Percentage points of accuracy, by layer."""
    return gathered(
        (f"{TRANSFORM_NAMES[row['kind']]}, {form}", row["label"], [100 * row[entry]])
        for row in rows
        for form, entry in PENALTY_FORMS.items()
    )


def draw_rotation(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Bars per layer, one per kind, as printed; crosses are the paper's."""
    found = {series: values for series, values in rotation_numbers(plan, rows).items() if series.endswith("as printed")}
    labels = list(plan["settings"]["at"])
    table = {(label, series): found[series][label] for label in labels for series in found}
    known = {series: dict(zip(labels, values, strict=True)) for series, values in plan["printed"].items()}
    crosses = {(label, series): known[series][label] for label, series in table if series in known}
    figure = draw_bars(table, "rotation penalty, percentage points", crosses=crosses, cross_label="the paper's")
    figure.axes[0].set_xlabel("convolution")
    return figure


ROTATION = ExperimentKind(RotationSettings, run_rotation, rotation_numbers, draw_rotation)


DISSECTION_FORMS = ("fractions", "categories")


@dataclass(frozen=True)
class DissectionPlan:
    """The table [dissection]. The networks vary in `residual_relu`; pairs are chosen as "self".

    Attributes:
        pictures, test, seed, size, task: the drawn data set; its last `test` pictures are the test images.
        seen, seen_seed: number and seed of the pictures for dissection. at: places. alphas: powers of each rotation.
        form: of the figure, the fraction of interpretable units or their concepts by category.
    """

    pictures: int
    test: int
    seen: int
    at: list[str]
    alphas: list[float]
    rotations: int
    size: int = 32
    task: list[str] = field(default_factory=lambda: ["colour", "shape"])
    seed: int = 0
    seen_seed: int = 1
    form: str = "fractions"

    def check(self, plan: ExperimentPlan, file: str) -> None:
        """Refuse unknown forms, other networks, and pairs of different networks."""
        if self.form not in DISSECTION_FORMS:
            raise InputError(f"{file}: {unknown_name('form', self.form, DISSECTION_FORMS)}")
        if plan.networks is None or set(plan.networks.vary) != {"residual_relu"}:
            raise InputError(
                f"{file}: networks with and without a ReLU are compared. Vary residual_relu in [networks]."
            )
        check_single_networks(plan, file)


#: Names of the two kinds of network.
WITH, WITHOUT = "with residual ReLU", "without"
#: Series of the change from the first α to the last in points, by kind of network.
CHANGE = "change"


def dissection_curves(rows: Sequence[Row]) -> dict[str, dict[float, list[float]]]:
    """Kind of network → α → fractions, one per network and rotation.

    >>> dissection_curves([{"kind": "without", "alpha": 0.5, "fraction": 0.25}])
    {'without': {0.5: [0.25]}}
    """
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        found.setdefault(row["kind"], {}).setdefault(row["alpha"], []).append(row["fraction"])
    return found


def dissection_numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Kind of network → α → interpretable units in percent: one value per network, the mean over rotations."""
    found: Numbers = {kind: {} for kind in (WITH, WITHOUT)} | {CHANGE: {}}
    for kind, network in dict.fromkeys((row["kind"], row["network"]) for row in rows):
        curve = dissection_curves([row for row in rows if (row["kind"], row["network"]) == (kind, network)])[kind]
        means = {alpha: 100 * fmean(curve[alpha]) for alpha in sorted(curve)}
        for alpha, mean in means.items():
            found[kind].setdefault(f"α = {alpha:g}", []).append(mean)
        found[CHANGE].setdefault(kind, []).append(means[max(means)] - means[min(means)])
    return found


def draw_dissection(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Fractions against α, one line per kind of network; with `form = "categories"`, figure 18 instead."""
    if plan["settings"]["form"] == "categories":
        return draw_categories(rows)
    chance = {kind: fmean(row["chance"] for row in rows if row["kind"] == kind) for kind in dissection_curves(rows)}
    figure = draw_fractions(dissection_curves(rows), chance)
    figure.set_size_inches(6.4, 3.8)  # room for the title
    return figure


def draw_categories(rows: Sequence[Row]) -> Figure:
    """Different concepts by category, stacked, one bar per α: the mean over networks and rotations."""
    kinds = list(dissection_curves(rows))
    figure = new_figure(0.8 + 3.6 * len(kinds), 3.6)
    grid: Any = figure.subplots(1, len(kinds), sharey=True, squeeze=False)
    for axes, kind in zip(grid[0], kinds, strict=True):
        _stacked(axes, [row for row in rows if row["kind"] == kind])
        axes.set_title(kind, fontsize=9)
    grid[0][0].set_ylabel("different concepts", fontsize=9)
    legend_below(figure)
    return figure


def _stacked(axes: Axes, rows: Sequence[Row]) -> None:
    alphas = sorted({row["alpha"] for row in rows})
    below = [0.0] * len(alphas)
    for category in rows[0]["by_category"]:
        heights = [fmean(row["by_category"][category] for row in rows if row["alpha"] == alpha) for alpha in alphas]
        axes.bar([f"{alpha:g}" for alpha in alphas], heights, bottom=below, label=category)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xlabel("α, the power of the rotation", fontsize=9)


class DrawnWork(Work):
    """Work on drawn pictures of colours, textures, shapes and parts, instead of ResNet-50 and ConvNeXt on Broden."""

    @cached_property
    def data(self) -> Dataset:
        """The pictures of training and test."""
        settings: DissectionPlan = self.plan.settings
        return concept_images(settings.pictures, settings.seed, settings.size, settings.task).dataset(settings.test)

    @cached_property
    def seen(self) -> ConceptImages:
        """Other pictures with their labels, for dissection."""
        settings: DissectionPlan = self.plan.settings
        return concept_images(settings.seen, settings.seen_seed, settings.size, settings.task)


def run_dissection(work: Work) -> list[Row]:
    """One row per network, place and rotation."""
    drawn = DrawnWork(work.plan, work.folder, work.device, work.progress, work.data_folder)
    return drawn.per_pair(lambda pair, folder: _dissected(drawn, pair))


def _dissected(work: DrawnWork, pair: NetworkPair) -> Iterator[Row]:
    """The rows of one network (both ends of its pair are the same)."""
    settings: DissectionPlan = work.plan.settings
    place, seed = pair.front
    zoo = work.sources[place]
    assert isinstance(zoo, Zoo)
    accuracy = zoo.records[zoo.seeds.index(seed)].accuracy
    about = {"kind": WITH if groups(work.plan)[place].value else WITHOUT, "network": seed, "accuracy": accuracy}
    network, seen = work.network(pair.front), work.seen
    for at in settings.at:
        scan = rotation_scan(
            network, at, seen.inputs(), seen.concepts, settings.alphas, seeds=range(settings.rotations)
        )
        yield from (about | {"chance": scan.chance} | row for row in scan.to_rows())


DISSECTION = ExperimentKind(DissectionPlan, run_dissection, dissection_numbers, draw_dissection)
