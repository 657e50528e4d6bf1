"""Layerwise linear feature connectivity and its two conditions, weak additivity and commutativity, measured at every
layer of a pair of networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor, nn
from torch.func import functional_call

from intertwine.argument_types import Float
from intertwine.connect.layerwise import LayerOutputs, ObservedLayer, PairBatch, is_activation
from intertwine.data.batchnorm import ChannelMoments
from intertwine.data.layers import modules_of
from intertwine.graph.model import copy_module

# ----------------------------------------------------------------------------------------------------
# Layerwise linear feature connectivity: is the feature of the mix the mix of the features, but for a factor?
#
# Zhou et al. (2023) compare f(α·A + (1 − α)·B) with α·f(A) + (1 − α)·f(B), sample by sample, by the cosine.


Rows = Float[Tensor, "samples features"]
NEAR = 1e-4  # distances below it are worked out again, without cancellation


@dataclass(frozen=True)
class Llfc:
    """One layer at one α, the weight of the first network.

    Attributes:
        distance: the mean over samples of 1 − cos between the feature of the mix and the mix of the features, with its
            sign: 2 where they are opposite. None where no sample has both.
        c: the factor with the feature of the mix ≈ c · the mix of the features, by least squares over all samples. The
            printed definition has its c on the other side of the equation, where it is 1/c.
        c_mean, c_std: of the same factor, sample by sample.
    """

    alpha: float
    distance: float | None
    c: float | None
    c_mean: float | None
    c_std: float | None


@dataclass(frozen=True)
class Dots:
    """Sample by sample: the squared lengths of two features and their inner product."""

    first: Tensor
    second: Tensor
    product: Tensor

    @property
    def finite(self) -> Tensor:
        return (self.first + self.second).isfinite()


def dot(x: Rows, y: Rows) -> Float[Tensor, " samples"]:
    """Inner products, row by row, without a copy of the rows."""
    return (x[:, None] @ y[..., None])[:, 0, 0]


@dataclass
class Angles:
    """The mean of 1 − cos between two features of the same sample; counts the samples that have no angle."""

    total: float = 0.0
    count: int = 0
    zero: int = 0
    infinite: int = 0

    def add(self, x: Rows, y: Rows) -> Dots:
        """Take in some samples; the products of their features come back."""
        dots = Dots(dot(x, x), dot(y, y), dot(x, y))
        good = dots.finite & (dots.first > 0) & (dots.second > 0)
        distances = 1 - dots.product / dots.first.sqrt() / dots.second.sqrt()
        near = good & (distances < NEAR)
        if bool(near.any()):  # 1 − cos cancels; half the squared chord does not
            u, v = x[near] / dots.first[near, None].sqrt(), y[near] / dots.second[near, None].sqrt()
            distances[near] = (u - v).square().sum(1) / 2
        self.total += float(distances[good].sum())
        self.count += int(good.sum())
        self.zero += int((dots.finite & ~good).sum())
        self.infinite += int((~dots.finite).sum())
        return dots

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def words(self, what: str) -> str:
        """Which samples had to be left out, and why; empty where none."""
        samples = self.count + self.zero + self.infinite
        reasons = {"are zero": self.zero, "are not finite": self.infinite}
        found = [f"on {n:,} of {samples:,} samples features {why}" for why, n in reasons.items() if n]
        return f"{what}: {' and '.join(found)}; these samples are left out" if found else ""


@dataclass
class LlfcMeter:
    """Adds up what `Llfc` needs, batch by batch."""

    alpha: float
    angles: Angles = field(default_factory=Angles)
    products: float = 0.0
    squares: float = 0.0
    factors: ChannelMoments = field(default_factory=ChannelMoments)

    def add(self, a: Rows, b: Rows, mixed: Rows) -> None:
        """Take in the features of both ends and of the mix."""
        dots = self.angles.add(mixed, torch.lerp(b, a, self.alpha))
        products, squares = dots.product[dots.finite], dots.second[dots.finite]
        self.products += float(products.sum())
        self.squares += float(squares.sum())
        known = squares > 0
        if bool(known.any()):
            self.factors.add((products[known] / squares[known])[None], channels=0)

    def result(self) -> Llfc:
        known = self.factors.count > 0
        mean, std = (float(x) for x in (self.factors.mean, self.factors.variance().sqrt())) if known else (None, None)
        return Llfc(self.alpha, self.angles.mean, self.products / self.squares if known else None, mean, std)


# ----------------------------------------------------------------------------------------------------
# Weak additivity for activations: does the activation of a mix equal the mix of the activations? (Condition I)
#
# For a ReLU and two numbers it holds at every α exactly where the numbers do not have opposite signs.


@dataclass(frozen=True)
class Additivity:
    """One activation σ at one α, the weight of the first network; H̃ are its inputs.

    Attributes:
        distance: the mean over samples of 1 − cos between σ(αH̃_A + (1 − α)H̃_B) and ασ(H̃_A) + (1 − α)σ(H̃_B).
        residual: the length of their difference over the length of the second, all samples together.
    """

    alpha: float
    distance: float | None
    residual: float | None


@dataclass
class _Sums:
    alpha: float
    angles: Angles = field(default_factory=Angles)
    apart: float = 0.0
    whole: float = 0.0

    def add(self, left: Rows, right: Rows) -> None:
        dots = self.angles.add(left, right)
        apart = left - right
        self.apart += float(dot(apart, apart)[dots.finite].sum())
        self.whole += float(dots.second[dots.finite].sum())

    def result(self) -> Additivity:
        residual = sqrt(self.apart / self.whole) if self.whole > 0 else None
        return Additivity(self.alpha, self.angles.mean, residual)


@dataclass
class AdditivityMeter:
    """Adds up what `Additivity` needs for one activation, and how often both inputs have the same sign."""

    activation: Callable[[Tensor], Tensor]
    alphas: Sequence[float]
    same: int = 0
    entries: int = 0
    sums: list[_Sums] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sums = [_Sums(alpha) for alpha in self.alphas]

    def add(self, a: Rows, b: Rows) -> None:
        """Take in the inputs of the activation in both networks."""
        self.same += int((a.sign().mul_(b.sign()) >= 0).sum())  # signs first: a product of tiny numbers is zero
        self.entries += a.numel()
        first, second = self.activation(a.clone()), self.activation(b.clone())  # it may work in place
        for one in self.sums:
            left = self.activation(torch.lerp(b, a, one.alpha))
            one.add(left, torch.lerp(second, first, one.alpha))

    def results(self) -> tuple[Additivity, ...]:
        return tuple(one.result() for one in self.sums)

    @property
    def agreement(self) -> float | None:
        """The fraction of entries where both inputs have the same sign, or one is zero."""
        return self.same / self.entries if self.entries else None


# ----------------------------------------------------------------------------------------------------
# Commutativity: may the layers of two networks be swapped? (Condition II: (W_A − W_B)(H_A − H_B) = 0)
#
# It decides what a linear layer does to a mix of its inputs: W_α H_α = αW_A H_A + (1 − α)W_B H_B less the error
# α(1 − α)(W_A − W_B)(H_A − H_B). Biases cancel. The error is small where the weights are near, or the inputs are.


#: Layers that are one linear map of their input, given by one weight; a subclass that computes otherwise is not.
LINEAR_LAYERS = (
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


@dataclass(frozen=True)
class Commutativity:
    """One linear layer. Every length is relative to the root mean square of the two lengths it is made from.

    Attributes:
        residual: the length of (W_A − W_B)(H_A − H_B), relative to W_A H_A and W_B H_B. 0 where layers commute; about
            2 for networks that have nothing to do with each other, where nothing has a mean.
        weights: the length of W_A − W_B, relative to W_A and W_B. inputs: of H_A − H_B, relative to H_A and H_B.
    """

    residual: float | None
    weights: float | None
    inputs: float | None

    @property
    def product(self) -> float | None:
        """Both factors multiplied: about what the residual would be if they did not turn away from each other."""
        return None if self.weights is None or self.inputs is None else self.weights * self.inputs


def why_not_linear(layer: nn.Module) -> str:
    """Why a layer is no linear map by one weight, or empty.

    >>> why_not_linear(nn.Linear(2, 2)), why_not_linear(nn.LayerNorm(2))
    ('', 'a LayerNorm is no linear map by one weight')
    """
    if "forward" in vars(layer) or not any(type(layer).forward is kind.forward for kind in LINEAR_LAYERS):
        return f"a {type(layer).__name__} is no linear map by one weight"
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        return "its weight is computed from others"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "an Embedding with max_norm rewrites its weight while it runs"
    return ""


class CommutativityMeter:
    """Adds up squared lengths for one layer, batch by batch; runs the layer's own forward on differences."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        weight = a.get_parameter("weight").detach()
        exact = torch.promote_types(weight.dtype, torch.float32)  # half precision would round the difference away
        self.layer = copy_module(a)
        self.layer._forward_hooks.clear()  # of the user, which must not hear these calls
        self.layer._forward_pre_hooks.clear()
        self.a = weight.to(exact)
        self.b = b.get_parameter("weight").detach().to(weight.device, exact)
        self.sums = torch.zeros(6, dtype=torch.float64, device=weight.device)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Take in the inputs of the layer in both networks."""
        apart, first, second = self._outputs(a, b)
        inputs = _one_hot_squares(a, b) if isinstance(self.layer, nn.Embedding) else _squares(a - b, a, b)
        self.sums += torch.cat([_squares(apart, first, second), inputs])

    def _outputs(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(self.layer, nn.Embedding):
            difference = self.a - self.b
            apart = self._forward(difference, a) - self._forward(difference, b)
        else:
            a, b = a.to(self.a.dtype), b.to(self.a.dtype)
            apart = self._forward(self.a - self.b, a - b)
        return apart, self._forward(self.a, a), self._forward(self.b, b)

    def _forward(self, weight: Tensor, x: Tensor) -> Tensor:
        bias = getattr(self.layer, "bias", None)
        tensors = {"weight": weight} | ({} if bias is None else {"bias": torch.zeros_like(bias, dtype=weight.dtype)})
        return functional_call(self.layer, tensors, (x,))

    def result(self) -> Commutativity:
        weights = _squares(self.a - self.b, self.a, self.b)
        apart, first, second, inputs, left, right = self.sums.tolist()
        return Commutativity(
            _relative(apart, first, second), _relative(*weights.tolist()), _relative(inputs, left, right)
        )


def _squares(*tensors: Tensor) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in tensors])


def _one_hot_squares(a: Tensor, b: Tensor) -> Tensor:
    """The same for indices, each taken as the vector that has a one there."""
    differ = 2 * (a != b).sum()
    return torch.stack([differ, *differ.new_tensor([a.numel(), b.numel()])]).double()


def _relative(apart: float, first: float, second: float) -> float | None:
    return sqrt(2 * apart / (first + second)) if first + second > 0 else None


# ----------------------------------------------------------------------------------------------------
# What is measured at every layer of a pair of networks, added up batch by batch.


@dataclass(frozen=True)
class LayerConnectivity:
    """One layer.

    Attributes:
        layer, kind: the place and the class of its module. llfc: one `Llfc` per α.
        baseline: the mean over samples of 1 − cos between the features of the two networks themselves.
        additivity, sign_agreement: of an elementwise activation; empty and None for other layers.
        commutativity: of a linear layer. notes: what could not be measured, and why.
    """

    layer: str
    kind: str
    llfc: tuple[Llfc, ...]
    baseline: float | None
    additivity: tuple[Additivity, ...] = ()
    sign_agreement: float | None = None
    commutativity: Commutativity | None = None
    notes: tuple[str, ...] = ()

    @property
    def distance(self) -> float | None:
        """The largest LLFC distance over the α that have one."""
        return max((one.distance for one in self.llfc if one.distance is not None), default=None)


class LayerMeters:
    """Everything that is added up for the layers of a pair, batch by batch."""

    def __init__(self, a: nn.Module, b: nn.Module, alphas: Sequence[float]) -> None:
        self.modules = modules_of(a), modules_of(b)
        self.alphas = alphas
        self.llfc: dict[ObservedLayer, list[LlfcMeter]] = {}
        self.baseline: dict[ObservedLayer, Angles] = {}
        self.additivity: dict[ObservedLayer, AdditivityMeter] = {}
        self.commutativity: dict[ObservedLayer, CommutativityMeter] = {}
        self.unlike: dict[ObservedLayer, str] = {}

    def start(self, place: ObservedLayer) -> None:
        """What there is to measure at a layer."""
        self.llfc[place] = [LlfcMeter(alpha) for alpha in self.alphas]
        self.baseline[place] = Angles()
        module, other = (table[place.site.path] for table in self.modules)
        if place.site.side == "input" or place.site.keys:
            return
        if is_activation(module):
            self.additivity[place] = AdditivityMeter(module.forward, self.alphas)
        elif reason := why_not_linear(module):
            self.unlike[place] = f"no commutativity: {reason}"
        else:
            self.commutativity[place] = CommutativityMeter(module, other)

    def ends(self, visit: PairBatch) -> None:
        """Take in a batch at both ends."""
        for place in visit.places:
            if place not in self.llfc:
                self.start(place)
            self.baseline[place].add(*(place.by_sample(seen.outputs[place]) for seen in (visit.a, visit.b)))
            if place not in visit.a.inputs:
                continue
            inputs = [seen.inputs[place] for seen in (visit.a, visit.b)]
            if place in self.additivity:
                self.additivity[place].add(*(place.by_sample(x) for x in inputs))
            elif place in self.commutativity:
                self.commutativity[place].add(*inputs)

    def between(self, i: int, visit: PairBatch, mixed: LayerOutputs) -> None:
        """Take in the same batch at the i-th network between."""
        for place in visit.places:
            three = (visit.a.outputs[place], visit.b.outputs[place], mixed.outputs[place])
            self.llfc[place][i].add(*map(place.by_sample, three))

    def results(self) -> tuple[LayerConnectivity, ...]:
        return tuple(self._result(place) for place in self.llfc)

    def _result(self, place: ObservedLayer) -> LayerConnectivity:
        additivity, commutativity = self.additivity.get(place), self.commutativity.get(place)
        shared = commutativity.result() if commutativity else None
        notes = [self.baseline[place].words("the networks"), self.unlike.get(place, "")]
        notes += [meter.angles.words(f"α = {meter.alpha:g}") for meter in self.llfc[place]]
        if additivity:
            notes += [one.angles.words(f"weak additivity at α = {one.alpha:g}") for one in additivity.sums]
        if shared and shared.residual is None:
            notes.append("no commutativity: the layer gives nothing but its bias in both networks")
        return LayerConnectivity(
            place.name,
            place.kind,
            tuple(meter.result() for meter in self.llfc[place]),
            self.baseline[place].mean,
            additivity.results() if additivity else (),
            additivity.agreement if additivity else None,
            shared,
            tuple(filter(None, notes)),
        )
