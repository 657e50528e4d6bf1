"""Finds the wires of a network that can be folded, the merge rule of each, and the reasons why others are skipped.

A perturbation test removes wires whose features interact through anything but the layers that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from intertwine.data.layers import evaluating
from intertwine.errors import InputError, did_you_mean
from intertwine.fold.cutting import TOLERANCE, Example, outputs_in_float64, with_weights
from intertwine.fold.roles import BatchNormTensors, Roles, WorkingTensor, WorkingTensors, roles_of, working_tensors
from intertwine.graph.model import copy_module, tied_names
from intertwine.graph.runner import generic_copy
from intertwine.symmetry.blocks import WeightBlock, cut_block, weights_of
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.geometry import Layout, WireAxis
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

# ----------------------------------------------------------------------------------------------------
# Sites: where the features of a wire sit in the working tensors, and by which rule the wire is merged.
#
# Rule "sum": rows are added and outgoing columns averaged. It is exact where the activation lets positive scales through,
# which the symmetry knows: some scale of the wire enters all rows with power 1 and all columns with power −1.
# Rule "mean": rows and all numbers per feature are averaged, outgoing columns added. It is exact for any activation.
# Numbers per feature that no scale enters (PReLU, depthwise kernels) are averaged under both.


@dataclass(frozen=True)
class FoldBlock:
    """A block of a working tensor: a view of it, whose dimensions belong to one wire each or to none."""

    block: WeightBlock
    roles: tuple[str | None, ...]  # of its dimensions
    counted: str | None

    @property
    def data(self) -> Tensor:
        return self.block.data


@dataclass(frozen=True)
class FoldSlot:
    """One dimension of one piece, seen from its wire. `added`: slices of merged features are added, else averaged."""

    piece: FoldBlock
    dim: int
    role: str
    added: bool


@dataclass(frozen=True)
class FoldableWire:
    """A wire whose features can be merged exactly where they are the same."""

    name: str
    strand: int
    size: int
    rule: str  # "sum" or "mean"
    sites: tuple[FoldSlot, ...]

    @property
    def rule_in_words(self) -> str:
        return RULES[self.rule]


RULES = {
    "sum": "rows summed, columns averaged",
    "mean": "rows averaged, columns summed",
    "absorbed": "features expressed by those left",
}


@dataclass(frozen=True)
class Skipped:
    """A wire or layer that is not folded, and why. Unpacks as `what, reason`."""

    what: str
    reason: str

    def __iter__(self):
        return iter((self.what, self.reason))


def blocks_of(tensors: Iterable[WorkingTensor]) -> list[FoldBlock]:
    """Cut the working tensors into views along wires."""
    found = []
    for tensor in tensors:
        for block in cut_block(tensor.name, tensor.data, Layout(tensor.axes), 0.0):
            found.append(FoldBlock(block, tuple(tensor.roles[d.axis] for d in block.dims), tensor.counted))
    return found


def foldable_wires(
    symmetry: Symmetry, roles: Roles, pieces: Sequence[FoldBlock]
) -> tuple[list[FoldableWire], list[Skipped]]:
    """The wires that can be folded, and the others with the reason."""
    found, skipped = [], []
    bases = {base for strand in symmetry.wire_specs for base in strand.bases}
    for index, wire in enumerate(symmetry.wires):
        reason = None
        if symmetry.wire_specs[index].bases or index in bases:
            reason = "its features are heads or groups, or lie inside them, and merging two of them is not exact"
        elif not symmetry.wire_specs[index].permutes:
            reason = f"its features cannot change places: {wire.pinned or 'only scales or signs act on it'}"
        elif wire.size == 1:
            reason = "it has one feature"
        else:
            unclear = [roles.unclear[s.parameter] for s in wire.slots if s.parameter in roles.unclear]
            reason = unclear[0] if unclear else None
        wanted = reason or _foldable(wire.name, index, wire.size, pieces)
        if isinstance(wanted, FoldableWire):
            found.append(wanted)
        else:
            skipped.append(Skipped(wire.name, wanted))
    for frozen in symmetry.frozen:
        name = frozen.parameter
        if roles.axes.get((name, frozen.axis)) == "write" and len(symmetry.layouts[name].axes) > 1:
            skipped.append(Skipped(name, frozen.reason))  # once, however many blocks of the axis are frozen
    return found, list(dict.fromkeys(skipped))


def _foldable(name: str, strand: int, size: int, pieces: Sequence[FoldBlock]) -> FoldableWire | str:
    """The wire with its rule, or why it cannot be folded."""
    met: list[tuple[FoldBlock, int, str, WireAxis]] = []
    for piece in pieces:
        for dim in piece.block.places(strand):
            role = piece.roles[dim]
            if role is None:
                return f"it is not known what {piece.block.parameter} does with its features"
            met.append((piece, dim, role, piece.block.wire_axis(dim)))
    for role, what in (("write", "writes"), ("read", "reads")):
        if not any(r == role for _, _, r, _ in met):
            return f"no layer {what} its features"
    scales = len(met[0][3].powers)
    added = next((k for k in range(scales) if all(_passes(r, leaf, k) for _, _, r, leaf in met)), None)
    sites = tuple(
        FoldSlot(piece, dim, role, role == "read" if added is None else leaf.powers[added] == 1)
        for piece, dim, role, leaf in met
    )
    return FoldableWire(name, strand, size, "mean" if added is None else "sum", sites)


def _passes(role: str, leaf: WireAxis, k: int) -> bool:
    """Whether a scale enters a site as rows added and columns averaged ask for."""
    return leaf.powers[k] in {"write": (1,), "read": (-1,), "each": (0, 1)}[role]


# ----------------------------------------------------------------------------------------------------
# Widths: how many features every wire is to keep, asked for as one share or wire by wire.


Widths = float | Mapping[str, int]


def check_share(widths: Widths) -> None:
    """Refuse a share that is none; it needs no network, so it is said before any work."""
    if not isinstance(widths, Mapping) and not 0 < widths < 1:
        raise InputError(
            f"widths={widths} was asked for. It is the share of the features that every wire keeps, above 0 and below "
            "1, or a mapping of wires to whole numbers of features."
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
        if name not in sizes:
            raise InputError(
                f"A width was given for {name!r}, which is no wire that can be folded. {did_you_mean(name, sizes)}"
                f"Those are {', '.join(list(sizes)[:8]) or 'none'}{' …' if len(sizes) > 8 else ''}."
            )
        if not 1 <= width <= sizes[name]:
            raise InputError(
                f"The wire {name!r} was to keep {width} features; it has {sizes[name]}, and one must stay. Ask for a "
                f"number from 1 to {sizes[name]}."
            )
    return dict(widths)


# ----------------------------------------------------------------------------------------------------
# Crosstalk: proof by measurement that a feature acts through the layers that read it, and in no other way.
#
# Features whose outgoing columns are zero must not matter at all. Their rows are changed at random, in double precision;
# if the outputs change, something else looks at the features together (a norm over channels, a softmax, a mean), and the
# wire is not folded: there the number of features matters.


CROSSTALK = (
    "something besides the layers that read its features looks at them together (a norm over channels, a mean, a "
    "softmax), so their number matters"
)


def without_crosstalk(
    symmetry: Symmetry, roles: Roles, wires: Sequence[FoldableWire], model: nn.Module, example: Example
) -> tuple[list[FoldableWire], list[Skipped]]:
    """Those of some wires that pass, and the others with the reason."""
    probe = _Probe(symmetry, roles, model, example)
    if not wires or probe.quiet(wires):
        return list(wires), []
    passed = [wire for wire in wires if probe.quiet([wire])]
    names = {wire.name for wire in passed}
    return passed, [Skipped(wire.name, CROSSTALK) for wire in wires if wire.name not in names]


class _Probe:
    def __init__(self, symmetry: Symmetry, roles: Roles, model: nn.Module, example: Example) -> None:
        self.symmetry, self.roles, self.example = symmetry, roles, example
        self.model = generic_copy(model, 0)
        tied = tied_names(self.model)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        self.own = {tied[name]: tensor.detach() for name, tensor in named if tied[name] in symmetry.layouts}
        self.saved = {name: tensor.clone() for name, tensor in self.own.items()}

    def quiet(self, wires: Sequence[FoldableWire]) -> bool:
        """Whether unread features of these wires leave the outputs alone."""
        unread = {wire.strand: torch.arange(wire.size)[:: max(2, wire.size // 4)] for wire in wires}
        generator = torch.Generator().manual_seed(0)
        self._change(unread, generator, read=True)
        before = outputs_in_float64(self.model, self.example)
        self._change(unread, generator, read=False)
        after = outputs_in_float64(self.model, self.example)
        for name, tensor in self.own.items():
            tensor.copy_(self.saved[name])
        return all(
            relative_error(a, b) <= TOLERANCE for a, b in zip(before, after, strict=True) if a.is_floating_point()
        )

    def _change(self, unread: dict[int, Tensor], generator: torch.Generator, read: bool) -> None:
        """Set columns of unread features to zero (read), or change their rows by a factor and, if signed, a term."""
        for name, tensor in self.own.items():
            for block in cut_block(name, tensor, self.symmetry.layouts[name], 0.0):
                for strand, index in unread.items():
                    for dim in block.places(strand):
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


__all__ = ["Example", "outputs_in_float64", "without_crosstalk"]


# ----------------------------------------------------------------------------------------------------
# Prepared: everything about a network that folding needs, found once: symmetry, working tensors, wires and rules.


@dataclass(frozen=True)
class PreparedModel:
    """A network ready to be folded. Merging writes into `bench`, so one of these is good for one folding."""

    model: nn.Module
    example: Example
    symmetry: Symmetry
    bench: WorkingTensors
    norms: tuple[BatchNormTensors, ...]
    wires: tuple[FoldableWire, ...]
    skipped: tuple[Skipped, ...]

    def widened(self, kept: Mapping[int, list[int]]) -> nn.Module:
        """The merged network at full width."""
        merged = {w.strand for w in self.wires if len(kept[w.strand]) < w.size}
        new = {name: tensor for name, tensor in self.bench.weights().items() if self._touches(name, merged)}
        return with_weights(self.model, new) if new else copy_module(self.model)

    def _touches(self, name: str, strands: set[int]) -> bool:
        return not strands.isdisjoint(self.symmetry.layouts[name].wires)


def prepare(model: nn.Module, example: Example, norm: str = "fold") -> PreparedModel:
    """Read a network: which wires can be folded, by which rule, and why the others cannot."""
    args, kwargs = example
    with evaluating(model):
        symmetry = find_symmetry(model, *args, **kwargs)
    roles = roles_of(symmetry.geometry.graph.program)
    bench = working_tensors(symmetry.layouts, roles, _moving(symmetry, model), norm)
    wires, skipped = foldable_wires(symmetry, roles, blocks_of(bench.tensors))
    wires, loud = without_crosstalk(symmetry, roles, wires, model, example)
    return PreparedModel(model, example, symmetry, bench, roles.norms, tuple(wires), (*loud, *skipped))


def _moving(symmetry: Symmetry, model: nn.Module) -> dict[str, Tensor]:
    """The real-valued tensors that some wire moves."""
    weights = weights_of(symmetry, model)
    moved = {name for name, layout in symmetry.layouts.items() if layout.moves}
    return {n: t for n, t in weights.items() if n in moved and torch.is_floating_point(t)}
