"""Least-squares reconstruction: features are removed in the order of their cost, and the layers that read them are
adjusted to reconstruct them from the remaining features.
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

# ----------------------------------------------------------------------------------------------------
# Readers: the layers that read the features of a wire, and the second moments of what each one reads.
#
# A layer reads a feature through a slice of its weight, once or, behind a flatten, several times. One pass over some
# batches gives, for every reader, how its features vary together; that is all that absorbing needs of the data.


#: The calls through which layers read features, by the number of axes that follow the channels.
LAYER_CALLS = {"linear": 0} | {f"conv{kind}{d}d": d for kind in ("", "_transpose") for d in (1, 2, 3)}
#: Rows of one batch that enter the moments of one reader: more say little more, and take longer.
ROWS_PER_BATCH = 1 << 15


@dataclass(frozen=True, eq=False)
class Reader:
    """A weight that reads a wire along an axis; `positions` on it: one row per feature."""

    weight: str
    axis: int
    positions: Int[Tensor, "features copies"]

    def columns(self, weight: Tensor) -> Float[Tensor, "features copies ..."]:
        """What a weight of this reader does with each feature."""
        return weight.movedim(self.axis, 0)[self.positions.to(weight.device)]


def readers_of(wire: FoldableWire, symmetry: Symmetry) -> list[Reader]:
    """All readers of a wire."""
    axes = {(s.piece.block.parameter, s.piece.block.dims[s.dim].axis) for s in wire.sites if s.role == "read"}
    return [
        Reader(name, axis, found)
        for name, axis in sorted(axes)
        for found in positions_of(symmetry.layouts[name].axes[axis], wire.strand)
    ]


def positions_of(tree: LayoutAxis, strand: int) -> list[Int[Tensor, "features copies"]]:
    """Where the features of a strand lie on an axis, once for every part of the axis that holds them.

    >>> from intertwine.symmetry.geometry import WireAxis, SumAxis, FixedAxis, ProductAxis
    >>> positions_of(SumAxis((FixedAxis(2), ProductAxis((WireAxis(0, 3), FixedAxis(2))))), 0)[0].tolist()
    [[2, 3], [4, 5], [6, 7]]
    """
    blocks = cut_block("", torch.arange(tree.size), Layout((tree,)), 0.0)
    return [b.data.movedim(d, 0).reshape(b.data.shape[d], -1) for b in blocks for d in b.places(strand)]


class ReaderMoments:
    """Second moments of the features that a reader reads, the constant 1 after them."""

    def __init__(self, features: int) -> None:
        self.total = torch.zeros(features + 1, features + 1, dtype=torch.float64)
        self.rows = 0

    def add(self, x: Float[Tensor, "rows features"]) -> None:
        rows = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64, device=x.device)], 1)
        self.total = self.total.to(x.device) + rows.T @ rows
        self.rows += len(x)

    def mean(self) -> Float[Tensor, "ones ones"]:
        """The mean of the products of any two features."""
        return (self.total / self.rows).cpu()


class ReaderRecorder(TorchFunctionMode):
    """While it is entered, it takes in what some readers of a network read, and which bias each of them adds."""

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
                self._take(name, x.detach().movedim(x.ndim - 1 - after, -1))
        return func(*args, **kwargs)

    def _take(self, name: str, x: Float[Tensor, "... channels"]) -> None:
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
        """The parameter that is always added to what a weight makes; None where there is none."""
        found = self.biases.get(weight, {None})
        return next(iter(found)) if len(found) == 1 else None


def record_readers(model: nn.Module, readers: Sequence[Reader], batches: Iterable[Call]) -> ReaderRecorder:
    """Run batches through a network, in evaluation mode, and take in what the readers read."""
    listening = ReaderRecorder(model, readers)
    with evaluating(model), listening:
        for call in batches:
            args, kwargs = copied_arguments(on_device_of(call, model))
            model(*args, **kwargs)
    return listening


# ----------------------------------------------------------------------------------------------------
# Absorbing: a feature that the others can express is taken out, and the layers that read it read those instead.
#
# Of the features a layer reads, a = (a_1 … a_n), one is replaced by its best linear prediction from those that stay and
# a constant. The layer's columns change by the coefficients, its bias by the constant, and nothing else changes. With
# the second moments C of the features, leaving out feature i and predicting it from the rest costs ‖v_i‖²/(C⁻¹)_ii in
# the mean square of what the layer gives, v_i its column: the step of the optimal brain surgeon, for whole features.
# Features go in the order of that cost, a few at a time, and C⁻¹ and the columns are kept up to date.


#: Added to the diagonal of second moments, as a share of it: they come from few samples, and copies make them singular.
RIDGE = 1e-4
#: Features go in steps of one in so many of those that are left: costs change little within a step.
REMOVAL_STEPS = 64


@dataclass(frozen=True)
class ReaderStatistics:
    """What absorbing knows of one reader. The last row of `moments` is that of the constant.

    `gram`: inner products of its columns. `shift`: whether it has a bias that a constant can go into.
    """

    moments: Float[Tensor, "ones ones"]
    gram: Float[Tensor, "features features"]
    shift: bool

    @property
    def used(self) -> Float[Tensor, "used used"]:
        """The moments of the features, and of the constant if it can be used; a ridge on the features."""
        n = len(self.gram)
        moments = self.moments[: n + self.shift, : n + self.shift].clone()
        spread = self._about().diagonal()
        moments.diagonal()[:n] += RIDGE * spread + 1e-9 * spread.max().clamp(min=1e-30)
        return moments

    def _about(self) -> Float[Tensor, "features features"]:
        """Second moments of the features; about their means where a constant can be added."""
        n = len(self.gram)
        mean = self.moments[:n, n] if self.shift else torch.zeros(n, dtype=torch.float64)
        return self.moments[:n, :n] - torch.outer(mean, mean)

    @property
    def energy(self) -> float:
        """The mean square of what the reader gives; about its mean where a constant can be added to it."""
        return float((self._about() * self.gram).sum())


@dataclass(frozen=True)
class RemovalOrder:
    """The order in which the features of a wire go, and what it costs once the first k are gone, for k = 0, 1, …"""

    order: tuple[int, ...]
    costs: tuple[float, ...]

    def kept(self, width: int) -> list[int]:
        """The features that stay when so many are to stay."""
        return sorted(self.order[len(self.order) - width :])


def variance_cost(share: float) -> float:
    """What losing a share of a variance costs: little at first, and no end of it for the last."""
    return -math.log(max(1 - share, 1e-3))


def removal_order(reads: Sequence[ReaderStatistics]) -> RemovalOrder:
    """The order in which the features of a wire are best absorbed, all of its readers taken together."""
    parts = [_Part(read) for read in reads if read.energy > 0]
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
        alive = alive[_others(len(alive), gone)]
    missing = len(reads[0].gram) - len(costs)  # a wire that gives only constants
    return RemovalOrder((*order, *alive.tolist()), (*costs, *costs[-1:] * missing))


class _Part:
    """One reader while features go: the inverse moments and the columns' inner products of those that are left."""

    def __init__(self, read: ReaderStatistics) -> None:
        self.scale = 1 / read.energy
        self.inverse = torch.linalg.inv(read.used)
        self.gram = torch.zeros_like(self.inverse)  # the constant's column starts at zero
        n = len(read.gram)
        self.gram[:n, :n] = read.gram
        self.shift = int(read.shift)
        self.error = 0.0  # of all that is gone, as a share of what the reader gives

    def errors(self) -> Float[Tensor, " left"]:
        """What each feature alone would add to the error."""
        n = len(self.inverse) - self.shift
        return self.scale * (self.gram.diagonal() / self.inverse.diagonal())[:n].clamp(min=0)

    def remove(self, gone: Tensor) -> None:
        """Take features out."""
        block, cross = self.inverse[gone][:, gone], self.inverse[:, gone]
        share = torch.linalg.solve(block, cross.T).T  # how the columns of those that go are spread over the rest
        inner = self.gram[gone][:, gone]
        self.error += self.scale * max(float(torch.linalg.solve(block, inner).trace()), 0.0)
        stay = _others(len(self.inverse), gone)
        share = share[stay]
        across = self.gram[stay][:, gone]
        self.inverse = self.inverse[stay][:, stay] - share @ cross[stay].T
        moved = across @ share.T
        self.gram = self.gram[stay][:, stay] - moved - moved.T + share @ inner @ share.T


