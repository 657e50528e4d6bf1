"""Families of stitching maps: the base class, the registry, start matrices, and assignments with factors."""

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
from torch import Generator, Tensor

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError, MismatchError
from intertwine.stitch.direct import LinearMap, PairMoments, PairProducts

#: Single-precision tensors by name. Those with requires_grad are trained, the others are constant.
Parameters: TypeAlias = dict[str, Tensor]


class MapFamily(ABC):
    """A set of linear maps and the ways to find its members. One subclass per family, in `stitch/families/`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As users write it, such as "lowrank:4"."""

    #: The values of `how` that `start` accepts.
    starts: tuple[str, ...] = ("direct", "identity", "random")

    def check(self, inputs: int, outputs: int) -> None:  # noqa: B027 - most families have members of every shape
        """Raise MismatchError if the family has no member of this shape."""

    def start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        """Initial parameters, on the device of the moments, or on the CPU without moments.

        Args:
            inputs, outputs: the numbers of features. how: one of `starts`. rng: for random starts.
            moments: of the features; needed for the direct start.

        Raises:
            MismatchError: no member has this shape. InputError: an unknown start, or moments missing or of other
                widths.
        """
        self._check_start(how, moments, inputs, outputs)
        found = self._start(inputs, outputs, how, moments, rng)
        if moments is None:
            return found
        device = moments.a_mean.device
        return {name: x.detach().to(device).requires_grad_(x.requires_grad) for name, x in found.items()}

    @abstractmethod
    def _start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        """The parameters; shape, start and moments are valid."""

    @abstractmethod
    def map(self, parameters: Parameters) -> LinearMap:
        """The map used in training; gradients flow to the parameters."""

    def final(self, parameters: Parameters) -> LinearMap:
        """The member of the family that training ends with."""
        return self.map(parameters).detach()

    def project_(self, parameters: Parameters) -> None:  # noqa: B027 - most families need no projection
        """Project the parameters back onto the family after an optimizer step, in place and on their device."""

    def penalty(self, parameters: Parameters) -> Tensor:
        """A term added to the loss."""
        return next(iter(parameters.values())).new_zeros(())

    def refresh_(self, parameters: Parameters, done: float) -> None:  # noqa: B027 - most families do nothing
        """Called before each epoch; `done` is the completed share of the training."""

    def decayed(self) -> frozenset[str]:
        """The names of the parameters that weight decay applies to."""
        return frozenset()

    @abstractmethod
    def direct(self, moments: PairMoments) -> LinearMap:
        """The member that maps the front's rows closest to the back's, in closed form where there is one."""

    def __str__(self) -> str:
        return self.name

    def _check_start(self, how: str, moments: PairMoments | None, inputs: int, outputs: int) -> None:
        self.check(inputs, outputs)
        if how not in self.starts:
            raise InputError(
                f"The family {self.name!r} cannot start from {how!r}. Choose one of: {', '.join(self.starts)}."
            )
        if how == "direct" and moments is None:
            raise InputError(
                f"The family {self.name!r} needs moments of the features to start from the direct fit. Pass moments, "
                'or start from "identity" or "random".'
            )
        if moments is not None and (moments.inputs, moments.outputs) != (inputs, outputs):
            raise InputError(
                f"The map of the family {self.name!r} is {inputs} → {outputs}, but the moments are of "
                f"{moments.inputs} → {moments.outputs} features. Pass the moments of this stitch point."
            )


@dataclass(frozen=True)
class DirectFit(MapFamily):
    """The direct fit of a family, a constant among trained stitches."""

    family: MapFamily

    @property
    def name(self) -> str:  # pyrefly: ignore
        return self.family.name

    def check(self, inputs: int, outputs: int) -> None:
        self.family.check(inputs, outputs)

    def _start(self, inputs: int, outputs: int, how: str, moments: PairMoments | None, rng: Generator) -> Parameters:
        if moments is None:
            raise InputError(f"The direct fit of the family {self.name!r} needs moments of the features. Pass moments.")
        found = self.family.direct(moments).detach()
        return {"matrix": found.matrix} | ({} if found.bias is None else {"bias": found.bias})

    def _check_start(self, how: str, moments: PairMoments | None, inputs: int, outputs: int) -> None:
        """A direct fit has no start to choose."""

    def map(self, parameters: Parameters) -> LinearMap:
        return LinearMap(parameters["matrix"], parameters.get("bias"))

    def direct(self, moments: PairMoments) -> LinearMap:
        return self.family.direct(moments)


