"""Least-squares compensation: features are removed in the order of their cost, and the layers that read them adjusted.

Of the features a = (a_1 … a_n) that a layer reads, one is replaced by its best linear prediction from the others and a
constant. The columns of the layer change by the coefficients, its bias by the constant. With the second moments C of
the features and the column v_i, removing feature i adds ‖v_i‖²/(C⁻¹)_ii to the mean square error of the layer: the step
of the optimal brain surgeon for whole features. A few features are removed at a time; C⁻¹ and the columns are updated.

A layer reads a feature through a slice of its weight, once or, after a flatten, several times. One pass over some
batches gives the second moments for every layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from intertwine.argument_types import Float, Int
from intertwine.data.batches import Call, copied_arguments, on_device_of
from intertwine.data.layers import evaluating
from intertwine.fold.cutting import with_weights
from intertwine.fold.fold import assemble_fold
from intertwine.fold.prepare import FoldableWire, PreparedModel, Skipped
from intertwine.fold.result import Fold
from intertwine.graph.model import tied_names
from intertwine.symmetry.blocks import cut_block
from intertwine.symmetry.geometry import Layout, LayoutAxis
from intertwine.symmetry.symmetry import Symmetry

#: The calls through which layers read features → the number of axes after the channels.
LAYER_CALLS = {"linear": 0} | {f"conv{kind}{d}d": d for kind in ("", "_transpose") for d in (1, 2, 3)}
#: The largest number of rows of one batch in the moments of one reader: more are slower and hardly more accurate.
ROWS_PER_BATCH = 1 << 15
#: Added to the diagonal of second moments, as a share of it: few samples, and copies of features, make them singular.
RIDGE = 1e-4
#: One feature in this many of those that are left is removed in one step: costs change little within a step.
REMOVAL_STEPS = 64
READER_NOT_SEEN = "a layer that reads its features did not run on the inputs, so that nothing can compensate for them"


# -- Readers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reader:
    """A weight that reads a wire along an axis; `positions` on this axis, one row per feature."""

    weight: str
    axis: int
    positions: Int[Tensor, "features copies"]

    def columns(self, weight: Tensor) -> Float[Tensor, "features copies ..."]:
        """The columns of each feature in a weight of this reader."""
        return weight.movedim(self.axis, 0)[self.positions.to(weight.device)]


def readers_of(wire: FoldableWire, symmetry: Symmetry) -> list[Reader]:
    """All readers of a wire."""
    axes = {(s.block.parameter, s.block.dims[s.dim].axis) for s in wire.slots if s.role == "read"}
    return [
        Reader(name, axis, found)
        for name, axis in sorted(axes)
        for found in positions_of(symmetry.layouts[name].axes[axis], wire.index)
    ]


def positions_of(axis: LayoutAxis, wire: int) -> list[Int[Tensor, "features copies"]]:
    """The positions of the features of a wire on an axis, once for every part of the axis that holds them.

    >>> from intertwine.symmetry.geometry import WireAxis, SumAxis, FixedAxis, ProductAxis
    >>> positions_of(SumAxis((FixedAxis(2), ProductAxis((WireAxis(0, 3), FixedAxis(2))))), 0)[0].tolist()
    [[2, 3], [4, 5], [6, 7]]
    """
    blocks = cut_block("", torch.arange(axis.size), Layout((axis,)), 0.0)
    return [b.data.movedim(d, 0).reshape(b.data.shape[d], -1) for b in blocks for d in b.places(wire)]


class ReaderMoments:
    """Second moments of the features that a reader reads, followed by the constant 1."""

    def __init__(self, features: int) -> None:
        self.total = torch.zeros(features + 1, features + 1, dtype=torch.float64)
        self.rows = 0

    def add(self, x: Float[Tensor, "rows features"]) -> None:
        rows = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64, device=x.device)], 1)
        self.total = self.total.to(x.device) + rows.T @ rows
        self.rows += len(x)

    def mean(self) -> Float[Tensor, "ones ones"]:
        """The mean products of any two features."""
        return (self.total / self.rows).cpu()


class ReaderRecorder(TorchFunctionMode):
    """While it is entered, records the second moments of the inputs of some readers, and the biases that they add."""

    def __init__(self, model: nn.Module, readers: Sequence[Reader]) -> None:
        super().__init__()
        tied = tied_names(model)
        self.names = {id(p): tied[name] for name, p in model.named_parameters()}
        self.readers = readers
        self.moments = [ReaderMoments(len(reader.positions)) for reader in readers]
        self.biases: dict[str, set[str | None]] = {}  # weight → the biases it was seen with
        self.generator = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        after = LAYER_CALLS.get(getattr(func, "__name__", ""))
        if after is not None:
            x, weight, bias = (*args, *(kwargs.get(key) for key in ("input", "weight", "bias")[len(args) :]))[:3]
            name = self.names.get(id(weight))
            if name is not None and isinstance(x, Tensor):
                self.biases.setdefault(name, set()).add(self.names.get(id(bias)))
                self._add(name, x.detach().movedim(x.ndim - 1 - after, -1))
        return func(*args, **kwargs)

    def _add(self, name: str, x: Float[Tensor, "... channels"]) -> None:
        for reader, moments in zip(self.readers, self.moments, strict=True):
            if reader.weight == name:
                features, copies = reader.positions.shape
                rows = x.flatten(0, -2)
                most = max(ROWS_PER_BATCH // copies, 1)
                if len(rows) > most:
                    rows = rows[torch.randperm(len(rows), generator=self.generator)[:most].to(rows.device)]
                found = rows[:, reader.positions.flatten().to(rows.device)]
                moments.add(found.unflatten(1, (features, copies)).movedim(2, 1).flatten(0, 1))

    def bias_of(self, weight: str) -> str | None:
        """The bias that is always added after a weight; None where there is none."""
        found = self.biases.get(weight, {None})
        return next(iter(found)) if len(found) == 1 else None


def record_readers(model: nn.Module, readers: Sequence[Reader], batches: Iterable[Call]) -> ReaderRecorder:
    """Run batches through a network in evaluation mode, and record the inputs of the readers."""
    recorder = ReaderRecorder(model, readers)
    with evaluating(model), recorder:
        for call in batches:
            args, kwargs = copied_arguments(on_device_of(call, model))
            model(*args, **kwargs)
    return recorder


# -- The order of removal ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReaderStatistics:
    """The second moments of the inputs of a reader, those of the constant last.

    `gram`: inner products of its columns. `shift`: whether it has a bias that can take up a constant.
    """

    moments: Float[Tensor, "ones ones"]
    gram: Float[Tensor, "features features"]
    shift: bool

    @property
    def used(self) -> Float[Tensor, "used used"]:
        """The moments of the features with a ridge, and of the constant if it can be used."""
        n = len(self.gram)
        moments = self.moments[: n + self.shift, : n + self.shift].clone()
        spread = self._centred().diagonal()
        moments.diagonal()[:n] += RIDGE * spread + 1e-9 * spread.max().clamp(min=1e-30)
        return moments

    def _centred(self) -> Float[Tensor, "features features"]:
        """Second moments of the features; about their means where a constant can be added."""
        n = len(self.gram)
        mean = self.moments[:n, n] if self.shift else torch.zeros(n, dtype=torch.float64)
        return self.moments[:n, :n] - torch.outer(mean, mean)

    @property
    def energy(self) -> float:
        """The mean square of the reader's output; about its mean where a constant can be added."""
        return float((self._centred() * self.gram).sum())


