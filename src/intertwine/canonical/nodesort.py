"""NodeSort, the order of Sorensen's thesis: units sorted by the inner product of their outgoing weights with powers.

The key of a unit is Σ_j w_j p^j over what it feeds into. As printed, every layer's keys are taken from the weights as
they stand, so from two hidden layers on they depend on the order that was to be removed. The sequential version goes
backwards from the output and takes each key after the layer behind it has been sorted.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from intertwine.canonical.blocks import Pieces, Site
from intertwine.canonical.ordering import Ordering
from intertwine.canonical.ranks import refine, value_codes
from intertwine.errors import InputError
from intertwine.shapes import Float, Int


class NodeSort(Ordering):
    """The sequential version. Units with equal keys are told apart as in the lexicographic order."""

    def __init__(self, pieces: Pieces, base: float) -> None:
        super().__init__(pieces)
        self.base = base

    def _by_signs(self) -> bool:
        for s in reversed(self._open()):
            if self._read_signs(s):
                return True
            sites = self.pieces.sites[s]
            known = [x for x in reversed(sites) if self._signed(x.leaf) and self.known(s, x)]
            if not known or ("keys", s, -1) in self.used:
                continue
            self.used.add(("keys", s, -1))  # one key per strand, as in the thesis
            rows = self._ordered_rows(known[0])
            key, size = (inner_product(x, self.base).unsqueeze(-1) for x in (rows, rows.abs()))
            if self._update(s, refine(self.ranks[s], value_codes(key, known[0].block.noise, size))):
                return True
        return super()._by_signs()

    def _ordered_rows(self, site: Site) -> Tensor:
        chunks = [rows.cpu() for rows in self._chunks(site, self._alive(site, own=True), None)]
        return torch.cat(chunks, -1)


def inner_product(rows: Tensor, base: float) -> Float[Tensor, "*copies n"]:
    """Σ_j w_j p^(j−m+1): the thesis's key divided by its largest power, so that no width and no base overflows."""
    m = rows.shape[-1]
    powers = np.exp2(np.log2(base) * (np.arange(m) - (m - 1)))
    # a plain sum along rows rounds each row in the same way, wherever it stands
    return torch.from_numpy((rows.to(torch.float64).contiguous().numpy() * powers).sum(-1))


def printed_permutations(pieces: Pieces, base: float) -> dict[int, Int[Tensor, "*copies n"]]:
    """The order as printed: keys of all layers from the weights as they stand, with powers that may overflow."""
    found = {}
    for s, strand in enumerate(pieces.strands):
        if not (strand.permutes and pieces.sites[s]):
            continue
        site = pieces.sites[s][-1]
        rows = site.rows.reshape(*site.rows.shape[: len(site.front)], -1).cpu()
        found[s] = _printed_key(rows, base, strand.name).argsort(dim=-1, stable=True)
    return found


def _printed_key(rows: Tensor, base: float, wire: str) -> Float[Tensor, "*copies n"]:
    m = rows.shape[-1]
    with np.errstate(over="ignore"):
        powers = np.power(float(base), np.arange(m, dtype=np.float64))
    if not np.isfinite(powers).all():
        raise InputError(
            f"NodeSort as printed multiplies the {m} weights of a unit (wire {wire!r}) by powers of {base}, which "
            f"overflow float64. Use order='nodesort', which is safe for any width and base, or a base nearer to 1."
        )
    return torch.from_numpy((rows.to(torch.float64).contiguous().numpy() * powers).sum(-1))
