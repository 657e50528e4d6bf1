"""`align_many`: bring any number of networks into one common frame.

Every network i gets one element gᵢ into the frame, so the element from j to i is gᵢ⁻¹ gⱼ and compositions are cycle
consistent. Separate alignments of pairs are not.

All networks are first aligned pair by pair. The one to which the others come nearest is the anchor, whose own basis is
the frame. Then each other network in turn is aligned to the mean of the rest, and the step is kept only if the sum of
squared distances to the mean falls. Networks are visited in an order that depends on their weights alone, so the result
does not depend on the order in which they are given, to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import nn

from intertwine.align.align import SOLVERS, align
from intertwine.align.state import counted_weights, squared_distance
from intertwine.canonical.equivalence import common_symmetry
from intertwine.data.weights import mean_network
from intertwine.errors import InputError
from intertwine.lazy import data_frame
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

#: A step must lower the objective by more than this share of it: less is rounding.
LEAST = 1e-9
#: The last round lowers it by less than this share.
LEAST_GAIN = 1e-4


@dataclass(frozen=True, eq=False)
class CommonFrame:
    """Networks in one common frame.

    Attributes:
        models: every network moved into the frame, the same function as before. elements: what moved them.
        anchor: the network whose own basis is the frame; its element is the identity.
        before, after: the objective Σᵢ ‖gᵢθᵢ − mean‖², over the tensors that wires act on.
        history: the objective with all networks aligned to the anchor alone, then after every round.
    """

    models: tuple[nn.Module, ...] = field(repr=False)
    elements: tuple[Element, ...] = field(repr=False)
    anchor: int
    method: str
    before: float
    after: float
    history: tuple[float, ...]
    symmetry: Symmetry = field(repr=False)

    def between(self, i: int, j: int) -> Element:
        """The element that takes network j to network i, gᵢ⁻¹ gⱼ; `between(i, j) @ between(j, k) == between(i, k)`."""
        for number in (i, j):
            if not 0 <= number < len(self.elements):
                raise InputError(f"There is no network {number}. Networks are numbered 0 to {len(self.elements) - 1}.")
        return self.elements[i].inverse() @ self.elements[j]

    def to_dict(self) -> dict[str, Any]:
        """All but the networks and the elements, as plain values."""
        names = ("anchor", "method", "before", "after")
        more = {"networks": len(self.models), "history": list(self.history)}
        return {name: getattr(self, name) for name in names} | more

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per round, as plain data; round 0 is with all networks aligned to the anchor alone."""
        return [{"round": i, "objective": objective} for i, objective in enumerate(self.history)]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def __repr__(self) -> str:
        share = f", {self.after / self.before:.1%} left" if self.before > 0 else ""
        return (
            f"CommonFrame({len(self.models)} networks, {self.method}: squared distances to the mean {self.before:.4g} "
            f"→ {self.after:.4g}{share}, {len(self.history) - 1} rounds, anchor {self.anchor})"
        )


def align_many(
    models: Iterable[nn.Module],
    *example_args: Any,
    method: str = "weights",
    data: Any = None,
    seed: int = 0,
    starts: int = 3,
    wires: Sequence[str] | None = None,
    buffers: bool = False,
    sweeps: int = 100,
    rounds: int = 20,
    symmetry: Symmetry | None = None,
    options: Mapping[str, Any] | None = None,
    **example_kwargs: Any,
) -> CommonFrame:
    """Bring networks of one architecture into one common frame, without changing their functions.

    Args:
        models: two networks or more. *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`.
        method, data, seed, starts, wires, buffers, sweeps, symmetry, options: as for `intertwine.align`.
        rounds: the most rounds in which every network is aligned to the mean of the others; fewer if the objective no
            longer falls. Methods that use data compare networks, not means of networks, so they make no rounds.

    Returns:
        A `CommonFrame`: `.models`, `.elements`, `.between(i, j)`, `.before`, `.after`, `.history`.

    Raises:
        MismatchError: the networks are of different architectures. InputError: fewer than two networks, or an invalid
        argument of `align`.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        >>> sym = intertwine.symmetry(model, torch.zeros(1, 3))
        >>> twins = [model, *(sym.act(sym.random(seed), model) for seed in (1, 2))]
        >>> frame = intertwine.align_many(twins, torch.zeros(1, 3))
        >>> frame.before > 1, frame.after
        (True, 0.0)
    """
    models = check_list(models, "align_many")
    if len(models) < 2:
        raise InputError(f"align_many needs at least two networks, but got {len(models)}.")
    if isinstance(data, Iterator):
        raise InputError("The data is read once per pair, but a generator can be read once. Pass a list or DataLoader.")
    found = common_symmetry(models, symmetry, example_args, example_kwargs)
    order = sorted(range(len(models)), key=lambda i: _content_hash(models[i]))
    given = [models[i] for i in order]
    how = {"method": method, "seed": seed, "wires": wires, "buffers": buffers, "sweeps": sweeps, "symmetry": found}
    pairwise = _pairwise(given, how | {"starts": starts, "data": data, "options": options})
    search = _Search(found, given, how | {"options": options}, buffers)
    anchor = search.start(pairwise)
    history = [search.objective]
    improving = not SOLVERS[method].needs_data
    while improving and len(history) <= rounds:
        improving = search.round(anchor)
        history.append(search.objective)
    back = [order.index(i) for i in range(len(models))]
    return CommonFrame(
        tuple(search.moved[k] for k in back), tuple(search.elements[k] for k in back), order[anchor], method,
        search.before, search.objective, tuple(history), found,
    )  # fmt: skip


