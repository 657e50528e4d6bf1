"""Kind "stitching": every pair stitched at every place by every family (Godfrey et al. 2022, Csiszarik et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intertwine.errors import InputError, unknown_name
from intertwine.lab.papers import stitching_figures as figures
from intertwine.lab.papers import stitching_numbers as readings
from intertwine.lab.papers.plan import ExperimentKind, ExperimentPlan, Numbers, Row
from intertwine.lab.papers.stitching_numbers import NUMBERS
from intertwine.lab.papers.work import NetworkPair, Work
from intertwine.lab.zoo.augment import TrainingBatches
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.recipe import Recipe
from intertwine.lab.zoo.recipe import recipe as find_recipe
from intertwine.measure.measure import find
from intertwine.stitch.collection import Stitches
from intertwine.stitch.families.base import MapFamily
from intertwine.stitch.families.linear import Sparse
from intertwine.stitch.families.names import find_family
from intertwine.stitch.families.permutations import Birkhoff
from intertwine.stitch.interpolation import along
from intertwine.stitch.network import StitchedNetwork
from intertwine.stitch.result import Stitch, sparsity
from intertwine.stitch.stitch import cross_validate, split_samples, stitches

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureForm:
    """The numbers and the figure of a form, from the plan as plain data and the rows."""

    numbers: Callable[[Mapping[str, Any], Sequence[Row]], Numbers]
    draw: Callable[[Mapping[str, Any], Sequence[Row]], Any]


FORMS: Mapping[str, FigureForm] = {
    "penalties": FigureForm(readings.penalties, figures.penalties),
    "slopes": FigureForm(readings.slopes, figures.slopes),
    "histograms": FigureForm(readings.histograms, figures.histograms),
    "sparsity": FigureForm(readings.sparsity, figures.sparsity),
    "layers": FigureForm(readings.layers, figures.layers),
    "averages": FigureForm(readings.averages, figures.averages),
    "several": FigureForm(readings.several, figures.several),
    "groups": FigureForm(readings.groups, figures.groups),
    "fronts": FigureForm(readings.groups, figures.fronts),
    "ranks": FigureForm(readings.layers, figures.ranks),
    "starts": FigureForm(readings.starts, figures.starts),
    "iterations": FigureForm(readings.iterations, figures.iterations),
    "lines": FigureForm(readings.lines, figures.lines),
}


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """The numbers of the rows, in the unit of the printed ones."""
    return FORMS[plan["settings"]["form"]].numbers(plan, rows)


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """The figure in the paper's form."""
    return FORMS[plan["settings"]["form"]].draw(plan, rows)


@dataclass(frozen=True)
class StitchingSettings:
    """The table [stitching]. `families` are trained, those of `direct` fitted in closed form.

    Attributes:
        form: of the figure and of its numbers, see `FORMS`. what: the number, or numbers, of a stitch in the figure.
        at: name of a place in the figure → the place.
        batches: the zoo recipe whose batch size and augmentation the training has.
        variants, options: settings of `intertwine.stitch.training` that change the recipe.
        seeds: random starts in one run. orders: runs with other data orders and other seeds.
        threshold: entries up to it count as zero. matrices: whether matrices of the first pair are in the rows.
        alphas: of relu:birkhoff, one chosen by cross-validation after `trial_epochs` of each.
        cka_images: test images for the CKA of stitched and own features; 0 for none.
        line: points on the line between any two stitches of one place; 0 for no lines. good: the least relative
            accuracy of stitches with lines.
    """

    form: str
    what: str | list[str]
    at: Mapping[str, str]
    recipe: str
    batches: str
    families: list[str] = field(default_factory=list)
    direct: list[str] = field(default_factory=list)
    variants: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    orders: int = 1
    skip: str | None = None
    threshold: float = 1e-3
    alphas: list[float] = field(default_factory=list)
    trial_epochs: int = 5
    matrices: bool = False
    cka_images: int = 0
    line: int = 0
    good: float = 0.8

    def check(self, plan: ExperimentPlan, file: str) -> None:
        """Refuse unknown names, and a table without maps."""
        if self.form not in FORMS:
            raise InputError(f"{file}: {unknown_name('form', self.form, FORMS)}")
        for name in [self.what] if isinstance(self.what, str) else self.what:
            if name not in NUMBERS:
                raise InputError(f"{file}: {unknown_name('number of a stitch', name, NUMBERS)}")
        if not (self.families or self.direct or self.alphas):
            raise InputError(f"{file}: [stitching] defines no maps. Set families, direct or alphas.")


