"""Triton kernels for convolutions of many networks in one launch, each with its own images and weights.

Images are (networks, images, height, width, channels), weights (networks, rows, columns, in, out), both contiguous. One
kernel computes the forward pass and, in reverse, the gradient of the images; a second one the gradient of the weights.
Each is a matrix product whose left rows are gathered pixel by pixel, so the images are never unfolded in memory. There
are no atomics: the same inputs give the same bits.
"""

# pyrefly: ignore-errors
from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Number of programs of the weight gradient that fill a large GPU.
BUSY = 512


@dataclass(frozen=True)
class Tile:
    """The tiling of a product: rows, columns and depth of a tile, warps per program, and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@triton.jit
def _pixel(
    rows, tap,
    IN_H: tl.constexpr, IN_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The input pixel that an output pixel meets under one tap of the kernel, and whether there is one."""
    n, p, q = rows // (OUT_H * OUT_W), rows // OUT_W % OUT_H, rows % OUT_W
    r, s = tap // COLUMNS, tap % COLUMNS
    if BACKWARD:
        up, left = p + PAD - r, q + PAD - s
        h, w = up // STRIDE, left // STRIDE
        inside = (up >= 0) & (left >= 0) & (h < IN_H) & (w < IN_W)
        if STRIDE > 1:
            inside = inside & (up % STRIDE == 0) & (left % STRIDE == 0)
    else:
        h, w = p * STRIDE + r - PAD, q * STRIDE + s - PAD
        inside = (h >= 0) & (w >= 0) & (h < IN_H) & (w < IN_W)
    return (n * IN_H + h) * IN_W + w, inside


