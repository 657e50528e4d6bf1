"""Verbs of one network: its accuracy, its symmetry with the proof, its complexity, and what is left of it folded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from intertwine.fold.budget import fold_to
from intertwine.fold.complexity import complexity as measure_complexity
from intertwine.fold.fold import fold as merge_features
from intertwine.fold.pruning import prune
from intertwine.stitch.passes import accuracy_of
from intertwine.study.rows import Row
from intertwine.study.verbs.verb import Ask
from intertwine.symmetry.symmetry import symmetry as find_symmetry

#: How the verb "fold" makes networks smaller: each takes a share of parameters or of features, or a β.
SMALLER: Mapping[str, Callable[..., Any]] = {
    "fold_to": lambda model, x, at: fold_to(model, x, parameters=at),
    "merge": lambda model, x, at: fold_to(model, x, parameters=at, how="merge"),
    "fold": lambda model, x, at: merge_features(model, x, beta=at),
    "prune": lambda model, x, at: prune(model, x, widths=at),
}


def accuracy(ask: Ask) -> Iterator[Row]:
    """On the test part."""
    yield Row("accuracy", accuracy_of(ask.a, ask.test()))


def symmetry(ask: Ask) -> Iterator[Row]:
    """Its size, and by how much random elements of it change outputs and hidden features."""
    found = find_symmetry(ask.a, ask.x)
    proof = found.certify(ask.a, ask.x, trials=ask.options["trials"])
    yield Row("wires", float(len(found.wires)))
    yield Row("log_order", float(found.log_order))
    yield Row("dimension", float(found.dimension))
    yield Row("coverage", float(found.coverage(ask.a)))
    yield Row("feature_error", float(max(proof.per_wire.values(), default=0.0)))
    yield Row("certificate_error", float(proof.max_error), note=None if proof.ok else "the certificate failed")


def complexity(ask: Ask) -> Iterator[Row]:
    """How many features of each layer are not equivalent to each other."""
    for layer in measure_complexity(ask.a, ask.x, beta=ask.options["beta"]).layers:
        for quantity in ("classes", "width", "dead"):
            yield Row(quantity, float(getattr(layer, quantity)), layer=layer.name)


def fold(ask: Ask) -> Iterator[Row]:
    """Accuracy of the network made smaller, against the share of its parameters that is left."""
    make = SMALLER[ask.options["method"]]
    yield Row("accuracy", accuracy_of(ask.a, ask.test()), index=1.0)
    for at in ask.options["at"]:
        small = make(ask.a, ask.x, at)
        yield Row("accuracy", accuracy_of(small.model, ask.test()), index=small.parameters.share)
