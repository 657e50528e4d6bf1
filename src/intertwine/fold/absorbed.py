"""Absorbed: a network in which features can be absorbed, and the smaller network for any widths of its wires."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from intertwine.features.batches import Call
from intertwine.fold.absorbing import Read, Trace, absorb, coefficients
from intertwine.fold.cutting import widened
from intertwine.fold.fold import as_fold
from intertwine.fold.folded import Fold
from intertwine.fold.prepared import Prepared
from intertwine.fold.readers import Listening, Reader, listened, readers_of
from intertwine.fold.sites import Skipped
from intertwine.shapes import Float

UNHEARD = "a layer that reads its features was not seen while inputs passed, so that nothing can take them over"


@dataclass(frozen=True)
class Reading:
    """One reader of a wire, what is known of it, and where a constant that it is to add can go."""

    reader: Reader
    read: Read
    bias: str | None  # a constant is added to this bias
    mean: str | None  # or taken off this running mean, that of the BatchNorm behind the layer


class Absorbing:
    """Everything about a network that absorbing needs, found in one pass over some inputs."""

    def __init__(self, prepared: Prepared, seen_by: nn.Module, batches: Iterable[Call]) -> None:
        """`seen_by`: the network through which the inputs go, the prepared one or one with other statistics."""
        self.prepared = prepared
        readers = {wire.strand: readers_of(wire, prepared.symmetry) for wire in prepared.wires}
        flat = [(strand, reader) for strand, of in readers.items() for reader in of]
        listening = listened(seen_by, [reader for _, reader in flat], batches)
        unheard = {s for (s, _), moments in zip(flat, listening.moments, strict=True) if not moments.rows}
        self.wires = tuple(wire for wire in prepared.wires if wire.strand not in unheard)
        self.skipped = tuple(Skipped(w.name, UNHEARD) for w in prepared.wires if w.strand in unheard)
        # of a layer before a BatchNorm: with its scale, which what the layer gives is multiplied by
        folded = {tensor.name: tensor.data for tensor in prepared.bench.tensors}
        self._norms = {norm.layer.weight: norm for norm in prepared.norms if norm.layer is not None}
        self.readings: dict[int, list[Reading]] = {}
        for (strand, reader), moments in zip(flat, listening.moments, strict=True):
            if strand not in unheard:
                found = self._reading(reader, moments.mean(), _gram(reader, folded[reader.weight]), listening)
                self.readings.setdefault(strand, []).append(found)
        self.traces: dict[int, Trace] = {s: absorb([r.read for r in of]) for s, of in self.readings.items()}

    @property
    def costs(self) -> dict[int, tuple[float, ...]]:
        """Strand → what it costs once 0, 1, … of its features are gone."""
        return {strand: trace.costs for strand, trace in self.traces.items()}

    def _reading(self, reader: Reader, moments: Tensor, gram: Tensor, listening: Listening) -> Reading:
        bias = listening.bias_of(reader.weight)
        norm = self._norms.get(reader.weight)
        mean = norm.mean if norm is not None and bias is None else None
        shift = reader.axis == 1 and (bias or mean) is not None  # behind a transposed one it depends on the place
        return Reading(reader, Read(moments, gram, shift), bias if shift else None, mean if shift else None)

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
                    shares, constants = coefficients(reading.read, kept[wire.strand])
                    _rewire(new, own, reading, shares, constants, kept[wire.strand])
                    if not k:
                        groups[wire.name] = _groups(reading.read, shares, kept[wire.strand])
        wide = widened(self.prepared.model, new)
        return as_fold(self.prepared, wide, kept, groups, dict.fromkeys(groups, "absorbed"), self.skipped)


def _rewire(
    new: dict[str, Tensor],
    own: Mapping[str, Tensor],
    reading: Reading,
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


def _groups(read: Read, shares: Float[Tensor, "features kept"], kept: list[int]) -> tuple[tuple[int, ...], ...]:
    """Every feature that goes stands beside the one that takes over most of it."""
    spread = read.moments.diagonal()[kept].sqrt()
    nearest = (shares.abs() * spread).argmax(1).tolist()
    return tuple(tuple(i for i, k in enumerate(nearest) if k == at) for at in range(len(kept)))


def _gram(reader: Reader, weight: Tensor) -> Float[Tensor, "features features"]:
    """Inner products of a reader's columns."""
    columns = reader.columns(weight).flatten(1)
    return columns @ columns.T
