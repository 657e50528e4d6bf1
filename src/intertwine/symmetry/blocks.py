"""Blocks: parameters cut so that every dimension of every piece belongs to one wire or to none.

A parameter whose axis is a product is reshaped, one whose axis is a concatenation is split. The result is a list of
plain arrays with labelled dimensions, which is all that normal forms and matching need of an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from intertwine.argument_types import Float
from intertwine.errors import InputError
from intertwine.graph.model import tied_names
from intertwine.symmetry.element import Element, WireSpec
from intertwine.symmetry.geometry import Dim, Layout, ProductAxis, SumAxis, WireAxis, act, base_dims
from intertwine.symmetry.symmetry import Symmetry

#: How far two numbers may differ by rounding once scales have acted, in units of the precision.
ROUNDING = 16.0
#: A shorter slice counts as zero. Weight decay shrinks the weights of dead units to 1e-38, and the square of the scale
#: that brings those to length one, which a running variance needs, overflows in single precision.
SHORTEST = 1e-18


@dataclass(frozen=True)
class WeightBlock:
    """A piece of one parameter. `dims`: for every dimension of `data` the wire it belongs to, if any.

    `precision` is that of the parameter; `data` may have a higher one.
    """

    parameter: str
    data: Tensor
    dims: tuple[Dim, ...]
    precision: float

    @property
    def scaled(self) -> bool:
        """Whether scales act on it."""
        return any(isinstance(dim.tree, WireAxis) and any(dim.tree.powers) for dim in self.dims)

    @property
    def noise(self) -> float:
        """Relative difference of two members of an orbit by rounding; 0: they agree to the last bit.

        In half precision rounding is as large as the differences of units, so it is not separated from them.
        """
        return ROUNDING * self.precision if self.scaled and self.precision <= torch.finfo(torch.float32).eps else 0.0

    def places(self, wire: int) -> list[int]:
        """The dimensions that belong to a wire."""
        return [i for i, dim in enumerate(self.dims) if isinstance(dim.tree, WireAxis) and dim.tree.wire == wire]

    def wire_axis(self, dim: int) -> WireAxis:
        tree = self.dims[dim].tree
        assert isinstance(tree, WireAxis)
        return tree


@dataclass(frozen=True)
class BlockSlot:
    """One slot of a wire in a block, seen from the wire.

    `front`: the dimensions of its bases, then its own; `rest`: all others, in their order.
    """

    block: WeightBlock
    axis: WireAxis
    front: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def rows(self) -> Tensor:
        """A view of the block: one axis per base, one for the wire's index, then the rest."""
        return self.block.data.permute(*self.front, *self.rest)

    def lengths(self, rows: Tensor | None = None) -> Float[Tensor, "*copies n"]:
        """The length of every slice, in double precision; of other rows than the block's own if they are given."""
        x = self.rows if rows is None else rows
        dims = tuple(range(len(self.front), x.ndim))
        return (torch.linalg.vector_norm(x, dim=dims, dtype=torch.float64) if dims else x.abs().double()).cpu()

    def others(self) -> list[tuple[int, WireAxis]]:
        """(dimension, wire axis) of every other wire in the block that is not one of the wire's bases."""
        return self._wire_axes(self.rest)

    def company(self) -> list[tuple[int, WireAxis]]:
        """(dimension, wire axis) of all other wires in the block, which may scale or flip its entries."""
        return self._wire_axes((*self.front[:-1], *self.rest))

    def _wire_axes(self, dims: tuple[int, ...]) -> list[tuple[int, WireAxis]]:
        return [(d, self.block.wire_axis(d)) for d in dims if isinstance(self.block.dims[d].tree, WireAxis)]


@dataclass(frozen=True)
class BlockedWeights:
    """All blocks of one set of weights, and for every wire its places in them (`sites`)."""

    wire_specs: tuple[WireSpec, ...]
    blocks: tuple[WeightBlock, ...]
    sites: tuple[tuple[BlockSlot, ...], ...]


