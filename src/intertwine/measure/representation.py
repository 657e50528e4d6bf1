"""A representation as a measure reads it: samples × features, checked once, centred with care."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.shapes import Float

#: A feature whose spread is below this fraction of its size does not vary: what is left is rounding of the input.
STILL = 8.0


@dataclass(frozen=True, eq=False)
class Representation:
    """Values (samples, features), or (samples, channels, positions) for measures that tell channels from places.

    `values` is float64 where that was given, else float32: large products are taken in it, after centring; whatever is
    small enough is done in float64. `eps` is the precision of what was given.
    """

    values: Float[Tensor, "samples ..."]
    eps: float

    @property
    def samples(self) -> int:
        return self.values.shape[0]

    @cached_property
    def flat(self) -> Float[Tensor, "samples features"]:
        """All channels and positions as features."""
        return self.values.flatten(1)

    @cached_property
    def centred(self) -> Float[Tensor, "samples features"]:
        """Features minus their means over the samples; a feature that does not vary is exactly zero."""
        rest = self.flat - self.flat.mean(0)
        rest -= rest.mean(0)  # what the rounding of the mean left: small numbers now, so that nothing is lost
        still = _peaks(rest) <= STILL * self.eps * _peaks(self.flat)
        return torch.where(still, 0.0, rest) if still.any() else rest

    @cached_property
    def size(self) -> float:
        """The largest centred entry; 0 where nothing varies."""
        return float(_peaks(self.centred).amax())

    @cached_property
    def varying(self) -> int:
        """How many features vary over the samples."""
        return int((self.centred != 0).any(0).sum())


def _peaks(x: Float[Tensor, "samples features"]) -> Float[Tensor, " features"]:
    """The largest size of every feature, without a copy of all sizes."""
    return torch.maximum(x.amax(0), -x.amin(0))


def represent(x: Tensor, name: str = "x") -> Representation:
    """Check a tensor and read it.

    Raises:
        InputError: it is no tensor of numbers (samples, features) or (samples, channels, positions), or not finite.
    """
    if not isinstance(x, Tensor) or x.dim() not in (2, 3) or x.is_complex():
        found = f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise InputError(
            f"{name} must be a tensor (samples, features), or (samples, channels, positions); found {found}. "
            f"{_advice(x, name)}"
        )
    if not x.numel():
        raise InputError(f"{name} has no entries: its shape is {tuple(x.shape)}. Give at least one sample and feature.")
    values = x.detach().to(torch.float64 if x.dtype == torch.float64 or not x.is_floating_point() else torch.float32)
    if not values.sum().isfinite() and not values.isfinite().all():  # the sum alone is quick, and may overflow
        bad = int((~values.isfinite()).sum())
        raise InputError(
            f"{name} holds {bad} entries that are not finite (NaN or infinity). Find the layer that made them; no "
            "measure has a meaning there."
        )
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else torch.finfo(torch.float64).eps
    return Representation(values, float(eps))


def _advice(x: object, name: str) -> str:
    """What to do with what is no representation."""
    if not isinstance(x, Tensor):
        return f"Make it one: torch.as_tensor({name})."
    if x.dim() < 2:
        return f"For one feature per sample write {name}[:, None]."
    if x.is_complex():
        return f"Take its real and imaginary parts as features: torch.view_as_real({name}).flatten(1)."
    return "Flatten or pool other axes first; `intertwine.compare` does it for a model's layers."


def check_pair(a: Representation, b: Representation) -> None:
    """Two representations are compared sample by sample."""
    if a.samples != b.samples:
        raise MismatchError(
            f"A measure compares two representations of the same samples, but x has {a.samples} and y {b.samples}. "
            "Give the features of the same inputs in the same order."
        )
