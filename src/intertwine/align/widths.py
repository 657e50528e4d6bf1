"""`align_widths`: express a network in the widths of another network of the same family, by optimal transport between
units.

For every wire, a plan T says how much of unit j of b goes to unit i of a; every unit of a weighs 1/n, every one of b
1/m. Unit i then has the mean of the incoming weights of its units, Σⱼ n·Tᵢⱼ Bⱼ, and the sum of their outgoing weights,
Σⱼ m·Tᵢⱼ Bⱼ. Units that were split into equal copies are joined exactly, and units to be copied share their outgoing
weights. Plans are found one wire after the other, all others fixed: each is the exact optimum of ⟨A, moved B⟩, which
never falls. Between equal widths this is weight matching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from intertwine.argument_types import Float
from intertwine.errors import InputError, MismatchError
from intertwine.graph.model import copy_module, empty_caches, tied_names
from intertwine.measure.procrustes import transport
from intertwine.symmetry.blocks import WeightBlock, block_weights, weights_of
from intertwine.symmetry.geometry import FixedAxis, Layout, LayoutAxis, ProductAxis, SumAxis, WireAxis
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

Plans = dict[int, Tensor]  # wire → how much of every unit of b goes to every unit of a
Reads = dict[str, int | None]  # tensor → the axis that takes units in, if it has one
#: A plan must raise ⟨A, moved B⟩ by more than this share of it: less is rounding.
LEAST = 1e-9


def check_same_but_widths(a: Symmetry, b: Symmetry) -> None:
    """Raise an error for networks that differ in more than sizes of wires, and for wires that are not plain units."""
    calls = [[call.op for call in s.geometry.graph.program.calls] for s in (a, b)]
    names = [[w.name for w in s.wires] for s in (a, b)]
    alike = calls[0] == calls[1] and names[0] == names[1] and a.layouts.keys() == b.layouts.keys()
    for name in a.layouts if alike else ():
        if not _same_structure(a.layouts[name].axes, b.layouts[name].axes):
            raise MismatchError(
                f"{name!r} has shape {a.layouts[name].shape} in the first network and {b.layouts[name].shape} in the "
                "second: they differ along an axis that is not a wire (inputs, outputs, kernel sizes). Only numbers of "
                "hidden units may differ."
            )
    if not alike:
        raise MismatchError(
            "The two networks differ in more than their widths: their layers or wires are different. Compare "
            "intertwine.symmetry(a, …).wires with intertwine.symmetry(b, …).wires."
        )
    for s, wire in zip(a.wire_specs, a.wires, strict=False):
        if s.bases or not s.permutes:
            why = "is nested in another one" if s.bases else "cannot be permuted"
            raise InputError(
                f"The wire {wire.name!r} {why}, so its units cannot be mixed. align_widths needs networks of plain "
                "units: no attention heads, no groups of channels."
            )
    if not a.wires:
        raise InputError("There is nothing to align: no wire acts on these networks.")


def _same_structure(a: Sequence[LayoutAxis], b: Sequence[LayoutAxis]) -> bool:
    """Whether axes have the same structure, up to the sizes of wires."""

    def same(x: LayoutAxis, y: LayoutAxis) -> bool:
        match x, y:
            case WireAxis(), WireAxis():
                return x.wire == y.wire
            case FixedAxis(), FixedAxis():
                return x.size == y.size
            case (ProductAxis(), ProductAxis()) | (SumAxis(), SumAxis()):
                return _same_structure(x.parts, y.parts)
        return False

    return len(a) == len(b) and all(map(same, a, b))


def reading_axes(symmetry: Symmetry, model: nn.Module) -> Reads:
    """For every tensor on which wires act: the axis along which a layer sums over units, None for per-unit numbers."""
    found: Reads = {}
    tied = tied_names(model)
    for path, module in model.named_modules():
        for key in [*module._parameters, *module._buffers]:
            name = tied.get(f"{path}.{key}" if path else key)
            if name is None or name in found or not symmetry.layouts.get(name, Layout(())).moves:
                continue
            found[name] = _reading_axis(module, key, name)
    for wire in symmetry.wires:
        if not any(found.get(slot.parameter) == slot.axis for slot in wire.slots):
            raise InputError(
                f"No layer reads the units of the wire {wire.name!r}, so their number matters to the function. "
                "align_widths needs units that linear or convolution layers read."
            )
    return found


def _reading_axis(module: nn.Module, key: str, name: str) -> int | None:
    if isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and module.groups == 1):
        transposed = isinstance(module, _ConvNd) and module.transposed
        return None if key != "weight" else 0 if transposed else 1
    if isinstance(module, (_BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.PReLU)):
        return None
    raise InputError(
        f"{name!r} belongs to a {type(module).__name__}, whose input axis is not known. align_widths supports linear "
        "and convolution layers (without groups), batch, layer and RMS norms, embeddings and PReLU."
    )


class WidthTransport:
    """Two networks cut into blocks; plans raise the inner product of the first with the moved second."""

    def __init__(
        self, symmetries: tuple[Symmetry, ...], weights: tuple[Mapping[str, Tensor], ...], reads: Reads
    ) -> None:
        cuts = []
        for symmetry, tensors in zip(symmetries, weights, strict=True):
            # the objective ignores batch statistics, as in `align`
            names = [n for n in tensors if n in reads and not n.endswith(("running_mean", "running_var"))]
            cuts.append(block_weights(symmetry, {n: tensors[n].double().cpu() for n in names}).blocks)
        self.blocks: list[tuple[WeightBlock, WeightBlock]] = list(zip(*cuts, strict=True))
        self.reads = reads
        self.count = len(symmetries[0].wires)

    def solve(self, order: Sequence[int], sweeps: int) -> tuple[Plans, list[float]]:
        """Plans from a start that adds one wire after the other, then sweeps until none gains."""
        plans: Plans = {}
        for w in order:
            plans[w] = transport(self._gain(w, plans))
        history = [self._value(plans)]
        for _ in range(sweeps):
            for w in order:
                candidate = plans | {w: transport(self._gain(w, plans))}
                if self._value(candidate) > self._value(plans) + LEAST * abs(history[0]):
                    plans = candidate
            history.append(self._value(plans))
            if history[-1] == history[-2]:
                break
        return plans, history

    def _gain(self, w: int, plans: Plans) -> Float[Tensor, "first second"]:
        """⟨unit i of a, unit j of b⟩ over slots of a wire; a block with a wire that has no plan yet is left out."""
        total: Tensor | None = None
        for first, second in self.blocks:
            for place in first.places(w):
                others = [d for d, dim in enumerate(first.dims) if isinstance(dim.tree, WireAxis) and d != place]
                if any(first.wire_axis(d).wire not in plans for d in others):
                    gain = torch.zeros(first.data.shape[place], second.data.shape[place], dtype=torch.float64)
                else:
                    x, y = first.data.movedim(place, 0), self._moved(second, plans, others).movedim(place, 0)
                    # what a unit of b sends out counts as one of as many units as a has
                    factor = len(y) / len(x) if self._reads(second, place) else 1.0
                    gain = x.reshape(len(x), -1) @ (y * factor).reshape(len(y), -1).T
                total = gain if total is None else total + gain
        assert total is not None
        return total

    def _value(self, plans: Plans) -> float:
        total = 0.0
        for first, second in self.blocks:
            dims = [d for d, dim in enumerate(first.dims) if isinstance(dim.tree, WireAxis)]
            total += float((first.data * self._moved(second, plans, dims)).sum())
        return total

    def _moved(self, block: WeightBlock, plans: Plans, dims: Sequence[int]) -> Tensor:
        x = block.data
        for d in dims:
            x = mix_units(x, d, plans[block.wire_axis(d).wire], self._reads(block, d))
        return x

    def _reads(self, block: WeightBlock, d: int) -> bool:
        return self.reads[block.parameter] == block.dims[d].axis


def mix_units(x: Tensor, d: int, plan: Float[Tensor, "first second"], reads: bool) -> Tensor:
    """A tensor of b whose dimension d gets the units of a: means of units; sums along an axis that takes units in.

    >>> mix_units(torch.tensor([[1.0, 2.0]]), 1, torch.tensor([[0.5, 0.5]]), reads=True)
    tensor([[3.]])
    """
    matrix = plan * (plan.shape[1] if reads else plan.shape[0])
    return torch.tensordot(matrix.to(x.device, x.dtype), x, ([1], [d])).movedim(0, d)


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
    """Express network b in the widths of network a: a network of a's architecture, as near to a as plans allow.

    The function is kept exactly if b is a network of a's width with units split or copied. Otherwise units are mixed
    and the function changes; if b is wider, by as much as the units that are merged differ.

    Args:
        a, b: networks of one family: the same layers, with other numbers of units. Neither is changed.
        *example_args, **example_kwargs: inputs that both can be called with. sweeps: the most sweeps over all wires.

    Returns:
        A `WidthAlignment`: `.model`, `.plans`, `.history`.

    Raises:
        MismatchError: the networks differ in more than widths. InputError: wires that are not plain units, such as
        attention heads, groups of channels, or units that no layer reads.

    Example:
        >>> import torch
        >>> from intertwine.align.widths import align_widths
        >>> a, b = (torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.ReLU(), torch.nn.Linear(n, 2)) for n in (8, 16))
        >>> align_widths(a, b, torch.zeros(1, 3)).widths
        {'0': (8, 16)}
    """
    symmetries = tuple(find_symmetry(m, *example_args, **example_kwargs) for m in (a, b))
    check_same_but_widths(*symmetries)
    reads = reading_axes(symmetries[0], a)
    problem = WidthTransport(symmetries, (weights_of(symmetries[0], a), weights_of(symmetries[1], b)), reads)
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


def _built(symmetries: tuple[Symmetry, ...], a: nn.Module, b: nn.Module, plans: Plans, reads: Reads) -> nn.Module:
    """A copy of network a with the tensors of b, their units mixed by the plans."""
    model = copy_module(a)
    tied = tied_names(a)
    given = {tied[n]: t.detach() for n, t in [*b.named_parameters(), *b.named_buffers()] if n in tied}
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tied[name] != name:
                continue
            layout, x = symmetries[1].layouts.get(name), given[name]
            if layout is not None and x.is_floating_point():
                x = x.double()
                for axis, tree in enumerate(layout.axes):
                    x = _mix_axis(x, axis, tree, plans, reads.get(name) == axis)
            tensor.copy_(x)
    empty_caches(model)
    return model


def _mix_axis(x: Tensor, axis: int, tree: LayoutAxis, plans: Plans, reads: bool) -> Tensor:
    """One axis of a tensor of b in the width of a. Running variances need no eps: their means keep it."""
    match tree:
        case WireAxis():
            return mix_units(x, axis, plans[tree.wire], reads)
        case ProductAxis():
            inner = x.unflatten(axis, [part.size for part in tree.parts])
            for k, part in enumerate(tree.parts):
                inner = _mix_axis(inner, axis + k, part, plans, reads)
            return inner.flatten(axis, axis + len(tree.parts) - 1)
        case SumAxis():
            blocks = zip(x.split([part.size for part in tree.parts], axis), tree.parts, strict=True)
            return torch.cat([_mix_axis(y, axis, part, plans, reads) for y, part in blocks], axis)
    return x
