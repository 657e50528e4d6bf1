"""The largest of many Gram matrices on a GPU: Kᵢⱼ = max over channels c of Σ over positions of x[c, i] · x[c, j].

One program holds one tile of K and walks through all channels, so that nothing but K is ever written. Tiles below the
diagonal are the mirror image of those above it.
"""

# pyrefly: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Tiles of rows whose programs run near one another, so that they find each other's rows in the cache.
GROUP = tl.constexpr(8)


@triton.jit
def _place(tiles):
    """The row and the column of a program's tile."""
    group = tl.program_id(0) // (GROUP * tiles) * GROUP
    high = tl.minimum(tiles - group, GROUP)
    within = tl.program_id(0) % (GROUP * tiles)
    return group + within % high, within // high


@triton.jit
def _store(out, best, m, n, samples):
    at = m.to(tl.int64)[:, None] * samples + n[None, :]
    tl.store(out + at, best, mask=(m < samples)[:, None] & (n < samples)[None, :])


@triton.jit
def _by_products(
    x, out, samples, C: tl.constexpr, P: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, HOW: tl.constexpr
):
    """Many positions: products of tiles. A row beyond the last sample reads the last one and is not stored."""
    row, column = _place(tl.cdiv(samples, B))
    if column < row:
        return
    m, n = row * B + tl.arange(0, B), column * B + tl.arange(0, B)
    k = tl.arange(0, BK)
    left = x + tl.minimum(m, samples - 1)[:, None] * P + k[None, :]
    right = x + tl.minimum(n, samples - 1)[None, :] * P + k[:, None]
    best = tl.full((B, B), float("-inf"), tl.float32)
    for _ in range(C):
        total = tl.zeros((B, B), tl.float32)
        for i in range(0, P, BK):
            if P % BK == 0:
                a, b = tl.load(left + i), tl.load(right + i)
            else:
                a = tl.load(left + i, mask=(k < P - i)[None, :], other=0.0)
                b = tl.load(right + i, mask=(k < P - i)[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=HOW)
        best = tl.maximum(best, total)
        left += samples * P
        right += samples * P
    _store(out, best, m, n, samples)
    if column > row:
        _store(out, tl.trans(best), n, m, samples)


@triton.jit
def _by_sums(x, out, samples, C: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    """Few positions: outer products of columns."""
    row, column = _place(tl.cdiv(samples, B))
    if column < row:
        return
    m, n = row * B + tl.arange(0, B), column * B + tl.arange(0, B)
    left, right = x + tl.minimum(m, samples - 1) * P, x + tl.minimum(n, samples - 1) * P
    best = tl.full((B, B), float("-inf"), tl.float32)
    for _ in range(C):
        total = tl.zeros((B, B), tl.float32)
        for i in tl.static_range(P):
            total += tl.load(left + i)[:, None] * tl.load(right + i)[None, :]
        best = tl.maximum(best, total)
        left += samples * P
        right += samples * P
    _store(out, best, m, n, samples)
    if column > row:
        _store(out, tl.trans(best), n, m, samples)


def max_gram(x: Tensor, precision: str = "ieee") -> Tensor:
    """K (samples, samples) of x (channels, samples, positions), contiguous and in single precision.

    `precision` is that of products: "ieee" (exact in single precision), "tf32x3" (nearly so) or "tf32" (ten bits).
    """
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    channels, samples, positions = x.shape
    assert samples * positions < 2**31  # offsets within a channel
    out = torch.empty(samples, samples, device=x.device)
    if positions < 16:
        block = 64
        _by_sums[(triton.cdiv(samples, block) ** 2,)](x, out, samples, channels, positions, block, num_warps=4)
        return out
    block, depth, warps, stages = tiles(positions, precision)
    grid = (triton.cdiv(samples, block) ** 2,)
    _by_products[grid](
        x, out, samples, channels, positions, block, depth, precision, num_warps=warps, num_stages=stages
    )
    return out


def tiles(positions: int, precision: str) -> tuple[int, int, int, int]:
    """Side of a tile, positions per step, warps and steps in flight: the fastest of those tried on an H200."""
    depth = 32 if positions >= 32 else 16
    if precision == "tf32" and 32 < positions <= 64:
        return 128, 64, 8, 3  # a channel in one step
    return {"ieee": (64, depth, 8, 3), "tf32x3": (128, depth, 8, 3), "tf32": (128, depth, 8, 4)}[precision]
