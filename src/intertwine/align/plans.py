"""Plans between the units of two networks of different widths: which networks have them, and how they are found.

The plans are found one wire after the other, all else held still. Each is the exact optimum of ⟨A, moved B⟩, which
never falls; it ends when none of them gains. Between equal widths this is weight matching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from intertwine.canonical.blocks import Block, pieces
from intertwine.errors import InputError, MismatchError
from intertwine.graph.capture import tied_names
from intertwine.measure.soft_matching import transport
from intertwine.shapes import Float
from intertwine.symmetry.layout import Layout, Leaf, Plus, Still, Times, Tree
from intertwine.symmetry.symmetry import Symmetry

Plans = dict[int, Tensor]  # strand → how much of every unit of b goes to every unit of a
Reads = dict[str, int | None]  # tensor → the axis that takes units in, if it has one
#: A plan must raise ⟨A, moved B⟩ by more than this share of it: less is rounding.
LEAST = 1e-9


# -- which networks ----------------------------------------------------------------------------------------------------


def check_family(a: Symmetry, b: Symmetry) -> None:
    """Refuse networks that differ in more than the sizes of wires, and wires that are no plain units."""
    calls = [[call.op for call in s._discovery.graph.program.calls] for s in (a, b)]
    names = [[w.name for w in s.wires] for s in (a, b)]
    alike = calls[0] == calls[1] and names[0] == names[1] and a.layouts.keys() == b.layouts.keys()
    for name in a.layouts if alike else ():
        if not _same_shape(a.layouts[name].axes, b.layouts[name].axes):
            raise MismatchError(
                f"{name!r} has shape {a.layouts[name].shape} in the first network and {b.layouts[name].shape} in the "
                "second: they differ along an axis that is no wire (inputs, outputs, kernel sizes). Only numbers of "
                "hidden units may differ."
            )
    if not alike:
        raise MismatchError(
            "The two networks differ in more than their widths: they do not have the same layers and wires. Compare "
            "intertwine.symmetry(a, …).wires with intertwine.symmetry(b, …).wires."
        )
    for s, wire in zip(a.strands, a.wires, strict=False):
        if s.bases or not s.permutes:
            why = "lies inside another one" if s.bases else "cannot be permuted"
            raise InputError(
                f"The wire {wire.name!r} {why}, so its units cannot be mixed. Widths are aligned where all wires are "
                "plain units: no attention heads, no groups of channels."
            )
    if not a.wires:
        raise InputError("There is nothing to align: no wire acts on these networks.")


def _same_shape(a: Sequence[Tree], b: Sequence[Tree]) -> bool:
    """Whether axes are made alike, but for the sizes of wires."""
    return len(a) == len(b) and all(_same_tree(x, y) for x, y in zip(a, b, strict=True))


def _same_tree(a: Tree, b: Tree) -> bool:
    match a, b:
        case Leaf(), Leaf():
            return a.strand == b.strand
        case Still(), Still():
            return a.size == b.size
        case (Times(), Times()) | (Plus(), Plus()):
            return _same_shape(a.parts, b.parts)
    return False


def reading_axes(symmetry: Symmetry, model: nn.Module) -> Reads:
    """For every tensor on which wires act: the axis along which a layer adds units up, None for per-unit numbers."""
    found: Reads = {}
    tied = tied_names(model)
    for path, module in model.named_modules():
        for key in [*module._parameters, *module._buffers]:
            name = tied.get(f"{path}.{key}" if path else key)
            if name is None or name in found or not any(True for _ in symmetry.layouts.get(name, Layout(())).leaves()):
                continue
            found[name] = _reading_axis(module, key, name)
    for wire in symmetry.wires:
        if not any(found.get(slot.parameter) == slot.axis for slot in wire.slots):
            raise InputError(
                f"No layer reads the units of the wire {wire.name!r}: they meet each other or are added up inside the "
                "network, where their number matters. Widths are aligned where linear or convolution layers read units."
            )
    return found


def _reading_axis(module: nn.Module, key: str, name: str) -> int | None:
    if isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and module.groups == 1):
        transposed = isinstance(module, _ConvNd) and module.transposed
        return None if key != "weight" else 0 if transposed else 1
    if isinstance(module, (_BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.PReLU)):
        return None
    raise InputError(
        f"{name!r} belongs to a {type(module).__name__}, and which of its axes takes units in is not known. Widths are "
        "aligned for linear and convolution layers (without groups), batch, layer and RMS norms, embeddings and PReLU."
    )


# -- finding plans -----------------------------------------------------------------------------------------------------


class Transport:
    """Two networks cut into blocks; plans raise the inner product of the first with the moved second."""

    def __init__(
        self,
        symmetries: tuple[Symmetry, ...],
        weights: tuple[Mapping[str, Tensor], ...],
        reads: Reads,
    ) -> None:
        cuts = []
        for symmetry, tensors in zip(symmetries, weights, strict=True):
            kept = {n: t.double().cpu() for n, t in tensors.items() if n in reads and _is_weight(n)}
            cuts.append(pieces(symmetry, kept).blocks)
        self.blocks: list[tuple[Block, Block]] = list(zip(*cuts, strict=True))
        self.reads = reads
        self.count = len(symmetries[0].wires)

    def solve(self, order: Sequence[int], sweeps: int) -> tuple[Plans, list[float]]:
        """Plans from a start that takes in one wire after the other, then sweeps until none gains."""
        plans: Plans = {}
        for s in order:
            gain = self._gain(s, plans)
            plans[s] = transport(gain)
        history = [self._value(plans)]
        for _ in range(sweeps):
            for s in order:
                candidate = plans | {s: transport(self._gain(s, plans))}
                if self._value(candidate) > self._value(plans) + LEAST * abs(history[0]):
                    plans = candidate
            history.append(self._value(plans))
            if history[-1] == history[-2]:
                break
        return plans, history

    def _gain(self, s: int, plans: Plans) -> Float[Tensor, "first second"]:
        """⟨unit i of a, unit j of b⟩ over places of a wire; a block with a wire that has no plan yet is left out."""
        total: Tensor | None = None
        for first, second in self.blocks:
            for place in first.places(s):
                others = [d for d, dim in enumerate(first.dims) if isinstance(dim.tree, Leaf) and d != place]
                if any(first.leaf(d).strand not in plans for d in others):
                    gain = torch.zeros(first.data.shape[place], second.data.shape[place], dtype=torch.float64)
                else:
                    x = self._moved(second, plans, others) * self._factor(second, first, place)
                    gain = _rows(first.data, place) @ _rows(x, place).T
                total = gain if total is None else total + gain
        assert total is not None
        return total

    def _value(self, plans: Plans) -> float:
        total = 0.0
        for first, second in self.blocks:
            dims = [d for d, dim in enumerate(first.dims) if isinstance(dim.tree, Leaf)]
            total += float((first.data * self._moved(second, plans, dims)).sum())
        return total

    def _moved(self, block: Block, plans: Plans, dims: Sequence[int]) -> Tensor:
        x = block.data
        for d in dims:
            plan = plans[block.leaf(d).strand]
            x = along(x, d, plan * (plan.shape[1] if self._reads(block, d) else plan.shape[0]))
        return x

    def _factor(self, second: Block, first: Block, d: int) -> float:
        """What a unit of b sends out, counted as one of as many units as a has."""
        return second.data.shape[d] / first.data.shape[d] if self._reads(second, d) else 1.0

    def _reads(self, block: Block, d: int) -> bool:
        return self.reads[block.parameter] == block.dims[d].axis


def _is_weight(name: str) -> bool:
    """Batch statistics have no part in the objective, as in `align`."""
    return not name.endswith(("running_mean", "running_var"))


def _rows(x: Tensor, d: int) -> Float[Tensor, "units entries"]:
    """One row per index of a dimension."""
    return x.movedim(d, 0).reshape(x.shape[d], -1)


def along(x: Tensor, d: int, matrix: Tensor) -> Tensor:
    """A tensor whose dimension d is multiplied by a matrix.

    >>> along(torch.tensor([[1.0, 2.0]]), 1, torch.tensor([[1.0, 1.0]]))
    tensor([[3.]])
    """
    return torch.tensordot(matrix.to(x.device, x.dtype), x, ([1], [d])).movedim(0, d)