@dataclass(frozen=True)
class RemovalOrder:
    """The order in which the features of a wire are removed, and the cost after the first k, for k = 0, 1, …"""

    order: tuple[int, ...]
    costs: tuple[float, ...]

    def kept(self, width: int) -> list[int]:
        """The features that are left at this width."""
        return sorted(self.order[len(self.order) - width :])


def variance_cost(share: float) -> float:
    """The cost of losing a share of a variance: it grows without bound as the share approaches one."""
    return -math.log(max(1 - share, 1e-3))


def removal_order(reads: Sequence[ReaderStatistics]) -> RemovalOrder:
    """The order in which the features of a wire are best removed, for all of its readers together."""
    parts = [_Removal(read) for read in reads if read.energy > 0]
    alive = torch.arange(len(reads[0].gram))
    order, costs = [], [0.0]
    while len(alive) > 1 and parts:
        errors = torch.stack([part.errors() for part in parts]).sum(0)
        step = max(1, len(alive) // REMOVAL_STEPS)
        gone = errors.argsort(stable=True)[:step]
        for part in parts:
            part.remove(gone)
        after = sum(variance_cost(part.error) for part in parts)
        costs += torch.linspace(costs[-1], max(after, costs[-1]), step + 1)[1:].tolist()
        order += alive[gone].tolist()
        alive = alive[_complement(len(alive), gone)]
    missing = len(reads[0].gram) - len(costs)  # a wire whose features are all constant
    return RemovalOrder((*order, *alive.tolist()), (*costs, *costs[-1:] * missing))


class _Removal:
    """The inverse moments, and inner products of columns, of the features of one reader that are left."""

    def __init__(self, read: ReaderStatistics) -> None:
        self.scale = 1 / read.energy
        self.inverse = torch.linalg.inv(read.used)
        self.gram = torch.zeros_like(self.inverse)  # the constant's column starts at zero
        n = len(read.gram)
        self.gram[:n, :n] = read.gram
        self.shift = int(read.shift)
        self.error = 0.0  # of all removals, as a share of the reader's output

    def errors(self) -> Float[Tensor, " left"]:
        """The error that removing each feature alone would add."""
        n = len(self.inverse) - self.shift
        return self.scale * (self.gram.diagonal() / self.inverse.diagonal())[:n].clamp(min=0)

    def remove(self, gone: Tensor) -> None:
        """Remove features."""
        block, cross = self.inverse[gone][:, gone], self.inverse[:, gone]
        share = torch.linalg.solve(block, cross.T).T  # how removed columns are distributed over the others
        inner = self.gram[gone][:, gone]
        self.error += self.scale * max(float(torch.linalg.solve(block, inner).trace()), 0.0)
        stay = _complement(len(self.inverse), gone)
        share = share[stay]
        across = self.gram[stay][:, gone]
        self.inverse = self.inverse[stay][:, stay] - share @ cross[stay].T
        moved = across @ share.T
        self.gram = self.gram[stay][:, stay] - moved - moved.T + share @ inner @ share.T


def _complement(size: int, gone: Tensor) -> Tensor:
    stay = torch.ones(size, dtype=torch.bool)
    stay[gone] = False
    return stay.nonzero().flatten()


def reconstruction(
    read: ReaderStatistics, kept: Sequence[int]
) -> tuple[Float[Tensor, "features kept"], Float[Tensor, " features"]]:
    """The coefficients that express the features of a reader by the kept ones, and the remaining constants."""
    n, moments, index = len(read.gram), read.used, torch.tensor(kept)
    known = torch.cat([index, torch.tensor([n])]) if read.shift else index
    found = torch.linalg.solve(moments[known][:, known], moments[known][:, :n]).T
    found[index] = 0.0
    found[index, torch.arange(len(kept))] = 1.0  # a kept feature is itself
    constant = found[:, -1] if read.shift else torch.zeros(n, dtype=torch.float64)
    return found[:, : len(kept)], constant


# -- The smaller network -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompensatedReader:
    """A reader of a wire, its statistics, and the parameter that takes up a constant."""

    reader: Reader
    read: ReaderStatistics
    bias: str | None  # a constant is added to this bias
    mean: str | None  # or subtracted from this running mean of the BatchNorm behind the layer


class Compensation:
    """The costs of removing features from a network, from one pass over some inputs; builds it at any widths."""

    def __init__(self, prepared: PreparedModel, seen_by: nn.Module, batches: Iterable[Call]) -> None:
        """`seen_by`: the network that runs on the inputs, the prepared one or one with other BatchNorm statistics."""
        self.prepared = prepared
        readers = [(wire.index, reader) for wire in prepared.wires for reader in readers_of(wire, prepared.symmetry)]
        recorder = record_readers(seen_by, [reader for _, reader in readers], batches)
        unseen = {index for (index, _), moments in zip(readers, recorder.moments, strict=True) if not moments.rows}
        self.wires = tuple(wire for wire in prepared.wires if wire.index not in unseen)
        self.skipped = tuple(Skipped(w.name, READER_NOT_SEEN) for w in prepared.wires if w.index in unseen)
        # a layer before a BatchNorm counts with the scale of the norm, by which its output is multiplied
        folded = {tensor.name: tensor.data for tensor in prepared.working.tensors}
        self._norms = {norm.layer.weight: norm for norm in prepared.norms if norm.layer is not None}
        self.readings: dict[int, list[CompensatedReader]] = {}
        for (index, reader), moments in zip(readers, recorder.moments, strict=True):
            if index not in unseen:
                columns = reader.columns(folded[reader.weight]).flatten(1)
                found = self._reading(reader, moments.mean(), columns @ columns.T, recorder)
                self.readings.setdefault(index, []).append(found)
        self.orders = {index: removal_order([r.read for r in of]) for index, of in self.readings.items()}
        self.costs = {index: order.costs for index, order in self.orders.items()}

    def _reading(self, reader: Reader, moments: Tensor, gram: Tensor, recorder: ReaderRecorder) -> CompensatedReader:
        bias = recorder.bias_of(reader.weight)
        norm = self._norms.get(reader.weight)
        mean = norm.mean if norm is not None and bias is None else None
        shift = reader.axis == 1 and (bias or mean) is not None  # behind a transposed layer they vary by position
        read = ReaderStatistics(moments, gram, shift)
        return CompensatedReader(reader, read, bias if shift else None, mean if shift else None)

    def build(self, widths: Mapping[int, int]) -> Fold:
        """The network at these widths."""
        kept = {wire.index: list(range(wire.size)) for wire in self.prepared.wires}
        kept |= {index: self.orders[index].kept(width) for index, width in widths.items()}
        own = dict(self.prepared.model.named_parameters()) | dict(self.prepared.model.named_buffers())
        new: dict[str, Tensor] = {}
        groups: dict[str, tuple[tuple[int, ...], ...]] = {
            wire.name: tuple((i,) for i in range(wire.size)) for wire in self.prepared.wires
        }
        for wire in self.wires:
            if len(kept[wire.index]) < wire.size:
                for k, reading in enumerate(self.readings[wire.index]):
                    shares, constants = reconstruction(reading.read, kept[wire.index])
                    _rewire(new, own, reading, shares, constants, kept[wire.index])
                    if not k:
                        groups[wire.name] = _groups(reading.read, shares, kept[wire.index])
        wide = with_weights(self.prepared.model, new)
        return assemble_fold(self.prepared, wide, kept, groups, dict.fromkeys(groups, "absorbed"), self.skipped)


def _rewire(
    new: dict[str, Tensor],
    own: Mapping[str, Tensor],
    reading: CompensatedReader,
    shares: Float[Tensor, "features kept"],
    constants: Float[Tensor, " features"],
    kept: list[int],
) -> None:
    """Let one reader read the kept features instead of all."""

    def tensor(name: str) -> Tensor:
        return new.setdefault(name, own[name].detach().to("cpu", torch.float64, copy=True))

    reader = reading.reader
    weight = tensor(reader.weight)
    columns = reader.columns(weight)
    constant = (columns.movedim(0, -1) @ constants).movedim(1, 0).flatten(1).sum(1)  # over copies and positions
    after = torch.zeros_like(columns)
    after[kept] = torch.einsum("f...,fk->k...", columns, shares)
    weight.movedim(reader.axis, 0)[reader.positions] = after
    if reading.bias is not None:
        tensor(reading.bias).add_(constant)
    elif reading.mean is not None:
        tensor(reading.mean).sub_(constant)


def _groups(
    read: ReaderStatistics, shares: Float[Tensor, "features kept"], kept: list[int]
) -> tuple[tuple[int, ...], ...]:
    """Every removed feature in one group with the kept feature that expresses most of it."""
    spread = read.moments.diagonal()[kept].sqrt()
    nearest = (shares.abs() * spread).argmax(1).tolist()
    return tuple(tuple(i for i, k in enumerate(nearest) if k == at) for at in range(len(kept)))
