"""Hazards: blocks around other blocks: residual and parallel branches, halves, sharing, windows, writing in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_pieces import Fn, Grow, Pick, axis_of, hazard, like, mix, param, per_channel, same_size, width_of
from torch import Tensor, nn


@hazard("any", nests=1)
def residual(pick: Pick, x: Tensor, inner: Sequence[Grow]) -> nn.Module:
    body, y = inner[0](x)
    back = like(x, y)
    y = back(y)
    body = nn.Sequential(body, back)
    fits = y.shape == x.shape
    style = pick("plain", "project", "scaled", "pre", "inplace", "zeros", "highway")
    if style == "zeros" and x.ndim == 4:
        return Fn(_option_a(x, y), body=body)
    if style == "highway" and fits:
        return Fn(lambda m, x: _highway(m.gate(x).sigmoid(), x, m.body(x)), gate=mix(x, width_of(x)), body=body)
    if style == "inplace" and fits:
        return Fn(lambda m, x: m.body(x).add_(x), body=body)
    if style == "project" or not fits:
        return Fn(lambda m, x: m.short(x) + m.body(x), short=same_size(x, y), body=body)
    if style == "scaled":
        return Fn(lambda m, x: x + m.gamma * m.body(x), gamma=param(*per_channel(x)), body=body)
    if style == "pre":
        return Fn(lambda m, x: torch.relu(x + 0.5 * m.body(x)), body=body)
    return Fn(lambda m, x: x + m.body(x), body=body)


def _highway(gate: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return gate * y + (1 - gate) * x


def _option_a(x: Tensor, y: Tensor) -> Callable[[Any, Tensor], Tensor]:
    """The shortcut without parameters: every other pixel, and zeros for the channels that are missing."""
    more = max(0, y.shape[1] - x.shape[1])
    before = more // 2

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.body(x)
        short = x[:, : y.shape[1]]
        if short.shape[2:] != y.shape[2:]:
            short = short[:, :, ::2, ::2]
        if short.shape[2:] != y.shape[2:]:
            short = F.adaptive_avg_pool2d(short, tuple(y.shape[2:]))
        return y + F.pad(short, (0, 0, 0, 0, before, more - before))

    return forward


@hazard("any", nests=2)
def branches(pick: Pick, x: Tensor, inner: Sequence[Grow]) -> nn.Module:
    """Two branches, brought together by concatenation, sum, product, maximum, choice or quotient."""
    (a, y), (b, z) = inner[0](x), inner[1](x)
    style = pick("cat", "add", "mul", "max", "where", "div", "dense")
    b = nn.Sequential(b, like(y, z))
    z = b(x)
    if style in ("cat", "dense"):
        size = y.shape[2:] if y.ndim == 4 else y.shape[1:2]
        fits = (z.shape[2:] if z.ndim == 4 else z.shape[1:2]) == size and width_of(y) + width_of(z) <= 24
        if not fits:
            b = nn.Sequential(b, same_size(z, y))
        axis = axis_of(y)
        if style == "dense" and x.ndim == y.ndim and x.shape[axis % 2 + 1 :][:1] == y.shape[axis % 2 + 1 :][:1]:
            return Fn(lambda m, x: torch.cat([m.a(x), m.b(x), m.a(x)], axis), a=a, b=b)
        return Fn(lambda m, x: torch.cat([m.a(x), m.b(x)], axis), a=a, b=b)
    if y.shape != z.shape:
        b = nn.Sequential(b, same_size(z, y))
    fn = {
        "add": lambda m, x: m.a(x) - m.b(x),
        "mul": lambda m, x: m.a(x) * m.b(x),
        "max": lambda m, x: torch.maximum(m.a(x), m.b(x)),
        "where": lambda m, x: torch.where(m.a(x) > 0, m.a(x), m.b(x)),
        "div": lambda m, x: m.a(x) / (1 + m.b(x).abs()),
    }[style]
    return Fn(fn, a=a, b=b)


@hazard("any", nests=2)
def halves(pick: Pick, x: Tensor, inner: Sequence[Grow]) -> nn.Module:
    """The channels cut in two, each part treated in its own way, and laid together."""
    axis, n = axis_of(x), width_of(x)
    if n < 3:
        return mix(x, 6)
    cut = pick(n // 2, n // 3, 1)
    pieces = x.split([cut, n - cut], axis)
    (a, y), (b, z) = inner[0](pieces[0]), inner[1](pieces[1])
    a, b = nn.Sequential(a, like(x, y)), nn.Sequential(b, like(x, z))
    y, z = a(pieces[0]), b(pieces[1])
    if (y.ndim == 4 and y.shape[2:] != z.shape[2:]) or (y.ndim == 3 and y.shape[1] != z.shape[1]):
        b = nn.Sequential(b, same_size(z, y))
    only_first = pick(False, True) and y.shape[1:] == pieces[0].shape[1:]

    def forward(m: Any, x: Tensor) -> Tensor:
        first, second = x.split([cut, n - cut], axis)
        return torch.cat([second, m.a(first)], axis) if only_first else torch.cat([m.a(first), m.b(second)], axis)

    return Fn(forward, a=a, b=b)


@hazard("any", nests=1)
def twice(pick: Pick, x: Tensor, inner: Sequence[Grow]) -> nn.Module:
    """One module called twice, one after the other where its sizes allow it, else on two tensors."""
    body, y = inner[0](x)
    style = pick("chain", "both", "outer")
    fn = pick(torch.relu, torch.tanh, lambda v: v)
    if style == "outer" or y.shape != x.shape:
        return Fn(lambda m, x: m.body(x) + m.body(fn(x)), body=body)
    if style == "both":
        return Fn(lambda m, x: torch.cat([m.body(x), m.body(m.map(x))], axis_of(x)), body=body, map=mix(x, width_of(x)))
    return Fn(lambda m, x: m.body(fn(m.body(x))), body=body)


@hazard("image", nests=1)
def windows(pick: Pick, x: Tensor, inner: Sequence[Grow]) -> nn.Module:
    """Roll, cut into windows, run a network on the tokens of each window, and put the image together again."""
    side, shift = 2, pick(0, 1)
    example = F.adaptive_avg_pool2d(x, 4)
    c = x.shape[1]

    def partition(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], c, 2, side, 2, side).permute(0, 2, 4, 3, 5, 1).reshape(-1, side * side, c)

    body, y = inner[0](partition(example))
    if y.ndim != 3 or y.shape[1] != side * side:
        body, y = nn.Linear(c, c), partition(example)
    out = y.shape[2]

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(x, 4)
        x = torch.roll(x, (-shift, -shift), (2, 3)) if shift else x
        y = m.body(partition(x))
        y = y.view(x.shape[0], 2, 2, side, side, out).permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], out, 4, 4)
        return torch.roll(y, (shift, shift), (2, 3)) if shift else y

    return Fn(forward, body=body)


@hazard("any", nests=1)
def in_place(pick: Pick, x: Tensor, inner: Sequence[Grow]) -> nn.Module:
    """Writing into a tensor: activations, sums, slices."""
    axis, n = axis_of(x), width_of(x)
    styles = (
        "relu",
        "add",
        "mul",
        "slice",
        "copy",
        "view",
        "chunk",
        "zero",
        "row",
        "index",
        "buffer",
        "contiguous",
        "counter",
        "fill",
    )
    style = pick(*styles) if n > 2 else "relu"
    body, y = inner[0](x)
    if y.shape != x.shape:
        body = mix(x, n)
    half = n // 2

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.body(x)
        if style == "relu":
            return F.relu_(y) + y
        if style == "add":
            y += x
            return y
        if style == "mul":
            return y.mul_(m.w)
        z = y.clone()
        if style == "slice":
            z.narrow(axis, 0, half).relu_()
        elif style == "copy":
            z.narrow(axis, 0, half).copy_(y.narrow(axis, n - half, half))
        elif style == "view":
            z.flatten(1).tanh_()
        elif style == "row":
            z[:, :1] += 1
        elif style == "contiguous":  # a copy, because what is copied is transposed
            flipped = z.transpose(1, -1)
            same = flipped.contiguous()
            same.mul_(m.w.view(per_channel(z)).transpose(0, -1) if z.ndim == 4 else m.w[:, None])
            z = flipped.transpose(1, -1) + 2 * same.transpose(1, -1)
        elif style == "counter":
            m.count.add_(1)
            m.mean.mul_(0.9).add_(z.mean())
        elif style == "fill":
            z.masked_fill_(z < 0, 0.0).clamp_(max=2.0)
        elif style == "index":
            z[:, torch.tensor([0, 1]) % z.shape[1]] = 0.5
        elif style == "buffer":
            z = torch.empty_like(y)
            z.narrow(axis, 0, half).copy_(y.narrow(axis, n - half, half))
            z.narrow(axis, half, n - half).copy_(y.narrow(axis, 0, n - half).tanh())
        elif style == "chunk":
            first, second = z.chunk(2, axis)
            first.add_(second.narrow(axis, 0, 1))
        else:
            z.select(axis, 0).zero_()
        return z

    parts: dict[str, Any] = {"w": param(*per_channel(x))} if style in ("mul", "contiguous") else {}
    if style == "counter":
        parts = {"count": torch.tensor(0), "mean": torch.zeros(n)}
    return Fn(forward, body=body, **parts)
