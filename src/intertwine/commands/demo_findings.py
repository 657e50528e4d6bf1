"""What the demo says in short: the numbers of its study that tell the story, picked out of the table of results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One number and what it is. `share`: it is a fraction, to be written in percent."""

    name: str
    value: float
    share: bool = True

    def __str__(self) -> str:
        return f"{self.value:.1%}" if self.share else f"{self.value:.3f}"


@dataclass(frozen=True)
class Findings:
    """The results of a study as records; the pair of networks that the story is about is the first of them."""

    records: list[dict[str, Any]]

    @cached_property
    def networks(self) -> list[str]:
        """All networks that were tested, such as "digits:0"."""
        return list(dict.fromkeys(r["a"] for r in self.records if r["verb"] == "accuracy"))

    def chosen(self, verb: str, quantity: str, **options: Any) -> list[dict[str, Any]]:
        """The rows of a quantity for the first network, or for the first two, under some options."""
        first, second = self.networks[:2]
        return [
            r
            for r in self.records
            if (r["verb"], r["quantity"], r["a"]) == (verb, quantity, first)
            and r["b"] in (None, second)
            and r["value"] is not None
            and options.items() <= json.loads(r["options"]).items()
        ]

    def certified(self) -> bool:
        """Whether every certificate held."""
        errors = [r for r in self.records if r["quantity"] == "certificate_error"]
        return bool(errors) and all(r["value"] is not None and r["note"] is None for r in errors)

    def told(self) -> list[Finding]:
        """The story in numbers."""
        return [*self._accuracies(), *self._averages(), *self._features(), *self._smaller()]

    def _accuracies(self) -> Iterable[Finding]:
        for r in self.records:
            if r["verb"] == "accuracy":
                yield Finding(f"accuracy of network {letter(self.networks.index(r['a']))}", r["value"])

    def _averages(self) -> Iterable[Finding]:
        """Half-way between two networks: as they are, moved onto each other, and with their statistics mended."""
        ways: Mapping[str, tuple[str, bool]] = {
            "average of A and B": ("none", False),
            "average of A and B, aligned": ("activations", False),
            "average of A and B, aligned and BatchNorm's statistics taken again": ("activations", True),
        }
        for name, (method, reset) in ways.items():
            line = self.chosen("barrier", "error", method=method, reset=reset)
            yield from (Finding(name, 1 - r["value"]) for r in line if r["index"] == 0.5)
        for name, quantity in (("moved", "average_accuracy"), ("moved, brought back", "average_accuracy_back")):
            found = self.chosen("canonical", quantity)
            yield from (Finding(f"average of A and A {name}", r["value"]) for r in found)

    def _features(self) -> Iterable[Finding]:
        """What the networks have in common, layer by layer."""
        for name, method in (("the average", "none"), ("the aligned average", "activations")):
            far = [r["value"] for r in self.chosen("connectivity", "llfc", method=method)]
            if far:
                yield Finding(f"features of {name} off the average of features (LLFC)", sum(far) / len(far), False)
        alike = max(self.chosen("compare", "linear_cka"), key=lambda r: r["value"], default=None)
        if alike:
            yield Finding(f"most alike: {alike['layer']} and {alike['other_layer']} (CKA)", alike["value"], False)
        for name, family in (("as they are", "identity"), ("by order and scale", "relu"), ("linearly", "linear")):
            lost = [r["value"] for r in self.chosen("stitch", "penalty", family=family)]
            if lost:
                yield Finding(f"accuracy lost by stitching A to B {name}, at the worst layer", max(lost))

    def _smaller(self) -> Iterable[Finding]:
        """The smallest folded network that is at most one percent worse."""
        curve = self.chosen("fold", "accuracy", method="fold_to")
        whole = max((r["value"] for r in curve if r["index"] == 1.0), default=0.0)
        good = [r for r in curve if r["value"] >= whole - 0.01]
        if good:
            least = min(good, key=lambda r: r["index"])
            yield Finding(f"accuracy of A folded to {least['index']:.0%} of its parameters", least["value"])


def letter(number: int) -> str:
    """The name of a network in the story.

    >>> letter(0), letter(2)
    ('A', 'C')
    """
    return chr(ord("A") + number)
