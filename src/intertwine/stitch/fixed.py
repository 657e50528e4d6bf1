"""A family with its direct fit in place of training: it stands among trained stitches and is never changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from intertwine.errors import InputError
from intertwine.stitch.family import Family, Parameters
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments


@dataclass(frozen=True)
class Fixed(Family):
    """The direct fit of a family, which has nothing to train."""

    family: Family

    @property
    def name(self) -> str:  # pyrefly: ignore
        return self.family.name

    def check(self, inputs: int, outputs: int) -> None:
        self.family.check(inputs, outputs)

    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        if moments is None:
            raise InputError(f"The family {self.name!r} was to be fitted directly, and no moments were given.")
        found = self.family.direct(moments).detach()
        return {"matrix": found.matrix} | ({} if found.bias is None else {"bias": found.bias})

    def _check_start(self, how: str, moments: Moments | None, inputs: int, outputs: int) -> None:
        """A direct fit has no start to choose."""

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["matrix"], parameters.get("bias"))

    def direct(self, moments: Moments) -> LinearMap:
        return self.family.direct(moments)