def _others(size: int, gone: Tensor) -> Tensor:
    stay = torch.ones(size, dtype=torch.bool)
    stay[gone] = False
    return stay.nonzero().flatten()


def reconstruction(
    read: ReaderStatistics, kept: Sequence[int]
) -> tuple[Float[Tensor, "features kept"], Float[Tensor, " features"]]:
    """How the features of a reader are expressed by those that stay, and the constants that are left over."""
    n, moments, index = len(read.gram), read.used, torch.tensor(kept)
    known = torch.cat([index, torch.tensor([n])]) if read.shift else index
    found = torch.linalg.solve(moments[known][:, known], moments[known][:, :n]).T
    found[index] = 0.0
    found[index, torch.arange(len(kept))] = 1.0  # a feature that stays is itself
    constant = found[:, -1] if read.shift else torch.zeros(n, dtype=torch.float64)
    return found[:, : len(kept)], constant


# ----------------------------------------------------------------------------------------------------
# Absorbed: a network in which features can be absorbed, and the smaller network for any widths of its wires.


READER_NOT_SEEN = "a layer that reads its features was not seen while inputs passed, so that nothing can take them over"


@dataclass(frozen=True)
class CompensatedReader:
    """One reader of a wire, what is known of it, and where a constant that it is to add can go."""

    reader: Reader
    read: ReaderStatistics
    bias: str | None  # a constant is added to this bias
    mean: str | None  # or taken off this running mean, that of the BatchNorm behind the layer


