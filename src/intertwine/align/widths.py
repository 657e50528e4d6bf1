"""`align_widths`: a network expressed in the width of another one of the same family, by optimal transport of units.

For every wire, a plan T says how much of unit j of b goes to unit i of a; every unit of a weighs 1/n, every one of b
1/m. Unit i then has the mean of the incoming weights of its units, Σⱼ n·Tᵢⱼ Bⱼ, and their outgoing weights come
together, Σⱼ m·Tᵢⱼ Bⱼ. Units that were split into equal copies are joined exactly, and units to be copied share what
they send out.

The plans are found one wire after the other, all else held still: each is the exact optimum of ⟨A, moved B⟩, which
never falls, and until none of them gains. Between equal widths this is weight matching.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.align.plans import Plans, Reads, Transport, along, check_family, reading_axes
from intertwine.canonical.blocks import weights_of
from intertwine.graph.capture import empty_caches, tied_names
from intertwine.graph.copies import copied
from intertwine.symmetry.layout import Leaf, Plus, Times, Tree
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry


@dataclass(frozen=True, eq=False)
class WidthAlignment:
    """Network b in the width of network a.

    Attributes:
        model: a network of a's architecture. plans: by wire, how much of every unit of b goes to every unit of a; the
            rows sum to 1/width of a, the columns to 1/width of b.
        history: ⟨A, moved B⟩ after every sweep of the start that was kept; higher is nearer.
    """

    model: nn.Module = field(repr=False)
    plans: Mapping[str, Tensor] = field(repr=False)
    history: tuple[float, ...]

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """Wire → (units of a, units of b)."""
        return {name: (plan.shape[0], plan.shape[1]) for name, plan in self.plans.items()}

    def to_dict(self) -> dict[str, Any]:
        """All but the network, as plain values."""
        return {"plans": {n: p.tolist() for n, p in self.plans.items()}, "history": list(self.history)}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {b} → {a}" for name, (a, b) in self.widths.items())
        return f"WidthAlignment({sizes}; {len(self.history)} sweeps, inner product {self.history[-1]:.4g})"


def align_widths(
    a: nn.Module, b: nn.Module, *example_args: Any, sweeps: int = 50, **example_kwargs: Any
) -> WidthAlignment:
    """Express network b in the widths of network a: a real network of a's architecture, as near to a as plans allow.

    The function is kept exactly where b is a network of a's width with units split or copied. Otherwise units are mixed
    and the function changes; where b is wider, that costs as much as b has units unlike each other.

    Args:
        a, b: networks of one family: the same layers, with other numbers of units. Neither is changed.
        *example_args, **example_kwargs: inputs that both can be called with. sweeps: the most visits to every wire.

    Returns:
        A `WidthAlignment`: `.model`, `.plans`, `.history`.

    Raises:
        MismatchError: the networks differ in more than widths. InputError: wires that are no plain units, such as heads
        of attention, groups of channels, or units that no layer reads.

    Example:
        >>> import torch
        >>> from intertwine.align.widths import align_widths
        >>> a, b = (torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.ReLU(), torch.nn.Linear(n, 2)) for n in (8, 16))
        >>> align_widths(a, b, torch.zeros(1, 3)).widths
        {'0': (8, 16)}
    """
    symmetries = tuple(find_symmetry(m, *example_args, **example_kwargs) for m in (a, b))
    check_family(*symmetries)
    reads = reading_axes(symmetries[0], a)
    problem = Transport(symmetries, (weights_of(symmetries[0], a), weights_of(symmetries[1], b)), reads)
    best: tuple[Plans, list[float]] | None = None
    for order in (range(problem.count), reversed(range(problem.count))):
        found = problem.solve(list(order), sweeps)
        if best is None or found[1][-1] > best[1][-1]:
            best = found
    assert best is not None
    plans, history = best
    names = [w.name for w in symmetries[0].wires]
    model = _built(symmetries, a, b, plans, reads)
    return WidthAlignment(model, {names[s]: plan for s, plan in sorted(plans.items())}, tuple(history))


# -- building the network ----------------------------------------------------------------------------------------------


def _built(symmetries: tuple[Symmetry, ...], a: nn.Module, b: nn.Module, plans: Plans, reads: Reads) -> nn.Module:
    model = copied(a)
    tied = tied_names(a)
    given = {tied[n]: t.detach() for n, t in _tensors(b) if n in tied}
    with torch.no_grad():
        for name, tensor in _tensors(model):
            if tied[name] != name:
                continue
            layout = symmetries[1].layouts.get(name)
            x = given[name]
            if layout is not None and x.is_floating_point():
                mixed = x.double()
                for axis, tree in enumerate(layout.axes):
                    mixed = _mix(mixed, axis, tree, plans, reads.get(name) == axis)
                x = mixed
            tensor.copy_(x)
    empty_caches(model)
    return model


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _mix(x: Tensor, axis: int, tree: Tree, plans: Plans, reads: bool) -> Tensor:
    """One axis of a tensor of b in the width of a. The sums of variances need no eps: means keep it."""
    match tree:
        case Leaf():
            plan = plans[tree.strand]
            return along(x, axis, plan * (plan.shape[1] if reads else plan.shape[0]))
        case Times():
            inner = x.unflatten(axis, [part.size for part in tree.parts])
            for k, part in enumerate(tree.parts):
                inner = _mix(inner, axis + k, part, plans, reads)
            return inner.flatten(axis, axis + len(tree.parts) - 1)
        case Plus():
            blocks = x.split([part.size for part in tree.parts], axis)
            return torch.cat([_mix(y, axis, p, plans, reads) for y, p in zip(blocks, tree.parts, strict=True)], axis)
    return x
