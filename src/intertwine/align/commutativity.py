"""Method `commutativity`: minimise the commutativity cost of weight and activation differences over linear and
convolution layers, on a sample of positions.

The cost of two networks is Σ ‖(W_A − g·W_B)(H_A − g·H_B)‖² over layers. If it is zero, features of the mixed network
are mixed features (Zhou et al. 2023). In an order P on the outputs of a layer the cost is linear. In an order Q on its
inputs it is quadratic: with QᵀQ = 1 the residual is W_A·H_A + W_B·H_B − W_A·Q·H_B − W_B·Qᵀ·H_A, so its gradient is a
similarity of units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from intertwine.align.activation_sites import CapturedForward, run_side_by_side
from intertwine.align.activations import ActivationOptions, match_features, paired_activations
from intertwine.align.matching import FeatureMatching, unit_count
from intertwine.align.similarity import Flips, rows_of, sign_exponents, slots_of
from intertwine.align.solver import AlignmentTask, Solution
from intertwine.align.state import AlignmentStep, MovableWires, move_of
from intertwine.align.weights import WeightsOptions, solve_weights
from intertwine.argument_types import Float, Int
from intertwine.errors import InputError
from intertwine.graph.program import Call, Ref
from intertwine.symmetry.element import Element, Move
from intertwine.symmetry.geometry import FixedAxis, Layout, LayoutAxis, act
from intertwine.symmetry.symmetry import Symmetry

LINEAR = "aten.linear.default"
#: Convolutions → how many spatial axes they have.
CONVOLUTIONS = {f"aten.conv{n}d.{way}": n for n in (1, 2, 3) for way in ("default", "padding")}
#: A step must lower the cost by more than this share of it: less is rounding.
LEAST = 1e-6

# -- Layers and samples of their inputs --


@dataclass
class SampledLayer:
    """One call of a linear or convolution layer: the weight it reads, and inputs of both networks at some positions.

    The weight has the axes (groups, outputs, inputs, kernel positions) and `inputs` the axes (samples, groups × inputs,
    kernel positions), so that the layer is one matrix product. `degree`: −1 if the tree of the channels is that of the
    weight, on which scales act inversely.
    """

    weight: str
    groups: int
    channels: LayoutAxis
    degree: int
    keys: Float[Tensor, " samples"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    inputs: tuple[Tensor, Tensor] | None = None

    def layout(self) -> Layout:
        """The layout of the inputs."""
        assert self.inputs is not None
        return Layout((FixedAxis(len(self.inputs[0])), self.channels, FixedAxis(self.inputs[0].shape[2])))


@dataclass
class SampledLayers:
    """Collects a uniform sample of the inputs of every layer (see `run_side_by_side`).

    Layers whose weight is not a parameter (weight norm, a weight stored transposed) and transposed convolutions are
    skipped.
    """

    samples: int
    generator: torch.Generator
    found: dict[str, SampledLayer] = field(default_factory=dict)

    def on_call(
        self,
        captured: CapturedForward,
        position: int,
        read: tuple[Mapping[str, Any], Mapping[str, Any]],
        a: Any,
        b: Any,
    ) -> None:
        """Sample the inputs of one call, if it is a layer."""
        call = captured.program.calls[position]
        layer = self.found.get(call.name) or _layer(captured, call)
        if layer is None:
            return
        self.found[call.name] = layer
        views = [_InputView(call, values) for values in read]
        keys = torch.rand(prod(views[0].grid), generator=self.generator, dtype=torch.float64)
        both = torch.cat([layer.keys, keys])
        kept = both.argsort()[: self.samples]
        old, new = kept[kept < len(layer.keys)], kept[kept >= len(layer.keys)] - len(layer.keys)
        x, y = (view.at(new) for view in views)
        if layer.inputs is not None:
            x, y = (torch.cat([z[old.to(z.device)], fresh]) for z, fresh in zip(layer.inputs, (x, y), strict=True))
        layer.keys, layer.inputs = both[torch.cat([old, new + len(layer.keys)])], (x, y)


def _layer(captured: CapturedForward, call: Call) -> SampledLayer | None:
    """The layer that a call is; None if it is none."""
    if call.op != LINEAR and call.op not in CONVOLUTIONS:
        return None
    x, weight = call.args[:2]
    sources = {source.name: source.target for source in captured.program.inputs if source.moves}
    name = sources.get(weight.name)
    layouts = captured.geometry.layouts
    if name not in layouts or x.name not in captured.from_data or len(layouts[name].axes) < 2:
        return None
    groups = 1 if call.op == LINEAR else _argument(call, 6, "groups", 1)
    if groups == 1:
        return SampledLayer(name, 1, layouts[name].axes[1], -1)
    value = captured.value(x.name)
    if value is None or not captured.geometry.predicts(value):
        return None
    return SampledLayer(name, groups, captured.geometry.layout(value).axes[-1 - CONVOLUTIONS[call.op]], 1)


def _argument(call: Call, place: int, name: str, default: Any) -> Any:
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


class _InputView:
    """The inputs of a layer by position: one per row of a linear layer, one per output pixel of a convolution."""

    def __init__(self, call: Call, values: Mapping[str, Any]) -> None:
        x, weight = (values[v.name] for v in call.args[:2] if isinstance(v, Ref))
        if call.op == LINEAR:
            self.x, self.kernel, self.grid = x.reshape(-1, x.shape[-1]), (), (x.numel() // x.shape[-1],)
        else:
            self.kernel = tuple(weight.shape[2:])
            x = x if x.ndim == len(self.kernel) + 2 else x[None]
            self.stride = _each(_argument(call, 3, "stride", 1), self.kernel)
            self.dilation = _each(_argument(call, 5, "dilation", 1), self.kernel)
            self.x = F.pad(x, self._padding(call))
            reach = zip(self.x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
            self.grid = (len(x), *((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in reach))

    def _padding(self, call: Call) -> list[int]:
        given = _argument(call, 4, "padding", 0)
        if given == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            sides = [(t // 2, t - t // 2) for t in totals]
        else:
            sides = [(p, p) for p in _each(0 if given == "valid" else given, self.kernel)]
        return [n for side in reversed(sides) for n in side]

    def at(self, positions: Int[Tensor, " some"]) -> Float[Tensor, "some channels places"]:
        """The inputs at some positions."""
        positions = positions.to(self.x.device)
        if not self.kernel:
            return self.x[positions].unsqueeze(-1)
        sample, *corner = torch.unravel_index(positions, self.grid)
        space = len(self.kernel)
        index: list[Tensor] = [sample.reshape(-1, *[1] * space)]
        for d in range(space):
            steps = torch.arange(self.kernel[d], device=self.x.device) * self.dilation[d]
            shape = [1] * (space + 1)
            shape[0], shape[d + 1] = -1, self.kernel[d]
            index.append((corner[d][:, None] * self.stride[d] + steps).reshape(shape))
        patches = self.x.movedim(1, -1)[tuple(index)]
        return patches.movedim(-1, 1).flatten(2)


def _each(value: int | Sequence[int], kernel: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * len(kernel)
    return tuple(value) * (len(kernel) if len(value) == 1 else 1)


# -- The cost --


@dataclass(frozen=True)
class LayerTerm:
    """One layer at the present element: weights and inputs of both networks."""

    layer: SampledLayer
    weights: tuple[Tensor, Tensor]
    inputs: tuple[Tensor, Tensor]

    @staticmethod
    def of(layer: SampledLayer, weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]) -> LayerTerm:
        assert layer.inputs is not None
        first = weights[0][layer.weight]
        first = first if first.dtype == torch.float64 else first.float()
        x, y = layer.inputs
        return LayerTerm(layer, (first, weights[1][layer.weight].to(first)), (x.to(first), y.to(first)))

    @property
    def residual(self) -> Float[Tensor, "samples outputs"]:
        """(W_A − W_B)(H_A − H_B), one row per position."""
        return self.apply(self.weights[0] - self.weights[1], self.inputs[0] - self.inputs[1])

    def cost(self) -> float:
        return float(torch.linalg.vector_norm(self.residual, dtype=torch.float64)) ** 2

    def apply(self, weight: Tensor, x: Tensor) -> Float[Tensor, "samples outputs"]:
        """The layer without its bias."""
        x = x.unflatten(1, (self.layer.groups, -1))
        return torch.einsum("sgik,goik->sgo", x, self._by_group(weight)).flatten(1)

    def transpose(self, weight: Tensor, y: Tensor) -> Float[Tensor, "samples channels places"]:
        """The transpose of the layer."""
        y = y.unflatten(1, (self.layer.groups, -1))
        return torch.einsum("sgo,goik->sgik", y, self._by_group(weight)).flatten(1, 2)

    def _by_group(self, weight: Tensor) -> Tensor:
        groups = self.layer.groups
        return weight.reshape(groups, len(weight) // groups, weight.shape[1], self.inputs[0].shape[2])


class CommutativityCost:
    """The cost of two networks, b moved by `element`."""

    def __init__(
        self,
        symmetry: Symmetry,
        wires: MovableWires,
        layers: Iterable[SampledLayer],
        weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    ) -> None:
        self.symmetry, self.wires = symmetry, wires
        self.start = [LayerTerm.of(layer, weights) for layer in layers]
        wires_of = [symmetry.layouts[term.layer.weight].wires | term.layer.layout().wires for term in self.start]
        count = range(len(wires.wire_specs))
        self.terms_of = [[i for i, acting in enumerate(wires_of) if w in acting] for w in count]
        self.start_at(symmetry.identity())

    def start_at(self, element: Element) -> None:
        """Forget all steps and move b by an element."""
        self.element = element
        self.terms = [self._moved(term, element) for term in self.start]
        self.costs = [term.cost() for term in self.terms]

    @property
    def cost(self) -> float:
        return sum(self.costs)

    def step(self, moves: Mapping[int, Move]) -> bool:
        """Move some wires if that lowers the cost; whether it did."""
        touched = sorted({i for w in moves for i in self.terms_of[w]})
        step = replace(self.element, moves=dict(moves))
        terms = {i: self._moved(self.terms[i], step) for i in touched}
        costs = {i: term.cost() for i, term in terms.items()}
        before = sum(self.costs[i] for i in touched)
        if not before - sum(costs.values()) > LEAST * before:
            return False
        for i, term in terms.items():
            self.terms[i], self.costs[i] = term, costs[i]
        self.element = replace(step, moves={**self.symmetry.identity().moves, **moves}) @ self.element
        return True

    def _moved(self, term: LayerTerm, g: Element) -> LayerTerm:
        weight = act(self.symmetry.layouts[term.layer.weight], term.weights[1], g)
        inputs = act(term.layer.layout(), term.inputs[1], g, term.layer.degree)
        return replace(term, weights=(term.weights[0], weight), inputs=(term.inputs[0], inputs))

    def similarities(self, w: int) -> dict[Flips, Float[Tensor, "units units"]]:
        """Similarity of the units of a wire at the present element: exact on outputs, the gradient on inputs."""
        found: dict[Flips, Tensor] = {}
        for i in self.terms_of[w]:
            term = self.terms[i]
            weight, inputs = self.symmetry.layouts[term.layer.weight], term.layer.layout()
            outputs = Layout((FixedAxis(len(term.inputs[0])), weight.axes[0]))
            if w in outputs.wires:
                change = term.inputs[0] - term.inputs[1]
                self._add(found, w, outputs, *(term.apply(x, change) for x in term.weights))
            if w in inputs.wires:
                here, there = (term.transpose(x, term.residual) for x in term.weights)
                self._add(found, w, inputs, here, term.inputs[1])
                self._add(found, w, inputs, term.inputs[0], there)
        return found

    def _add(self, found: dict[Flips, Tensor], w: int, layout: Layout, a: Tensor, b: Tensor) -> None:
        for x, y in zip(*(slots_of(layout, v, w, self.wires.wire_specs) for v in (a, b)), strict=True):
            flips = sign_exponents(x)
            matrix = (rows_of(x) @ rows_of(y).mT).double().cpu()
            found[flips] = found[flips] + matrix if flips in found else matrix


# -- The solver --


@dataclass(frozen=True)
class CommutativityOptions:
    """`samples`: how many positions are kept per layer; memory and time grow with it.

    `exchanges`: how many exchanges of two units are tried when the gradient finds no improvement.
    """

    samples: int = 512
    exchanges: int = 16


def solve_commutativity(task: AlignmentTask, options: CommutativityOptions) -> Solution:
    """The element with the lowest cost found, and every step of every start; the matching state ends there.

    It starts at the results of `weights` and `activations` and at the identity, the best `starts` of them, so its cost
    is never higher than theirs. Each wire in turn gets the order that is best by the gradient of the cost; if that does
    not lower the cost itself, the cycles of that order are tried one by one, then the exchanges of two units with the
    largest predicted gain. Signs stay those of the start: norms depend on them in ways that this cost does not see.
    """
    if options.samples < 1 or options.exchanges < 0:
        raise InputError(
            f"samples must be at least 1, but is {options.samples}, and exchanges at least 0, but is "
            f"{options.exchanges}. Leave them out for the defaults."
        )
    state = task.state
    generator = torch.Generator().manual_seed(task.seed)
    layers = SampledLayers(options.samples, generator)
    features = paired_activations(state, ActivationOptions())
    run_side_by_side(state.symmetry, task.a, task.b, task.data, [features, layers])
    if not layers.found:
        raise InputError(
            "No linear or convolution layer of this network reads a weight of its own, so there is no commutativity "
            "cost. The methods 'weights' and 'activations' need no such layers."
        )
    cost = CommutativityCost(state.symmetry, state.wires, layers.found.values(), (task.problem.a, task.problem.b))
    starts: dict[str, Element] = {
        "identity": state.symmetry.identity(),
        "weights": solve_weights(task, WeightsOptions())[0],
        "activations": match_features(state, features, ActivationOptions())[0],
    }
    runs: list[tuple[float, float, Element, list[AlignmentStep]]] = []
    for name, element in starts.items():
        state.start_at(element)
        cost.start_at(element)
        runs.append((cost.cost, state.objective, element, [AlignmentStep(name, 0, "", state.objective, cost.cost)]))
    runs.sort(key=lambda run: run[:2])  # of equal costs, the one with the nearer weights
    for i, (_, _, element, history) in enumerate(runs[: task.starts]):
        cost.start_at(element)
        history += _descend(task, cost, history[0].start, generator, options.exchanges)
        runs[i] = cost.cost, history[-1].objective, cost.element, history
    runs.sort(key=lambda run: run[:2], reverse=True)
    best = runs[-1][2]
    state.start_at(best)
    return best, [step for *_, history in runs for step in history]  # the run that was kept comes last


def _descend(
    task: AlignmentTask, cost: CommutativityCost, start: str, generator: torch.Generator, exchanges: int
) -> list[AlignmentStep]:
    """Visit every wire until none moves; a wire is revisited only after a wire in the same layers has moved."""
    state, history = task.state, list[AlignmentStep]()
    wires = [w for w in cost.wires.in_order if cost.terms_of[w]]
    waiting = set(wires)
    for sweep in range(1, task.sweeps + 1):
        for i in torch.randperm(len(wires), generator=generator).tolist():
            w = wires[i]
            if w not in waiting:
                continue
            waiting.discard(w)
            if _cost_step(cost, w, exchanges):
                waiting |= {t for t in wires if set(cost.terms_of[t]) & set(cost.terms_of[w])}
                state.start_at(cost.element)
                history.append(AlignmentStep(start, sweep, state.wire_specs[w].name, state.objective, cost.cost))
        if not waiting:
            break
    return history


def _cost_step(cost: CommutativityCost, w: int, exchanges: int) -> bool:
    """Lower the cost by one wire; whether that was possible."""
    nested = cost.wires.nested(w)
    similarities = {t: matrices for t in (w, *nested) if (matrices := cost.similarities(t))}
    if not similarities:
        return False
    moves = FeatureMatching(cost.wires, similarities, signs=False).moves(w, cost.symmetry.identity())
    if moves and cost.step(moves):
        return True
    if w not in similarities or not cost.wires.wire_specs[w].permutes:
        return False
    orders = _cycles(moves[w]) if w in moves and not nested else []
    orders += _exchanges(cost, w, similarities[w], exchanges)
    tried = [cost.step({w: move_of(cost.wires.wire_specs, w, permutation=order)}) for order in orders]
    return any(tried)


def _cycles(move: Move) -> list[Int[Tensor, "all_copies n"]]:
    """The cycles of the permutation of a move, each a permutation of its own; empty if there is only one."""
    assert move.permutation is not None
    rows = move.permutation.reshape(-1, move.permutation.shape[-1])
    found: list[Tensor] = []
    for copy, row in enumerate(rows.tolist()):
        seen: set[int] = set()
        for first in range(len(row)):
            if first in seen or row[first] == first:
                continue
            part, here = torch.arange(len(row)).repeat(len(rows), 1), first
            while here not in seen:
                seen.add(here)
                part[copy, here] = row[here]
                here = row[here]
            found.append(part)
    return found if len(found) > 1 else []


def _exchanges(
    cost: CommutativityCost, w: int, similarities: Mapping[Flips, Tensor], count: int
) -> list[Int[Tensor, "all_copies n"]]:
    """The exchanges of two units with the largest gain predicted by the gradient."""
    n, units = cost.wires.wire_specs[w].size, unit_count(cost.wires.wire_specs, w)
    many = units // n
    matrix = sum(similarities.values(), torch.zeros(units, units, dtype=torch.float64)).reshape(many, n, many, n)
    own = torch.stack([matrix[c, :, c] for c in range(many)])
    stay = own.diagonal(dim1=1, dim2=2)
    gain = (own + own.mT - stay[:, :, None] - stay[:, None, :]).triu(1).flatten()
    found: list[Tensor] = []
    for index in gain.topk(min(count, len(gain))).indices.tolist():
        if gain[index] <= 0:
            break
        copy, i, j = index // (n * n), index // n % n, index % n
        order = torch.arange(n).repeat(many, 1)
        order[copy, i], order[copy, j] = j, i
        found.append(order)
    return found
