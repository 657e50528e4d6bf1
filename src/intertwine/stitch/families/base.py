"""What every family of maps shares: the base class, the registry, initial matrices, assignments with factors, and a
direct fit that is not trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TypeAlias

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError, MismatchError
from intertwine.stitch.direct import LinearMap, PairMoments, PairProducts

# ----------------------------------------------------------------------------------------------------
# What a family of stitching maps can do: start, run, stay in the family, end in it, and be fitted directly.


#: Single-precision tensors by name. Those with requires_grad are trained, the others only kept.
Parameters: TypeAlias = dict[str, Tensor]


class MapFamily(ABC):
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
        self, inputs: int, outputs: int, how: str, moments: PairMoments | None, generator: torch.Generator
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
        self, inputs: int, outputs: int, how: str, moments: PairMoments | None, generator: torch.Generator
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
    def direct(self, moments: PairMoments) -> LinearMap:
        """The member nearest to taking the front's rows to the back's, in closed form where there is one."""

    def __str__(self) -> str:
        return self.name

    def _check_start(self, how: str, moments: PairMoments | None, inputs: int, outputs: int) -> None:
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


# ----------------------------------------------------------------------------------------------------
# Families by name: every file of this folder registers its own members, and importing them all makes them known.


_MEMBERS: dict[str, MapFamily] = {}


def register(*members: MapFamily) -> None:
    """Make families known by their names; one of the same name takes the place of the first.

    Example:
        >>> from intertwine.stitch.families.linear import Linear
        >>> register(Linear())
        >>> "linear" in known_families()
        True
    """
    _MEMBERS.update({member.name: member for member in members})


def known_families() -> dict[str, MapFamily]:
    """All families whose names hold no number, by name."""
    _import_all()
    return dict(_MEMBERS)


@cache
def _import_all() -> None:
    """Only once: what is imported has registered itself."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")


# ----------------------------------------------------------------------------------------------------
# Which input goes to which output, each at most once, where an output is one input times a factor.


#: The smallest factor, as a share of the ratio of lengths ‖b‖/‖a‖: a member of the group has none that is zero.
FLOOR = 1e-6
#: What the factors of a family may be.
FACTORS = ("one", "sign", "positive", "nonzero")


def best_assignment(gains: Float[Tensor, "outputs inputs"]) -> Int[Tensor, " outputs"]:
    """The input of every output, no input twice, with the largest sum of gains (Hungarian method; row 000-G33).

    >>> best_assignment(torch.tensor([[5.0, 4.0], [4.0, 0.0]]))
    tensor([1, 0])
    """
    found = linear_sum_assignment(gains.detach().double().numpy(force=True), maximize=True)[1]
    return torch.from_numpy(found).to(gains.device)


def check_injection(name: str, inputs: int, outputs: int) -> None:
    """Refuse more outputs than inputs: some output would have no input of its own."""
    if outputs > inputs:
        raise MismatchError(
            f"The family {name!r} was asked to take {inputs} features to {outputs}. Every output is one input, and no "
            'input is used twice, so there can be no more outputs than inputs. Use "linear" or "affine" here, or '
            "stitch in the other direction."
        )


def gains(products: PairProducts, factors: str) -> Float[Tensor, "outputs inputs"]:
    """By how much input j, with the best factor allowed, lowers the squared distance to output i.

    For positive factors this is max(0, ⟨b_i, a_j⟩)²/‖a_j‖². Inputs that are zero lower nothing.
    """
    ab, lengths = products.ab.T, products.aa.diagonal()
    dead = lengths <= 0
    if factors == "one":
        return 2 * ab - lengths
    if factors == "sign":
        return 2 * ab.abs() - lengths
    met = ab.clamp(min=0) if factors == "positive" else ab
    return torch.where(dead, 0.0, met.square() / torch.where(dead, 1.0, lengths))


def best_factors(products: PairProducts, order: Int[Tensor, " outputs"], factors: str) -> Float[Tensor, " outputs"]:
    """The best factor of each output on its input, ⟨b, a⟩/‖a‖² where it may be any.

    Two rules for dead features: on an input that is zero the factor is 1; an output that is zero, or that its input
    opposes, has the smallest factor (`FLOOR`, relative to the ratio of lengths).
    """
    met = products.ab.T.gather(1, order[:, None])[:, 0]
    if factors == "one":
        return torch.ones_like(met)
    if factors == "sign":
        return torch.where(met < 0, -1.0, 1.0).to(met)
    inputs, outputs = products.aa.diagonal()[order], products.bb.diagonal()
    dead = inputs <= 0
    safe = torch.where(dead, 1.0, inputs)
    lowest = FLOOR * torch.where(outputs > 0, (outputs / safe).clamp(min=0).sqrt(), 1.0)
    best = met / safe
    if factors == "positive":
        best = torch.maximum(best, lowest)
    else:
        best = torch.where(best.abs() < lowest, torch.where(best < 0, -lowest, lowest), best)
    return torch.where(dead, 1.0, best)


