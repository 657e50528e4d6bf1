"""Jobs: the stitches that are fitted together, and those of one cut side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from intertwine.shapes import Float
from intertwine.stitch.family import Family, Parameters
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.settings import Settings


@dataclass(eq=False)
class Job:
    """One stitch while it is fitted.

    Attributes:
        cut: number of its cut in the splice. number: of the job, which names it in files.
        parameters: of the family. kept: copies of them from the last epoch with finite losses.
        diverged: what happened, where losses stopped being numbers; the job then rests at `kept`.
    """

    number: int
    cut: int
    family: Family
    seed: int
    settings: Settings
    parameters: Parameters = field(default_factory=dict)
    kept: Parameters = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    diverged: str | None = None

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that are trained."""
        return {name: tensor for name, tensor in self.parameters.items() if tensor.requires_grad}

    def hold(self) -> None:
        """Remember the parameters as they are."""
        self.kept = {name: tensor.detach().clone() for name, tensor in self.parameters.items()}

    @torch.no_grad()
    def rest(self, why: str) -> None:
        """Go back to what was remembered, for good."""
        self.diverged = why
        for name, tensor in self.parameters.items():
            tensor.copy_(self.kept[name])
            tensor.requires_grad_(False)


def mapped(
    rows: Float[Tensor, "samples positions inputs"], maps: Sequence[LinearMap]
) -> Float[Tensor, "stacked positions outputs"]:
    """The rows under each map, those of the first one first: one product for all."""
    matrices = torch.stack([one.matrix for one in maps])
    cast = torch.is_autocast_enabled(rows.device.type)  # which chooses the numbers of products by itself
    flat = rows.flatten(0, 1)
    moved = torch.matmul(flat if cast else flat.to(matrices.dtype), matrices.mT)
    if any(one.bias is not None for one in maps):
        biases = [one.bias if one.bias is not None else one.matrix.new_zeros(len(one.matrix)) for one in maps]
        moved = moved + torch.stack(biases).to(moved)[:, None]
    if not cast:
        moved = moved.to(rows.dtype)  # the back's own numbers
    return moved.view(len(maps) * len(rows), rows.shape[1], -1)