class Compensation:
    """Everything about a network that absorbing needs, found in one pass over some inputs."""

    def __init__(self, prepared: PreparedModel, seen_by: nn.Module, batches: Iterable[Call]) -> None:
        """`seen_by`: the network through which the inputs go, the prepared one or one with other statistics."""
        self.prepared = prepared
        readers = {wire.strand: readers_of(wire, prepared.symmetry) for wire in prepared.wires}
        flat = [(strand, reader) for strand, of in readers.items() for reader in of]
        listening = record_readers(seen_by, [reader for _, reader in flat], batches)
        unheard = {s for (s, _), moments in zip(flat, listening.moments, strict=True) if not moments.rows}
        self.wires = tuple(wire for wire in prepared.wires if wire.strand not in unheard)
        self.skipped = tuple(Skipped(w.name, READER_NOT_SEEN) for w in prepared.wires if w.strand in unheard)
        # of a layer before a BatchNorm: with its scale, which what the layer gives is multiplied by
        folded = {tensor.name: tensor.data for tensor in prepared.bench.tensors}
        self._norms = {norm.layer.weight: norm for norm in prepared.norms if norm.layer is not None}
        self.readings: dict[int, list[CompensatedReader]] = {}
        for (strand, reader), moments in zip(flat, listening.moments, strict=True):
            if strand not in unheard:
                found = self._reading(reader, moments.mean(), _gram(reader, folded[reader.weight]), listening)
                self.readings.setdefault(strand, []).append(found)
        self.traces: dict[int, RemovalOrder] = {
            s: removal_order([r.read for r in of]) for s, of in self.readings.items()
        }

    @property
    def costs(self) -> dict[int, tuple[float, ...]]:
        """Strand → what it costs once 0, 1, … of its features are gone."""
        return {strand: trace.costs for strand, trace in self.traces.items()}

    def _reading(self, reader: Reader, moments: Tensor, gram: Tensor, listening: ReaderRecorder) -> CompensatedReader:
        bias = listening.bias_of(reader.weight)
        norm = self._norms.get(reader.weight)
        mean = norm.mean if norm is not None and bias is None else None
        shift = reader.axis == 1 and (bias or mean) is not None  # behind a transposed one it depends on the place
        return CompensatedReader(
            reader, ReaderStatistics(moments, gram, shift), bias if shift else None, mean if shift else None
        )

    def built(self, widths: Mapping[int, int]) -> Fold:
        """The network with so many features left in each wire."""
        kept = {wire.strand: list(range(wire.size)) for wire in self.prepared.wires}
        kept |= {strand: self.traces[strand].kept(width) for strand, width in widths.items()}
        own = dict(self.prepared.model.named_parameters()) | dict(self.prepared.model.named_buffers())
        new: dict[str, Tensor] = {}
        groups: dict[str, tuple[tuple[int, ...], ...]] = {
            wire.name: tuple((i,) for i in range(wire.size)) for wire in self.prepared.wires
        }
        for wire in self.wires:
            if len(kept[wire.strand]) < wire.size:
                for k, reading in enumerate(self.readings[wire.strand]):
                    shares, constants = reconstruction(reading.read, kept[wire.strand])
                    _rewire(new, own, reading, shares, constants, kept[wire.strand])
                    if not k:
                        groups[wire.name] = _groups(reading.read, shares, kept[wire.strand])
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
    """Let one reader read the features that stay instead of all."""

    def tensor(name: str) -> Tensor:
        return new.setdefault(name, own[name].detach().to("cpu", torch.float64, copy=True))

    reader = reading.reader
    weight = tensor(reader.weight)
    columns = reader.columns(weight)
    constant = (columns.movedim(0, -1) @ constants).movedim(1, 0).flatten(1).sum(1)  # over copies and places
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
    """Every feature that goes stands beside the one that takes over most of it."""
    spread = read.moments.diagonal()[kept].sqrt()
    nearest = (shares.abs() * spread).argmax(1).tolist()
    return tuple(tuple(i for i, k in enumerate(nearest) if k == at) for at in range(len(kept)))


def _gram(reader: Reader, weight: Tensor) -> Float[Tensor, "features features"]:
    """Inner products of a reader's columns."""
    columns = reader.columns(weight).flatten(1)
    return columns @ columns.T
