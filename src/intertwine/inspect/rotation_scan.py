"""Rotation scan: a layer dissected in rotated bases Q^α, for α from 0 to 1 (Godfrey et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from intertwine.errors import InputError
from intertwine.inspect.concepts import concept_data
from intertwine.inspect.dissect import MEMORY, SHARE, DissectionSettings, Maps, dissect_maps
from intertwine.inspect.dissection import LEVEL, Dissection, draw_fractions
from intertwine.inspect.rotation import haar, planes
from intertwine.lazy import data_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, eq=False)
class RotationScan:
    """(α, seed of the rotation) → dissection in the basis Q^α. `at`: the layer."""

    at: str
    dissections: Mapping[tuple[float, int], Dissection] = field(repr=False)

    @property
    def curve(self) -> dict[float, list[float]]:
        """α → the fraction of interpretable units, one number per rotation."""
        found: dict[float, list[float]] = {}
        for (alpha, _), one in self.dissections.items():
            found.setdefault(alpha, []).append(one.fraction)
        return found

    @property
    def chance(self) -> float | None:
        """The mean fraction above the level by chance; None without a null."""
        nulls = [one.null.above(one.level) for one in self.dissections.values() if one.null is not None]
        return sum(nulls) / len(nulls) if nulls else None

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per rotation, as plain data."""
        return [
            {
                "at": self.at, "alpha": alpha, "seed": seed, "fraction": one.fraction,
                "concepts": len(one.by_concept), "fraction_above_chance": one.fraction_above_chance,
                "null_95": None if one.null is None else one.null.quantile(),
                "by_category": {kind: found.concepts for kind, found in one.by_category.items()},
            }
            for (alpha, seed), one in self.dissections.items()
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """All rotations, as plain data."""
        return {"at": self.at, "chance": self.chance, "rotations": self.to_rows()}

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def plot(self) -> Figure:
        """The fraction of interpretable units against α; the dotted line is the fraction by chance."""
        return draw_fractions({self.at: self.curve}, {} if self.chance is None else {self.at: self.chance})

    def __repr__(self) -> str:
        means = ", ".join(f"{alpha:g}: {sum(some) / len(some):.1%}" for alpha, some in self.curve.items())
        return f"RotationScan({self.at}; interpretable units by α: {means})"


def rotation_scan(
    model: nn.Module,
    at: str,
    images: Any,
    concepts: Any,
    alphas: Sequence[float | int] = ALPHAS,
    *,
    seeds: Sequence[int] = (0,),
    level: float = LEVEL,
    share: float = SHARE,
    null: int = 1,
    memory: int = MEMORY,
) -> RotationScan:
    """Dissect one layer in the bases Q^α, one rotation Q per seed; the network runs once if memory allows.

    Args:
        alphas: the powers of the rotations. seeds: one rotation each. The others are those of `dissect`.

    >>> import torch
    >>> from intertwine.inspect.rotation_scan import rotation_scan
    >>> images = torch.rand(60, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> rotation_scan(torch.nn.Sequential(torch.nn.Identity()), "0", images, images > 0.995, [0, 1])
    RotationScan(0; interpretable units by α: 0: 100.0%, 1: 0.0%)
    """
    if not alphas or not seeds:
        raise InputError("A scan over rotations needs at least one alpha and one seed.")
    maps, data, settings = (
        Maps(model, at, images, memory),
        concept_data(concepts),
        DissectionSettings(level, share, null),
    )
    found: dict[tuple[float, int], Dissection] = {}
    own = dissect_maps(maps, data, None, settings) if 0 in alphas else None
    for seed in seeds:
        turn = planes(haar(maps.units, seed)) if set(alphas) - {0} else None
        for alpha in alphas:
            if own is not None and alpha == 0:  # the basis is the same for every rotation
                found[0.0, seed] = own
            elif turn is not None:
                found[float(alpha), seed] = dissect_maps(maps, data, turn.power(alpha), settings)
    return RotationScan(at, found)