def weights_of(symmetry: Symmetry, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that its function reads, by their first names; refuses NaN and infinities."""
    symmetry.check_model(model)
    tied = tied_names(model)
    read = symmetry.geometry.graph.program.read_weights
    moving = {name for name, layout in symmetry.layouts.items() if layout.moves}
    named = [*model.named_parameters(), *model.named_buffers()]
    found = {tied[name]: t.detach() for name, t in named if tied[name] in read}
    for name, tensor in found.items():
        check_finite(name, tensor, name in moving)
    return found


def check_finite(name: str, tensor: Tensor, moved: bool) -> None:
    """Refuse NaN, and infinities in weights that move; constants that nothing moves (attention masks) may be −∞."""
    # fast path: a finite sum has finite terms
    if not tensor.is_floating_point() or bool(tensor.sum().isfinite()):
        return
    nan = bool(tensor.isnan().any())
    if nan or (moved and not bool(tensor.isfinite().all())):
        what = "NaN" if nan else "infinite values"
        raise InputError(
            f"{name!r} holds {what}, which have no order and no length, so the units of this network can be "
            "neither sorted nor compared. Repair or retrain the checkpoint first."
        )


def transform_weights(symmetry: Symmetry, g: Element, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights moved by an element, without a model around them."""
    return {n: act(symmetry.layouts[n], t, g) if n in symmetry.layouts else t for n, t in weights.items()}


def block_weights(symmetry: Symmetry, weights: Mapping[str, Tensor], *, copy: bool = False) -> BlockedWeights:
    """Cut weights into blocks; with `copy` the blocks may be written to."""
    blocks: list[WeightBlock] = []
    for name, layout in symmetry.layouts.items():
        if name in weights:
            precision = torch.finfo(weights[name].dtype).eps if weights[name].is_floating_point() else 0.0
            blocks += cut_block(name, _working(weights[name], layout, copy), layout, precision)
    sites = tuple(
        tuple(site for block in blocks for site in block_slots(block, s, symmetry.wire_specs))
        for s in range(len(symmetry.wire_specs))
    )
    return BlockedWeights(symmetry.wire_specs, tuple(blocks), sites)


def _working(tensor: Tensor, layout: Layout, copy: bool) -> Tensor:
    """Weights as single or double precision numbers; a running variance as the (v + eps) that scales."""
    x = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)
    if layout.shift:
        return x + layout.shift
    return x.clone(memory_format=torch.contiguous_format) if copy and x is tensor else x.contiguous()


def cut_block(name: str, x: Tensor, layout: Layout, precision: float) -> Iterator[WeightBlock]:
    """The pieces of one tensor."""
    for data, dims in _expose(x, [Dim(axis, i) for i, axis in enumerate(layout.axes)]):
        yield WeightBlock(name, data, dims, precision)


def _expose(x: Tensor, dims: list[Dim]) -> Iterator[tuple[Tensor, tuple[Dim, ...]]]:
    for i, dim in enumerate(dims):
        if isinstance(dim.tree, ProductAxis):
            inner = [Dim(part, dim.axis) for part in dim.tree.parts]
            x = x.unflatten(i, [p.tree.size for p in inner])
            yield from _expose(x, [*dims[:i], *inner, *dims[i + 1 :]])
            return
        if isinstance(dim.tree, SumAxis):
            for part, block in zip(dim.tree.parts, x.split([p.size for p in dim.tree.parts], i), strict=True):
                yield from _expose(block, [*dims[:i], Dim(part, dim.axis), *dims[i + 1 :]])
            return
    if x.numel() and any(isinstance(dim.tree, WireAxis) for dim in dims):
        yield x, tuple(dims)


def block_slots(block: WeightBlock, wire: int, specs: tuple[WireSpec, ...]) -> Iterator[BlockSlot]:
    """Where a wire occurs in a block."""
    for place in block.places(wire):
        front = (*base_dims(block.dims, place, specs[wire].bases), place)
        yield BlockSlot(
            block, block.wire_axis(place), front, tuple(d for d in range(len(block.dims)) if d not in front)
        )