def leaf(values: Tensor, *, trained: bool = True) -> Tensor:
    """A copy of a tensor as a leaf of autograd in single precision, trained or constant."""
    return values.detach().to(torch.float32, copy=True).contiguous().requires_grad_(trained)


def check_square(name: str, inputs: int, outputs: int) -> None:
    """Refuse a map between different numbers of features."""
    if inputs != outputs:
        raise MismatchError(
            f"The family {name!r} needs as many outputs as inputs, but the map is {inputs} → {outputs}. Use "
            '"linear" or "affine", or "relu" if there are fewer outputs than inputs.'
        )


def check_injection(name: str, inputs: int, outputs: int) -> None:
    """Refuse more outputs than inputs where every output has an input of its own."""
    if outputs > inputs:
        raise MismatchError(
            f"The family {name!r} assigns an input of its own to every output, but the map is {inputs} → {outputs}, "
            'with more outputs than inputs. Use "linear" or "affine", or stitch in the other direction.'
        )


# -- registry ----------------------------------------------------------------------------------------------------------

_MEMBERS: dict[str, MapFamily] = {}


def register(*members: MapFamily) -> None:
    """Add families under their names; a new family replaces an old one of the same name.

    Example:
        >>> from intertwine.stitch.families.linear import Linear
        >>> register(Linear())
        >>> "linear" in known_families()
        True
    """
    _MEMBERS.update({member.name: member for member in members})


def known_families() -> dict[str, MapFamily]:
    """All registered families by name: those of this library, then those of other modules in this folder."""
    _import_all()
    return dict(_MEMBERS)


@cache
def _import_all() -> None:
    modules = {module.name for module in iter_modules([str(Path(__file__).parent)])}
    for name in sorted(modules, key=lambda name: (name != "names", name)):
        import_module(f"{__package__}.{name}")


# -- start matrices ----------------------------------------------------------------------------------------------------

#: The starts of a general matrix besides the direct fit.
PLAIN_STARTS = ("identity", "random", "permutation", "ones")


def start_matrix(inputs: int, outputs: int, how: str, rng: Generator) -> Float[Tensor, "outputs inputs"]:
    """An initial matrix.

    Args:
        inputs, outputs: the numbers of features. rng: for the random starts.
        how: "identity" (ones on the diagonal, also of a matrix that is not square), "random" (uniform in ±1/√inputs, as
            layers of PyTorch start), "permutation" (random inputs, each at most once) or "ones".

    Example:
        >>> import torch
        >>> start_matrix(3, 2, "identity", torch.Generator())
        tensor([[1., 0., 0.], [0., 1., 0.]])
    """
    match how:
        case "identity":
            return torch.eye(outputs, inputs)
        case "ones":
            return torch.ones(outputs, inputs)
        case "permutation":
            return matrix_from(random_order(inputs, outputs, rng), torch.ones(outputs), inputs)
        case "random":
            return random_uniform((outputs, inputs), inputs, rng)
    raise InputError(f"Unknown start {how!r} of a matrix. Choose one of: {', '.join(PLAIN_STARTS)}.")


def random_uniform(shape: tuple[int, ...], inputs: int, rng: Generator) -> Tensor:
    """Uniform in ±1/√inputs."""
    return (2 * torch.rand(shape, generator=rng) - 1) / inputs**0.5


def random_order(inputs: int, outputs: int, rng: Generator) -> Tensor:
    """A random input for every output, each at most once."""
    check_injection("permutation", inputs, outputs)
    return torch.randperm(inputs, generator=rng)[:outputs]


# -- assignments with factors ------------------------------------------------------------------------------------------

#: The smallest factor, as a share of the ratio of lengths ‖b‖/‖a‖: no member of the group has a factor of zero.
FLOOR = 1e-6
#: Which factors a family allows.
FACTORS = ("one", "sign", "positive", "nonzero")


