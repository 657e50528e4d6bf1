"""Kind "accuracy": the test accuracy of the networks of a zoo (Godfrey et al. 2022, table 3 and section D.1).

"accuracy, as printed" is that of the epoch that is best on the test images, as in the paper, which selects by what it
reports; "accuracy, corrected" is that of the last epoch. Plans choose their pairs as "self".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError
from intertwine.figures import legend_below, new_figure
from intertwine.lab.papers.plan import ExperimentKind, ExperimentPlan, Numbers, Row, check_single_networks, gathered
from intertwine.lab.papers.work import NetworkPair, Work
from intertwine.lab.zoo.folder import Zoo
from intertwine.stitch.result import summary
from intertwine.stitch.scores import accuracy_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Series → the entry of a row behind it.
SERIES = {"accuracy, as printed": "accuracy", "accuracy, corrected": "last_accuracy"}


@dataclass(frozen=True)
class AccuracySettings:
    """The table [accuracy]. `label`: of the networks; by default the value of the option that varies."""

    label: str = ""

    def check(self, plan: ExperimentPlan, where: str) -> None:
        """Refuse pairs of different networks, and networks without a label."""
        check_single_networks(plan, where)
        if not self.label and (plan.networks is None or not plan.networks.vary):
            raise InputError(f"{where}: the networks have no label. Set label in [accuracy] or vary in [networks].")


def run(work: Work) -> list[Row]:
    """One row per network. Both accuracies are fractions of the test images."""

    def find(pair: NetworkPair, folder: Path) -> Iterator[Row]:
        source, seed = work.sources[pair.front[0]], pair.front[1]
        accuracy = accuracy_of(work.network(pair.front), work.placed.batches("test"))
        trained = isinstance(source, Zoo)  # published networks come without a history
        last = source.records[source.seeds.index(seed)].history["accuracy"][-1] if trained else None
        yield {"accuracy": accuracy, "last_accuracy": last}

    return work.per_pair(find)


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Percent, by the value of the option that varies, or by the label of the plan."""
    label = plan["settings"]["label"]
    return gathered(
        (series, label or f"{row['front_group']:g}", [100 * row[entry]])
        for row in rows
        for series, entry in SERIES.items()
        if row[entry] is not None
    )


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Accuracies with whiskers of one deviation; crosses are the paper's."""
    found = numbers(plan, rows)
    labels = list(dict.fromkeys(label for values in found.values() for label in values))
    figure = new_figure(3 + 0.6 * max(3, len(labels)), 3.4)
    axes = figure.subplots()
    for i, (series, values) in enumerate(found.items()):
        points = [(labels.index(label) + 0.12 * i, *summary(some)) for label, some in values.items()]
        _points(axes, points, "o", series)
    for series, printed in plan["printed"].items():
        spreads = plan["spread"].get(series, [0.0] * len(printed))
        held = zip(plan["labels"], printed, spreads, strict=True)
        points = [(labels.index(label) - 0.12, value, spread) for label, value, spread in held if label in labels]
        _points(axes, points, "kx", "the paper's")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel(next(iter((plan["networks"] or {}).get("vary") or {}), ""))
    axes.set_ylabel("test accuracy, %")
    legend_below(figure)
    return figure


def _points(axes: Axes, points: Sequence[tuple[float, float, float]], form: str, label: str) -> None:
    places, means, spreads = zip(*points, strict=True)
    axes.errorbar(places, means, spreads, fmt=form, markersize=4, capsize=3, label=label)


ACCURACY = ExperimentKind(AccuracySettings, run, numbers, draw)
