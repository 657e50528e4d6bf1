"""What a plan says of its stitches: the table [stitching]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from intertwine.errors import InputError, did_you_mean
from intertwine.reproduce.kinds.stitching.forms import FORMS
from intertwine.reproduce.kinds.stitching.rows import NUMBERS
from intertwine.reproduce.plan import Plan


@dataclass(frozen=True)
class Stitching:
    """What is stitched. `families` are trained, those of `direct` fitted in closed form.

    Attributes:
        form: of the figure and of its numbers, see `forms`. what: the number, or the numbers, of a stitch it shows.
        at: what a place is called in the figure → the place.
        batches: the zoo recipe whose batch size and augmentation the training has.
        variants, options: settings of `intertwine.stitch.settings` that change the recipe.
        seeds: random starts in one run. orders: runs with other data orders and other seeds.
        threshold: entries up to it count as zero. matrices: those of the first pair are kept in the rows.
        alphas: of relu:birkhoff, one chosen by cross-validation after `trial_epochs` of each.
        cka_images: test images on which stitched and own features are compared; 0 compares none.
        line: points on the line between any two stitches of one place; 0 draws none. good: lines are drawn between
            stitches that reach this share of the back network's accuracy.
    """

    form: str
    what: str | list[str]
    at: Mapping[str, str]
    recipe: str
    batches: str
    families: list[str] = field(default_factory=list)
    direct: list[str] = field(default_factory=list)
    variants: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    orders: int = 1
    skip: str | None = None
    threshold: float = 1e-3
    alphas: list[float] = field(default_factory=list)
    trial_epochs: int = 5
    matrices: bool = False
    cka_images: int = 0
    line: int = 0
    good: float = 0.8

    def check(self, plan: Plan, file: str) -> None:
        """Raise an `InputError` where the table cannot be carried out."""
        if self.form not in FORMS:
            raise InputError(f"{file}: the form is {self.form!r}; there are {', '.join(FORMS)}.")
        for name in [self.what] if isinstance(self.what, str) else self.what:
            if name not in NUMBERS:
                raise InputError(
                    f"{file}: {name!r} is to be shown. {did_you_mean(name, NUMBERS)}Numbers of a stitch are "
                    f"{', '.join(NUMBERS)}."
                )
        if not (self.families or self.direct or self.alphas):
            raise InputError(
                f"{file}: [stitching] has neither families, nor direct, nor alphas, so nothing is stitched."
            )
