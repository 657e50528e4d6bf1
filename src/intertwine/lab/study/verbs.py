"""The verbs of a study: each runs one function of the library on one or two networks and yields result rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

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
from intertwine.lab.study.verb import Option, Verb, VerbContext, flag, number, numbers, one_of, read_by, some_of, whole
from intertwine.measure.compare import compare as compare_layers
from intertwine.measure.measure import every
from intertwine.stitch.families.names import find_family
from intertwine.stitch.scores import accuracy_of, run_model
from intertwine.stitch.stitch import stitch as make_stitch
from intertwine.symmetry.symmetry import symmetry as find_symmetry

FINGERPRINT_DIGITS = 12  # kept in the note of a row
#: Methods of the verb "fold"; `at` is a share of parameters or of features, or a β.
FOLD_METHODS: Mapping[str, Callable[..., Any]] = {
    "fold_to": lambda model, x, at: fold_to(model, x, parameters=at),
    "merge": lambda model, x, at: fold_to(model, x, parameters=at, how="merge"),
    "fold": lambda model, x, at: merge_features(model, x, beta=at),
    "prune": lambda model, x, at: prune(model, x, widths=at),
}

# -- Verbs of one network ----------------------------------------------------------------------------------------------


def accuracy(context: VerbContext) -> Iterator[ResultRow]:
    """Accuracy on the test part."""
    yield ResultRow("accuracy", accuracy_of(context.a, context.test()))


def symmetry(context: VerbContext) -> Iterator[ResultRow]:
    """Size of the symmetry, and the largest change of outputs and hidden features under random elements."""
    sym = find_symmetry(context.a, context.x)
    proof = sym.certify(context.a, context.x, trials=context.options["trials"])
    yield ResultRow("wires", float(len(sym.wires)))
    yield ResultRow("log_order", float(sym.log_order))
    yield ResultRow("dimension", float(sym.dimension))
    yield ResultRow("coverage", float(sym.coverage(context.a)))
    yield ResultRow("feature_error", float(max(proof.per_wire.values(), default=0.0)))
    yield ResultRow("certificate_error", float(proof.max_error), note=None if proof.ok else "the certificate failed")


def complexity(context: VerbContext) -> Iterator[ResultRow]:
    """The number of non-equivalent features of each layer."""
    for layer in measure_complexity(context.a, context.x, beta=context.options["beta"]).layers:
        for quantity in ("classes", "width", "dead"):
            yield ResultRow(quantity, float(getattr(layer, quantity)), layer=layer.name)


def fold(context: VerbContext) -> Iterator[ResultRow]:
    """Accuracy of smaller networks, by the share of parameters left."""
    yield ResultRow("accuracy", accuracy_of(context.a, context.test()), index=1.0)
    for at in context.options["at"]:
        small = FOLD_METHODS[context.options["method"]](context.a, context.x, at)
        yield ResultRow("accuracy", accuracy_of(small.model, context.test()), index=small.parameters.share)


def canonical(context: VerbContext) -> Iterator[ResultRow]:
    """Moves a network by a random element of its symmetry, and recovers the element from the weights.

    Both networks compute the same function, but their average is another one until the element is undone.
    """
    sym, data = find_symmetry(context.a, context.x), context.test()
    moved = sym.act(sym.random(seed=context.seed), context.a)
    yield ResultRow("moved", weight_distance(context.a, moved))
    with torch.no_grad():
        answers = [
            torch.cat([run_model(model, on_device_of(call, model)).argmax(1) for call in calls(data)])
            for model in (context.a, moved)
        ]
    yield ResultRow("changed_predictions", float((answers[0] != answers[1]).sum()))
    print_a, print_moved = (fingerprint(model, symmetry=sym) for model in (context.a, moved))
    yield ResultRow("fingerprint_equal", float(print_a == print_moved), note=print_a[:FINGERPRINT_DIGITS])
    yield ResultRow("average_accuracy", accuracy_of(interpolate(context.a, moved, 0.5), data))
    back = equivalent(context.a, moved, symmetry=sym)
    if back is None:
        for quantity in ("way_back_error", "average_accuracy_back"):
            yield ResultRow(quantity, None, note="no element that maps the moved network back was found")
        return
    returned = sym.act(back, moved)
    yield ResultRow("way_back_error", weight_distance(context.a, returned))
    yield ResultRow("average_accuracy_back", accuracy_of(interpolate(context.a, returned, 0.5), data))


def weight_distance(a: nn.Module, b: nn.Module) -> float:
    """The distance between the parameters of two networks, relative to the norm of the first.

    >>> a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> b.load_state_dict({name: 1.5 * weights for name, weights in a.state_dict().items()})
    <All keys matched successfully>
    >>> weight_distance(a, b)
    0.5
    """
    first, second = (parameters_to_vector(model.parameters()).detach().double() for model in (a, b))
    return float((first - second).norm() / first.norm())


# -- Verbs of two networks ---------------------------------------------------------------------------------------------


def barrier(context: VerbContext) -> Iterator[ResultRow]:
    """Loss and error along the line from the first network to the aligned second one."""
    reset = context.train() if context.options["reset"] else None
    found = measure_barrier(
        context.a, _aligned(context), context.test(), points=context.options["points"], reset_statistics=reset
    )
    for i, t in enumerate(found.ts):
        yield ResultRow("loss", found.loss[i], index=t)
        if found.error is not None:
            yield ResultRow("error", found.error[i], index=t)
    yield ResultRow("loss_barrier", found.loss_barrier)
    if found.error_barrier is not None:
        yield ResultRow("error_barrier", found.error_barrier)


def connectivity(context: VerbContext) -> Iterator[ResultRow]:
    """Linear connectivity of the features between two networks, layer by layer."""
    found = measure_connectivity(context.a, _aligned(context), context.test(), alphas=tuple(context.options["alphas"]))
    for row in found.to_rows():
        for quantity in ("llfc", "additivity", "sign_agreement", "commutativity"):
            if row[quantity] is not None:
                note = row["notes"] or None
                yield ResultRow(quantity, row[quantity], index=row["alpha"], layer=row["layer"], note=note)


def compare(context: VerbContext) -> Iterator[ResultRow]:
    """Measures of similarity, every layer against every layer."""
    names = context.options["measure"]
    measures = (names,) if isinstance(names, str) else tuple(names)
    found = compare_layers(
        context.a, context.other, context.test(), layers=context.options["layers"], measures=measures
    )
    for row in found.to_rows():
        note = row["degenerate"] or row["notes"] or None
        yield ResultRow(row["measure"], row["value"], layer=row["first"], other_layer=row["second"], note=note)


def stitch(context: VerbContext) -> Iterator[ResultRow]:
    """The front of the first network stitched to the back of the second; the penalty has a 95 % interval."""
    options = context.options
    direct = options["fit"] == "direct"
    data, more = (context.train(), {}) if direct else (context.shuffled(), {"epochs": options["epochs"]})
    found = make_stitch(
        context.a, context.other, context.at, family=options["family"], fit=options["fit"], data=data,
        test=context.test(), seed=context.seed, **more,
    )  # fmt: skip
    interval = (None, None)
    if found.penalty is not None and found.accuracy is not None:
        low, high = wilson_interval(found.accuracy, sum(len(targets) for _, targets in context.test()))
        reference = found.penalty + found.accuracy
        interval = (reference - high, reference - low)
    yield ResultRow("penalty", found.penalty, *interval, layer=context.layer, note=found.diverged)
    values = found.to_dict()
    for quantity in ("accuracy", "relative_accuracy", "cross_entropy"):
        yield ResultRow(quantity, values[quantity], layer=context.layer, note=found.diverged)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share measured on `count` examples.

    >>> low, high = wilson_interval(0.9, 100)
    >>> round(low, 3), round(high, 3)
    (0.826, 0.945)
    """
    z = 1.959964 / sqrt(count)
    middle, half = (share + z * z / 2) / (1 + z * z), z * sqrt(share * (1 - share) + z * z / 4) / (1 + z * z)
    return middle - half, middle + half


