"""Kind "rotation": what a network loses when a layer's features are transformed (Godfrey et al. 2022, figure 4).

A random member of G_ReLU or a random orthogonal matrix is put behind a convolution, everything up to it is frozen, and
the layers behind are trained again; see `intertwine.inspect.rotation_penalty`. As printed, the penalty is that of the
best epoch on the test images; corrected, that of the last. "control" trains on without any transform: what training
alone gains or loses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError
from intertwine.inspect.penalties import draw_bars
from intertwine.inspect.rotation_penalty import rotation_penalty
from intertwine.reproduce.kinds.registry import Kind, Numbers, Row
from intertwine.reproduce.networks import Pair
from intertwine.reproduce.work import Work
from intertwine.zoo.feeding import TrainingBatches
from intertwine.zoo.recipe import recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Kind of transform → its name in the paper.
KINDS = {"relu": "G_ReLU", "orthogonal": "orthogonal", "identity": "control"}
#: What the series end with → the entry of a row behind it.
FORMS = {"as printed": "best_penalty", "corrected": "penalty"}


@dataclass(frozen=True)
class Settings:
    """What [rotation] may say.

    Attributes:
        at: convolutions, what the paper calls each → its module path. trials: transforms of each kind per network.
        epochs, rate: of the training behind. batches: the recipe of its batches and augmentation, of `batch` images
            where that is given.
    """

    at: dict[str, str]
    trials: int = 1
    epochs: int = 50
    rate: float = 1e-3
    batches: str = "godfrey"
    batch: int | None = None

    def check(self, plan: Any, where: str) -> None:
        """Refuse pairs of different networks.

        Raises:
            InputError: what is wrong and what it may be.
        """
        if plan.pairs is None or plan.pairs.choose != "self":
            raise InputError(f'{where}: penalties are of single networks; in [pairs], say choose = "self".')


def run(work: Work) -> list[Row]:
    """One row per network, layer, kind of transform and trial; the control has one trial per network and layer."""

    def find(pair: Pair, folder: Path) -> Iterator[Row]:
        asked: Settings = work.plan.settings
        network, how = work.network(pair.front), recipe(asked.batches, batch=asked.batch)
        names = {place: label for label, place in asked.at.items()}
        seeds = [pair.number * asked.trials + trial for trial in range(asked.trials)]
        for kinds, some in ((("identity",), seeds[:1]), (("relu", "orthogonal"), seeds)):
            found = rotation_penalty(
                network, list(names), TrainingBatches(work.placed, how), work.placed.batches("test"), kind=kinds,
                seeds=some, epochs=asked.epochs, rate=asked.rate, out=folder / kinds[0],
            )  # fmt: skip
            yield from ({"label": names[trial.at]} | trial.to_dict() for trial in found.trials)

    return work.per_pair(find)


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Percentage points of accuracy, by layer."""
    found: Numbers = {}
    for row in rows:
        for form, entry in FORMS.items():
            series = found.setdefault(f"{KINDS[row['kind']]}, {form}", {})
            series.setdefault(row["label"], []).append(100 * row[entry])
    return found


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Bars per layer, one per kind, as printed; crosses are the paper's."""
    found = {series: values for series, values in numbers(plan, rows).items() if series.endswith("as printed")}
    labels = list(plan["settings"]["at"])
    table = {(label, series): found[series][label] for label in labels for series in found}
    known = {series: dict(zip(labels, values, strict=True)) for series, values in plan["printed"].items()}
    crosses = {(label, series): known[series][label] for label, series in table if series in known}
    figure = draw_bars(table, "rotation penalty, percentage points", crosses=crosses, told="the paper's")
    figure.axes[0].set_xlabel("convolution")
    return figure


KIND = Kind(Settings, run, numbers, draw)
