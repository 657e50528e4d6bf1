"""The verbs of a study by name: what each needs, its options with their defaults, and what turns it into rows."""

from __future__ import annotations

from collections.abc import Mapping

from intertwine.study.verbs import pairs, single
from intertwine.study.verbs.dissecting import dissect
from intertwine.study.verbs.moving import canonical
from intertwine.study.verbs.verb import Ask as Ask
from intertwine.study.verbs.verb import Verb as Verb

VERBS: Mapping[str, Verb] = {
    "accuracy": Verb(1, {"images": None}, single.accuracy),
    "symmetry": Verb(1, {"trials": 3}, single.symmetry),
    "canonical": Verb(1, {"images": None}, canonical),
    "barrier": Verb(2, {"method": "weights", "points": 11, "reset": False, "images": None}, pairs.barrier),
    "connectivity": Verb(2, {"method": "weights", "alphas": (0.25, 0.5, 0.75), "images": None}, pairs.connectivity),
    "compare": Verb(2, {"measure": "linear_cka", "images": None, "layers": None}, pairs.compare, takes_layers=True),
    "stitch": Verb(2, {"family": "relu", "fit": "direct", "epochs": 5, "images": None}, pairs.stitch, layered=True),
    "complexity": Verb(1, {"beta": 0.1}, single.complexity),
    "fold": Verb(1, {"method": "fold_to", "at": (0.75, 0.5, 0.25), "images": None}, single.fold),
    "dissect": Verb(
        1, {"concepts": "strokes", "level": 0.04, "share": 0.005, "rotation": 0.0, "images": None}, dissect,
        layered=True,
    ),
}  # fmt: skip
