"""The verbs of a study: each runs one function of the library on a network or a pair and yields result rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.align.align import SOLVERS, align
from intertwine.canonical.equivalence import equivalent
from intertwine.canonical.fingerprint import fingerprint
from intertwine.connect.arithmetic import interpolate
from intertwine.connect.barrier import barrier as measure_barrier
from intertwine.connect.connectivity import connectivity as measure_connectivity
from intertwine.data.batches import calls, on_device_of
from intertwine.fold.budget import fold_to
from intertwine.fold.complexity import complexity as measure_complexity
from intertwine.fold.fold import fold as merge_features
from intertwine.fold.prune import prune
from intertwine.lab.study.concepts import CONCEPTS, dissect
from intertwine.lab.study.records import ResultRow
from intertwine.lab.study.verb import Verb as Verb
from intertwine.lab.study.verb import (
    VerbContext,
    anything,
    flag,
    number,
    numbers,
    one_of,
    positives,
    read_by,
    share,
    some_of,
    whole,
)
from intertwine.measure.compare import compare as compare_layers
from intertwine.measure.measure import every
from intertwine.stitch.families.names import find_family
from intertwine.stitch.scores import accuracy_of, run_model
from intertwine.stitch.stitch import stitch as make_stitch
from intertwine.symmetry.symmetry import symmetry as find_symmetry

# ----------------------------------------------------------------------------------------------------
# Verbs of one network: its accuracy, its symmetry with the proof, its complexity, and what is left of it folded.


#: How the verb "fold" makes networks smaller: each takes a share of parameters or of features, or a β.
SMALLER: Mapping[str, Callable[..., Any]] = {
    "fold_to": lambda model, x, at: fold_to(model, x, parameters=at),
    "merge": lambda model, x, at: fold_to(model, x, parameters=at, how="merge"),
    "fold": lambda model, x, at: merge_features(model, x, beta=at),
    "prune": lambda model, x, at: prune(model, x, widths=at),
}


def accuracy(ask: VerbContext) -> Iterator[ResultRow]:
    """On the test part."""
    yield ResultRow("accuracy", accuracy_of(ask.a, ask.test()))


def symmetry(ask: VerbContext) -> Iterator[ResultRow]:
    """Its size, and by how much random elements of it change outputs and hidden features."""
    found = find_symmetry(ask.a, ask.x)
    proof = found.certify(ask.a, ask.x, trials=ask.options["trials"])
    yield ResultRow("wires", float(len(found.wires)))
    yield ResultRow("log_order", float(found.log_order))
    yield ResultRow("dimension", float(found.dimension))
    yield ResultRow("coverage", float(found.coverage(ask.a)))
    yield ResultRow("feature_error", float(max(proof.per_wire.values(), default=0.0)))
    yield ResultRow("certificate_error", float(proof.max_error), note=None if proof.ok else "the certificate failed")


def complexity(ask: VerbContext) -> Iterator[ResultRow]:
    """How many features of each layer are not equivalent to each other."""
    for layer in measure_complexity(ask.a, ask.x, beta=ask.options["beta"]).layers:
        for quantity in ("classes", "width", "dead"):
            yield ResultRow(quantity, float(getattr(layer, quantity)), layer=layer.name)


def fold(ask: VerbContext) -> Iterator[ResultRow]:
    """Accuracy of the network made smaller, against the share of its parameters that is left."""
    make = SMALLER[ask.options["method"]]
    yield ResultRow("accuracy", accuracy_of(ask.a, ask.test()), index=1.0)
    for at in ask.options["at"]:
        small = make(ask.a, ask.x, at)
        yield ResultRow("accuracy", accuracy_of(small.model, ask.test()), index=small.parameters.share)


# ----------------------------------------------------------------------------------------------------
# The verb `canonical`: a network is moved along its symmetry, and found again from its weights alone.


FINGERPRINT_DIGITS = 12  # of a fingerprint that are shown


def canonical(ask: VerbContext) -> Iterator[ResultRow]:
    """A random element moves the weights and keeps the function; the canonical form does not see it.

    The average of a network and its moved copy is that of one function with itself, and yet another function.
    """
    found, data = find_symmetry(ask.a, ask.x), ask.test()
    moved = found.act(found.random(seed=ask.seed), ask.a)
    yield ResultRow("moved", weight_distance(ask.a, moved))
    yield ResultRow("changed_predictions", _changed(ask.a, moved, data))
    mark, twin = (fingerprint(model, symmetry=found) for model in (ask.a, moved))
    yield ResultRow("fingerprint_equal", float(mark == twin), note=mark[:FINGERPRINT_DIGITS])
    yield ResultRow("average_accuracy", accuracy_of(interpolate(ask.a, moved, 0.5), data))
    back = equivalent(ask.a, moved, symmetry=found)
    if back is None:
        for quantity in ("way_back_error", "average_accuracy_back"):
            yield ResultRow(quantity, None, note="no element was found that takes the moved network back")
        return
    returned = found.act(back, moved)
    yield ResultRow("way_back_error", weight_distance(ask.a, returned))
    yield ResultRow("average_accuracy_back", accuracy_of(interpolate(ask.a, returned, 0.5), data))


def weight_distance(a: nn.Module, b: nn.Module) -> float:
    """How far the parameters of two networks lie apart, relative to those of the first.

    >>> a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> b.load_state_dict({name: 1.5 * weights for name, weights in a.state_dict().items()})
    <All keys matched successfully>
    >>> weight_distance(a, b)
    0.5
    """

    def flat(model: nn.Module) -> Tensor:
        return torch.cat([p.detach().double().flatten() for p in model.parameters()])

    return float((flat(a) - flat(b)).norm() / flat(a).norm())


@torch.no_grad()
def _changed(a: nn.Module, b: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    """How many inputs get another answer."""
    there = (on_device_of(call, a) for call in calls(data))
    return float(sum(int((run_model(a, call).argmax(1) != run_model(b, call).argmax(1)).sum()) for call in there))


# ----------------------------------------------------------------------------------------------------
# Verbs of two networks: what lies between them, how their features compare, and whether they can be stitched.


def barrier(ask: VerbContext) -> Iterator[ResultRow]:
    """Loss and error along the line to the other network, moved onto the first by a method of alignment."""
    reset = ask.train() if ask.options["reset"] else None
    found = measure_barrier(ask.a, _aligned(ask), ask.test(), points=ask.options["points"], reset_statistics=reset)
    for i, t in enumerate(found.ts):
        yield ResultRow("loss", found.loss[i], index=t)
        if found.error is not None:
            yield ResultRow("error", found.error[i], index=t)
    yield ResultRow("loss_barrier", found.loss_barrier)
    if found.error_barrier is not None:
        yield ResultRow("error_barrier", found.error_barrier)


def connectivity(ask: VerbContext) -> Iterator[ResultRow]:
    """How features of networks between the two are made of theirs, layer by layer."""
    found = measure_connectivity(ask.a, _aligned(ask), ask.test(), alphas=tuple(ask.options["alphas"]))
    for row in found.to_rows():
        for quantity in ("llfc", "additivity", "sign_agreement", "commutativity"):
            if row[quantity] is not None:
                note = row["notes"] or None
                yield ResultRow(quantity, row[quantity], index=row["alpha"], layer=row["layer"], note=note)


def compare(ask: VerbContext) -> Iterator[ResultRow]:
    """Measures of similarity, layer by layer."""
    names = ask.options["measure"]
    measures = (names,) if isinstance(names, str) else tuple(names)
    found = compare_layers(ask.a, ask.other, ask.test(), layers=ask.options["layers"], measures=measures)
    for row in found.to_rows():
        note = row["degenerate"] or row["notes"] or None
        yield ResultRow(row["measure"], row["value"], layer=row["first"], other_layer=row["second"], note=note)


def stitch(ask: VerbContext) -> Iterator[ResultRow]:
    """The front of the first network joined to the back of the other, with 95 % intervals for the accuracy lost."""
    direct = ask.options["fit"] == "direct"
    data, more = (ask.train(), {}) if direct else (ask.shuffled(), {"epochs": ask.options["epochs"]})
    found = make_stitch(
        ask.a, ask.other, ask.at, family=ask.options["family"], fit=ask.options["fit"], data=data, test=ask.test(),
        seed=ask.seed, **more,
    )  # fmt: skip
    ends = (None, None)
    if found.penalty is not None and found.accuracy is not None:
        low, high = wilson_interval(found.accuracy, sum(len(targets) for _, targets in ask.test()))
        best = found.penalty + found.accuracy  # what it is compared with
        ends = (best - high, best - low)
    yield ResultRow("penalty", found.penalty, *ends, layer=ask.layer, note=found.diverged)
    for quantity in ("accuracy", "relative_accuracy", "cross_entropy"):
        value = found.to_dict()[quantity]
        yield ResultRow(quantity, value, layer=ask.layer, note=found.diverged)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share that was measured on so many examples.

    >>> low, high = wilson_interval(0.9, 100)
    >>> round(low, 3), round(high, 3)
    (0.826, 0.945)
    """
    z = 1.959964 / sqrt(count)
    middle, half = (share + z * z / 2) / (1 + z * z), z * sqrt(share * (1 - share) + z * z / 4) / (1 + z * z)
    return middle - half, middle + half