def likeness(stitch: Stitch, data: Dataset, images: int) -> Row:
    """Biased linear CKA of the mapped features and the back network's own, on the first test images.

    The baselines of Csiszárik et al. take an image as one sample, with all channels at all positions as its features;
    least squares takes every position as a sample.
    """
    if not isinstance(stitch.model, StitchedNetwork):
        raise TypeError(f"A stitched network was expected; found {type(stitch.model).__name__}.")
    split, point = stitch.model.split, stitch.model.index
    call = (data.inputs(data.test_images[:images]),), {}
    with split.running(), torch.no_grad():
        (features,) = split.front(call, [point])
        moved, own = stitch.map(features.rows), split.targets(call)[point]
    cka = find("linear_cka_biased")
    return {
        "cka_images": cka(moved.flatten(1), own.flatten(1)).value,
        "cka_positions": cka(moved.flatten(0, -2), own.flatten(0, -2)).value,
    }


#: Images in a batch outside of training.
LARGE = 1000


def run(work: Work) -> list[Row]:
    """The rows of all pairs. The matrices of the first are kept where the figure shows them."""

    def matrices(pair: NetworkPair) -> bool:
        return work.plan.settings.matrices and pair.number == 0

    def find(pair: NetworkPair, folder: Path) -> Iterator[Row]:
        models = work.network(pair.front), work.network(pair.back)
        yield from PairStitches(work.plan.settings, models, work.placed, folder, matrices(pair)).rows()

    rows = work.per_pair(find, lambda pair: {"matrices": matrices(pair)})
    shown = figures.shown_matrices(rows)
    for row in rows:
        if not any(row is one for one in shown):
            row.pop("matrix", None)
    return rows