@triton.jit
def _convolve(
    x, weight, y, images,
    IN_H: tl.constexpr, IN_W: tl.constexpr, IN_C: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, OUT_C: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BACKWARD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    network = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (OUT_C + BN - 1) // BN
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    o = tl.program_id(0) % across * BN + tl.arange(0, BN)
    total = images * OUT_H * OUT_W
    x += network * images * IN_H * IN_W * IN_C
    weight += network * ROWS * COLUMNS * IN_C * OUT_C
    acc = tl.zeros((BM, BN), tl.float32)
    blocks: tl.constexpr = (IN_C + BK - 1) // BK
    for i in range(ROWS * COLUMNS * blocks):
        tap = i // blocks
        c = i % blocks * BK + tl.arange(0, BK)
        pixel, inside = _pixel(m, tap, IN_H, IN_W, OUT_H, OUT_W, COLUMNS, STRIDE, PAD, BACKWARD)
        left = tl.load(
            x + pixel[:, None] * IN_C + c[None, :],
            mask=(inside & (m < total))[:, None] & (c < IN_C)[None, :],
            other=0.0,
        )
        if BACKWARD:  # the weights are (taps, OUT_C, IN_C) as seen from here
            right = tl.load(
                weight + (tap * OUT_C + o)[:, None] * IN_C + c[None, :],
                mask=(o < OUT_C)[:, None] & (c < IN_C)[None, :],
                other=0.0,
            )
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        else:
            right = tl.load(
                weight + (tap * IN_C + c)[:, None] * OUT_C + o[None, :],
                mask=(c < IN_C)[:, None] & (o < OUT_C)[None, :],
                other=0.0,
            )
            acc = tl.dot(left, right, acc, input_precision="ieee")
    y += network * total * OUT_C
    place = y + m[:, None] * OUT_C + o[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=(m < total)[:, None] & (o < OUT_C)[None, :])


@triton.jit
def _weight_gradient(
    x, dy, dw, images, networks,
    IN_H: tl.constexpr, IN_W: tl.constexpr, IN_C: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, OUT_C: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    network, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    taps: tl.constexpr = ROWS * COLUMNS
    across: tl.constexpr = (OUT_C + BN - 1) // BN
    tap = tl.program_id(0) % taps  # neighbours in time share dy
    tile = tl.program_id(0) // taps
    c = tile // across * BM + tl.arange(0, BM)
    o = tile % across * BN + tl.arange(0, BN)
    total = images * OUT_H * OUT_W
    x += network * images * IN_H * IN_W * IN_C
    dy += network * total * OUT_C
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(STEPS):
        m = (part * STEPS + i) * BK + tl.arange(0, BK)
        pixel, inside = _pixel(m, tap, IN_H, IN_W, OUT_H, OUT_W, COLUMNS, STRIDE, PAD, False)
        left = tl.load(
            x + pixel[:, None] * IN_C + c[None, :],
            mask=(inside & (m < total))[:, None] & (c < IN_C)[None, :],
            other=0.0,
        )
        right = tl.load(
            dy + m[:, None] * OUT_C + o[None, :], mask=(m < total)[:, None] & (o < OUT_C)[None, :], other=0.0
        )
        acc = tl.dot(tl.trans(left), right, acc, input_precision="ieee")
    dw += (part * networks + network) * taps * IN_C * OUT_C
    tl.store(dw + (tap * IN_C + c)[:, None] * OUT_C + o[None, :], acc, mask=(c < IN_C)[:, None] & (o < OUT_C)[None, :])


def convolve(x: Tensor, weight: Tensor, stride: int, pad: int, tile: Tile | None = None) -> Tensor:
    """Images (K, N, H, W, C) under weights (K, R, S, C, O): (K, N, P, Q, O)."""
    _, _, h, w, c = x.shape
    rows, columns, out = weight.shape[1], weight.shape[2], weight.shape[4]
    size = ((h + 2 * pad - rows) // stride + 1, (w + 2 * pad - columns) // stride + 1)
    return _launch(x, weight, (h, w, c), (*size, out), stride, pad, False, tile)


def image_gradient(
    dy: Tensor, weight: Tensor, size: tuple[int, int], stride: int, pad: int, tile: Tile | None = None
) -> Tensor:
    """The gradient of the images of `convolve`, whose height and width are `size`."""
    _, _, p, q, o = dy.shape
    return _launch(dy, weight, (p, q, o), (*size, weight.shape[3]), stride, pad, True, tile)


def _launch(
    x: Tensor, weight: Tensor, inside: tuple[int, ...], outside: tuple[int, ...], stride: int, pad: int,
    backward: bool, tile: Tile | None,
) -> Tensor:  # fmt: skip
    assert x.is_contiguous()  # the kernels walk through memory in order
    assert weight.is_contiguous()
    networks, images = x.shape[:2]
    tile = tile or _tile(inside[2], outside[2])
    y = torch.empty(networks, images, *outside, dtype=x.dtype, device=x.device)
    grid = (ceil(images * outside[0] * outside[1] / tile.rows) * ceil(outside[2] / tile.columns), networks)
    _convolve[grid](
        x, weight, y, images, *inside, *outside, weight.shape[1], weight.shape[2], stride, pad, backward,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def weight_gradient(
    x: Tensor, dy: Tensor, window: tuple[int, int], stride: int, pad: int, tile: Tile | None = None
) -> Tensor:
    """The gradient of the weights of `convolve` in single precision, (K, R, S, C, O)."""
    assert x.is_contiguous()
    assert dy.is_contiguous()
    networks, images, h, w, c = x.shape
    p, q, o = dy.shape[2:]
    tile = tile or _weight_tile(c, o)
    programs = window[0] * window[1] * ceil(c / tile.rows) * ceil(o / tile.columns)
    steps = ceil(images * p * q / tile.depth)
    parts = max(1, min(ceil(BUSY / (programs * networks)), steps // 4))
    steps = ceil(steps / parts)
    dw = torch.empty(parts, networks, *window, c, o, device=x.device)
    _weight_gradient[(programs, networks, parts)](
        x, dy, dw, images, networks, h, w, c, p, q, o, *window, stride, pad, steps,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dw[0] if parts == 1 else dw.sum(0)


def _tile(inside: int, outside: int) -> Tile:
    """The fastest tiling measured on an H200; with three stages of 128 columns, two programs run at a time."""
    columns = max(16, min(256, triton.next_power_of_2(outside)))
    depth = max(16, min(64, triton.next_power_of_2(inside)))
    return Tile(128, columns, depth, 8 if columns >= 128 else 4, 3)


def _weight_tile(inside: int, outside: int) -> Tile:
    rows = max(16, min(128, triton.next_power_of_2(inside)))
    columns = max(16, min(128, triton.next_power_of_2(outside)))
    return Tile(rows, columns, 64, 8 if rows * columns >= 128 * 128 else 4, 3)
