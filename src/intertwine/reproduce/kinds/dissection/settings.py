"""The table [dissection] of a plan: which pictures are drawn, and where and in which bases networks are dissected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from intertwine.errors import InputError

FORMS = ("fractions", "categories")


@dataclass(frozen=True)
class Dissection:
    """The networks are those of [networks], which vary in `residual_relu`; each is a pair with itself in [pairs].

    Attributes:
        pictures, test, seed, size, task: what they learn from, of which the last `test` pictures test them.
        seen, seen_seed: how many other pictures they are dissected on. at: places. alphas: powers of each rotation.
        form: what is drawn, the fraction of interpretable units, or beside it their concepts by category.
    """

    pictures: int
    test: int
    seen: int
    at: list[str]
    alphas: list[float]
    rotations: int
    size: int = 32
    task: list[str] = field(default_factory=lambda: ["colour", "shape"])
    seed: int = 0
    seen_seed: int = 1
    form: str = "fractions"

    def check(self, plan: Any, file: str) -> None:
        """Refuse what cannot be carried out."""
        if self.form not in FORMS:
            raise InputError(f"{file}: the form {self.form!r} was asked for; there are {', '.join(FORMS)}.")
        if plan.networks is None or set(plan.networks.vary) != {"residual_relu"}:
            raise InputError(
                f"{file}: networks are dissected with and without a ReLU; vary residual_relu in [networks]."
            )
        if plan.pairs is None or plan.pairs.choose != "self":
            raise InputError(f'{file}: networks are dissected one by one; choose = "self" in [pairs].')
