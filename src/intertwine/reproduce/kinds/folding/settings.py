"""Settings of the experiments on folding (Chen et al. 2024), and the rules by which features are merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from intertwine.errors import InputError
from intertwine.fold.options import PAPER_CODE, PRINTED
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.plan import Plan

#: Name → options of `intertwine.fold`. In all of them counts are kept: set to 1 after every merge, as Algorithm 1 is
#: printed, nothing is exact. "as printed" sums rows before it compares them, "as published" sums BatchNorm too, which
#: is not exact; "corrected" compares means; "this library" compares by what a merge changes in the layers behind.
RULES: Mapping[str, Mapping[str, Any]] = {
    "as printed": PRINTED,
    "as published": PAPER_CODE,
    "corrected": {**PRINTED, "rows": "mean"},
    "this library": {},
}
MEASURES = ("curves", "distances", "swaps", "complexity", "groups", "seconds")


@dataclass(frozen=True)
class Settings:
    """The table [folding]; a measure reads the entries that it needs.

    Attributes:
        measure: "curves" accuracy against parameters, "distances" between features, "swaps" of equivalent features,
            "complexity" per layer, "groups" what groups of features see, "seconds" per sweep. form: which rows a plan
            shows, where it does not show all.
        architectures: each gives networks of its own; none: that of [networks].
        rules, betas: names in `RULES`, and the grid. shares: of parameters that are to be left, for other methods.
        methods: the others, names in `intertwine.reproduce.kinds.folding.curves`.
        at: percent of parameters at which curves are read off. within: points of accuracy that may be lost.
        seen: training images on which BatchNorm statistics are estimated again. points, seeds: of swaps.
        layer, classes, images, groups: where groups of features are looked at, on images of which classes, how many.
        sweeps: over all layers, timed. options: of the architectures that are timed.
    """

    measure: str
    form: str = ""
    architectures: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=lambda: list(RULES))
    betas: list[float] = field(default_factory=lambda: [0.01, 0.03, 0.05, 0.07, 0.1, 0.12, 0.14, 0.15, 0.18, 0.2])
    shares: list[float] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    within: float = 2.0
    seen: int = 5000
    points: int = 11
    seeds: int = 3
    layer: str = ""
    classes: list[str] = field(default_factory=list)
    images: int = 3
    groups: int = 3
    sweeps: int = 100
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, plan: Plan, where: str) -> None:
        """Refuse words that nothing is known of."""
        from intertwine.reproduce.kinds.folding.curves import OTHERS  # which reads the rules above

        known = [(self.measure, MEASURES), *((rule, tuple(RULES)) for rule in self.rules)]
        for word, words in [*known, *((method, tuple(OTHERS)) for method in self.methods)]:
            if word not in words:
                raise InputError(f"{where}: [folding] says {word!r}; it may say {', '.join(words)}.")


def network_of(row: Row) -> str:
    """What the network of a row is called: its architecture, and the option that varies where one does."""
    group = row.get("front_group")
    return row["network"] + ("" if group is None else f" ×{group:g}")