def matrix_from(
    order: Int[Tensor, " outputs"], factors: Float[Tensor, " outputs"], inputs: int
) -> Float[Tensor, "outputs inputs"]:
    """The matrix with one entry a row: factors[i] at column order[i].

    >>> matrix_from(torch.tensor([1, 0]), torch.tensor([2.0, 3.0]), 2)
    tensor([[0., 2.], [3., 0.]])
    """
    return factors.new_zeros(len(order), inputs).scatter(1, order[:, None], factors[:, None])


def default_factors(products: PairProducts, factors: str) -> Float[Tensor, "outputs inputs"]:
    """What input j is multiplied by where it stands for output i: the ratio of lengths, the sign of ⟨b_i, a_j⟩, both.

    One where a feature is zero.
    """
    ab = products.ab.T
    table = torch.ones_like(ab)
    if factors in ("positive", "nonzero"):
        a, b = (x.diagonal().clamp(min=0).sqrt() for x in (products.aa, products.bb))
        live = (b[:, None] > 0) & (a > 0)
        table = torch.where(live, b[:, None] / torch.where(a > 0, a, 1.0), 1.0)
    return torch.where(ab < 0, -table, table) if factors in ("sign", "nonzero") else table


def correlations(centred: PairProducts) -> Float[Tensor, "outputs inputs"]:
    """Of every output with every input; zero where one of them does not vary."""
    a, b = (x.diagonal().clamp(min=0).sqrt() for x in (centred.aa, centred.bb))
    sizes = b[:, None] * a
    return torch.where(sizes > 0, centred.ab.T / torch.where(sizes > 0, sizes, 1.0), 0.0)


# ----------------------------------------------------------------------------------------------------
# Where a matrix can begin before it is trained (row 001-C35).


#: Without the direct fit, which is the family's own.
PLAIN_STARTS = ("identity", "random", "permutation", "ones")


def start_matrix(inputs: int, outputs: int, how: str, generator: torch.Generator) -> Float[Tensor, "outputs inputs"]:
    """A matrix to begin with.

    "identity": ones on the diagonal, also of a matrix that is not square. "random": even in ±1/√inputs, as layers of
    PyTorch begin (rows 000-G28, 001-C29). "permutation": a random choice of inputs, none twice. "ones": all ones.

    Example:
        >>> import torch
        >>> start_matrix(3, 2, "identity", torch.Generator())
        tensor([[1., 0., 0.], [0., 1., 0.]])
    """
    if how == "identity":
        return torch.eye(outputs, inputs)
    if how == "ones":
        return torch.ones(outputs, inputs)
    if how == "permutation":
        return matrix_from(random_order(inputs, outputs, generator), torch.ones(outputs), inputs)
    if how == "random":
        return random_uniform((outputs, inputs), inputs, generator)
    raise InputError(f"A matrix was asked to begin at {how!r}. It can begin at: {', '.join(PLAIN_STARTS)}.")


def random_uniform(shape: tuple[int, ...], inputs: int, generator: torch.Generator) -> Tensor:
    """Even in ±1/√inputs."""
    return (2 * torch.rand(shape, generator=generator) - 1) / inputs**0.5


def random_order(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    """One input for every output, none twice."""
    check_injection("permutation", inputs, outputs)
    return torch.randperm(inputs, generator=generator)[:outputs]


# ----------------------------------------------------------------------------------------------------
# A family with its direct fit in place of training: it stands among trained stitches and is never changed.


@dataclass(frozen=True)
class DirectFit(MapFamily):
    """The direct fit of a family, which has nothing to train."""

    family: MapFamily

    @property
    def name(self) -> str:  # pyrefly: ignore
        return self.family.name

    def check(self, inputs: int, outputs: int) -> None:
        self.family.check(inputs, outputs)

    def _start(
        self, inputs: int, outputs: int, how: str, moments: PairMoments | None, generator: torch.Generator
    ) -> Parameters:
        if moments is None:
            raise InputError(f"The family {self.name!r} was to be fitted directly, and no moments were given.")
        found = self.family.direct(moments).detach()
        return {"matrix": found.matrix} | ({} if found.bias is None else {"bias": found.bias})

    def _check_start(self, how: str, moments: PairMoments | None, inputs: int, outputs: int) -> None:
        """A direct fit has no start to choose."""

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["matrix"], parameters.get("bias"))

    def direct(self, moments: PairMoments) -> LinearMap:
        return self.family.direct(moments)