@dataclass(frozen=True)
class PairStitches:
    """All stitches of one pair. `matrices`: whether they are in the rows."""

    settings: StitchingSettings
    models: tuple[nn.Module, nn.Module]
    data: Dataset
    folder: Path
    matrices: bool

    def rows(self) -> Iterator[Row]:
        """Trained in every order, fitted in closed form, and chosen by cross-validation."""
        for order in range(self.settings.orders if self.settings.families else 0):
            yield from self._trained(order)
        if self.settings.direct:
            found = stitches(
                *self.models, self.places, self._families(self.settings.direct), fit="direct",
                data=self.data.batches("train", LARGE), **self.shared,
            )  # fmt: skip
            yield from self._rows(found, {})
        if self.settings.alphas:
            yield from self._chosen()

    @cached_property
    def places(self) -> list[str]:
        return list(self.settings.at.values())

    @cached_property
    def how(self) -> Recipe:
        """Batches and augmentation."""
        return find_recipe(self.settings.batches)

    @property
    def shared(self) -> dict[str, Any]:
        """The options of all fits."""
        return {
            "direct_data": self.data.batches("train", LARGE), "test": self.data.batches("test", LARGE),
            "recipe": self.settings.recipe, "skip": self.settings.skip, **self.settings.options,
        }  # fmt: skip

    def _trained(self, order: int) -> Iterator[Row]:
        seeds = range(order * self.settings.seeds, (order + 1) * self.settings.seeds)
        found = stitches(
            *self.models, self.places, self._families(self.settings.families), fit="task", seeds=seeds,
            data=TrainingBatches(self.data, self.how, order), variants=self.settings.variants,
            out=self.folder / f"order{order}", **self.shared,
        )  # fmt: skip
        yield from self._rows(found, {"order": order})
        if self.settings.line:
            yield from self._lines(found)

    def _families(self, names: Sequence[str]) -> list[MapFamily]:
        """The families of these names; sparse ones set entries up to the plan's threshold to zero."""
        found = map(find_family, names)
        return [
            replace(one, threshold=float(self.settings.threshold)) if isinstance(one, Sparse) else one for one in found
        ]

    def _chosen(self) -> Iterator[Row]:
        """G_ReLU with α by cross-validation: trained on 80 % of the training images, selected on the others."""
        data = self.data
        first, second = (part.to(data.labels.device) for part in split_samples(len(data.labels), 0.8, seed=0))
        one, two = ((data.images[some], data.labels[some]) for some in (first, second))
        halves = Dataset.of(f"{data.name}, split", one, two, data.mean, data.std, data.classes)
        choices = cross_validate(
            *self.models, self.places, [Birkhoff(alpha=float(alpha), head_start=0.0) for alpha in self.settings.alphas],
            data=TrainingBatches(data, self.how),
            parts=(TrainingBatches(halves, self.how), halves.batches("test", LARGE)),
            trial={"epochs": self.settings.trial_epochs}, out=self.folder / "chosen", **self.shared,
        )  # fmt: skip
        for choice in choices:
            about = {"alpha": self.settings.alphas[choice.chosen], "held_back": list(choice.accuracies)}
            yield from self._rows(Stitches([choice.stitch]), about)

    def _rows(self, found: Stitches, about: Row) -> Iterator[Row]:
        """One row per stitch, with histories of traced features, and matrices if the plan has them."""
        for stitch, row in zip(found, found.to_rows(), strict=True):
            row |= about | {"label": self._label(stitch), "variant": _variant(row, self.settings.variants)}
            row["sparsity"] = sparsity(stitch.matrix, self.settings.threshold)
            if row.get("trace_every"):
                row["history"] = stitch.to_dict()["history"]
            if self.matrices:
                row["matrix"] = [[round(value, 3) for value in line] for line in stitch.matrix.tolist()]
            if self.settings.cka_images:
                row |= likeness(stitch, self.data, self.settings.cka_images)
            yield row

    def _lines(self, found: Stitches) -> Iterator[Row]:
        """Between any two good stitches of one place: relative accuracies from the one to the other."""
        good = [one for one in found if (one.relative_accuracy or 0.0) >= self.settings.good]
        for one, two in combinations(good, 2):
            if one.place == two.place:
                between = along(one, two, self.data.batches("test", LARGE), self.settings.line)
                yield {
                    "label": self._label(one), "family": one.family, "fit": "line", "skip": one.point.skip,
                    "seeds": [one.settings["seed"], two.settings["seed"]], "shares": list(between.shares),
                    "line": list(between.relative_accuracy), "lowest": between.lowest,
                }  # fmt: skip

    def _label(self, stitch: Stitch) -> str:
        return next(label for label, place in self.settings.at.items() if place == stitch.point.back)


def _variant(row: Row, variants: Sequence[Mapping[str, Any]]) -> str:
    """The variant of a row in words: the matching one with the most settings.

    >>> _variant({"rate": 0.1, "momentum": 0.9}, [{}, {"rate": 0.1}, {"rate": 0.1, "momentum": 0.9}])
    'rate 0.1, momentum 0.9'
    """
    fitting = [one for one in variants if all(row.get(name) == value for name, value in one.items())]
    best = max(fitting, key=len, default={})
    return ", ".join(f"{name} {value}" for name, value in best.items())


STITCHING = ExperimentKind(StitchingSettings, run, numbers, draw)
