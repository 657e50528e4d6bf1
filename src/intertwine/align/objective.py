"""The objective that every solver lowers: Σ ‖A − g·B‖² over the tensors that wires act on.

It counts the parameters the function reads and, where asked, its buffers. Whole tensors are counted, also positions of
them that nothing moves; a tensor under two names is counted once. Squares are added in double precision.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from intertwine.canonical.blocks import pieces
from intertwine.graph.capture import tied_names
from intertwine.symmetry.layout import Layout, Plus, Still, Times, Tree
from intertwine.symmetry.symmetry import Symmetry

#: Smaller entries are taken for zero: products of two of them are no numbers of single precision.
TRACE = 1e-30


def counted(symmetry: Symmetry, model: nn.Module, weights: Mapping[str, Tensor], buffers: bool) -> dict[str, Tensor]:
    """Those weights of a model that the objective counts."""
    tied = tied_names(model)
    parameters = {tied[name] for name, _ in model.named_parameters()}
    moving = {name for name, layout in symmetry.layouts.items() if any(True for _ in layout.leaves())}
    return {
        name: tensor
        for name, tensor in weights.items()
        if name in moving and tensor.is_floating_point() and (buffers or name in parameters)
    }


def without_traces(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without what weight decay has left of dead units (1e-38), which makes arithmetic many times slower."""
    found = dict(weights)
    for name, x in weights.items():
        if x.dtype != torch.float32 or not x.numel() or float(x.abs().min()) >= TRACE:  # the least is found quickly
            continue
        if bool((traces := (x.abs() < TRACE) & (x != 0)).any()):
            found[name] = x.masked_fill(traces, 0.0)
    return found


def squared_distance(x: Tensor, y: Tensor) -> float:
    """‖x − y‖², accumulated in double precision."""
    return float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2


def unmoved_part(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """What positions that nothing moves add to the objective, in tensors other positions of which are moved."""
    total = 0.0
    for name, x in a.items():
        if _has_still_blocks(symmetry.layouts[name]):
            still = torch.ones(x.shape)
            for block in pieces(symmetry, {name: still}).blocks:
                block.data.zero_()
            there = still.bool().to(x.device)
            total += squared_distance(x[there], b[name].to(x.device)[there])
    return total


def _has_still_blocks(layout: Layout) -> bool:
    def split(tree: Tree) -> bool:
        if isinstance(tree, Plus):
            return any(isinstance(part, Still) or split(part) for part in tree.parts)
        return isinstance(tree, Times) and any(split(part) for part in tree.parts)

    return any(split(axis) for axis in layout.axes)
