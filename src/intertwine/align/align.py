"""`align`: move one network onto another by an element of their symmetry; the table of methods and the result
(`Alignment`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from intertwine.align.activations import ActivationOptions, solve_activations
from intertwine.align.commutativity import CommutativityOptions, solve_commutativity
from intertwine.align.learned import SinkhornOptions, StraightThroughOptions, solve_sinkhorn, solve_straight_through
from intertwine.align.scale_aware import solve_scale_aware
from intertwine.align.solver import AlignmentProblem, AlignmentTask, Solver
from intertwine.align.state import AlignmentStep, MatchingState, counted_weights, without_denormals
from intertwine.align.weights import WeightsOptions, solve_weights
from intertwine.canonical.equivalence import common_symmetry
from intertwine.data.batches import check_batches
from intertwine.errors import InputError, did_you_mean, unknown_name
from intertwine.graph.model import copy_module
from intertwine.lazy import data_frame
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry


@dataclass(frozen=True)
class WirePart:
    """The share of the objective in the tensors of one wire, before and after; a tensor of two wires is in both."""

    wire: str
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class Alignment:
    """One network moved onto another.

    `model`: b moved by `element`, the same function as b. `reference`: the network to compare it with, a itself; under
    a symmetry that folds norm weights away, a so folded. `before`, `after`: the objective Σ ‖A − B‖², lower is nearer.
    `history`: the objective at every start and after every step that was kept. `per_wire`: the part of every wire.
    """

    model: nn.Module = field(repr=False)
    reference: nn.Module = field(repr=False)
    element: Element
    method: str
    before: float
    after: float
    history: tuple[AlignmentStep, ...] = field(repr=False)
    per_wire: tuple[WirePart, ...] = field(repr=False)
    symmetry: Symmetry = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """All but the model and the element, as plain values."""
        names = ("method", "before", "after")
        parts = {"history": self.to_rows(), "per_wire": [asdict(part) for part in self.per_wire]}
        return {name: getattr(self, name) for name in names} | parts

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per step of the history, as plain data."""
        return [asdict(step) for step in self.history]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def __repr__(self) -> str:
        share = f", {self.after / self.before:.1%} left" if self.before > 0 else ""
        steps = sum(1 for step in self.history if step.sweep)
        return (
            f"Alignment({self.method}: squared distance {self.before:.4g} → {self.after:.4g}{share}, {steps} steps, "
            f"{self.element})"
        )


SOLVERS: dict[str, Solver] = {
    "weights": Solver(solve_weights, moves=frozenset({"permutation", "matrix"}), options=WeightsOptions),
    "scale-aware": Solver(solve_scale_aware, moves=frozenset({"permutation", "sign", "scale", "matrix"})),
    "activations": Solver(
        solve_activations, frozenset({"permutation", "sign", "scale"}), needs_data=True, options=ActivationOptions
    ),
    "commutativity": Solver(
        solve_commutativity, frozenset({"permutation", "sign"}), needs_data=True, options=CommutativityOptions
    ),
    "straight-through": Solver(
        solve_straight_through, frozenset({"permutation"}), needs_data=True, options=StraightThroughOptions
    ),
    "sinkhorn": Solver(solve_sinkhorn, frozenset({"permutation"}), needs_data=True, options=SinkhornOptions),
}


