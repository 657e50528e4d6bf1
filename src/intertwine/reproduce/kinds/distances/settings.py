"""The table [distances] of a plan: how networks are trained, how many, and what is measured on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from intertwine.errors import InputError
from intertwine.reproduce.kinds.distances.stacked_mlp import ACTIVATIONS


@dataclass(frozen=True)
class Distances:
    """Networks of one hidden layer; network i has the seed `first_seed` + i, of its start and the order of its samples.

    Attributes:
        bases: p of the thesis's order, as many as are tried. matched_pairs: pairs for what is work per pair.
        matching_images: training images for activation matching.
        average_sizes, average_groups: networks in an average, and how many averages.
        curve_pairs, curve_points: straight lines between two networks, and the points on each.
        noise: relative to the norm of each tensor, on `noise_nets` networks.
        control_nets: networks with a permuted copy. seed: picks pairs, groups, noise and the copies.
    """

    hidden: int
    nets: int
    activation: str
    learning_rate: float
    epsilon: float
    epochs: int
    batch_size: int
    bases: list[float]
    matched_pairs: int
    matching_images: int
    average_sizes: list[int]
    average_groups: int
    curve_pairs: int
    curve_points: int
    noise: list[float]
    noise_nets: int
    control_nets: int
    first_seed: int = 0
    seed: int = 0

    def check(self, plan: Any, file: str) -> None:
        """Refuse what cannot be carried out."""
        if self.nets < 2:
            raise InputError(f"{file}: {self.nets} networks were asked for, but distances need at least 2.")
        if self.activation not in ACTIVATIONS:
            raise InputError(
                f"{file}: the activation {self.activation!r} was asked for; there are {', '.join(ACTIVATIONS)}."
            )
        if plan.data is None:
            raise InputError(f"{file}: the networks learn from images, but the table [data] is missing.")
