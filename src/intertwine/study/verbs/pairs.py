"""Verbs of two networks: what lies between them, how their features compare, and whether they can be stitched."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from torch import nn

from intertwine.align.align import align
from intertwine.connect.barrier import barrier as measure_barrier
from intertwine.connect.connectivity import connectivity as measure_connectivity
from intertwine.measure.compare import compare as compare_layers
from intertwine.stitch.stitch import stitch as make_stitch
from intertwine.study.rows import Row
from intertwine.study.verbs.verb import Ask


def barrier(ask: Ask) -> Iterator[Row]:
    """Loss and error along the line to the other network, moved onto the first by a method of alignment."""
    reset = ask.train() if ask.options["reset"] else None
    found = measure_barrier(ask.a, _aligned(ask), ask.test(), points=ask.options["points"], reset_statistics=reset)
    for i, t in enumerate(found.ts):
        yield Row("loss", found.loss[i], index=t)
        if found.error is not None:
            yield Row("error", found.error[i], index=t)
    yield Row("loss_barrier", found.loss_barrier)
    if found.error_barrier is not None:
        yield Row("error_barrier", found.error_barrier)


def connectivity(ask: Ask) -> Iterator[Row]:
    """How features of networks between the two are made of theirs, layer by layer."""
    found = measure_connectivity(ask.a, _aligned(ask), ask.test(), alphas=tuple(ask.options["alphas"]))
    for row in found.to_rows():
        for quantity in ("llfc", "additivity", "sign_agreement", "commutativity"):
            if row[quantity] is not None:
                note = row["notes"] or None
                yield Row(quantity, row[quantity], index=row["alpha"], layer=row["layer"], note=note)


def compare(ask: Ask) -> Iterator[Row]:
    """Measures of similarity, layer by layer."""
    names = ask.options["measure"]
    measures = (names,) if isinstance(names, str) else tuple(names)
    found = compare_layers(ask.a, ask.other, ask.test(), layers=ask.options["layers"], measures=measures)
    for row in found.to_rows():
        note = row["degenerate"] or row["notes"] or None
        yield Row(row["measure"], row["value"], layer=row["first"], other_layer=row["second"], note=note)


def stitch(ask: Ask) -> Iterator[Row]:
    """The front of the first network joined to the back of the other, with 95 % intervals for the accuracy lost."""
    direct = ask.options["fit"] == "direct"
    data, more = (ask.train(), {}) if direct else (ask.shuffled(), {"epochs": ask.options["epochs"]})
    found = make_stitch(
        ask.a, ask.other, ask.at, family=ask.options["family"], fit=ask.options["fit"], data=data, test=ask.test(),
        seed=ask.seed, **more,
    )  # fmt: skip
    ends = (None, None)
    if found.penalty is not None and found.accuracy is not None:
        low, high = interval(found.accuracy, sum(len(targets) for _, targets in ask.test()))
        best = found.penalty + found.accuracy  # what it is compared with
        ends = (best - high, best - low)
    yield Row("penalty", found.penalty, *ends, layer=ask.layer, note=found.diverged)
    for quantity in ("accuracy", "relative_accuracy", "cross_entropy"):
        value = found.to_dict()[quantity]
        yield Row(quantity, value, layer=ask.layer, note=found.diverged)


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share that was measured on so many examples.

    >>> low, high = interval(0.9, 100)
    >>> round(low, 3), round(high, 3)
    (0.826, 0.945)
    """
    z = 1.959964 / sqrt(count)
    middle, half = (share + z * z / 2) / (1 + z * z), z * sqrt(share * (1 - share) + z * z / 4) / (1 + z * z)
    return middle - half, middle + half


def _aligned(ask: Ask) -> nn.Module:
    """The second network, moved onto the first by the method that was asked for."""
    method = ask.options["method"]
    if method == "none":
        return ask.other
    data = ask.train() if method not in ("weights", "scale-aware") else None
    return align(ask.a, ask.other, ask.x, method=method, data=data, seed=ask.seed).model
