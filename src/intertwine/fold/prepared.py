"""Prepared: everything about a network that folding needs, found once: symmetry, working tensors, wires and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from intertwine.canonical.blocks import weights_of
from intertwine.features.capture import evaluating
from intertwine.fold.crosstalk import Example, without_crosstalk
from intertwine.fold.cutting import widened
from intertwine.fold.roles import Norm, roles_of
from intertwine.fold.sites import Foldable, Skipped, choose, pieces_of
from intertwine.fold.working import Workbench, workbench
from intertwine.graph.copies import copied
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry


@dataclass(frozen=True)
class Prepared:
    """A network ready to be folded. Merging writes into `bench`, so one of these is good for one folding."""

    model: nn.Module
    example: Example
    symmetry: Symmetry
    bench: Workbench
    norms: tuple[Norm, ...]
    wires: tuple[Foldable, ...]
    skipped: tuple[Skipped, ...]

    def widened(self, kept: Mapping[int, list[int]]) -> nn.Module:
        """The merged network at full width."""
        merged = {w.strand for w in self.wires if len(kept[w.strand]) < w.size}
        new = {name: tensor for name, tensor in self.bench.weights().items() if self._touches(name, merged)}
        return widened(self.model, new) if new else copied(self.model)

    def _touches(self, name: str, strands: set[int]) -> bool:
        return any(leaf.strand in strands for leaf in self.symmetry.layouts[name].leaves())


def prepare(model: nn.Module, example: Example, norm: str = "fold") -> Prepared:
    """Read a network: which wires can be folded, by which rule, and why the others cannot."""
    args, kwargs = example
    with evaluating(model):
        symmetry = find_symmetry(model, *args, **kwargs)
    roles = roles_of(symmetry._discovery.graph.program)
    bench = workbench(symmetry.layouts, roles, _moving(symmetry, model), norm)
    wires, skipped = choose(symmetry, roles, pieces_of(bench.tensors))
    wires, loud = without_crosstalk(symmetry, roles, wires, model, example)
    return Prepared(model, example, symmetry, bench, roles.norms, tuple(wires), (*loud, *skipped))


def _moving(symmetry: Symmetry, model: nn.Module) -> dict[str, Tensor]:
    """The real-valued tensors that some wire moves."""
    weights = weights_of(symmetry, model)
    moved = {name for name, layout in symmetry.layouts.items() if any(True for _ in layout.leaves())}
    return {n: t for n, t in weights.items() if n in moved and torch.is_floating_point(t)}
