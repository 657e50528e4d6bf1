"""Merging: features of wires merged one pair at a time, the weights and all live distances kept up to date.

Merging in one wire shortens the slices of its neighbours: in a weight of both, two slices become one. For the Gram
matrix of a neighbour that is an update of low rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from intertwine.fold.distances import Array, Distances
from intertwine.fold.effects import Effects
from intertwine.fold.options import Options
from intertwine.fold.sites import Foldable, Site
from intertwine.shapes import Float


class Merging:
    """The state of folding: which feature is in which group, and how far apart those that are left are."""

    def __init__(self, wires: Sequence[Foldable], options: Options) -> None:
        self._effects = Effects(wires, options.bias) if options.rows == "effect" else None
        wires = self._effects.wires if self._effects else wires
        self.wires, self.options = tuple(wires), options
        self.groups = [[[i] for i in range(wire.size)] for wire in wires]  # empty: merged into another
        self.alive = [np.ones(wire.size, bool) for wire in wires]
        # how many features each one stands for, or how much it is read
        self.counts = self._effects.weights if self._effects else [np.ones(wire.size) for wire in wires]
        self.live: dict[int, Distances] = {}  # wires whose distances are kept up to date
        self.stale: set[int] = set()
        self._number = {wire.strand: i for i, wire in enumerate(wires)}
        self._met = {(id(s.piece), s.dim): s for wire in wires for s in wire.sites}
        # a layer from a wire to itself changes its own slices along their length: its distances are measured anew
        self._loops = [len({id(s.piece) for s in wire.sites}) < len(wire.sites) for wire in wires]
        # views of the working tensors: a merge touches short slices, where arrays of numpy are quicker
        self._views = [[np.moveaxis(s.piece.data.numpy(), s.dim, 0) for s in wire.sites] for wire in wires]
        self._beside = [[self._neighbours(site) for site in wire.sites] for wire in wires]

    # -- distances -------------------------------------------------------------------------------------------------

    def distances(self, w: int) -> Distances:
        """The distances of a wire, up to date; they stay so until they are dropped."""
        if w not in self.live:
            follow = self.options.maximum == "recompute"
            self.live[w] = Distances(self._grams(w), self.counts[w], self.alive[w], self.options.rows, follow)
        elif w in self.stale:
            if self._loops[w]:
                self.live[w].grams = self._grams(w)
            self.live[w].rebuild()
        self.stale.discard(w)
        return self.live[w]

    def drop(self, w: int) -> None:
        """Stop keeping the distances of a wire."""
        self.live.pop(w, None)
        self.stale.discard(w)

    def _grams(self, w: int) -> dict[str, Array]:
        grams: dict[str, Array] = {}
        for site in self.wires[w].sites:
            if self.measured(site):
                rows = slices(site.piece.data, site.dim).numpy()
                gram = rows @ rows.T  # of an array and itself numpy makes one half, and copies it
                kind = _kind(site)
                grams[kind] = grams[kind] + gram if kind in grams else gram
        return grams

    def measured(self, site: Site) -> bool:
        """Whether distances look at a site."""
        if site.role == "read":
            return self.options.terms == "in+out" and site.piece.counted is not None
        return site.piece.counted == "in" or (site.piece.counted == "bias" and self.options.bias)

    # -- merging ---------------------------------------------------------------------------------------------------

    def merge(self, w: int, m: int, n: int) -> None:
        """Merge feature n of a wire into feature m."""
        shares = self.counts[w][[m, n]] / self.counts[w][[m, n]].sum()
        if w in self.live:
            self.live[w].merge(m, n)
        else:
            self.counts[w][m] += self.counts[w][n]
            self.counts[w][n], self.alive[w][n] = 1.0, False
        for site, rows, beside in zip(self.wires[w].sites, self._views[w], self._beside[w], strict=True):
            a, b = (1.0, 1.0) if site.added else (float(shares[0]), float(shares[1]))
            for dim, other in beside:
                self._follow(site, dim, other, m, n, a, b)
            rows[m] = rows[m] + rows[n] if site.added else a * rows[m] + b * rows[n]
            rows[n] = 0.0
        if self._loops[w] and w in self.live:
            self.stale.add(w)
        self.groups[w][m] += self.groups[w][n]
        self.groups[w][n] = []

    def _neighbours(self, site: Site) -> list[tuple[int, Site]]:
        """The sites of other wires in the same piece whose distances look at it, each with its dimension there."""
        met = ((dim, self._met.get((id(site.piece), dim))) for dim in range(site.piece.data.ndim) if dim != site.dim)
        return [(dim, other) for dim, other in met if other is not None and self.measured(other)]

    def _follow(self, site: Site, dim: int, other: Site, m: int, n: int, a: float, b: float) -> None:
        """Update the Gram matrix of another wire in the same piece, before two slices of it become one."""
        w = self._number[site.piece.block.leaf(dim).strand]
        if w not in self.live:
            return
        self.stale.add(w)
        if self._loops[w]:
            return
        at = dim - (dim > site.dim)
        first, second = (slices(site.piece.data.select(site.dim, i), at) for i in (m, n))
        left = torch.cat([(a * a - 1) * first + a * b * second, a * b * first + (b * b - 1) * second], 1)
        gram = torch.from_numpy(self.live[w].grams[_kind(other)])
        gram.addmm_(left, torch.cat([first, second], 1).T)

    def settle(self) -> None:
        """Leave the working tensors as the smaller network is to have them; nothing can be merged afterwards."""
        if self._effects is not None:
            self._effects.settle(self.groups)

    def kept(self, w: int) -> list[int]:
        """The features that are left, in their order."""
        return np.flatnonzero(self.alive[w]).tolist()

    def merged(self, w: int) -> tuple[tuple[int, ...], ...]:
        """The groups of a wire: the features behind every one that is left."""
        return tuple(tuple(sorted(self.groups[w][i])) for i in self.kept(w))


def slices(x: Tensor, dim: int) -> Float[Tensor, "features entries"]:
    """One row per index of a dimension."""
    return x.movedim(dim, 0).reshape(x.shape[dim], -1)


def _kind(site: Site) -> str:
    return "sum" if site.added else "mean"
