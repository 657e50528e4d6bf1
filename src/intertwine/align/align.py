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
from intertwine.canonical.equivalence import check_same_architecture
from intertwine.data.batches import check_batches
from intertwine.errors import InputError, did_you_mean
from intertwine.graph.model import copy_module
from intertwine.lazy import data_frame
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

# ----------------------------------------------------------------------------------------------------
# Alignment: what `align` returns.


@dataclass(frozen=True)
class WirePart:
    """What the tensors of one wire add to the objective, before and after; a tensor of two wires is part of both."""

    wire: str
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class Alignment:
    """One network moved onto another.

    `model`: b moved by `element`, the same function as b. `reference`: what it lies near to, which is a itself; under a
    symmetry that folds norm weights away, a so folded. `before`, `after`: the objective Σ ‖A − B‖², lower is nearer.
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
        return {
            "method": self.method,
            "before": self.before,
            "after": self.after,
            "history": [asdict(step) for step in self.history],
            "per_wire": [asdict(part) for part in self.per_wire],
        }

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


# ----------------------------------------------------------------------------------------------------
# `align`: move one network onto another by an element of their symmetry.


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

    Every method tells the same objective at every step, the squared distance Σ ‖A − g·B‖² over the tensors that wires
    act on. "weights" and "scale-aware" lower it, and keep no step that raises it. The methods that need data lower a
    measure of their own instead, which their steps tell beside it (`Step.own`); the distance may rise under them.

    Args:
        a, b: two networks of one architecture. *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`.
        method: "weights" (permutations), "scale-aware" (permutations, positive scales and signs; never worse),
            "straight-through" and "sinkhorn" (permutations with a low task loss halfway between a and b), or another
            name in `SOLVERS`.
        data: batches of (inputs, targets), for the methods that look at features or losses.
        seed: of the order of wires and of random starts. starts: how many are tried (the identity, the way between
            canonical forms, paired units, the way in from the embeddings, then random elements); the one that is best
            after one sweep over all wires is followed to the end.
        wires: names of the only wires to move; all of them by default. buffers: count batch statistics too.
        sweeps: the most times that descent visits every wire from one start.
        symmetry: the symmetry of the architecture where it is already known; both models are then trusted to be of it.
            One with continuous=True lets "weights" and "scale-aware" move by matrices too: rotations of a residual
            stream, a matrix per head. Norm weights of both networks are then folded into what reads them, and
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
        known = ", ".join(map(repr, SOLVERS))
        raise InputError(f"There is no method {method!r}. {did_you_mean(method, SOLVERS)}Choose one of {known}.")
    solver = SOLVERS[method]
    settings = solver.settings(method, options)
    if solver.needs_data and data is None:
        raise InputError(
            f"The method {method!r} looks at what the networks do on data, and none was given. Pass data=, batches of "
            "(inputs, targets); 'weights' and 'scale-aware' need none."
        )
    if data is not None:
        check_batches(data)
    _check_count("starts", starts)
    _check_count("sweeps", sweeps)
    found = symmetry
    if found is None:
        found = find_symmetry(a, *example_args, **example_kwargs)
        check_same_architecture(found, a, b, find_symmetry(b, *example_args, **example_kwargs))
    chosen = _chosen_wires(found, wires, method, solver)
    if any(s.matrix for s in found.wire_specs):
        a, b = found.folded(a), found.folded(b)
    with torch.inference_mode(False):  # some solvers follow slopes, and all write into tensors of their own
        here, there = _with_slopes(a), _with_slopes(b)
        weights_a, weights_b = (without_denormals(weights_of(found, m)) for m in (here, there))
        problem = AlignmentProblem(found, weights_a, weights_b, tuple(chosen))
        left, right = (
            counted_weights(found, here, problem.a, buffers),
            counted_weights(found, there, problem.b, buffers),
        )
        pair = MatchingState(found, left, right, chosen.values())
        before, parts_before = pair.objective, [pair.part(s) for s in range(len(found.wires))]
        element, history = solver.solve(AlignmentTask(here, there, problem, pair, data, seed, starts, sweeps), settings)
    parts = zip(found.wires, parts_before, strict=True)
    per_wire = tuple(WirePart(wire.name, x, pair.part(s)) for s, (wire, x) in enumerate(parts))
    return Alignment(found.act(element, b), a, element, method, before, pair.objective, tuple(history), per_wire, found)


def _with_slopes(model: nn.Module) -> nn.Module:
    """The network, copied where it was made in inference mode: such tensors can be neither traced nor followed."""
    made_for_inference = any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    return copy_module(model) if made_for_inference else model


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{name}={value} was asked for; at least one is needed. Leave it out for the default.")


def _chosen_wires(symmetry: Symmetry, wires: Sequence[str] | None, method: str, solver: Solver) -> dict[str, int]:
    """Name → strand of the wires that may move, under a method that can move them."""
    names = [w.name for w in symmetry.wires]
    for name in wires if wires is not None else ():
        if name not in names:
            raise InputError(
                f"There is no wire {name!r} to align. {did_you_mean(name, names)}The wires: {', '.join(names[:20])}"
                f"{' …' if len(names) > 20 else ''}."
            )
    matrices = [s.name for s in symmetry.wire_specs if s.matrix]
    if matrices and "matrix" not in solver.moves:
        able_to = ", ".join(repr(name) for name, s in SOLVERS.items() if "matrix" in s.moves)
        raise InputError(
            f"The symmetry lets whole matrices act on {matrices[0]!r}, and {method!r} does not move matrices. Choose "
            f"one of {able_to}, or pass the symmetry without continuous=True."
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
