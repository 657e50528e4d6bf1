"""The verbs of a study: what each needs, its options with their defaults, and how what it finds becomes rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from intertwine.align.align import align
from intertwine.connect.barrier import barrier as measure_barrier
from intertwine.connect.connectivity import connectivity as measure_connectivity
from intertwine.fold.budget import fold_to
from intertwine.fold.complexity import complexity as measure_complexity
from intertwine.fold.fold import fold as merge_features
from intertwine.fold.pruning import prune
from intertwine.measure.compare import compare as compare_layers
from intertwine.stitch.passes import accuracy_of
from intertwine.stitch.stitch import stitch as make_stitch
from intertwine.study.rows import Row
from intertwine.study.workbench import Workbench
from intertwine.symmetry.symmetry import symmetry as find_symmetry

#: How the verb "fold" makes networks smaller: each takes a share of parameters or of features, or a β.
SMALLER: Mapping[str, Callable[..., Any]] = {
    "fold_to": lambda model, x, at: fold_to(model, x, parameters=at),
    "merge": lambda model, x, at: fold_to(model, x, parameters=at, how="merge"),
    "fold": lambda model, x, at: merge_features(model, x, beta=at),
    "prune": lambda model, x, at: prune(model, x, widths=at),
}


@dataclass(frozen=True)
class Ask:
    """What a verb is asked: the networks, a layer, options with defaults filled in, and a seed for what is random."""

    bench: Workbench
    zoo: str
    a: nn.Module
    b: nn.Module | None
    layer: str | None
    options: Mapping[str, Any]
    seed: int

    @property
    def other(self) -> nn.Module:
        assert self.b is not None  # verbs of two networks are only asked with two
        return self.b

    @property
    def x(self) -> Tensor:
        return self.bench.example(self.zoo)

    def test(self) -> list[tuple[Tensor, Tensor]]:
        return self.bench.batches(self.zoo, "test", self.options.get("images"))

    def train(self) -> list[tuple[Tensor, Tensor]]:
        return self.bench.batches(self.zoo, "train", self.options.get("images"))


@dataclass(frozen=True)
class Verb:
    """`networks`: one or two. `layered`: one task per layer. `takes_layers`: it may be told which to look at."""

    networks: int
    options: Mapping[str, Any]
    run: Callable[[Ask], Iterable[Row]]
    layered: bool = False
    takes_layers: bool = False


def _accuracy(ask: Ask) -> Iterator[Row]:
    yield Row("accuracy", accuracy_of(ask.a, ask.test()))


def _symmetry(ask: Ask) -> Iterator[Row]:
    found = find_symmetry(ask.a, ask.x)
    proof = found.certify(ask.a, ask.x, trials=ask.options["trials"])
    yield Row("wires", float(len(found.wires)))
    yield Row("log_order", float(found.log_order))
    yield Row("dimension", float(found.dimension))
    yield Row("coverage", float(found.coverage(ask.a)))
    yield Row("certificate_error", float(proof.max_error), note=None if proof.ok else "the certificate failed")


def _aligned(ask: Ask) -> nn.Module:
    """The second network, moved onto the first by the method that was asked for."""
    method = ask.options["method"]
    if method == "none":
        return ask.other
    data = ask.train() if method not in ("weights", "scale-aware") else None
    return align(ask.a, ask.other, ask.x, method=method, data=data, seed=ask.seed).model


def _barrier(ask: Ask) -> Iterator[Row]:
    reset = ask.train() if ask.options["reset"] else None
    found = measure_barrier(ask.a, _aligned(ask), ask.test(), points=ask.options["points"], reset_statistics=reset)
    for i, t in enumerate(found.ts):
        yield Row("loss", found.loss[i], index=t)
        if found.error is not None:
            yield Row("error", found.error[i], index=t)
    yield Row("loss_barrier", found.loss_barrier)
    if found.error_barrier is not None:
        yield Row("error_barrier", found.error_barrier)


def _connectivity(ask: Ask) -> Iterator[Row]:
    found = measure_connectivity(ask.a, _aligned(ask), ask.test(), alphas=tuple(ask.options["alphas"]))
    for row in found.to_rows():
        for quantity in ("llfc", "additivity", "sign_agreement", "commutativity"):
            if row[quantity] is not None:
                note = row["notes"] or None
                yield Row(quantity, row[quantity], index=row["alpha"], layer=row["layer"], note=note)


def _compare(ask: Ask) -> Iterator[Row]:
    names = ask.options["measure"]
    measures = (names,) if isinstance(names, str) else tuple(names)
    found = compare_layers(ask.a, ask.other, ask.test(), layers=ask.options["layers"], measures=measures)
    for row in found.to_rows():
        note = row["degenerate"] or row["notes"] or None
        yield Row(row["measure"], row["value"], layer=row["first"], other_layer=row["second"], note=note)


def _stitch(ask: Ask) -> Iterator[Row]:
    assert ask.layer is not None  # stitch is layered
    more = {} if ask.options["fit"] == "direct" else {"epochs": ask.options["epochs"]}
    found = make_stitch(
        ask.a, ask.other, ask.layer, family=ask.options["family"], fit=ask.options["fit"], data=ask.train(),
        test=ask.test(), seed=ask.seed, **more,
    )  # fmt: skip
    for quantity in ("penalty", "accuracy", "relative_accuracy", "cross_entropy"):
        value = found.to_dict()[quantity]
        yield Row(quantity, value, layer=ask.layer, note=found.diverged)


def _complexity(ask: Ask) -> Iterator[Row]:
    for layer in measure_complexity(ask.a, ask.x, beta=ask.options["beta"]).layers:
        for quantity in ("classes", "width", "dead"):
            yield Row(quantity, float(getattr(layer, quantity)), layer=layer.name)


def _fold(ask: Ask) -> Iterator[Row]:
    make = SMALLER[ask.options["method"]]
    yield Row("accuracy", accuracy_of(ask.a, ask.test()), index=1.0)
    for at in ask.options["at"]:
        small = make(ask.a, ask.x, at)
        yield Row("accuracy", accuracy_of(small.model, ask.test()), index=small.parameters.share)


VERBS: Mapping[str, Verb] = {
    "accuracy": Verb(1, {"images": None}, _accuracy),
    "symmetry": Verb(1, {"trials": 3}, _symmetry),
    "barrier": Verb(2, {"method": "weights", "points": 11, "reset": False, "images": None}, _barrier),
    "connectivity": Verb(2, {"method": "weights", "alphas": (0.25, 0.5, 0.75), "images": None}, _connectivity),
    "compare": Verb(2, {"measure": "linear_cka", "images": None, "layers": None}, _compare, takes_layers=True),
    "stitch": Verb(2, {"family": "relu", "fit": "direct", "epochs": 5, "images": None}, _stitch, layered=True),
    "complexity": Verb(1, {"beta": 0.1}, _complexity),
    "fold": Verb(1, {"method": "fold_to", "at": (0.75, 0.5, 0.25), "images": None}, _fold),
}
