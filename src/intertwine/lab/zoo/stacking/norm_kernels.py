"""Triton kernels for the layers between two convolutions, for many networks in one launch.

They compute z = scale · x + shift per channel, add the skip connection, apply a ReLU-like activation (the unit) and, if
pooling follows, take the maximum of every 2 × 2 pixels. Images are (networks, images, height, width, channels),
contiguous. The forward pass reads the images once; the backward pass recomputes z. Sums over pixels are computed per
tile and added later, so the same inputs give the same bits.
"""

# pyrefly: ignore-errors
from __future__ import annotations

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Numbers that a program holds at once, and tiles that it adds before it writes its sums.
HELD, TILES = 4096, 16


@triton.jit
def _unit(z, slope):
    return tl.where(z > 0, z, z * slope)


@triton.jit
def _affine(x, at, mask, scale, shift):
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    return value, value * scale[None, :] + shift[None, :]


@triton.jit
def _corner(rows, WIDTH: tl.constexpr):
    """The first of the four pixels of each pooled one; images of even height follow one another without a gap."""
    return rows // (WIDTH // 2) * 2 * WIDTH + rows % (WIDTH // 2) * 2


@triton.jit
def _four(x, at, mask, scale, shift, WIDTH: tl.constexpr, C: tl.constexpr):
    """x and z of the four pixels of each pooled one, and the largest z."""
    x0, z0 = _affine(x, at, mask, scale, shift)
    x1, z1 = _affine(x, at + C, mask, scale, shift)
    x2, z2 = _affine(x, at + WIDTH * C, mask, scale, shift)
    x3, z3 = _affine(x, at + (WIDTH + 1) * C, mask, scale, shift)
    return x0, x1, x2, x3, z0, z1, z2, tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3))


@triton.jit
def _place(C: tl.constexpr, BC: tl.constexpr):
    """The network, the tile of rows and the channels of a program."""
    across: tl.constexpr = (C + BC - 1) // BC
    return tl.program_id(1).to(tl.int64), tl.program_id(0) // across, tl.program_id(0) % across * BC + tl.arange(0, BC)


@triton.jit
def _per_channel(values, network, c, C: tl.constexpr):
    return tl.load(values + network * C + c, mask=c < C, other=0.0)