def align(
    a: nn.Module,
    b: nn.Module,
    *example_args: Any,
    method: str = "weights",
    data: Any = None,
    seed: int = 0,
    starts: int = 3,
    wires: Sequence[str] | None = None,
    buffers: bool = False,
    sweeps: int = 100,
    symmetry: Symmetry | None = None,
    options: Mapping[str, Any] | None = None,
    **example_kwargs: Any,
) -> Alignment:
    """Move network b as near to network a as its symmetry allows, without changing its function.

    Every method reports the same objective at every step, the squared distance Σ ‖A − g·B‖² over the tensors that wires
    act on. "weights" and "scale-aware" minimise it and keep no step that raises it. The methods that need data minimise
    a quantity of their own, which the history also holds (`AlignmentStep.own`); the distance may rise under them.

    Args:
        a, b: two networks of one architecture. *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`.
        method: "weights" (permutations), "scale-aware" (permutations, positive scales and signs; never worse),
            "straight-through" and "sinkhorn" (permutations with a low task loss halfway between a and b), or another
            name in `SOLVERS`.
        data: batches of (inputs, targets), for the methods that use features or losses.
        seed: of the order of wires and of random starts. starts: how many are tried (the identity, between canonical
            forms, paired units, from the embeddings, then random elements); the search continues from the one that is
            best after one sweep over all wires.
        wires: names of the only wires to move; all of them by default. buffers: count batch statistics too.
        sweeps: the most sweeps over all wires from one start.
        symmetry: the symmetry of the architecture if it is known; it is then not checked that both models have it.
            One with continuous=True lets "weights" and "scale-aware" move by matrices too: rotations of a residual
            stream, a matrix per head. Norm weights of both networks are then folded into the layers that read them, and
            `.reference` is a so folded: compare `.model` with that.
        options: settings of the method, by name.

    Returns:
        An `Alignment`: `.model` (b moved onto a), `.element`, `.before`, `.after`, `.history`, `.per_wire`.

    Raises:
        MismatchError: the networks are of different architectures. InputError: an unknown method or wire, or a network
        on which nothing acts.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> sym = intertwine.symmetry(model, torch.zeros(1, 3))
        >>> twin = sym.act(sym.random(seed=1), model)
        >>> found = intertwine.align(model, twin, torch.zeros(1, 3), method="scale-aware")
        >>> found.before > 1, found.after
        (True, 0.0)
    """
    if method not in SOLVERS:
        raise InputError(unknown_name("method", method, SOLVERS))
    solver = SOLVERS[method]
    settings = solver.settings(method, options)
    if solver.needs_data and data is None:
        raise InputError(
            f"The method {method!r} needs data. Pass data=, batches of (inputs, targets); 'weights' and 'scale-aware' "
            "need none."
        )
    if data is not None:
        check_batches(data)
    for name, count in (("starts", starts), ("sweeps", sweeps)):
        if count < 1:
            raise InputError(f"{name} must be at least 1, but is {count}. Leave it out for the default.")
    found = common_symmetry([a, b], symmetry, example_args, example_kwargs)
    chosen = _chosen_wires(found, wires, method, solver)
    if any(s.matrix for s in found.wire_specs):
        a, b = found.folded(a), found.folded(b)
    with torch.inference_mode(False):  # some solvers need gradients, and all write into tensors of their own
        here, there = _without_inference_mode(a), _without_inference_mode(b)
        weights_a, weights_b = (without_denormals(weights_of(found, m)) for m in (here, there))
        left = counted_weights(found, here, weights_a, buffers)
        right = counted_weights(found, there, weights_b, buffers)
        problem = AlignmentProblem(found, weights_a, weights_b, tuple(chosen))
        state = MatchingState(found, left, right, chosen.values())
        before, parts_before = state.objective, [state.part(w) for w in range(len(found.wires))]
        element, history = solver.solve(
            AlignmentTask(here, there, problem, state, data, seed, starts, sweeps), settings
        )
    parts = zip(found.wires, parts_before, strict=True)
    per_wire = tuple(WirePart(wire.name, x, state.part(w)) for w, (wire, x) in enumerate(parts))
    moved, after = found.act(element, b), state.objective
    return Alignment(moved, a, element, method, before, after, tuple(history), per_wire, found)


def _without_inference_mode(model: nn.Module) -> nn.Module:
    """A copy of a network with inference tensors, which can be neither traced nor differentiated; else the network."""
    inference = any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    return copy_module(model) if inference else model


def _chosen_wires(symmetry: Symmetry, wires: Sequence[str] | None, method: str, solver: Solver) -> dict[str, int]:
    """Name → index of the wires that may move, under a method that can move them."""
    names = [w.name for w in symmetry.wires]
    for name in wires if wires is not None else ():
        if name not in names:
            raise InputError(
                f"Unknown wire {name!r}. {did_you_mean(name, names)}The wires: {', '.join(names[:20])}"
                f"{' …' if len(names) > 20 else ''}."
            )
    matrices = [s.name for s in symmetry.wire_specs if s.matrix]
    if matrices and "matrix" not in solver.moves:
        able_to = ", ".join(repr(name) for name, s in SOLVERS.items() if "matrix" in s.moves)
        raise InputError(
            f"The symmetry contains matrices (on {matrices[0]!r}), which {method!r} does not move. Choose one of "
            f"{able_to}, or pass the symmetry without continuous=True."
        )
    able = [bool(solver.moves & {part for part, _ in move.items()}) for move in symmetry.identity().moves.values()]
    wanted = names if wires is None else wires
    chosen = {n: i for i, n in enumerate(names) if able[i] and n in wanted}
    if not chosen:
        what = "this network" if wires is None else f"the wires {', '.join(map(repr, wires))}"
        raise InputError(
            f"There is nothing to align: no wire of {what} can be moved by {method!r}. Look at "
            "intertwine.symmetry(model, …).frozen for the reasons, axis by axis."
        )
    return chosen
