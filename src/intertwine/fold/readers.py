"""Readers: the layers that read the features of a wire, and the second moments of what each one reads.

A layer reads a feature through a slice of its weight, once or, behind a flatten, several times. One pass over some
batches gives, for every reader, how its features vary together; that is all that absorbing needs of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from intertwine.canonical.blocks import cut_block
from intertwine.features.batches import Call, fresh, placed
from intertwine.features.capture import evaluating
from intertwine.fold.sites import Foldable
from intertwine.graph.capture import tied_names
from intertwine.shapes import Float, Int
from intertwine.symmetry.layout import Layout, Tree
from intertwine.symmetry.symmetry import Symmetry

#: The calls through which layers read features, by the number of axes that follow the channels.
LAYERS = {"linear": 0} | {f"conv{kind}{d}d": d for kind in ("", "_transpose") for d in (1, 2, 3)}
#: Rows of one batch that enter the moments of one reader: more say little more, and take longer.
ROWS = 1 << 15


@dataclass(frozen=True, eq=False)
class Reader:
    """A weight that reads a wire along an axis; `positions` on it: one row per feature."""

    weight: str
    axis: int
    positions: Int[Tensor, "features copies"]

    def columns(self, weight: Tensor) -> Float[Tensor, "features copies ..."]:
        """What a weight of this reader does with each feature."""
        return weight.movedim(self.axis, 0)[self.positions.to(weight.device)]


def readers_of(wire: Foldable, symmetry: Symmetry) -> list[Reader]:
    """All readers of a wire."""
    axes = {(s.piece.block.parameter, s.piece.block.dims[s.dim].axis) for s in wire.sites if s.role == "read"}
    return [
        Reader(name, axis, found)
        for name, axis in sorted(axes)
        for found in positions_of(symmetry.layouts[name].axes[axis], wire.strand)
    ]


def positions_of(tree: Tree, strand: int) -> list[Int[Tensor, "features copies"]]:
    """Where the features of a strand lie on an axis, once for every part of the axis that holds them.

    >>> from intertwine.symmetry.layout import Leaf, Plus, Still, Times
    >>> positions_of(Plus((Still(2), Times((Leaf(0, 3), Still(2))))), 0)[0].tolist()
    [[2, 3], [4, 5], [6, 7]]
    """
    blocks = cut_block("", torch.arange(tree.size), Layout((tree,)), 0.0)
    return [b.data.movedim(d, 0).reshape(b.data.shape[d], -1) for b in blocks for d in b.places(strand)]


class Moments:
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


class Listening(TorchFunctionMode):
    """While it is entered, it takes in what some readers of a network read, and which bias each of them adds."""

    def __init__(self, model: nn.Module, readers: Sequence[Reader]) -> None:
        super().__init__()
        tied = tied_names(model)
        self.names = {id(p): tied[name] for name, p in model.named_parameters()}
        self.readers = readers
        self.moments = [Moments(len(reader.positions)) for reader in readers]
        self.biases: dict[str, set[str | None]] = {}  # weight → the biases it was seen with
        self.generator = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        after = LAYERS.get(getattr(func, "__name__", ""))
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
                most = max(ROWS // copies, 1)
                if len(rows) > most:
                    rows = rows[torch.randperm(len(rows), generator=self.generator)[:most].to(rows.device)]
                found = rows[:, reader.positions.flatten().to(rows.device)]
                moments.add(found.unflatten(1, (features, copies)).movedim(2, 1).flatten(0, 1))

    def bias_of(self, weight: str) -> str | None:
        """The parameter that is always added to what a weight makes; None where there is none."""
        found = self.biases.get(weight, {None})
        return next(iter(found)) if len(found) == 1 else None


def listened(model: nn.Module, readers: Sequence[Reader], batches: Iterable[Call]) -> Listening:
    """Run batches through a network, in evaluation mode, and take in what the readers read."""
    listening = Listening(model, readers)
    with evaluating(model), listening:
        for call in batches:
            args, kwargs = fresh(placed(call, model))
            model(*args, **kwargs)
    return listening
