"""The verbs of a study by name: what each needs, its options and what they may be, and what turns it into rows."""

from __future__ import annotations

from collections.abc import Mapping

from intertwine.align.align import SOLVERS
from intertwine.measure.measure import every
from intertwine.stitch.family import find_family
from intertwine.study.verbs import pairs, single
from intertwine.study.verbs.dissecting import CONCEPTS, dissect
from intertwine.study.verbs.moving import canonical
from intertwine.study.verbs.options import (
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
from intertwine.study.verbs.verb import Ask as Ask
from intertwine.study.verbs.verb import Verb as Verb

_IMAGES = whole(None)
_METHOD = one_of("weights", lambda: ("none", *SOLVERS))
_MEASURE = some_of("linear_cka", lambda: [measure.name for measure in every()])
_FIT = one_of("direct", lambda: ("direct", "task"))

VERBS: Mapping[str, Verb] = {
    "accuracy": Verb(1, {"images": _IMAGES}, single.accuracy),
    "symmetry": Verb(1, {"trials": whole(3)}, single.symmetry),
    "canonical": Verb(1, {"images": _IMAGES}, canonical),
    "barrier": Verb(
        2, {"method": _METHOD, "points": whole(11, least=3), "reset": flag(False), "images": _IMAGES}, pairs.barrier
    ),
    "connectivity": Verb(
        2, {"method": _METHOD, "alphas": numbers((0.25, 0.5, 0.75), 0.0, 1.0), "images": _IMAGES}, pairs.connectivity
    ),
    "compare": Verb(
        2, {"measure": _MEASURE, "images": _IMAGES, "layers": anything(None)}, pairs.compare, takes_layers=True
    ),
    "stitch": Verb(
        2, {"family": read_by("relu", find_family), "fit": _FIT, "epochs": whole(5), "images": _IMAGES}, pairs.stitch,
        layered=True,
    ),
    "complexity": Verb(1, {"beta": share(0.1)}, single.complexity),
    "fold": Verb(
        1, {"method": one_of("fold_to", lambda: single.SMALLER), "at": positives((0.75, 0.5, 0.25)),
            "images": _IMAGES}, single.fold,
    ),
    "dissect": Verb(
        1, {"concepts": one_of("strokes", lambda: CONCEPTS), "level": number(0.04, 0.0, 1.0),
            "share": number(0.005, 0.0, 1.0), "rotation": number(0.0), "images": _IMAGES}, dissect, layered=True,
    ),
}  # fmt: skip