def _aligned(context: VerbContext) -> nn.Module:
    """The second network, aligned to the first by the option `method`."""
    method = context.options["method"]
    if method == "none":
        return context.other
    data = context.train() if method not in ("weights", "scale-aware") else None
    return align(context.a, context.other, context.x, method=method, data=data, seed=context.seed).model


# -- The table of verbs ------------------------------------------------------------------------------------------------


_IMAGES: Mapping[str, Option] = {"images": whole(None)}
_METHOD: Mapping[str, Option] = {"method": one_of("weights", lambda: ("none", *SOLVERS))}
_MEASURE = some_of("linear_cka", lambda: [measure.name for measure in every()])
_FIT = one_of("direct", lambda: ("direct", "task"))

VERBS: Mapping[str, Verb] = {
    "accuracy": Verb(1, {**_IMAGES}, accuracy),
    "symmetry": Verb(1, {"trials": whole(3)}, symmetry),
    "canonical": Verb(1, {**_IMAGES}, canonical),
    "barrier": Verb(2, {**_METHOD, "points": whole(11, least=3), "reset": flag(False), **_IMAGES}, barrier),
    "connectivity": Verb(2, {**_METHOD, "alphas": numbers((0.25, 0.5, 0.75), 0.0, 1.0), **_IMAGES}, connectivity),
    "compare": Verb(
        2, {"measure": _MEASURE, **_IMAGES, "layers": Option(None, lambda name, value: None)}, compare,
        takes_layers=True,
    ),
    "stitch": Verb(
        2, {"family": read_by("relu", find_family), "fit": _FIT, "epochs": whole(5), **_IMAGES}, stitch, layered=True
    ),
    "complexity": Verb(1, {"beta": number(0.1, 0.0, 1.0, exclusive=True)}, complexity),
    "fold": Verb(
        1, {"method": one_of("fold_to", lambda: FOLD_METHODS), "at": numbers((0.75, 0.5, 0.25), 0.0, exclusive=True),
            **_IMAGES}, fold,
    ),
    "dissect": Verb(
        1, {"concepts": one_of("strokes", lambda: CONCEPTS), "level": number(0.04, 0.0, 1.0),
            "share": number(0.005, 0.0, 1.0), "rotation": number(0.0), **_IMAGES}, dissect, layered=True,
    ),
}  # fmt: skip
