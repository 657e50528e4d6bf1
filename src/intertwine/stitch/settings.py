"""Settings: how a stitch is fitted, and the recipes of the papers by name.

The papers differ in nearly every option, so each is explicit here and recorded with the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from intertwine.errors import InputError, did_you_mean

#: Option → what it may be, where only a few words are allowed.
CHOICES = {
    "optimizer": ("adam", "sgd"),
    "targets": ("hard", "soft", "both"),
    "norm": ("frozen", "adapt"),
    "select": ("last", "best"),
    "precision": ("float32", "bfloat16"),
}
#: Stitches that are trained together must agree in these.
SHARED = ("epochs", "norm", "score_every", "trace_every", "precision")


@dataclass(frozen=True)
class Settings:
    """How one stitch is trained.

    Attributes:
        epochs: passes over the data.
        optimizer, rate, momentum, decay: momentum is SGD's; decay applies where the family says so.
        drops: whether the rate falls to a tenth after a third and after two thirds of the training.
        targets: "hard" labels of the data, "soft" answers of the back network, or "both" in equal parts.
        start: from the "direct" fit, the "identity", at "random", or another way that the family has.
        norm: BatchNorm layers "frozen" as trained, or "adapt": batch statistics while training, and statistics of the
            stitched network itself, averaged over the data, when it is evaluated.
        select: keep the map of the "last" epoch or of the one that is "best" on the test data, by accuracy, or by
            the loss where there are no classes.
        cka: weight of the linear CKA between stitched and own features, added to the loss.
        score_every: epochs between two evaluations; 0 evaluates at the end only.
        trace_every: steps between two comparisons of features (CKA, R², CCA) on the first batch; 0 for none.
        precision: "bfloat16" runs both networks under autocast.
    """

    epochs: int = 10
    optimizer: str = "adam"
    rate: float | int = 1e-3
    momentum: float | int = 0.0
    decay: float | int = 0.0
    drops: bool = True
    targets: str = "hard"
    start: str = "direct"
    norm: str = "frozen"
    select: str = "last"
    cka: float | int = 0.0
    score_every: int = 0
    trace_every: int = 0
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                raise InputError(
                    f"The option {name}={getattr(self, name)!r} was asked for; it is one of {', '.join(words)}."
                )
        if self.epochs < 0 or self.rate <= 0:
            raise InputError(
                f"epochs={self.epochs} and rate={self.rate} were asked for. Epochs are counted from 0, and a rate is "
                "greater than 0."
            )
        if self.select == "best" and not self.score_every:
            object.__setattr__(self, "score_every", 1)

    def rate_at(self, epoch: int) -> float:
        """The rate in an epoch, counted from 0.

        >>> [Settings(epochs=6, rate=1.0).rate_at(epoch) for epoch in (0, 2, 4)]
        [1.0, 0.1, 0.01]
        """
        drops = 3 * epoch // self.epochs if self.drops and self.epochs else 0
        return self.rate * (1.0, 0.1, 0.01)[min(drops, 2)]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


#: Name → settings. "godfrey" is paper 0 (rates per family: see `of_recipe`), "csiszarik" paper 1, "intertwine" our own.
RECIPES: dict[str, Settings] = {
    "intertwine": Settings(),
    "godfrey": Settings(
        epochs=20, optimizer="sgd", rate=1e-3, decay=1e-4, drops=False, start="random", norm="adapt", score_every=1
    ),
    "csiszarik": Settings(epochs=30, targets="soft"),
}
#: Paper 0 trains its group families at ten times the rate of the others: the rate on the command line never arrived.
GODFREY_GROUP_RATE = 1e-2


def of_recipe(recipe: str, family: str, options: Mapping[str, Any]) -> Settings:
    """The settings of a recipe for a family, with some options changed.

    >>> of_recipe("godfrey", "relu:birkhoff", {}).rate, of_recipe("godfrey", "linear", {"epochs": 2}).epochs
    (0.01, 2)
    """
    if recipe not in RECIPES:
        raise InputError(
            f"The recipe {recipe!r} was asked for. {did_you_mean(recipe, RECIPES)}Recipes are {', '.join(RECIPES)}."
        )
    known = [field.name for field in fields(Settings)]
    for name in options:
        if name not in known:
            raise InputError(
                f"The option {name!r} was given to stitching. {did_you_mean(name, known)}Options are "
                f"{', '.join(known)}."
            )
    found = RECIPES[recipe]
    if recipe == "godfrey" and family.partition(":")[0] in ("relu", "softsort", "permutation"):
        found = replace(found, rate=GODFREY_GROUP_RATE)
    return replace(found, **options)
