"""What a family of stitching maps can do: start, run, stay in the family, end in it, and be fitted directly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments

#: Single-precision tensors by name. Those with requires_grad are trained, the others only kept.
Parameters: TypeAlias = dict[str, Tensor]


class Family(ABC):
    """A set of linear maps and how its members are found. One subclass per family, in `stitch/families/`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As users write it, such as "lowrank:4"."""

    #: The ways to start that `start` knows.
    starts: tuple[str, ...] = ("direct", "identity", "random")

    def check(self, inputs: int, outputs: int) -> None:  # noqa: B027 - most families have members of every shape
        """Raise MismatchError where the family has no member of this shape."""

    def start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        """Fresh parameters: from the direct fit, at the identity or at random, or what else `starts` names.

        They are on the device of the moments, or on the CPU where there are none.

        Raises:
            MismatchError: no member has this shape. InputError: no such start, or no moments for a direct one.
        """
        self._check_start(how, moments, inputs, outputs)
        found = self._start(inputs, outputs, how, moments, generator)
        if moments is None:
            return found
        device = moments.a_mean.device
        return {name: x.detach().to(device).requires_grad_(x.requires_grad) for name, x in found.items()}

    @abstractmethod
    def _start(
        self, inputs: int, outputs: int, how: str, moments: Moments | None, generator: torch.Generator
    ) -> Parameters:
        """The parameters; shape, way and moments are checked already."""

    @abstractmethod
    def map(self, parameters: Parameters) -> LinearMap:
        """The map that runs while training; gradients flow to the parameters."""

    def final(self, parameters: Parameters) -> LinearMap:
        """The member of the family that training ends in."""
        return self.map(parameters).detach()

    def project_(self, parameters: Parameters) -> None:  # noqa: B027 - most families fill their space
        """Bring the parameters back where they belong after an optimiser step, in place, without leaving the device."""

    def penalty(self, parameters: Parameters) -> Tensor:
        """What is added to the loss."""
        return next(iter(parameters.values())).new_zeros(())

    def refresh_(self, parameters: Parameters, done: float) -> None:  # noqa: B027 - most families do nothing
        """Before each epoch; `done` is the share of the training that is behind."""

    def decayed(self) -> frozenset[str]:
        """The names of the parameters that weight decay applies to."""
        return frozenset()

    @abstractmethod
    def direct(self, moments: Moments) -> LinearMap:
        """The member nearest to taking the front's rows to the back's, in closed form where there is one."""

    def __str__(self) -> str:
        return self.name

    def _check_start(self, how: str, moments: Moments | None, inputs: int, outputs: int) -> None:
        """Refuse a way to start that this family does not have, and a direct one without moments that fit."""
        self.check(inputs, outputs)
        if how not in self.starts:
            raise InputError(
                f"The family {self.name!r} was asked to start from {how!r}. It starts from: {', '.join(self.starts)}."
            )
        if how == "direct" and moments is None:
            raise InputError(
                f"The family {self.name!r} was asked to start from the direct fit, and no moments were given. Pass the "
                'moments of the features, or start from "identity" or "random".'
            )
        if moments is not None and (moments.inputs, moments.outputs) != (inputs, outputs):
            raise InputError(
                f"The family {self.name!r} was asked for a map {inputs} → {outputs}, and the moments are of "
                f"{moments.inputs} → {moments.outputs} features. Pass the moments of this place."
            )


def leaf(values: Tensor, *, trained: bool = True) -> Tensor:
    """A tensor of its own in single precision, trained or kept."""
    return values.detach().to(torch.float32, copy=True).contiguous().requires_grad_(trained)
