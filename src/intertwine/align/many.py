"""`align_many`: bring any number of networks into one common frame.

Every network i gets one element gᵢ into the frame, so the way from j to i is gᵢ⁻¹ gⱼ and ways around a circle close by
construction. Alignments of pairs, each found alone, do not close.

All networks are first aligned pair by pair. The one to which all others come nearest is the anchor, whose own basis is
the frame. Then each other network in turn is aligned to the mean of all the rest, and kept there only if the sum of
squared distances to the mean falls. Networks take their turns in an order that their weights alone decide, so the order
in which they are given makes no difference, down to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from intertwine.align.align import SOLVERS, align
from intertwine.align.state import counted_weights, squared_distance
from intertwine.canonical.equivalence import check_same_architecture
from intertwine.data.weights import mean_network
from intertwine.errors import InputError
from intertwine.lazy import data_frame
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

#: A step must lower the objective by more than this share of it: less is rounding.
LEAST = 1e-9
#: A round that lowers it by less than this share is the last.
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
        """What takes network j to network i, gᵢ⁻¹ gⱼ; `between(i, j) @ between(j, k)` is `between(i, k)`."""
        for number in (i, j):
            if not 0 <= number < len(self.elements):
                raise InputError(
                    f"There is no network {number}; {len(self.elements)} were aligned, counted from 0 to "
                    f"{len(self.elements) - 1}."
                )
        return self.elements[i].inverse() @ self.elements[j]

    def to_dict(self) -> dict[str, Any]:
        """All but the networks and the elements, as plain values."""
        names = ("anchor", "method", "before", "after")
        return {name: getattr(self, name) for name in names} | {
            "networks": len(self.models),
            "history": list(self.history),
        }

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
        rounds: the most times that every network is aligned to the mean of the others; fewer where nothing falls any
            more. Methods that look at data compare networks, not means of networks, so they take no rounds.

    Returns:
        A `CommonFrame`: `.models`, `.elements`, `.between(i, j)`, `.before`, `.after`, `.history`.

    Raises:
        MismatchError: the networks are of different architectures. InputError: fewer than two networks, or what `align`
        refuses.

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
        raise InputError(f"Two networks or more are needed to align them with each other; found {len(models)}.")
    if isinstance(data, Iterator):
        raise InputError("The data is read once per pair, but a generator can be read once. Pass a list or DataLoader.")
    found = common_symmetry(models, symmetry, example_args, example_kwargs)
    order = sorted(range(len(models)), key=lambda i: _content(models[i]))
    given = [models[i] for i in order]
    how = {"method": method, "seed": seed, "wires": wires, "buffers": buffers, "sweeps": sweeps, "symmetry": found}
    ways = _pairwise(given, how | {"starts": starts, "data": data, "options": options})
    search = _Search(found, given, how | {"options": options}, buffers)
    anchor = search.start(ways)
    history = [search.objective]
    if not SOLVERS[method].needs_data:
        going = True
        while going and len(history) <= rounds:
            going = search.round(anchor)
            history.append(search.objective)
    back = [order.index(i) for i in range(len(models))]
    return CommonFrame(
        tuple(search.moved[k] for k in back), tuple(search.elements[k] for k in back), order[anchor], method,
        search.before, search.objective, tuple(history), found,
    )  # fmt: skip


def check_list(models: Iterable[nn.Module], function: str) -> list[nn.Module]:
    """The networks as a list. One network is refused there: a Sequential would pass for the list of its layers."""
    if isinstance(models, nn.Module):
        raise InputError(
            f"A list of networks was expected, and one {type(models).__name__} was given. Put them into a list: "
            f"{function}([a, b], x)."
        )
    return list(models)


def spread(symmetry: Symmetry, models: Sequence[nn.Module], buffers: bool = False) -> float:
    """Σᵢ ‖θᵢ − mean‖² over the tensors that wires act on."""
    weights = [counted_weights(symmetry, m, weights_of(symmetry, m), buffers) for m in models]
    total = 0.0
    for name, x in weights[0].items():
        stacked = torch.stack([w[name].to(x.device, torch.float64) for w in weights])
        if not bool((stacked == stacked[0]).all()):  # equal ones would differ from their mean by a rounding
            total += squared_distance(stacked, stacked.mean(0, keepdim=True))
    return total


def common_symmetry(
    models: Sequence[nn.Module], symmetry: Symmetry | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Symmetry:
    """The symmetry of all models; they must be of one architecture."""
    if symmetry is not None:
        return symmetry
    found = find_symmetry(models[0], *args, **kwargs)
    for other in models[1:]:
        check_same_architecture(found, models[0], other, find_symmetry(other, *args, **kwargs))
    return found


def _content(model: nn.Module) -> str:
    """A hash of all weights, to put models in an order that does not depend on how they are given."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _pairwise(models: Sequence[nn.Module], how: Mapping[str, Any]) -> dict[tuple[int, int], Element]:
    """(i, j) → the element that takes model j to model i, each pair found alone.

    Permutations, signs and rotations keep distances, so the way back is the inverse. Where scales or other matrices may
    move, distances change, and both ways are searched.
    """
    known, symmetry = SOLVERS.get(how["method"]), how["symmetry"]
    moves = known.moves if known is not None else frozenset()  # align refuses an unknown method
    stretches = any(
        (s.scales and "scale" in moves) or (s.matrix == "GL" and "matrix" in moves) for s in symmetry.wire_specs
    )
    ways: dict[tuple[int, int], Element] = {}
    for i in range(len(models)):
        for j in range(len(models)):
            if i == j:
                continue
            if i > j and not stretches:
                ways[i, j] = ways[j, i].inverse()
            else:
                ways[i, j] = align(models[i], models[j], **how).element
    return ways


class _Search:
    """The networks on their way into a frame, with the objective at hand."""

    def __init__(self, symmetry: Symmetry, models: Sequence[nn.Module], how: Mapping[str, Any], buffers: bool) -> None:
        self.symmetry, self.models, self.how, self.buffers = symmetry, models, how, buffers
        self._place([symmetry.identity()] * len(models))
        self.before = self.objective

    def _place(self, elements: list[Element]) -> None:
        self.elements = elements
        self.moved = [self.symmetry.act(g, m) for g, m in zip(elements, self.models, strict=True)]
        self.objective = spread(self.symmetry, self.moved, self.buffers)

    def start(self, ways: Mapping[tuple[int, int], Element]) -> int:
        """Align all networks to the one for which that leaves least; which one that is."""
        best: tuple[float, int, list[Element]] | None = None
        for i in range(len(self.models)):
            star = [self.symmetry.identity() if i == j else ways[i, j] for j in range(len(self.models))]
            self._place(star)
            if best is None or self.objective < best[0]:
                best = self.objective, i, star
        assert best is not None
        self._place(best[2])
        return best[1]

    def round(self, anchor: int) -> bool:
        """Align every network but the anchor to the mean of all others; whether that was worth another round."""
        before = self.objective
        for i in range(len(self.models)):
            if i != anchor:
                self._improve(i)
        return before - self.objective > LEAST_GAIN * before

    def _improve(self, i: int) -> None:
        rest = mean_network(m for k, m in enumerate(self.moved) if k != i)
        step = align(rest, self.moved[i], starts=1, **self.how)
        moved = [step.model if k == i else m for k, m in enumerate(self.moved)]
        objective = spread(self.symmetry, moved, self.buffers)
        if objective < self.objective * (1 - LEAST):
            self.elements[i] = step.element @ self.elements[i]
            self.moved, self.objective = moved, objective