def best_assignment(gains: Float[Tensor, "outputs inputs"]) -> Int[Tensor, " outputs"]:
    """The input of every output, each input at most once, with the largest sum of gains (Hungarian method).

    >>> best_assignment(torch.tensor([[5.0, 4.0], [4.0, 0.0]]))
    tensor([1, 0])
    """
    found = linear_sum_assignment(gains.detach().double().numpy(force=True), maximize=True)[1]
    return torch.from_numpy(found).to(gains.device)


def ratio(top: Tensor, bottom: Tensor, otherwise: float = 0.0) -> Tensor:
    """top / bottom where bottom is positive, `otherwise` elsewhere."""
    positive = bottom > 0
    return torch.where(positive, top / torch.where(positive, bottom, 1.0), otherwise)


def lengths(products: PairProducts) -> tuple[Tensor, Tensor]:
    """The lengths of the columns of A and of B."""
    a, b = (x.diagonal().clamp(min=0).sqrt() for x in (products.aa, products.bb))
    return a, b


def gains(products: PairProducts, factors: str) -> Float[Tensor, "outputs inputs"]:
    """By how much input j, with its best factor, lowers the squared distance to output i.

    For positive factors this is max(0, ⟨b_i, a_j⟩)²/‖a_j‖². Inputs that are zero lower nothing.
    """
    ab, squares = products.ab.T, products.aa.diagonal()
    if factors in ("one", "sign"):
        return 2 * (ab if factors == "one" else ab.abs()) - squares
    return ratio((ab.clamp(min=0) if factors == "positive" else ab).square(), squares)


def best_factors(products: PairProducts, order: Int[Tensor, " outputs"], factors: str) -> Float[Tensor, " outputs"]:
    """The best factor of each output on its input: ⟨b, a⟩/‖a‖² if any factor is allowed.

    Two rules for dead features: on an input that is zero the factor is 1; an output that is zero, or that its input
    opposes, has the smallest factor (`FLOOR`, relative to the ratio of lengths).
    """
    inner = products.ab.T.gather(1, order[:, None])[:, 0]
    if factors == "one":
        return torch.ones_like(inner)
    if factors == "sign":
        return torch.where(inner < 0, -1.0, 1.0).to(inner)
    inputs, outputs = products.aa.diagonal()[order], products.bb.diagonal()
    dead = inputs <= 0
    safe = torch.where(dead, 1.0, inputs)
    lowest = FLOOR * torch.where(outputs > 0, (outputs / safe).clamp(min=0).sqrt(), 1.0)
    best = inner / safe
    if factors == "positive":
        best = torch.maximum(best, lowest)
    else:
        best = torch.where(best.abs() < lowest, torch.where(best < 0, -lowest, lowest), best)
    return torch.where(dead, 1.0, best)


def matrix_from(
    order: Int[Tensor, " outputs"], factors: Float[Tensor, " outputs"], inputs: int
) -> Float[Tensor, "outputs inputs"]:
    """The matrix with one entry per row: factors[i] at column order[i].

    >>> matrix_from(torch.tensor([1, 0]), torch.tensor([2.0, 3.0]), 2)
    tensor([[0., 2.], [3., 0.]])
    """
    return factors.new_zeros(len(order), inputs).scatter(1, order[:, None], factors[:, None])


def default_factors(products: PairProducts, factors: str) -> Float[Tensor, "outputs inputs"]:
    """The factor of input j as output i: ratio of lengths, sign of ⟨b_i, a_j⟩, or both; 1 for a zero feature."""
    ab = products.ab.T
    table = torch.ones_like(ab)
    if factors in ("positive", "nonzero"):
        a, b = lengths(products)
        table = torch.where(b[:, None] > 0, ratio(b[:, None], a.expand_as(ab), 1.0), 1.0)
    return torch.where(ab < 0, -table, table) if factors in ("sign", "nonzero") else table


def correlations(centred: PairProducts) -> Float[Tensor, "outputs inputs"]:
    """Of every output with every input; zero if one of them is constant."""
    a, b = lengths(centred)
    return ratio(centred.ab.T, b[:, None] * a)
