"""Layerwise linear feature connectivity (Zhou et al. 2023) and its two conditions, weak additivity and commutativity,
measured at every layer of a pair of networks.
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

Rows = Float[Tensor, "samples features"]
NEAR = 1e-4  # smaller distances are computed from the chord, without cancellation


# -- LLFC: are the features of the mix the mix of the features, up to a factor? ----------------------------------------


@dataclass(frozen=True)
class Llfc:
    """One layer at one α, the weight of the first network.

    Attributes:
        distance: the mean over samples of 1 − cos between the feature of the mix and the mix of the features, with its
            sign: 2 if they are opposite. None if no sample has both.
        c: the factor with the feature of the mix ≈ c · the mix of the features, by least squares over all samples. The
            paper's definition has c on the other side of the equation, where it is 1/c.
        c_mean, c_std: of the same factor per sample.
    """

    alpha: float
    distance: float | None
    c: float | None
    c_mean: float | None
    c_std: float | None


@dataclass(frozen=True)
class Dots:
    """Per sample: the squared lengths of two features and their inner product."""

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
        """Add some samples; returns the products of their features."""
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

    def note(self, what: str) -> str:
        """How many samples are left out, and why; empty if none."""
        samples = self.count + self.zero + self.infinite
        reasons = {"are zero": self.zero, "are not finite": self.infinite}
        found = [f"on {n:,} of {samples:,} samples features {why}" for why, n in reasons.items() if n]
        return f"{what}: {' and '.join(found)}; these samples are left out" if found else ""


@dataclass
class LlfcMeter:
    """Sums for `Llfc`, updated batch by batch."""

    alpha: float
    angles: Angles = field(default_factory=Angles)
    products: float = 0.0
    squares: float = 0.0
    factors: ChannelMoments = field(default_factory=ChannelMoments)

    def add(self, a: Rows, b: Rows, mixed: Rows) -> None:
        """Add the features of both ends and of the mix."""
        dots = self.angles.add(mixed, torch.lerp(b, a, self.alpha))
        products, squares = dots.product[dots.finite], dots.second[dots.finite]
        self.products += float(products.sum())
        self.squares += float(squares.sum())
        known = squares > 0
        if bool(known.any()):
            self.factors.add((products[known] / squares[known])[None], channels=0)

    def result(self) -> Llfc:
        if not self.factors.count:
            return Llfc(self.alpha, self.angles.mean, None, None, None)
        mean, std = float(self.factors.mean), float(self.factors.variance().sqrt())
        return Llfc(self.alpha, self.angles.mean, self.products / self.squares, mean, std)


# -- Condition I, weak additivity: is the activation of a mix the mix of the activations? ------------------------------


@dataclass(frozen=True)
class Additivity:
    """One activation σ at one α, the weight of the first network; H̃ are its inputs.

    For a ReLU and two numbers it holds at every α exactly if the numbers do not have opposite signs.

    Attributes:
        distance: the mean over samples of 1 − cos between σ(αH̃_A + (1 − α)H̃_B) and ασ(H̃_A) + (1 − α)σ(H̃_B).
        residual: the length of their difference over the length of the second, all samples together.
    """

    alpha: float
    distance: float | None
    residual: float | None


@dataclass
class _AdditivitySums:
    alpha: float
    angles: Angles = field(default_factory=Angles)
    difference: float = 0.0
    whole: float = 0.0

    def add(self, left: Rows, right: Rows) -> None:
        dots = self.angles.add(left, right)
        difference = left - right
        self.difference += float(dot(difference, difference)[dots.finite].sum())
        self.whole += float(dots.second[dots.finite].sum())

    def result(self) -> Additivity:
        residual = sqrt(self.difference / self.whole) if self.whole > 0 else None
        return Additivity(self.alpha, self.angles.mean, residual)


class AdditivityMeter:
    """Sums for `Additivity` of one activation, and how often both inputs have the same sign."""

    def __init__(self, activation: Callable[[Tensor], Tensor], alphas: Sequence[float]) -> None:
        self.activation = activation
        self.sums = [_AdditivitySums(alpha) for alpha in alphas]
        self.same = self.entries = 0

    def add(self, a: Rows, b: Rows) -> None:
        """Add the inputs of the activation in both networks."""
        self.same += int((a.sign().mul_(b.sign()) >= 0).sum())  # signs first: a product of tiny numbers is zero
        self.entries += a.numel()
        first, second = self.activation(a.clone()), self.activation(b.clone())  # it may work in place
        for sums in self.sums:
            left = self.activation(torch.lerp(b, a, sums.alpha))
            sums.add(left, torch.lerp(second, first, sums.alpha))

    @property
    def agreement(self) -> float | None:
        """The fraction of entries with inputs of the same sign, or one of them zero."""
        return self.same / self.entries if self.entries else None


# -- Condition II, commutativity: (W_A − W_B)(H_A − H_B) = 0 -----------------------------------------------------------

#: Layers that are one linear map of their input, given by one weight; a subclass with another forward is not.
LINEAR_LAYERS = (
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


@dataclass(frozen=True)
class Commutativity:
    """One linear layer. Every length is relative to the root mean square of the two lengths it comes from.

    It is the error of a linear layer on a mix of inputs, biases cancel:
    W_α H_α = αW_A H_A + (1 − α)W_B H_B − α(1 − α)(W_A − W_B)(H_A − H_B).

    Attributes:
        residual: the length of (W_A − W_B)(H_A − H_B), relative to W_A H_A and W_B H_B. 0 if layers commute; about 2
            for unrelated networks with centred features.
        weights: the length of W_A − W_B, relative to W_A and W_B. inputs: of H_A − H_B, relative to H_A and H_B.
    """

    residual: float | None
    weights: float | None
    inputs: float | None

    @property
    def product(self) -> float | None:
        """Both factors multiplied: about the residual of differences that are not orthogonal to each other."""
        return None if self.weights is None or self.inputs is None else self.weights * self.inputs


def why_not_linear(layer: nn.Module) -> str:
    """Why a layer is not a linear map by one weight; empty if it is.

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
    """Sums of squared lengths for one layer, updated batch by batch; runs the layer's own forward on differences."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        weight = a.get_parameter("weight").detach()
        exact = torch.promote_types(weight.dtype, torch.float32)  # half precision would round the difference away
        self.layer = copy_module(a)
        self.layer._forward_hooks.clear()  # of the user, which must not see these calls
        self.layer._forward_pre_hooks.clear()
        self.a = weight.to(exact)
        self.b = b.get_parameter("weight").detach().to(weight.device, exact)
        self.sums = torch.zeros(6, dtype=torch.float64, device=weight.device)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add the inputs of the layer in both networks."""
        if isinstance(self.layer, nn.Embedding):
            difference = self._forward(self.a - self.b, a) - self._forward(self.a - self.b, b)
            unequal = 2 * (a != b).sum()  # each index is the vector that has a one there
            inputs = torch.stack([unequal, *unequal.new_tensor([a.numel(), b.numel()])]).double()
        else:
            inputs = _squares(a - b, a, b)
            a, b = a.to(self.a.dtype), b.to(self.a.dtype)
            difference = self._forward(self.a - self.b, a - b)
        outputs = _squares(difference, self._forward(self.a, a), self._forward(self.b, b))
        self.sums += torch.cat([outputs, inputs])

    def _forward(self, weight: Tensor, x: Tensor) -> Tensor:
        bias = getattr(self.layer, "bias", None)
        tensors = {"weight": weight} | ({} if bias is None else {"bias": torch.zeros_like(bias, dtype=weight.dtype)})
        return functional_call(self.layer, tensors, (x,))

    def result(self) -> Commutativity:
        weights = _squares(self.a - self.b, self.a, self.b).tolist()
        outputs, inputs = self.sums[:3].tolist(), self.sums[3:].tolist()
        residual, relative_weights, relative_inputs = (
            sqrt(2 * difference / (first + second)) if first + second > 0 else None
            for difference, first, second in (outputs, weights, inputs)
        )
        return Commutativity(residual, relative_weights, relative_inputs)