def _aligned(ask: VerbContext) -> nn.Module:
    """The second network, moved onto the first by the method that was asked for."""
    method = ask.options["method"]
    if method == "none":
        return ask.other
    data = ask.train() if method not in ("weights", "scale-aware") else None
    return align(ask.a, ask.other, ask.x, method=method, data=data, seed=ask.seed).model


# ----------------------------------------------------------------------------------------------------
# The verbs of a study by name: what each needs, its options and what they may be, and what turns it into rows.


_IMAGES = whole(None)
_METHOD = one_of("weights", lambda: ("none", *SOLVERS))
_MEASURE = some_of("linear_cka", lambda: [measure.name for measure in every()])
_FIT = one_of("direct", lambda: ("direct", "task"))

VERBS: Mapping[str, Verb] = {
    "accuracy": Verb(1, {"images": _IMAGES}, accuracy),
    "symmetry": Verb(1, {"trials": whole(3)}, symmetry),
    "canonical": Verb(1, {"images": _IMAGES}, canonical),
    "barrier": Verb(
        2, {"method": _METHOD, "points": whole(11, least=3), "reset": flag(False), "images": _IMAGES}, barrier
    ),
    "connectivity": Verb(
        2, {"method": _METHOD, "alphas": numbers((0.25, 0.5, 0.75), 0.0, 1.0), "images": _IMAGES}, connectivity
    ),
    "compare": Verb(
        2, {"measure": _MEASURE, "images": _IMAGES, "layers": anything(None)}, compare, takes_layers=True
    ),
    "stitch": Verb(
        2, {"family": read_by("relu", find_family), "fit": _FIT, "epochs": whole(5), "images": _IMAGES}, stitch,
        layered=True,
    ),
    "complexity": Verb(1, {"beta": share(0.1)}, complexity),
    "fold": Verb(
        1, {"method": one_of("fold_to", lambda: SMALLER), "at": positives((0.75, 0.5, 0.25)),
            "images": _IMAGES}, fold,
    ),
    "dissect": Verb(
        1, {"concepts": one_of("strokes", lambda: CONCEPTS), "level": number(0.04, 0.0, 1.0),
            "share": number(0.005, 0.0, 1.0), "rotation": number(0.0), "images": _IMAGES}, dissect, layered=True,
    ),
}  # fmt: skip