@triton.jit
def _forward(
    x, skip, y, scale, shift, slope, rows,
    WIDTH: tl.constexpr, C: tl.constexpr, SKIP: tl.constexpr, POOL: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    network, tile, c = _place(C, BC)
    m = tile * BM + tl.arange(0, BM)
    mask = (m < rows)[:, None] & (c < C)[None, :]
    a = _per_channel(scale, network, c, C)
    b = _per_channel(shift, network, c, C)
    y += network * rows * C
    if POOL:
        x += network * rows * 4 * C
        at = _corner(m, WIDTH)[:, None] * C + c[None, :]
        _, _, _, _, _, _, _, z = _four(x, at, mask, a, b, WIDTH, C)
    else:
        x += network * rows * C
        _, z = _affine(x, m[:, None] * C + c[None, :], mask, a, b)
    if SKIP:
        z += tl.load(skip + network * rows * C + m[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y + m[:, None] * C + c[None, :], _unit(z, slope).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _reduce(
    x, y, dy, sums, scale, shift, mean, slope, rows, tiles,
    WIDTH: tl.constexpr, C: tl.constexpr, SKIP: tl.constexpr, POOL: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Per channel the sums over pixels of dz and of dz · (x - mean)."""
    network, tile, c = _place(C, BC)
    a = _per_channel(scale, network, c, C)
    b = _per_channel(shift, network, c, C)
    mu = _per_channel(mean, network, c, C)[None, :]
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    x += network * rows * (4 if POOL else 1) * C
    y += network * rows * C
    dy += network * rows * C
    for i in range(STEPS):
        m = (tile * STEPS + i) * BM + tl.arange(0, BM)
        mask = (m < rows)[:, None] & (c < C)[None, :]
        at = m[:, None] * C + c[None, :]
        dz = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        if POOL:
            corner = _corner(m, WIDTH)[:, None] * C + c[None, :]
            x0, x1, x2, x3, z0, z1, z2, z = _four(x, corner, mask, a, b, WIDTH, C)
            value = tl.where(z0 == z, x0, tl.where(z1 == z, x1, tl.where(z2 == z, x2, x3)))
        elif SKIP:  # the sign of what came out tells on which side of the unit z lay
            value, _ = _affine(x, at, mask, a, b)
            z = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        else:
            value, z = _affine(x, at, mask, a, b)
        dz = tl.where(z > 0, dz, dz * slope)
        first += dz
        second += tl.where(mask, dz * (value - mu), 0.0)
    place = sums + ((network * tiles + tile) * 2) * C + c
    tl.store(place, tl.sum(first, 0), mask=c < C)
    tl.store(place + C, tl.sum(second, 0), mask=c < C)


@triton.jit
def _part(dx, x, dz, at, mask, chosen, a, b, c):
    """Write dx = a · dz + b · x + c of one of four pooled pixels; only the chosen one has a gradient."""
    grad = tl.where(chosen, dz, 0.0) * a[None, :] + x * b[None, :] + c[None, :]
    tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    x, y, dy, dx, dskip, scale, shift, factor, linear, constant, slope, rows,
    WIDTH: tl.constexpr, C: tl.constexpr, SKIP: tl.constexpr, POOL: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = factor · dz + linear · x + constant per channel, and dz itself for the skip connection."""
    network, tile, c = _place(C, BC)
    m = tile * BM + tl.arange(0, BM)
    mask = (m < rows)[:, None] & (c < C)[None, :]
    a = _per_channel(scale, network, c, C)
    b = _per_channel(shift, network, c, C)
    f = _per_channel(factor, network, c, C)
    g = _per_channel(linear, network, c, C)
    h = _per_channel(constant, network, c, C)
    at = m[:, None] * C + c[None, :]
    x += network * rows * (4 if POOL else 1) * C
    dx += network * rows * (4 if POOL else 1) * C
    dz = tl.load(dy + network * rows * C + at, mask=mask, other=0.0).to(tl.float32)
    if POOL:
        at = _corner(m, WIDTH)[:, None] * C + c[None, :]
        x0, x1, x2, x3, z0, z1, z2, z = _four(x, at, mask, a, b, WIDTH, C)
        dz = tl.where(z > 0, dz, dz * slope)
        is0 = z0 == z  # the first of equals, as torch has it
        is1 = (z1 == z) & (z0 != z)
        is2 = (z2 == z) & (z1 != z) & (z0 != z)
        is3 = (z2 != z) & (z1 != z) & (z0 != z)
        _part(dx, x0, dz, at, mask, is0, f, g, h)
        _part(dx, x1, dz, at + C, mask, is1, f, g, h)
        _part(dx, x2, dz, at + WIDTH * C, mask, is2, f, g, h)
        _part(dx, x3, dz, at + (WIDTH + 1) * C, mask, is3, f, g, h)
    else:
        value, z = _affine(x, at, mask, a, b)
        if SKIP:
            z = tl.load(y + network * rows * C + at, mask=mask, other=0.0).to(tl.float32)
        dz = tl.where(z > 0, dz, dz * slope)
        if SKIP:
            tl.store(dskip + network * rows * C + at, dz.to(dskip.dtype.element_ty), mask=mask)
        grad = dz * f[None, :] + value * g[None, :] + h[None, :]
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _moments(x, sums, rows, tiles, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr):
    """Per channel the sum over pixels of x and of its square."""
    network, tile, c = _place(C, BC)
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    x += network * rows * C
    for i in range(STEPS):
        m = (tile * STEPS + i) * BM + tl.arange(0, BM)
        mask = (m < rows)[:, None] & (c < C)[None, :]
        value = tl.load(x + m[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        first += value
        second += value * value
    place = sums + ((network * tiles + tile) * 2) * C + c
    tl.store(place, tl.sum(first, 0), mask=c < C)
    tl.store(place + C, tl.sum(second, 0), mask=c < C)


def _dense(*tensors: Tensor) -> None:
    """Check that tensors are contiguous, as the kernels assume."""
    assert all(t.is_contiguous() for t in tensors)


def moments(x: Tensor) -> Tensor:
    """Sums and sums of squares per network and channel of images (K, N, H, W, C): (K, 2, C)."""
    _dense(x)
    rows, block, grid, tiles = _cut(x, x.shape[1:4].numel(), TILES)
    sums = torch.empty(len(x), tiles, 2, x.shape[-1], device=x.device)
    _moments[grid](x, sums, rows, tiles, x.shape[-1], *block, TILES)
    return sums.sum(1)


def affine_unit(
    x: Tensor, scale: Tensor, shift: Tensor, slope: float, skip: Tensor | None = None, pool: bool = False
) -> Tensor:
    """unit(scale · x + shift + skip), pooled; scale and shift are (K, C) in single precision."""
    _dense(x, scale, shift, *(() if skip is None else (skip,)))
    k, n, h, w, c = x.shape
    assert not pool or h % 2 == w % 2 == 0  # see `_corner`
    assert skip is None or skip.shape == x.shape
    y = torch.empty(k, n, h // 2, w // 2, c, dtype=x.dtype, device=x.device) if pool else torch.empty_like(x)
    rows, block, grid, _ = _cut(y, y.shape[1:4].numel(), 1, 4 if pool else 1)
    _forward[grid](x, x if skip is None else skip, y, scale, shift, slope, rows, w, c, skip is not None, pool, *block)
    return y


def unit_sums(
    x: Tensor, y: Tensor, dy: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, slope: float, skip: bool, pool: bool
) -> Tensor:
    """Per channel the sums of dz and of dz · (x - mean), (K, 2, C), where dz is the gradient before the unit."""
    _dense(x, y, dy, scale, shift, mean)
    rows, block, grid, tiles = _cut(dy, dy.shape[1:4].numel(), TILES, 4 if pool else 1)
    sums = torch.empty(len(x), tiles, 2, x.shape[-1], device=x.device)
    _reduce[grid](
        x, y, dy, sums, scale, shift, mean, slope, rows, tiles, x.shape[3], x.shape[-1], skip, pool, *block, TILES
    )
    return sums.sum(1)


def affine_unit_gradient(
    x: Tensor, y: Tensor, dy: Tensor, scale: Tensor, shift: Tensor, slope: float, skip: bool, pool: bool,
    factor: Tensor, linear: Tensor, constant: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dx = factor · dz + linear · x + constant, and dz where a skip connection came in."""
    _dense(x, y, dy, scale, shift, factor, linear, constant)
    dx, dskip = torch.empty_like(x), torch.empty_like(x) if skip else None
    rows, block, grid, _ = _cut(dy, dy.shape[1:4].numel(), 1, 4 if pool else 1)
    _backward[grid](
        x, y, dy, dx, dx if dskip is None else dskip, scale, shift, factor, linear, constant, slope, rows,
        x.shape[3], x.shape[-1], skip, pool, *block,
    )  # fmt: skip
    return dx, dskip


def _cut(y: Tensor, rows: int, steps: int, fold: int = 1) -> tuple[int, tuple[int, int], tuple[int, int], int]:
    """The rows of one network, the rows and channels of a program, the grid, and the number of tiles along the rows."""
    networks, c = len(y), y.shape[-1]
    wide = min(triton.next_power_of_2(c), 128)
    high = max(1, HELD // wide // fold)
    tiles = ceil(rows / (high * steps))
    return rows, (high, wide), (tiles * ceil(c / wide), networks), tiles