def check_list(models: Iterable[nn.Module], function: str) -> list[nn.Module]:
    """The networks as a list. A single network raises an error: a Sequential would pass for the list of its layers."""
    if isinstance(models, nn.Module):
        raise InputError(
            f"{function} needs a list of networks, but got one {type(models).__name__}. Put them into a list: "
            f"{function}([a, b], x)."
        )
    return list(models)


def squared_spread(symmetry: Symmetry, models: Sequence[nn.Module], buffers: bool = False) -> float:
    """Σᵢ ‖θᵢ − mean‖² over the tensors that wires act on."""
    weights = [counted_weights(symmetry, m, weights_of(symmetry, m), buffers) for m in models]
    total = 0.0
    for name, x in weights[0].items():
        stacked = torch.stack([w[name].to(x.device, torch.float64) for w in weights])
        if not bool((stacked == stacked[0]).all()):  # equal tensors would differ from their mean by rounding
            total += squared_distance(stacked, stacked.mean(0, keepdim=True))
    return total


def _content_hash(model: nn.Module) -> str:
    """A hash of all weights, by which models are ordered."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _pairwise(models: Sequence[nn.Module], how: Mapping[str, Any]) -> dict[tuple[int, int], Element]:
    """(i, j) → the element that takes model j to model i, each pair aligned alone.

    Permutations, signs and rotations keep distances, so the reverse element is the inverse. Where scales or other
    matrices may move, distances change, and both directions are searched.
    """
    moves = SOLVERS[how["method"]].moves if how["method"] in SOLVERS else frozenset()  # align rejects unknown methods
    stretches = any(
        (s.scales and "scale" in moves) or (s.matrix == "GL" and "matrix" in moves) for s in how["symmetry"].wire_specs
    )
    found: dict[tuple[int, int], Element] = {}
    for i, j in permutations(range(len(models)), 2):
        reverse = i > j and not stretches
        found[i, j] = found[j, i].inverse() if reverse else align(models[i], models[j], **how).element
    return found


class _Search:
    """The networks while they are moved into a frame, with their elements and the objective."""

    def __init__(self, symmetry: Symmetry, models: Sequence[nn.Module], how: Mapping[str, Any], buffers: bool) -> None:
        self.symmetry, self.models, self.how, self.buffers = symmetry, models, how, buffers
        self._place([symmetry.identity()] * len(models))
        self.before = self.objective

    def _place(self, elements: list[Element]) -> None:
        self.elements = elements
        self.moved = [self.symmetry.act(g, m) for g, m in zip(elements, self.models, strict=True)]
        self.objective = squared_spread(self.symmetry, self.moved, self.buffers)

    def start(self, pairwise: Mapping[tuple[int, int], Element]) -> int:
        """Align all networks to the one with the lowest objective; which one that is."""
        best: tuple[float, int, list[Element]] | None = None
        for i in range(len(self.models)):
            star = [self.symmetry.identity() if i == j else pairwise[i, j] for j in range(len(self.models))]
            self._place(star)
            if best is None or self.objective < best[0]:
                best = self.objective, i, star
        assert best is not None
        self._place(best[2])
        return best[1]

    def round(self, anchor: int) -> bool:
        """Align every network but the anchor to the mean of all others; whether another round is worthwhile."""
        before = self.objective
        for i in range(len(self.models)):
            if i == anchor:
                continue
            rest = mean_network(m for k, m in enumerate(self.moved) if k != i)
            step = align(rest, self.moved[i], starts=1, **self.how)
            moved = [step.model if k == i else m for k, m in enumerate(self.moved)]
            objective = squared_spread(self.symmetry, moved, self.buffers)
            if objective < self.objective * (1 - LEAST):
                self.elements[i] = step.element @ self.elements[i]
                self.moved, self.objective = moved, objective
        return before - self.objective > LEAST_GAIN * before