def _squares(*tensors: Tensor) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in tensors])


# -- All layers of a pair ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerConnectivity:
    """One layer.

    Attributes:
        layer, kind: its path and the class of its module. llfc: one `Llfc` per α.
        baseline: the mean over samples of 1 − cos between the features of the two networks themselves.
        additivity, sign_agreement: of an elementwise activation; empty and None for other layers.
        commutativity: of a linear layer. notes: what cannot be measured, and why.
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
    """The sums for all layers of a pair, updated batch by batch."""

    def __init__(self, a: nn.Module, b: nn.Module, alphas: Sequence[float]) -> None:
        self.modules = modules_of(a), modules_of(b)
        self.alphas = alphas
        self.llfc: dict[ObservedLayer, list[LlfcMeter]] = {}
        self.baseline: dict[ObservedLayer, Angles] = {}
        self.additivity: dict[ObservedLayer, AdditivityMeter] = {}
        self.commutativity: dict[ObservedLayer, CommutativityMeter] = {}
        self.not_linear: dict[ObservedLayer, str] = {}

    def _start(self, layer: ObservedLayer) -> None:
        """Create the meters of a layer."""
        self.llfc[layer] = [LlfcMeter(alpha) for alpha in self.alphas]
        self.baseline[layer] = Angles()
        module, other = (table[layer.at.path] for table in self.modules)
        if layer.at.side == "input" or layer.at.keys:
            return
        if is_activation(module):
            self.additivity[layer] = AdditivityMeter(module.forward, self.alphas)
        elif reason := why_not_linear(module):
            self.not_linear[layer] = f"no commutativity: {reason}"
        else:
            self.commutativity[layer] = CommutativityMeter(module, other)

    def add_ends(self, pair: PairBatch) -> None:
        """Add a batch at both ends."""
        for layer in pair.layers:
            if layer not in self.llfc:
                self._start(layer)
            self.baseline[layer].add(*(layer.by_sample(one.outputs[layer]) for one in (pair.a, pair.b)))
            if layer not in pair.a.inputs:
                continue
            inputs = [one.inputs[layer] for one in (pair.a, pair.b)]
            if layer in self.additivity:
                self.additivity[layer].add(*map(layer.by_sample, inputs))
            elif layer in self.commutativity:
                self.commutativity[layer].add(*inputs)

    def add_between(self, i: int, pair: PairBatch, mixed: LayerOutputs) -> None:
        """Add the same batch at the i-th network between."""
        for layer in pair.layers:
            features = (pair.a.outputs[layer], pair.b.outputs[layer], mixed.outputs[layer])
            self.llfc[layer][i].add(*map(layer.by_sample, features))

    def results(self) -> tuple[LayerConnectivity, ...]:
        return tuple(self._result(layer) for layer in self.llfc)

    def _result(self, layer: ObservedLayer) -> LayerConnectivity:
        additivity, meter = self.additivity.get(layer), self.commutativity.get(layer)
        commutativity = meter.result() if meter else None
        notes = [self.baseline[layer].note("the networks"), self.not_linear.get(layer, "")]
        notes += [one.angles.note(f"α = {one.alpha:g}") for one in self.llfc[layer]]
        if additivity:
            notes += [one.angles.note(f"weak additivity at α = {one.alpha:g}") for one in additivity.sums]
        if commutativity and commutativity.residual is None:
            notes.append("no commutativity: the layer gives nothing but its bias in both networks")
        return LayerConnectivity(
            layer.name,
            layer.kind,
            tuple(one.result() for one in self.llfc[layer]),
            self.baseline[layer].mean,
            tuple(one.result() for one in additivity.sums) if additivity else (),
            additivity.agreement if additivity else None,
            commutativity,
            tuple(filter(None, notes)),
        )
