"""The work behind a stitching figure: every pair is stitched at every place, by every family, one row per stitch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import nn

from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.kinds.stitching.likeness import likeness
from intertwine.reproduce.kinds.stitching.settings import Stitching
from intertwine.reproduce.networks import Pair
from intertwine.reproduce.work import Work
from intertwine.stitch.closeness import sparsity
from intertwine.stitch.collection import Stitches
from intertwine.stitch.cross_validation import cross_validate, split
from intertwine.stitch.families.birkhoff import Birkhoff
from intertwine.stitch.families.sparse import Sparse
from intertwine.stitch.family import Family, find_family
from intertwine.stitch.interpolation import along
from intertwine.stitch.many import stitches
from intertwine.stitch.outcome import Stitch
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.feeding import TrainingBatches
from intertwine.zoo.recipe import Recipe
from intertwine.zoo.recipe import recipe as find_recipe

#: Images in a batch where nothing is trained.
LARGE = 1000


def run(work: Work) -> list[Row]:
    """The rows of all pairs."""

    def matrices(pair: Pair) -> bool:
        return work.plan.settings.matrices and pair.number == 0

    def find(pair: Pair, folder: Path) -> Iterator[Row]:
        models = work.network(pair.front), work.network(pair.back)
        yield from PairStitches(work.plan.settings, models, work.placed, folder, matrices(pair)).rows()

    return work.per_pair(find, lambda pair: {"matrices": matrices(pair)})


@dataclass(frozen=True)
class PairStitches:
    """Everything that a plan asks of one pair. `matrices`: whether they are kept in the rows."""

    asked: Stitching
    models: tuple[nn.Module, nn.Module]
    data: Dataset
    folder: Path
    matrices: bool

    def rows(self) -> Iterator[Row]:
        """Trained in every order, fitted directly, and chosen by cross-validation."""
        for order in range(self.asked.orders if self.asked.families else 0):
            yield from self._trained(order)
        if self.asked.direct:
            found = stitches(
                *self.models, self.places, self._families(self.asked.direct), fit="direct",
                data=self.data.batches("train", LARGE), **self.shared,
            )  # fmt: skip
            yield from self._rows(found, {})
        if self.asked.alphas:
            yield from self._chosen()

    @cached_property
    def places(self) -> list[str]:
        return list(self.asked.at.values())

    @cached_property
    def how(self) -> Recipe:
        """Batches and augmentation."""
        return find_recipe(self.asked.batches)

    @property
    def shared(self) -> dict[str, Any]:
        """What all fits are given."""
        return {
            "direct_data": self.data.batches("train", LARGE), "test": self.data.batches("test", LARGE),
            "recipe": self.asked.recipe, "skip": self.asked.skip, **self.asked.options,
        }  # fmt: skip

    def _trained(self, order: int) -> Iterator[Row]:
        seeds = range(order * self.asked.seeds, (order + 1) * self.asked.seeds)
        found = stitches(
            *self.models, self.places, self._families(self.asked.families), fit="task", seeds=seeds,
            data=TrainingBatches(self.data, self.how, order), variants=self.asked.variants,
            out=self.folder / f"order{order}", **self.shared,
        )  # fmt: skip
        yield from self._rows(found, {"order": order})
        if self.asked.line:
            yield from self._lines(found)

    def _families(self, names: Sequence[str]) -> list[Family]:
        """The families of these names; a sparse one ends with entries up to the plan's threshold at zero."""
        found = map(find_family, names)
        return [
            replace(one, threshold=float(self.asked.threshold)) if isinstance(one, Sparse) else one for one in found
        ]

    def _chosen(self) -> Iterator[Row]:
        """G_ReLU with α by cross-validation: tried on 80 % of the training images, chosen by the others."""
        data = self.data
        first, second = (part.to(data.labels.device) for part in split(len(data.labels), 0.8, seed=0))
        one, two = ((data.images[some], data.labels[some]) for some in (first, second))
        cut = Dataset.of(f"{data.name}, split", one, two, data.mean, data.std, data.classes)
        choices = cross_validate(
            *self.models, self.places, [Birkhoff(alpha=float(alpha), head_start=0.0) for alpha in self.asked.alphas],
            data=TrainingBatches(data, self.how), parts=(TrainingBatches(cut, self.how), cut.batches("test", LARGE)),
            trial={"epochs": self.asked.trial_epochs}, out=self.folder / "chosen", **self.shared,
        )  # fmt: skip
        for choice in choices:
            about = {"alpha": self.asked.alphas[choice.chosen], "held_back": list(choice.accuracies)}
            yield from self._rows(Stitches([choice.stitch]), about)

    def _rows(self, found: Stitches, about: Row) -> Iterator[Row]:
        """One row per stitch; histories where features were traced, matrices where they are kept."""
        for stitch, row in zip(found, found.to_rows(), strict=True):
            row |= about | {"label": self._label(stitch), "variant": _variant(row, self.asked.variants)}
            row["sparsity"] = sparsity(stitch.matrix, self.asked.threshold)
            if row.get("trace_every"):
                row["history"] = stitch.to_dict()["history"]
            if self.matrices:
                row["matrix"] = [[round(value, 5) for value in line] for line in stitch.matrix.tolist()]
            if self.asked.cka_images:
                row |= likeness(stitch, self.data, self.asked.cka_images)
            yield row

    def _lines(self, found: Stitches) -> Iterator[Row]:
        """Between any two good stitches of one place: relative accuracies from the one to the other."""
        good = [one for one in found if (one.relative_accuracy or 0.0) >= self.asked.good]
        for one, two in combinations(good, 2):
            if one.place == two.place:
                between = along(one, two, self.data.batches("test", LARGE), self.asked.line)
                yield {
                    "label": self._label(one), "family": one.family, "fit": "line", "skip": one.cut.skip,
                    "seeds": [one.settings["seed"], two.settings["seed"]], "shares": list(between.shares),
                    "line": list(between.relative_accuracy), "lowest": between.lowest,
                }  # fmt: skip

    def _label(self, stitch: Stitch) -> str:
        return next(label for label, place in self.asked.at.items() if place == stitch.cut.back)


def _variant(row: Row, variants: Sequence[Mapping[str, Any]]) -> str:
    """The variant a row was made with, in words: that with the most settings, where several fit it.

    >>> _variant({"rate": 0.1, "momentum": 0.9}, [{}, {"rate": 0.1}, {"rate": 0.1, "momentum": 0.9}])
    'rate 0.1, momentum 0.9'
    """
    fitting = [one for one in variants if all(row.get(name) == value for name, value in one.items())]
    best = max(fitting, key=len, default={})
    return ", ".join(f"{name} {value}" for name, value in best.items())
