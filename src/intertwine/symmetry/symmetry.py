"""The symmetry of a network: its wires and groups, elements and their action on models, states, features and
optimizers, and its certificate.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.errors import InputError, MismatchError
from intertwine.graph.capture import capture
from intertwine.graph.constraints import ConcatView, PermutedView, Value
from intertwine.graph.graph import build_graph
from intertwine.graph.model import copy_module, empty_caches
from intertwine.graph.program import Program
from intertwine.symmetry.discover import Geometry, discover
from intertwine.symmetry.element import Element, WireSpec, identity_move, random_move
from intertwine.symmetry.geometry import (
    FixedAxis,
    Layout,
    LayoutAxis,
    ProductAxis,
    SumAxis,
    WireAxis,
    act,
    check_ties,
    names_in_model,
    names_in_state,
    wire_axes,
)
from intertwine.symmetry.wire import Frozen, Wire

TOLERANCE = 1e-9


@dataclass(frozen=True)
class FailedOp:
    """An op at which a certificate failed: its name and place, the wires it touches and the error there."""

    op: str
    place: str
    wires: tuple[str, ...]
    error: float


@dataclass(frozen=True)
class Certificate:
    """The proof that a symmetry holds on a model.

    `max_error`: largest relative change of an output under random elements, in float64. `per_wire`: the same for the
    hidden features each wire moves. `broken`: ops at which the symmetry as found was wrong; `symmetry` is the one that
    holds (with those ops' axes frozen), the same object as before when nothing was broken. `vacuous` says that the
    outputs do not depend on the weights at all, so that nothing was proved.
    """

    ok: bool
    max_error: float
    trials: int
    per_wire: Mapping[str, float]
    broken: tuple[FailedOp, ...]
    vacuous: bool
    symmetry: Any = field(repr=False)  # a Symmetry; that class is built on this one

    def __repr__(self) -> str:
        verdict = "holds" if self.ok else "does not hold"
        extra = f"; {len(self.broken)} op(s) frozen after failing" if self.broken else ""
        extra += "; vacuous: the outputs do not depend on the weights" if self.vacuous else ""
        worst = max(self.per_wire.values(), default=0.0)
        measured = f"outputs change by {self.max_error:.1e}, hidden features by {worst:.1e} from prediction"
        return f"Certificate({verdict}: {measured} over {self.trials} random elements{extra})"

    def to_dict(self) -> dict[str, Any]:
        plain = {"ok": self.ok, "max_error": self.max_error, "trials": self.trials, "vacuous": self.vacuous}
        return plain | {"per_wire": dict(self.per_wire), "broken": [vars(b) for b in self.broken]}


#: Spread of random log-scales: near 1, so that float64 certificates stay far below 1e-9.
SCALE_SPREAD = 0.2


def symmetry(model: nn.Module, *example_args: Any, continuous: bool = False, **example_kwargs: Any) -> Symmetry:
    """Find the symmetry of a network by reading its graph.

    Args:
        model: any `torch.nn.Module`. It is not changed, and the result does not depend on the values of its weights.
        *example_args, **example_kwargs: inputs the model can be called with; only their shapes matter.
        continuous: let whole matrices act where only linear maps meet (per-head GL on queries and keys, values and
            outputs) or lengths (orthogonal maps of a residual stream read through RMS norms). Norm weights are then
            folded into their consumers by `act`; the default keeps the model's own parameterisation.

    Returns:
        A `Symmetry`: wires with their groups, what is frozen and why, elements, their action, and certificates.

    Raises:
        InputError: the model or its example inputs are not usable. CaptureError: the forward cannot be captured.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> sym = intertwine.symmetry(model, torch.zeros(1, 3))
        >>> [(wire.name, str(wire.group)) for wire in sym.wires]
        [('0', 'S_8 ⋉ (R₊)^8')]
        >>> sym.certify(model, torch.zeros(1, 3)).ok
        True
    """
    return from_program(capture(model, example_args, example_kwargs), continuous)


def from_program(program: Program, continuous: bool = False, distrusted: frozenset[str] = frozenset()) -> Symmetry:
    """The symmetry of a captured program; calls named in `distrusted` are treated as if they had no rule."""
    found = discover(build_graph(program, distrusted), continuous)
    return Symmetry(found.wires, found.frozen, found, continuous, distrusted)


@dataclass(frozen=True)
class Symmetry:
    """The symmetry group of an architecture. See `intertwine.symmetry`.

    `wires`: the index sets a group acts on. `frozen`: (what, reason) for every parameter axis with only the identity.
    `geometry`: the graph, and where every wire stands in every tensor. `distrusted`: names of calls whose rules failed
    a certificate and are not used.
    """

    wires: tuple[Wire, ...]
    frozen: tuple[Frozen, ...]
    geometry: Geometry = field(repr=False)
    continuous: bool = False
    distrusted: frozenset[str] = field(default=frozenset(), repr=False)

    # -- size ------------------------------------------------------------------------------------------------------

    @property
    def signature(self) -> str:
        """A short hash of the group and where it acts; elements belong to one signature."""
        return self.geometry.signature

    @property
    def wire_specs(self) -> tuple[WireSpec, ...]:
        """What elements act on: one entry per wire, in the order of `wires`, then the bases that do not move."""
        return self.geometry.wire_specs

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Parameter or buffer name → its layout; tied tensors appear under their first name."""
        return self.geometry.layouts

    def layout_of(self, name: str) -> Layout | None:
        """The layout of a parameter or buffer, by any of its names in the captured model; None if it has none."""
        return self.geometry.layouts.get(self.geometry.graph.program.tied.get(name, name))

    @property
    def log_order(self) -> float:
        """ln of the number of permutations."""
        return sum((w.group.log_order for w in self.wires), 0.0)

    @property
    def log_signs(self) -> float:
        """ln of the number of sign patterns."""
        return sum((w.group.log_signs for w in self.wires), 0.0)

    @property
    def dimension(self) -> int:
        """Dimension of the continuous part of the group."""
        return sum(w.group.dimension for w in self.wires)

    @property
    def unsupported(self) -> tuple[tuple[str, str], ...]:
        """(op, where) for every op without a rule; the axes it touched are frozen."""
        return tuple(self.geometry.graph.builder.unsupported)

    def coverage(self, model: nn.Module) -> float:
        """Fraction of the model's parameters that at least one wire moves."""
        self.check_model(model)
        moved = total = 0.0
        for name, parameter in model.named_parameters():
            total += parameter.numel()
            layout = self.layout_of(name)
            if layout is not None:
                moved += parameter.numel() * (1 - prod(1 - self._covered(a) / max(a.size, 1) for a in layout.axes))
        return moved / total if total else 0.0

    def _covered(self, tree: LayoutAxis) -> int:
        """How many positions of an axis some wire moves."""
        if isinstance(tree, WireAxis):
            spec = self.wire_specs[tree.wire]
            return tree.size if spec.permutes or spec.matrix or any(tree.powers) or any(tree.flips) else 0
        if isinstance(tree, SumAxis):
            return sum(map(self._covered, tree.parts))
        if isinstance(tree, ProductAxis):
            return round(tree.size * (1 - prod(1 - self._covered(part) / part.size for part in tree.parts)))
        return 0

    # -- elements --------------------------------------------------------------------------------------------------

    def identity(self) -> Element:
        """The element that changes nothing."""
        moves = {i: identity_move(self.wire_specs, i) for i in range(len(self.wires))}
        return Element(self.wire_specs, moves, self.signature)

    def random(self, seed: int = 0, scale_spread: float = SCALE_SPREAD) -> Element:
        """A random element: uniform permutations and signs, log-normal scales with the given spread."""
        generator = torch.Generator().manual_seed(seed)
        moves = {i: random_move(self.wire_specs, i, generator, scale_spread) for i in range(len(self.wires))}
        return Element(self.wire_specs, moves, self.signature)

    # -- actions ---------------------------------------------------------------------------------------------------

    def act(self, g: Element, model: nn.Module) -> nn.Module:
        """A new model with other weights and the same function. The given model is not touched."""
        self.check_element(g)
        self.check_model(model)
        moved = self.folded(model) if self.geometry.diagonals else copy_module(model)
        with torch.no_grad():
            for name, tensor in [*moved.named_parameters(), *moved.named_buffers()]:
                layout = self.layout_of(name)
                if layout is not None:
                    tensor.copy_(act(layout, tensor, g))
        empty_caches(moved)
        return moved

    def folded(self, model: nn.Module) -> nn.Module:
        """The same function, with every norm weight through which a matrix acts folded into its consumers.

        Folding is itself an action of the default symmetry's scales and signs; without such weights it is a plain copy.
        """
        names = self.geometry.diagonals
        if not names:
            return copy_module(model)
        plain = from_program(self.geometry.graph.program, False, self.distrusted)
        folded = plain.act(_unit_element(plain, model, names), model)
        with torch.no_grad():
            for name, weight in folded.named_parameters():
                if name in names:
                    weight.fill_(1)  # the action wire_axes it a rounding away from one
        return folded

    def act_on_state(self, g: Element, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Act on a state dict: gives a new dict, which shares the entries that no wire touches."""
        self.check_element(g)
        check_ties(names_in_state(state), self.layout_of, "the given state dict")
        layouts = {name: self.layout_of(name) for name in state}
        return {name: t if (layout := layouts[name]) is None else act(layout, t, g) for name, t in state.items()}

    def act_on_features(self, g: Element, name: str, x: Tensor) -> Tensor:
        """How hidden features move: the features of `act(g, model)` at a module are this function of the model's own.

        Args:
            g: an element. name: a module path, as printed by `model.named_modules()`; the module's output is meant.
            x: features at that module; the batch (and token or spatial) axes may have other sizes than in the example.
        """
        self.check_element(g)
        graph = self.geometry.graph
        if name not in graph.sites:
            near = [s for s in graph.sites if name.split(".")[0] in s][:8] or list(graph.sites)[:8]
            raise InputError(
                f"No tensor is computed under a module called {name!r}. Modules with features: {', '.join(near)} …"
            )
        value = graph.values[graph.sites[name]]
        if not value.lazy and not self.geometry.predicts(value):
            raise InputError(
                f"The features at {name!r} are squares inside a length, which a rotation mixes with products that the "
                "model never forms, so they do not move by themselves. Use the features before them, or after the norm "
                "they belong to."
            )
        return self.act_on_value(g, name, value, x)

    def act_on_value(self, g: Element, name: str, value: Value, x: Tensor) -> Tensor:
        """Move the tensor `x` of one value of the captured graph; a lazy view is moved as the tensor behind it."""
        layout = None if value.lazy else self.geometry.layout(value)
        pairs = [] if layout is None else list(zip(layout.axes, x.shape, strict=False))
        if layout is None:
            fits = tuple(x.shape) == value.shape
        else:
            moves = [any(True for _ in wire_axes(axis)) for axis in layout.axes]
            fits = x.ndim == value.ndim and all(
                a.size == n for (a, n), moved in zip(pairs, moves, strict=True) if moved
            )
        if not fits:
            raise InputError(
                f"The features at {name!r} must have the shape {value.shape} (axes on which nothing acts may differ), "
                f"but have {tuple(x.shape)}."
            )
        if layout is not None:  # nothing acts on an axis of another size
            return act(replace(layout, axes=tuple(a if a.size == n else FixedAxis(n) for a, n in pairs)), x, g)
        if isinstance(value.view, PermutedView):
            order = value.view.order
            back = x.permute(*(order.index(d) for d in range(x.ndim)))
            return self.act_on_value(g, name, value.view.source, back).permute(*order)
        if isinstance(value.view, ConcatView):
            blocks = x.split([s.shape[value.view.dim] for s in value.view.sources], value.view.dim)
            pairs = zip(value.view.sources, blocks, strict=True)
            return torch.cat([self.act_on_value(g, name, s, b) for s, b in pairs], value.view.dim)
        assert value.view is not None
        return self.act_on_value(g, name, value.view.source, x.reshape(value.view.source.shape)).reshape(x.shape)

    def act_on_optimizer(self, g: Element, optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
        """The optimizer's state moved with the parameters: a state dict to load into an optimizer of the moved model.

        First moments move as gradients do, second moments as squared gradients. After a move by permutations and signs
        training goes on exactly as it would have; scales change what an adaptive optimizer does next.
        """
        self.check_element(g)
        self.check_model(model)
        parameters = dict(model.named_parameters())
        unfolded = [n for n in self.geometry.diagonals if not bool((parameters[n] == 1).all())]
        if unfolded:
            raise InputError(
                f"This symmetry first folds {unfolded[0]!r} into its consumers, and an optimizer's state cannot be "
                "folded. Fold the model before training (symmetry.folded), or use the symmetry without continuous=True."
            )
        state = copy.deepcopy(optimizer.state_dict())
        names = {id(p): name for name, p in model.named_parameters()}
        order = [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
        if None in order:
            raise MismatchError(
                "The optimizer holds parameters that are not the model's. Pass the model the optimizer was made for."
            )
        for index, name in enumerate(order):
            layout = self.layout_of(str(name))
            for key, value in state["state"].get(index, {}).items():
                if layout is not None and isinstance(value, Tensor) and value.ndim and value.shape == layout.shape:
                    state["state"][index][key] = _moved_moment(key, value, layout, g)
        return state

    # -- proof -----------------------------------------------------------------------------------------------------

    def certify(
        self,
        model: nn.Module,
        *example_args: Any,
        trials: int = 3,
        seed: int = 0,
        tolerance: float = TOLERANCE,
        per_wire: bool = True,
        **example_kwargs: Any,
    ) -> Certificate:
        """Prove the symmetry on a model: random elements act in float64 and the function is measured.

        Args:
            model: the model; a copy is measured, with batch statistics and constant parameters drawn at random.
            *example_args, **example_kwargs: inputs to measure on. trials: random elements on all wires jointly.
            per_wire: also compare every hidden tensor with its prediction (costs two forwards).

        Returns:
            A `Certificate`. An op at which the symmetry fails is frozen, and `certificate.symmetry` is what holds.
        """
        from intertwine.symmetry.certify import certify  # it is built on this class

        self.check_model(model)
        return certify(self, model, example_args, example_kwargs, trials, seed, tolerance, per_wire)

    def distrusting(self, call: str) -> Symmetry:
        """The symmetry without the rule of one call: its axes are frozen."""
        return from_program(self.geometry.graph.program, self.continuous, self.distrusted | {call})

    # -- checks and display ----------------------------------------------------------------------------------------

    def check_element(self, g: Element) -> None:
        """Refuse an element of another symmetry, and anything that is no element."""
        if not isinstance(g, Element):
            raise InputError(
                f"g must be an Element, but is a {type(g).__name__}. Make one with sym.random(), sym.identity() or "
                "Element.load(file)."
            )
        own = self.identity()
        if (g.signature, g.wire_specs, set(g.moves)) != (own.signature, own.wire_specs, set(own.moves)):
            raise MismatchError(
                "The element belongs to the symmetry of another architecture. Use an element made by this "
                "symmetry (sym.random, Element.load of its file)."
            )

    def check_model(self, model: nn.Module) -> None:
        """Raise `InputError` or `MismatchError` unless a model has the architecture of this symmetry."""
        if not isinstance(model, nn.Module):
            raise InputError(f"The model must be a torch.nn.Module, but is a {type(model).__name__}.")
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        shapes = {name: tuple(t.shape) for name, t in tensors}
        for name, layout in self.geometry.layouts.items():
            if shapes.get(name) != layout.shape:
                found = f"has shape {shapes[name]}" if name in shapes else "does not exist"
                raise MismatchError(
                    f"This symmetry is of an architecture in which {name!r} has shape {layout.shape}; in the given "
                    f"model it {found}. Call intertwine.symmetry on this model."
                )
        check_ties(names_in_model(model), self.layout_of, "the given model")

    def to_dict(self) -> dict[str, Any]:
        return {
            "wires": [w.to_dict() for w in self.wires],
            "frozen": [{"what": f.what, "reason": f.reason} for f in self.frozen],
            "log_order": self.log_order,
            "log_signs": self.log_signs,
            "dimension": self.dimension,
            "unsupported": [list(u) for u in self.unsupported],
            "signature": self.signature,
        }

    def __repr__(self) -> str:
        size = f"e^{self.log_order:.0f} permutations, {self.dimension} continuous dimensions"
        return f"Symmetry({len(self.wires)} wires, {size}, {len(self.frozen)} frozen axes)"


#: How the tensors an optimizer keeps per parameter move: (degree, whether a sign is carried).
MOMENTS = {
    "exp_avg": (-1, True), "momentum_buffer": (-1, True), "grad_avg": (-1, True), "prev": (-1, True), "mu": (-1, True),
    "exp_avg_sq": (-2, False), "max_exp_avg_sq": (-2, False), "square_avg": (-2, False), "sum": (-2, False),
    "exp_inf": (-1, False), "acc_delta": (2, False), "step_size": (1, False), "ax": (1, True),
}  # fmt: skip


def _moved_moment(key: str, value: Tensor, layout: Layout, g: Element) -> Tensor:
    """One tensor of an optimizer's state, moved like the power of a gradient or parameter that it is."""
    if key not in MOMENTS:
        raise InputError(
            f"The optimizer keeps {key!r} for each parameter, and how that moves is not known. Known states: "
            f"{', '.join(sorted(MOMENTS))} (SGD, Adam and its relatives, RMSprop, Adagrad, Adadelta, Rprop, ASGD)."
        )
    degree, signed = MOMENTS[key]
    moved = act(layout, value, g, degree)
    return moved if signed else moved.abs()


def _unit_element(sym: Symmetry, model: nn.Module, names: tuple[str, ...]) -> Element:
    """The element of scales and signs that turns some weight vectors into ones."""
    moves = dict(sym.identity().moves)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wire_axes = {name: sym.geometry.layouts[name].axes[0] for name in names}
    for name, wire_axis in wire_axes.items():
        assert isinstance(wire_axis, WireAxis)
        others = [o for n, o in wire_axes.items() if n != name and isinstance(o, WireAxis) and o.wire == wire_axis.wire]
        power = next((k for k, p in enumerate(wire_axis.powers) if p and not any(o.powers[k] for o in others)), None)
        flip = next((k for k, f in enumerate(wire_axis.flips) if f and not any(o.flips[k] for o in others)), None)
        weight = parameters[name].detach().to(torch.float64).cpu()
        move = moves[wire_axis.wire]
        if power is None or move.scale is None or not bool(weight.all()) or (flip is None and bool((weight < 0).any())):
            raise InputError(
                f"{name!r} cannot be folded into its consumers (it holds zeros, or signs that no other weight can "
                "take), so no matrix can act through it. Use intertwine.symmetry without continuous=True."
            )
        scale, sign = move.scale.clone(), move.sign
        scale[power] = weight.abs() ** (-1 / float(wire_axis.powers[power]))
        if sign is not None and flip is not None:
            sign = sign.clone()
            sign[flip] = weight.sign()
        moves[wire_axis.wire] = replace(move, scale=scale, sign=sign)
    return replace(sym.identity(), moves=moves)
