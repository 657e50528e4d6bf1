"""Scales that can be read only through each other, fixed together.

When the entries of a block are scaled by products s_h · t_i, neither factor has a length of its own. The logarithms of
the lengths are then fitted by sums of logarithms, over all blocks at once; what is left has one form, whatever the
scales were before, because directions that the fit cannot see change no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.linalg import lsqr
from torch import Tensor

from intertwine.canonical.blocks import SHORTEST, Block, Pieces
from intertwine.shapes import Float, Int
from intertwine.symmetry.element import copies
from intertwine.symmetry.layout import Leaf, base_dims, spread

Free = Callable[[Leaf], Tensor]  # generators × indices of the leaf's strand: exponents of scales that are not known


def tangled(pieces: Pieces, stuck: list[int]) -> list[int]:
    """The strands among the stuck ones that are joined to the first of them through blocks."""
    found, grown = {stuck[0]}, True
    while grown:
        grown = False
        for block in pieces.blocks:
            here = {d.tree.strand for d in block.dims if isinstance(d.tree, Leaf) and any(d.tree.powers)} & set(stuck)
            if here & found and not here <= found:
                found |= here
                grown = True
    return sorted(found)


def balanced(pieces: Pieces, strands: list[int], free: Free) -> Mapping[int, Float[Tensor, "scales *copies n"]]:
    """Strand → the log-scales that bring the lengths in all blocks as near to one as they come."""
    start, total = {}, 0
    for s in strands:
        start[s] = total
        total += pieces.strands[s].scales * int(np.prod([*copies(pieces.strands, s), pieces.strands[s].size]))
    rows, columns, values, goals, count = [], [], [], [], 0
    for block in pieces.blocks:
        terms, goal = _equations(pieces, block, start, free)
        for column, value in terms:
            there = value != 0
            rows.append(count + np.flatnonzero(there))
            columns.append(column[there])
            values.append(value[there])
        goals.append(goal)
        count += len(goal)
    matrix = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), (count, total))
    solution = lsqr(matrix.tocsr(), np.concatenate(goals), atol=1e-15, btol=1e-15, iter_lim=10_000)[0]
    shapes = {s: (pieces.strands[s].scales, *copies(pieces.strands, s), pieces.strands[s].size) for s in strands}
    ends = {s: start[s] + int(np.prod(shape)) for s, shape in shapes.items()}
    return {s: torch.from_numpy(solution[start[s] : ends[s]]).reshape(shapes[s]) for s in strands}


def _equations(
    pieces: Pieces, block: Block, start: Mapping[int, int], free: Free
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """One equation per cell of a block: the exponents of the unknown scales there, and minus its log-length."""
    leaves = [(i, d.tree) for i, d in enumerate(block.dims) if isinstance(d.tree, Leaf)]
    active = [(i, leaf) for i, leaf in leaves if leaf.strand in start and any(leaf.powers) and bool(free(leaf).any())]
    if not active:
        return [], np.zeros(0)
    kept = sorted({p for i, leaf in active for p in (*base_dims(block.dims, i, pieces.strands[leaf.strand].bases), i)})
    rest = tuple(i for i in range(len(block.dims)) if i not in kept)
    length = torch.linalg.vector_norm(block.data, dim=rest, dtype=torch.float64) if rest else block.data.abs().double()
    there = (length > SHORTEST).flatten().cpu().numpy()
    terms = []
    for i, leaf in active:
        places = [kept.index(p) for p in (*base_dims(block.dims, i, pieces.strands[leaf.strand].bases), i)]
        powers = free(leaf)
        first = start[leaf.strand]
        numbers: Int[Tensor, "scales *copies n"] = torch.arange(first, first + powers.numel()).reshape(powers.shape)
        for number, power in zip(numbers, powers, strict=True):
            column = spread(number, places, len(kept)).expand(length.shape)
            value = spread(power, places, len(kept)).expand(length.shape)
            terms.append((column.flatten().numpy()[there], value.flatten().numpy()[there]))
    goal = -np.log(length.flatten().cpu().numpy()[there])
    return terms, goal
