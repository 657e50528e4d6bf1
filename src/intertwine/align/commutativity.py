"""Method `commutativity`: minimise the commutativity cost of weight and activation differences over linear and
convolution layers, on a sample of positions.
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
from intertwine.align.similarity import Flips, MovableStrands, rows_of, slots_of
from intertwine.align.solver import AlignmentTask, Solution
from intertwine.align.state import AlignmentStep
from intertwine.align.weights import WeightsOptions, solve_weights
from intertwine.argument_types import Float, Int
from intertwine.errors import InputError
from intertwine.graph.program import Call, Ref
from intertwine.symmetry.element import Element, Move, identity_move
from intertwine.symmetry.geometry import FixedAxis, Layout, LayoutAxis, act
from intertwine.symmetry.symmetry import Symmetry

# ----------------------------------------------------------------------------------------------------
# Layers: the linear and convolution layers of two networks, with what enters them at some positions of the data.
#
# A layer is kept as weights (groups, outputs, inputs, places of the kernel) and inputs (samples, groups, inputs, places
# of the kernel), so that it is one product of matrices. Layers whose weight is no parameter itself (weight norm, weights
# stored the other way round) and transposed convolutions are not kept.


LINEAR = "aten.linear.default"
#: Convolutions → how many axes of space they have.
CONVOLUTIONS = {f"aten.conv{n}d.{way}": n for n in (1, 2, 3) for way in ("default", "padding")}


@dataclass
class SampledLayer:
    """One call of a linear or convolution layer: which weight it reads, and inputs of both networks to it.

    `inputs`: (samples, channels, places of the kernel). `degree`: −1 where the tree of the channels is that of the
    weight, on which scales act the other way round.
    """

    weight: str
    groups: int
    channels: LayoutAxis
    degree: int
    keys: Float[Tensor, " samples"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    inputs: tuple[Tensor, Tensor] | None = None

    def layout(self) -> Layout:
        """Of the inputs."""
        assert self.inputs is not None
        return Layout((FixedAxis(len(self.inputs[0])), self.channels, FixedAxis(self.inputs[0].shape[2])))


@dataclass
class SampledLayers:
    """Listens to two networks (see `hidden.watch`) and keeps a fair sample of the positions at which layers look."""

    samples: int
    generator: torch.Generator
    found: dict[str, SampledLayer] = field(default_factory=dict)

    def hear(
        self,
        captured: CapturedForward,
        position: int,
        read: tuple[Mapping[str, Any], Mapping[str, Any]],
        a: Any,
        b: Any,
    ) -> None:
        call = captured.program.calls[position]
        layer = self.found.get(call.name) or _layer(captured, call)
        if layer is None:
            return
        self.found[call.name] = layer
        views = [_View(call, values) for values in read]
        keys = torch.rand(views[0].positions, generator=self.generator, dtype=torch.float64)
        both = torch.cat([layer.keys, keys])
        kept = both.argsort()[: self.samples]
        old, new = kept[kept < len(layer.keys)], kept[kept >= len(layer.keys)] - len(layer.keys)
        fresh = [view.at(new) for view in views]
        if layer.inputs is not None:
            fresh = [torch.cat([x[old.to(x.device)], y]) for x, y in zip(layer.inputs, fresh, strict=True)]
        layer.keys, layer.inputs = both[torch.cat([old, new + len(layer.keys)])], (fresh[0], fresh[1])


def _layer(captured: CapturedForward, call: Call) -> SampledLayer | None:
    """What a call is as a layer; None if it is none."""
    if call.op != LINEAR and call.op not in CONVOLUTIONS:
        return None
    x, weight = call.args[:2]
    sources = {source.name: source.target for source in captured.program.inputs if source.moves}
    name = sources.get(weight.name)
    layouts = captured.geometry.layouts
    if name not in layouts or x.name not in captured.from_data or len(layouts[name].axes) < 2:
        return None
    groups = 1 if call.op == LINEAR else _given(call, 6, "groups", 1)
    if groups == 1:
        return SampledLayer(name, 1, layouts[name].axes[1], -1)
    value = captured.value(x.name)
    if value is None or not captured.geometry.predicts(value):
        return None
    return SampledLayer(name, groups, captured.geometry.layout(value).axes[-1 - CONVOLUTIONS[call.op]], 1)


def _given(call: Call, place: int, name: str, default: Any) -> Any:
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


class _View:
    """What a layer looks at: one position per row of a linear layer, one per output pixel of a convolution."""

    def __init__(self, call: Call, values: Mapping[str, Any]) -> None:
        x, weight = (values[v.name] for v in call.args[:2] if isinstance(v, Ref))
        if call.op == LINEAR:
            self.x, self.kernel, self.grid = x.reshape(-1, x.shape[-1]), (), (x.numel() // x.shape[-1],)
        else:
            self.kernel = tuple(weight.shape[2:])
            x = x if x.ndim == len(self.kernel) + 2 else x[None]
            self.stride = _each(_given(call, 3, "stride", 1), self.kernel)
            self.dilation = _each(_given(call, 5, "dilation", 1), self.kernel)
            self.x = F.pad(x, self._padding(call))
            reach = zip(self.x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
            self.grid = (len(x), *((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in reach))

    def _padding(self, call: Call) -> list[int]:
        given = _given(call, 4, "padding", 0)
        if given == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            sides = [(t // 2, t - t // 2) for t in totals]
        else:
            sides = [(p, p) for p in _each(0 if given == "valid" else given, self.kernel)]
        return [n for side in reversed(sides) for n in side]

    @property
    def positions(self) -> int:
        return prod(self.grid)

    def at(self, positions: Int[Tensor, " some"]) -> Float[Tensor, "some channels places"]:
        """What the layer sees at some positions."""
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


# ----------------------------------------------------------------------------------------------------
# The commutativity of two networks: Σ ‖(W_A − g·W_B)(H_A − g·H_B)‖² over layers, on its way to a minimum.
#
# If it is zero, features of the mixed network are mixed features (paper 004, Eq. 2). In an order P on the outputs of a
# layer the cost is linear. In an order Q on its inputs it is quadratic: with QᵀQ = 1 the residual is
# W_A·H_A + W_B·H_B − W_A·Q·H_B − W_B·Qᵀ·H_A, so its slope says how well units fit.


#: A step must lower the cost by more than this share of it: less is rounding.
LEAST = 1e-6


@dataclass(frozen=True)
class LayerTerm:
    """One layer at the present element: weights and inputs of both networks, and the residual of their differences."""

    layer: SampledLayer
    weights: tuple[Tensor, Tensor]
    inputs: tuple[Tensor, Tensor]

    @property
    def residual(self) -> Float[Tensor, "samples outputs"]:
        """(W_A − W_B)(H_A − H_B), one row per position."""
        return self.apply(self.weights[0] - self.weights[1], self.inputs[0] - self.inputs[1])

    def cost(self) -> float:
        return float(torch.linalg.vector_norm(self.residual, dtype=torch.float64)) ** 2

    def factors(self) -> tuple[float, float]:
        """‖W_A − W_B‖² and ‖H_A − H_B‖², whose product bounds the cost."""
        pairs = (self.weights, self.inputs)
        first, second = (float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2 for x, y in pairs)
        return first, second

    def apply(self, weight: Tensor, x: Tensor) -> Float[Tensor, "samples outputs"]:
        """The layer without its bias."""
        return torch.einsum("sgik,goik->sgo", self._grouped(x), self._heads(weight)).flatten(1)

    def back(self, weight: Tensor, y: Tensor) -> Float[Tensor, "samples channels places"]:
        """The transpose of the layer."""
        y = y.unflatten(1, (self.layer.groups, -1))
        return torch.einsum("sgo,goik->sgik", y, self._heads(weight)).flatten(1, 2)

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.layer.groups, -1))

    def _heads(self, weight: Tensor) -> Tensor:
        places = self.inputs[0].shape[2]
        return weight.reshape(self.layer.groups, len(weight) // self.layer.groups, weight.shape[1], places)


class CommutativityCost:
    """The cost of two networks, b moved by `element`."""

    def __init__(
        self,
        symmetry: Symmetry,
        moving: MovableStrands,
        layers: Iterable[SampledLayer],
        weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    ) -> None:
        self.symmetry, self.moving = symmetry, moving
        self.start = [_term(layer, weights) for layer in layers]
        self.touched = [
            [i for i, term in enumerate(self.start) if s in self._strands(term)] for s in range(len(moving.wire_specs))
        ]
        self.start_at(symmetry.identity())

    def _strands(self, term: LayerTerm) -> set[int]:
        layouts = (self.symmetry.layouts[term.layer.weight], term.layer.layout())
        return set().union(*(layout.wires for layout in layouts))

    def start_at(self, element: Element) -> None:
        """Forget all steps and move b by an element."""
        self.element = element
        self.terms = [self._moved(term, element) for term in self.start]
        self.costs = [term.cost() for term in self.terms]

    @property
    def cost(self) -> float:
        return sum(self.costs)

    def step(self, moves: Mapping[int, Move]) -> bool:
        """Move some strands if that lowers the cost; whether it did."""
        touched = sorted({i for s in moves for i in self.touched[s]})
        step = replace(self.element, moves=dict(moves))
        terms = {i: self._moved(self.terms[i], step) for i in touched}
        costs = {i: term.cost() for i, term in terms.items()}
        if not sum(self.costs[i] for i in touched) - sum(costs.values()) > LEAST * sum(self.costs[i] for i in touched):
            return False
        for i, term in terms.items():
            self.terms[i], self.costs[i] = term, costs[i]
        self.element = replace(step, moves={**self.symmetry.identity().moves, **moves}) @ self.element
        return True

    def _moved(self, term: LayerTerm, g: Element) -> LayerTerm:
        weight = act(self.symmetry.layouts[term.layer.weight], term.weights[1], g)
        inputs = act(term.layer.layout(), term.inputs[1], g, term.layer.degree)
        return replace(term, weights=(term.weights[0], weight), inputs=(term.inputs[0], inputs))

    def fits(self, s: int) -> dict[Flips, Float[Tensor, "units units"]]:
        """How well units of a strand fit at the present element: exact on outputs, the slope of the cost on inputs."""
        found: dict[Flips, Tensor] = {}
        for i in self.touched[s]:
            term = self.terms[i]
            weight, inputs = self.symmetry.layouts[term.layer.weight], term.layer.layout()
            outputs = Layout((FixedAxis(len(term.inputs[0])), weight.axes[0]))
            if s in outputs.wires:
                change = term.inputs[0] - term.inputs[1]
                self._add(found, s, outputs, *(term.apply(w, change) for w in term.weights))
            if s in inputs.wires:
                here, there = (term.back(w, term.residual) for w in term.weights)
                self._add(found, s, inputs, here, term.inputs[1])
                self._add(found, s, inputs, term.inputs[0], there)
        return found

    def _add(self, found: dict[Flips, Tensor], s: int, layout: Layout, a: Tensor, b: Tensor) -> None:
        for x, y in zip(*(slots_of(layout, v, s, self.moving.wire_specs) for v in (a, b)), strict=True):
            flips = tuple(int(f) % 2 for f in x.axis.flips)
            fit = (rows_of(x) @ rows_of(y).mT).double().cpu()
            found[flips] = found[flips] + fit if flips in found else fit


def _term(layer: SampledLayer, weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]) -> LayerTerm:
    assert layer.inputs is not None
    first = weights[0][layer.weight]
    first = first if first.dtype == torch.float64 else first.float()
    x, y = layer.inputs
    return LayerTerm(layer, (first, weights[1][layer.weight].to(first)), (x.to(first), y.to(first)))


# ----------------------------------------------------------------------------------------------------
# Solver `commutativity`: the order in which differences of weights and differences of features cancel (004-L16).
#
# It lowers Σ ‖(W_A − g·W_B)(H_A − g·H_B)‖² over linear and convolution layers, at a bounded number of positions of the
# data. It begins at what `weights` and `activations` find and at the identity, the best `starts` of them, so it is never
# worse than they are by this cost. Each wire in turn is given the order that fits best by the slope of the cost; if that
# does not lower the cost itself, the cycles of that order are tried one by one, then the exchanges of two units that
# promise most. A visit takes a few products of each layer of the wire with its samples. Signs stay those of the start:
# norms have a part in them that this cost does not see.


@dataclass(frozen=True)
class CommutativityOptions:
    """`samples`: how many positions are kept per layer; memory and time grow with it.

    `exchanges`: how many exchanges of two units are tried when the slope helps no more.
    """

    samples: int = 512
    exchanges: int = 16


def solve_commutativity(task: AlignmentTask, options: CommutativityOptions) -> Solution:
    """The best element found, and every step of every start; the pair is left at that element."""
    if options.samples < 1 or options.exchanges < 0:
        raise InputError(
            f"samples={options.samples} and exchanges={options.exchanges} were asked for; at least one sample is "
            "needed, and a number of exchanges that is not negative. Leave them out for the defaults."
        )
    pair = task.pair
    generator = torch.Generator().manual_seed(task.seed)
    layers = SampledLayers(options.samples, generator)
    features = paired_activations(pair, ActivationOptions())
    run_side_by_side(pair.symmetry, task.a, task.b, task.data, [features, layers])
    if not layers.found:
        raise InputError(
            "No linear or convolution layer of this network reads a weight of its own, so there is nothing whose "
            "differences could cancel. The methods 'weights' and 'activations' need no such layers."
        )
    moving = MovableStrands(pair.wire_specs, pair.movable)
    commuting = CommutativityCost(pair.symmetry, moving, layers.found.values(), (task.problem.a, task.problem.b))
    starts: dict[str, Element] = {
        "identity": pair.symmetry.identity(),
        "weights": solve_weights(task, WeightsOptions())[0],
        "activations": match_features(pair, features, ActivationOptions())[0],
    }
    runs: list[tuple[float, float, Element, list[AlignmentStep]]] = []
    for name, element in starts.items():
        pair.start_at(element)
        commuting.start_at(element)
        history = [AlignmentStep(name, 0, "", pair.objective, commuting.cost)]
        runs.append((commuting.cost, pair.objective, element, history))
    runs.sort(key=lambda run: run[:2])  # of equals, the one whose weights are nearer
    for i, (_, _, element, history) in enumerate(runs[: task.starts]):
        commuting.start_at(element)
        history += _descend(task, commuting, history[0].start, generator, options.exchanges)
        runs[i] = commuting.cost, history[-1].objective, commuting.element, history
    runs.sort(key=lambda run: run[:2], reverse=True)
    best = runs[-1][2]
    pair.start_at(best)
    return best, [step for *_, history in runs for step in history]  # the run that was kept comes last


def _descend(
    task: AlignmentTask, commuting: CommutativityCost, start: str, generator: torch.Generator, exchanges: int
) -> list[AlignmentStep]:
    """Visit every wire until none moves; a wire is looked at again after any other has moved."""
    pair, history = task.pair, list[AlignmentStep]()
    strands = [s for s in commuting.moving.in_order if commuting.touched[s]]
    waiting = set(strands)
    for sweep in range(1, task.sweeps + 1):
        for i in torch.randperm(len(strands), generator=generator).tolist():
            s = strands[i]
            if s not in waiting:
                continue
            waiting.discard(s)
            if _visit(commuting, s, exchanges):
                beside = {t for t in strands if set(commuting.touched[t]) & set(commuting.touched[s])}
                waiting |= beside
                pair.start_at(commuting.element)
                history.append(AlignmentStep(start, sweep, pair.wire_specs[s].name, pair.objective, commuting.cost))
        if not waiting:
            break
    return history


def _visit(commuting: CommutativityCost, s: int, exchanges: int) -> bool:
    """Lower the cost by one strand; whether that was possible."""
    inside = commuting.moving.inside(s)
    fits = {t: fit for t in (s, *inside) if (fit := commuting.fits(t))}
    if not fits:
        return False
    moves = FeatureMatching(commuting.moving, fits, signs=False).moves(s, commuting.symmetry.identity())
    if moves and commuting.step(moves):
        return True
    if s not in fits or not commuting.moving.wire_specs[s].permutes:
        return False
    parts = _cycles(moves[s]) if s in moves and not inside else []
    tried = [commuting.step({s: part}) for part in [*parts, *_exchanges(commuting, s, fits[s], exchanges)]]
    return any(tried)


def _cycles(move: Move) -> list[Move]:
    """The permutation of a move cut into its cycles, each a move of its own; signs are left out."""
    assert move.permutation is not None
    order = move.permutation.reshape(-1, move.permutation.shape[-1])
    found: list[Move] = []
    for copy, row in enumerate(order.tolist()):
        seen: set[int] = set()
        for first in range(len(row)):
            if first in seen or row[first] == first:
                continue
            part, here = torch.arange(len(row)).repeat(len(order), 1), first
            while here not in seen:
                seen.add(here)
                part[copy, here] = row[here]
                here = row[here]
            found.append(_with_order(move, part))
    return found if len(found) > 1 else []


def _with_order(move: Move, order: Tensor) -> Move:
    assert move.permutation is not None
    sign = None if move.sign is None else torch.ones_like(move.sign)
    return replace(move, permutation=order.reshape(move.permutation.shape), sign=sign)


def _exchanges(commuting: CommutativityCost, s: int, fits: dict[tuple[int, ...], Tensor], count: int) -> list[Move]:
    """The exchanges of two units that promise most by the slope; signs stay."""
    strands = commuting.moving.wire_specs
    n, units = strands[s].size, unit_count(strands, s)
    fit = sum(fits.values(), torch.zeros(units, units, dtype=torch.float64)).reshape(units // n, n, units // n, n)
    own = torch.stack([fit[c, :, c] for c in range(units // n)])
    stay = own.diagonal(dim1=1, dim2=2)
    gain = (own + own.mT - stay[:, :, None] - stay[:, None, :]).triu(1).flatten()
    move = identity_move(strands, s)
    found: list[Move] = []
    for index in gain.topk(min(count, len(gain))).indices.tolist():
        if gain[index] <= 0:
            break
        copy, i, j = index // (n * n), index // n % n, index % n
        order = torch.arange(n).repeat(units // n, 1)
        order[copy, i], order[copy, j] = j, i
        found.append(_with_order(move, order))
    return found
