"""Sites: where the features of a wire sit in the working tensors, and by which rule the wire is merged.

Rule "sum": rows are added and outgoing columns averaged. It is exact where the activation lets positive scales through,
which the symmetry knows: some scale of the wire enters all rows with power 1 and all columns with power −1.
Rule "mean": rows and all numbers per feature are averaged, outgoing columns added. It is exact for any activation.
Numbers per feature that no scale enters (PReLU, depthwise kernels) are averaged under both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from intertwine.canonical.blocks import Block, cut_block
from intertwine.fold.roles import Roles
from intertwine.fold.working import Working
from intertwine.symmetry.layout import Layout, Leaf
from intertwine.symmetry.symmetry import Symmetry


@dataclass(frozen=True)
class Piece:
    """A block of a working tensor: a view of it, whose dimensions belong to one wire each or to none."""

    block: Block
    roles: tuple[str | None, ...]  # of its dimensions
    counted: str | None

    @property
    def data(self) -> Tensor:
        return self.block.data


@dataclass(frozen=True)
class Site:
    """One dimension of one piece, seen from its wire. `added`: slices of merged features are added, else averaged."""

    piece: Piece
    dim: int
    role: str
    added: bool


@dataclass(frozen=True)
class Foldable:
    """A wire whose features can be merged exactly where they are the same."""

    name: str
    strand: int
    size: int
    rule: str  # "sum" or "mean"
    sites: tuple[Site, ...]

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


def pieces_of(tensors: Iterable[Working]) -> list[Piece]:
    """Cut the working tensors into views along wires."""
    found = []
    for tensor in tensors:
        for block in cut_block(tensor.name, tensor.data, Layout(tensor.axes), 0.0):
            found.append(Piece(block, tuple(tensor.roles[d.axis] for d in block.dims), tensor.counted))
    return found


def choose(symmetry: Symmetry, roles: Roles, pieces: Sequence[Piece]) -> tuple[list[Foldable], list[Skipped]]:
    """The wires that can be folded, and the others with the reason."""
    found, skipped = [], []
    bases = {base for strand in symmetry.strands for base in strand.bases}
    for index, wire in enumerate(symmetry.wires):
        reason = None
        if symmetry.strands[index].bases or index in bases:
            reason = "its features are heads or groups, or lie inside them, and merging two of them is not exact"
        elif not symmetry.strands[index].permutes:
            reason = f"its features cannot change places: {wire.pinned or 'only scales or signs act on it'}"
        elif wire.size == 1:
            reason = "it has one feature"
        else:
            unclear = [roles.unclear[s.parameter] for s in wire.slots if s.parameter in roles.unclear]
            reason = unclear[0] if unclear else None
        wanted = reason or _foldable(wire.name, index, wire.size, pieces)
        if isinstance(wanted, Foldable):
            found.append(wanted)
        else:
            skipped.append(Skipped(wire.name, wanted))
    for frozen in symmetry.frozen:
        name = frozen.parameter
        if roles.axes.get((name, frozen.axis)) == "write" and len(symmetry.layouts[name].axes) > 1:
            skipped.append(Skipped(name, frozen.reason))  # once, however many blocks of the axis are frozen
    return found, list(dict.fromkeys(skipped))


def _foldable(name: str, strand: int, size: int, pieces: Sequence[Piece]) -> Foldable | str:
    """The wire with its rule, or why it cannot be folded."""
    met: list[tuple[Piece, int, str, Leaf]] = []
    for piece in pieces:
        for dim in piece.block.places(strand):
            role = piece.roles[dim]
            if role is None:
                return f"it is not known what {piece.block.parameter} does with its features"
            met.append((piece, dim, role, piece.block.leaf(dim)))
    for role, what in (("write", "writes"), ("read", "reads")):
        if not any(r == role for _, _, r, _ in met):
            return f"no layer {what} its features"
    scales = len(met[0][3].powers)
    added = next((k for k in range(scales) if all(_passes(r, leaf, k) for _, _, r, leaf in met)), None)
    sites = tuple(
        Site(piece, dim, role, role == "read" if added is None else leaf.powers[added] == 1)
        for piece, dim, role, leaf in met
    )
    return Foldable(name, strand, size, "mean" if added is None else "sum", sites)


def _passes(role: str, leaf: Leaf, k: int) -> bool:
    """Whether a scale enters a site as rows added and columns averaged ask for."""
    return leaf.powers[k] in {"write": (1,), "read": (-1,), "each": (0, 1)}[role]
