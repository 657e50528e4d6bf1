"""Crosstalk: proof by measurement that a feature acts through the layers that read it, and in no other way.

Features whose outgoing columns are zero must not matter at all. Their rows are changed at random, in double precision;
if the outputs change, something else looks at the features together (a norm over channels, a softmax, a mean), and the
wire is not folded: there the number of features matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.canonical.blocks import cut_block
from intertwine.features.capture import evaluating
from intertwine.fold.roles import Roles
from intertwine.fold.sites import Foldable, Skipped
from intertwine.graph.capture import tied_names
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.exact import float64_forward, generic_copy, to_float64
from intertwine.symmetry.symmetry import Symmetry

TOLERANCE = 1e-9
REASON = (
    "something besides the layers that read its features looks at them together (a norm over channels, a mean, a "
    "softmax), so their number matters"
)
Example = tuple[tuple[Any, ...], dict[str, Any]]


def without_crosstalk(
    symmetry: Symmetry, roles: Roles, wires: Sequence[Foldable], model: nn.Module, example: Example
) -> tuple[list[Foldable], list[Skipped]]:
    """Those of some wires that pass, and the others with the reason."""
    probe = _Probe(symmetry, roles, model, example)
    if not wires or probe.quiet(wires):
        return list(wires), []
    passed = [wire for wire in wires if probe.quiet([wire])]
    names = {wire.name for wire in passed}
    return passed, [Skipped(wire.name, REASON) for wire in wires if wire.name not in names]


def outputs_in_float64(model: nn.Module, example: Example) -> list[Tensor]:
    """Every tensor a model in double precision returns, in evaluation mode."""
    args, kwargs = to_float64(example)
    with evaluating(model), float64_forward():
        return [v for v in tree_leaves(model(*args, **kwargs)) if isinstance(v, Tensor)]


class _Probe:
    def __init__(self, symmetry: Symmetry, roles: Roles, model: nn.Module, example: Example) -> None:
        self.symmetry, self.roles, self.example = symmetry, roles, example
        self.model = generic_copy(model, 0)
        tied = tied_names(self.model)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        self.own = {tied[name]: tensor.detach() for name, tensor in named if tied[name] in symmetry.layouts}
        self.saved = {name: tensor.clone() for name, tensor in self.own.items()}

    def quiet(self, wires: Sequence[Foldable]) -> bool:
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
