"""Kind "accuracy": how well the networks of a zoo do on the test images (Godfrey et al. 2022, table 3 and section D.1).

The paper keeps the epoch that is best on the test images, and so chooses by what it reports: "accuracy, as printed".
"accuracy, corrected" is that of the last epoch. Plans choose their pairs as "self", each network with itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError
from intertwine.figures import legend_below, new_figure
from intertwine.lab.papers.plan import ExperimentKind, Numbers, Row
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
    """What [accuracy] may say: the label of the networks, where they are of one kind; else groups have their value."""

    label: str = ""

    def check(self, plan: Any, where: str) -> None:
        """Refuse pairs of different networks, and networks without a label.

        Raises:
            InputError: what is wrong and what it may be.
        """
        if plan.pairs is None or plan.pairs.choose != "self":
            raise InputError(f'{where}: accuracies are of single networks; in [pairs], say choose = "self".')
        if not self.label and (plan.networks is None or not plan.networks.vary):
            raise InputError(f"{where}: [accuracy] says no label, and [networks] varies nothing. Give one of the two.")


def run(work: Work) -> list[Row]:
    """One row per network. Both accuracies are fractions of the test images."""

    def find(pair: NetworkPair, folder: Path) -> Iterator[Row]:
        group, seed = pair.front
        accuracy = accuracy_of(work.network(pair.front), work.placed.batches("test"))
        yield {"accuracy": accuracy, "last_accuracy": _last(work.sources[group], seed)}

    return work.per_pair(find)


def _last(source: Any, seed: int) -> float | None:
    """The accuracy after the last epoch, which training wrote down; None of networks that others trained."""
    if not isinstance(source, Zoo):
        return None
    record = source.records[source.seeds.index(seed)]
    return record.history["accuracy"][-1]


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Per cent, by the value of the option that varies, or by the label of the plan."""
    found: Numbers = {}
    for row in rows:
        for series, entry in SERIES.items():
            if row[entry] is not None:
                found.setdefault(series, {}).setdefault(_label(plan, row), []).append(100 * row[entry])
    return found


def _label(plan: Mapping[str, Any], row: Row) -> str:
    return plan["settings"]["label"] or f"{row['front_group']:g}"


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
