"""Finds the wires of a network that can be folded, the merge rule of each, and the reasons why others are skipped.

Rule "sum" adds the rows of merged features and averages their outgoing columns. It is exact where the activation is
positively homogeneous, which the symmetry shows: some scale of the wire enters all rows with power 1 and all columns
with power −1. Rule "mean" averages rows and all numbers per feature, and adds outgoing columns; it is exact for any
activation. Numbers per feature that no scale enters (PReLU, depthwise kernels) are averaged under both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from intertwine.data.layers import evaluating
from intertwine.errors import InputError
from intertwine.fold.cutting import TOLERANCE, Example, outputs_in_float64, with_weights
from intertwine.fold.options import check_wire
from intertwine.fold.roles import BatchNormTensors, Roles, WorkingTensor, WorkingTensors, roles_of, working_tensors
from intertwine.graph.model import copy_module, tied_names
from intertwine.graph.runner import generic_copy
from intertwine.symmetry.blocks import WeightBlock, cut_block, weights_of
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.geometry import Dim, Layout, WireAxis
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

#: Merge rule → its description.
RULES = {
    "sum": "rows summed, columns averaged",
    "mean": "rows averaged, columns summed",
    "absorbed": "features expressed by those left",
}
CROSSTALK = (
    "something besides the layers that read its features looks at them together (a norm over channels, a mean, a "
    "softmax), so their number matters"
)
Widths = float | Mapping[str, int]  # the share of its features that every wire keeps, or wire → number of features


@dataclass(frozen=True)
class FoldBlock:
    """A block of a working tensor: a view of it, whose dimensions belong to one wire each or to none."""

    source: WeightBlock
    roles: tuple[str | None, ...]  # of its dimensions
    counted: str | None  # as in `WorkingTensor`

    @property
    def data(self) -> Tensor:
        return self.source.data

    @property
    def parameter(self) -> str:
        return self.source.parameter

    @property
    def dims(self) -> tuple[Dim, ...]:
        return self.source.dims

    def axis(self, dim: int) -> WireAxis:
        """The wire axis of a dimension."""
        return self.source.wire_axis(dim)


@dataclass(frozen=True)
class FoldSlot:
    """One dimension of a block, seen from its wire. `added`: slices of merged features are added, else averaged."""

    block: FoldBlock
    dim: int
    role: str
    added: bool


@dataclass(frozen=True)
class FoldableWire:
    """A wire whose features can be merged exactly where they are the same; `index` is its index in the symmetry."""

    name: str
    index: int
    size: int
    rule: str  # "sum" or "mean"
    slots: tuple[FoldSlot, ...]


@dataclass(frozen=True)
class Skipped:
    """A wire or layer that is not folded, and why. Unpacks as `what, reason`."""

    what: str
    reason: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.what, self.reason))

    def to_dict(self) -> dict[str, str]:
        return {"what": self.what, "reason": self.reason}


@dataclass(frozen=True)
class PreparedModel:
    """A network ready to be folded. Merging writes into `working`, so each of these is good for one folding."""

    model: nn.Module
    example: Example
    symmetry: Symmetry
    working: WorkingTensors
    norms: tuple[BatchNormTensors, ...]
    wires: tuple[FoldableWire, ...]
    skipped: tuple[Skipped, ...]

    def widened(self, kept: Mapping[int, list[int]]) -> nn.Module:
        """The merged network at full width."""
        merged = {w.index for w in self.wires if len(kept[w.index]) < w.size}
        layouts = self.symmetry.layouts
        new = {
            name: tensor
            for name, tensor in self.working.weights().items()
            if not merged.isdisjoint(layouts[name].wires)
        }
        return with_weights(self.model, new) if new else copy_module(self.model)


def prepare(model: nn.Module, example: Example, norm: str = "fold") -> PreparedModel:
    """Find which wires of a network can be folded, by which rule, and why the others cannot."""
    args, kwargs = example
    with evaluating(model):
        symmetry = find_symmetry(model, *args, **kwargs)
    roles = roles_of(symmetry.geometry.graph.program)
    moved = {name for name, layout in symmetry.layouts.items() if layout.moves}
    weights = {n: t for n, t in weights_of(symmetry, model).items() if n in moved and torch.is_floating_point(t)}
    working = working_tensors(symmetry.layouts, roles, weights, norm)
    wires, skipped = foldable_wires(symmetry, roles, blocks_of(working.tensors))
    wires, crosstalk = without_crosstalk(symmetry, roles, wires, model, example)
    return PreparedModel(model, example, symmetry, working, roles.norms, tuple(wires), (*crosstalk, *skipped))


def blocks_of(tensors: Iterable[WorkingTensor]) -> list[FoldBlock]:
    """Cut the working tensors into views along wires."""
    return [
        FoldBlock(block, tuple(tensor.roles[d.axis] for d in block.dims), tensor.counted)
        for tensor in tensors
        for block in cut_block(tensor.name, tensor.data, Layout(tensor.axes), 0.0)
    ]


def foldable_wires(
    symmetry: Symmetry, roles: Roles, blocks: Sequence[FoldBlock]
) -> tuple[list[FoldableWire], list[Skipped]]:
    """The wires that can be folded, and the others with the reason."""
    found, skipped = [], []
    bases = {base for spec in symmetry.wire_specs for base in spec.bases}
    for index, wire in enumerate(symmetry.wires):
        unclear = [roles.unclear[s.parameter] for s in wire.slots if s.parameter in roles.unclear]
        if symmetry.wire_specs[index].bases or index in bases:
            reason = "its features are heads or groups, or lie inside them, and merging two of them is not exact"
        elif not symmetry.wire_specs[index].permutes:
            reason = f"its features cannot change places: {wire.pinned or 'only scales or signs act on it'}"
        elif wire.size == 1:
            reason = "it has one feature"
        else:
            reason = unclear[0] if unclear else _foldable(wire.name, index, wire.size, blocks)
        if isinstance(reason, FoldableWire):
            found.append(reason)
        else:
            skipped.append(Skipped(wire.name, reason))
    for frozen in symmetry.frozen:
        name = frozen.parameter
        if roles.axes.get((name, frozen.axis)) == "write" and len(symmetry.layouts[name].axes) > 1:
            skipped.append(Skipped(name, frozen.reason))
    return found, list(dict.fromkeys(skipped))  # an axis with several frozen blocks is listed once


def _foldable(name: str, index: int, size: int, blocks: Sequence[FoldBlock]) -> FoldableWire | str:
    """The wire with its rule, or why it cannot be folded."""
    found: list[tuple[FoldBlock, int, str, tuple[Fraction, ...]]] = []
    for block in blocks:
        for dim in block.source.places(index):
            role = block.roles[dim]
            if role is None:
                return f"it is not known what {block.parameter} does with its features"
            found.append((block, dim, role, block.axis(dim).powers))
    for role, what in (("write", "writes"), ("read", "reads")):
        if not any(r == role for _, _, r, _ in found):
            return f"no layer {what} its features"
    exact = {"write": (1,), "read": (-1,), "each": (0, 1)}  # the powers of a scale under which rule "sum" is exact
    scales = range(len(found[0][3]))
    scale = next((k for k in scales if all(powers[k] in exact[role] for _, _, role, powers in found)), None)
    slots = tuple(
        FoldSlot(block, dim, role, role == "read" if scale is None else powers[scale] == 1)
        for block, dim, role, powers in found
    )
    return FoldableWire(name, index, size, "mean" if scale is None else "sum", slots)


# -- Widths ------------------------------------------------------------------------------------------------------------


def check_share(widths: Widths) -> None:
    """Refuse a share out of range, before any work."""
    if not isinstance(widths, Mapping) and not 0 < widths < 1:
        raise InputError(
            f"widths must be above 0 and below 1, the share of its features that every wire keeps, but is {widths}. "
            "Or pass a mapping of wires to whole numbers of features."
        )


def wanted_widths(widths: Widths, wires: Sequence[FoldableWire]) -> dict[str, int]:
    """Wire → the number of features to keep; at least one. A mapping leaves out the wires it does not name.

    Raises:
        InputError: a share outside (0, 1), a wire that cannot be folded, or more features than a wire has.
    """
    check_share(widths)
    sizes = {wire.name: wire.size for wire in wires}
    if not isinstance(widths, Mapping):
        return {name: max(1, round(widths * size)) for name, size in sizes.items()}
    for name, width in widths.items():
        check_wire("width", name, sizes)
        if not 1 <= width <= sizes[name]:
            raise InputError(f"The width of the wire {name!r} must be from 1 to {sizes[name]}, but is {width}.")
    return dict(widths)


# -- Crosstalk ---------------------------------------------------------------------------------------------------------


def without_crosstalk(
    symmetry: Symmetry, roles: Roles, wires: Sequence[FoldableWire], model: nn.Module, example: Example
) -> tuple[list[FoldableWire], list[Skipped]]:
    """The wires whose features act only through the layers that read them, and the others with the reason.

    Features with zero outgoing columns must not matter. Their rows are changed at random in double precision; where the
    outputs change, an op looks at the features together (a norm over channels, a softmax, a mean).
    """
    probe = _CrosstalkProbe(symmetry, roles, model, example)
    if not wires or probe.passes(wires):
        return list(wires), []
    passed = [wire for wire in wires if probe.passes([wire])]
    names = {wire.name for wire in passed}
    return passed, [Skipped(wire.name, CROSSTALK) for wire in wires if wire.name not in names]


class _CrosstalkProbe:
    def __init__(self, symmetry: Symmetry, roles: Roles, model: nn.Module, example: Example) -> None:
        self.symmetry, self.roles, self.example = symmetry, roles, example
        self.model = generic_copy(model, 0)
        tied = tied_names(self.model)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        self.tensors = {tied[name]: tensor.detach() for name, tensor in named if tied[name] in symmetry.layouts}
        self.saved = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def passes(self, wires: Sequence[FoldableWire]) -> bool:
        """Whether features of these wires that no layer reads have no effect on the outputs."""
        unread = {wire.index: torch.arange(wire.size)[:: max(2, wire.size // 4)] for wire in wires}
        generator = torch.Generator().manual_seed(0)
        self._change(unread, generator, read=True)
        before = outputs_in_float64(self.model, self.example)
        self._change(unread, generator, read=False)
        after = outputs_in_float64(self.model, self.example)
        for name, tensor in self.tensors.items():
            tensor.copy_(self.saved[name])
        return all(
            relative_error(a, b) <= TOLERANCE for a, b in zip(before, after, strict=True) if a.is_floating_point()
        )

    def _change(self, unread: dict[int, Tensor], generator: torch.Generator, read: bool) -> None:
        """Set columns of unread features to zero (read), or change their rows by a factor and, if signed, a term."""
        for name, tensor in self.tensors.items():
            for block in cut_block(name, tensor, self.symmetry.layouts[name], 0.0):
                for wire, index in unread.items():
                    for dim in block.places(wire):
                        role = self.roles.axes.get((name, block.dims[dim].axis))
                        slices = block.data.movedim(dim, 0)
                        if (role == "read") != read:
                            continue
                        if read:
                            slices[index] = 0.0
                            continue
                        noise = torch.randn(slices[index].shape, generator=generator, dtype=torch.float64)
                        noise = noise.to(slices.device)
                        term = 0.0 if name.endswith("running_var") else noise
                        slices[index] = slices[index] * noise.exp() + term
