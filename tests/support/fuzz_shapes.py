"""Hazards: the same numbers in another shape or order, and products of a tensor with itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fuzz_pieces import Fn, Pick, axis_of, fitted, hazard, mix, param, per_channel, width_of
from torch import Tensor, nn


@hazard("any")
def casts(pick: Pick, x: Tensor) -> nn.Module:
    """Operations that should change nothing or next to nothing."""
    axis = axis_of(x)
    fn = pick(
        lambda m, x: m.drop(x),
        lambda m, x: x.detach().clone(),
        lambda m, x: x.contiguous().to(x.dtype),
        lambda m, x: x.unsqueeze(0).squeeze(0),
        lambda m, x: x.transpose(0, 1).transpose(1, 0),
        lambda m, x: x.flatten().view(x.shape),
        lambda m, x: x.reshape(-1, x.shape[-1]).reshape(x.shape),
        lambda m, x: (
            x.transpose(axis, -1).reshape(-1, width_of(x)).reshape(x.transpose(axis, -1).shape).transpose(axis, -1)
        ),
        lambda m, x: x.reshape(x.shape[0], -1).unflatten(1, x.shape[1:]),
        lambda m, x: x.reshape(x.shape[0], -1, x.shape[1]).reshape(x.shape),
        lambda m, x: x.unfold(axis, 2, 2).sum(-1) if width_of(x) > 1 else x,
        lambda m, x: x.as_strided(x.shape, x.contiguous().stride()) if x.is_contiguous() else x,
        lambda m, x: m.drop2(x) if x.ndim == 4 else m.drop(x),
        lambda m, x: _without_gradients(x),
        lambda m, x: x.to(memory_format=torch.channels_last).contiguous() if x.ndim == 4 else x.to(torch.float64).to(x),
    )
    return Fn(fn, drop=nn.Dropout(0.3), drop2=nn.Dropout2d(0.3))


def _without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return torch.tanh(x)


@hazard("any")
def view_round_trip(pick: Pick, x: Tensor) -> nn.Module:
    """Split the channels, do something to one of the factors, and put them together again."""
    axis = axis_of(x)
    outer = pick.divisor(width_of(x))
    inner = width_of(x) // outer
    fn = pick(torch.relu, torch.tanh, lambda v: v)
    style = pick(
        "plain", "swap", "mean", "softmax", "scale", "norm", "maxout", "mix", "index", "first", "last", "three"
    )
    parts = {"w": param(outer, inner, *([1] * (x.ndim - axis - 1)))} if style == "scale" else {}
    if style == "mix":
        parts = {"w": param(inner, 3)}
    swapped = [*range(axis), axis + 1, axis, *range(axis + 2, x.ndim + 1)]

    def forward(m: Any, x: Tensor) -> Tensor:
        y = fn(x).unflatten(axis, (outer, inner))
        if style == "swap":
            y = y.permute(swapped)
        elif style == "mean":
            y = y - y.mean(axis + 1, keepdim=True)
        elif style == "softmax":
            y = y.softmax(axis)
        elif style == "scale":
            y = y * m.w
        elif style == "norm":
            y = y / (1 + y.norm(dim=axis, keepdim=True))
        elif style == "maxout":
            return y.amax(axis + 1)
        elif style == "mix":
            y = (y.movedim(axis + 1, -1) @ m.w).movedim(-1, axis + 1)
        elif style == "index":
            return y.select(axis, 0) * y.select(axis, outer - 1)
        elif style == "first":
            return y.narrow(axis, 0, 1).flatten(axis, axis + 1)
        elif style == "last":
            return y.narrow(axis + 1, inner - 1, 1).flatten(axis, axis + 1) + y.sum(axis + 1)
        elif style == "three":
            y = y.transpose(axis, axis + 1).flatten(axis, axis + 1).unflatten(axis, (outer, inner))
        return y.flatten(axis, axis + 1)

    return Fn(forward, **parts)


@hazard("any")
def reorder(pick: Pick, x: Tensor) -> nn.Module:
    """Slice or narrow the channels and lay the pieces together in another order."""
    if width_of(x) < 3:
        wider = mix(x, 6)
        return nn.Sequential(wider, reorder(pick, wider(x)))
    axis, n = axis_of(x), width_of(x)
    cut = pick(n // 2, 1, n // 3, n - 1)
    fn = pick(lambda v: v, torch.relu, torch.tanh, torch.neg)
    style = pick("swap", "narrow", "step", "drop", "double", "three", "mirror", "overlap", "cross")

    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = x.narrow(axis, 0, cut), x.narrow(axis, cut, n - cut)
        if style == "narrow":
            return torch.cat([fn(b), a], axis)
        if style == "step":
            every = [x[:, i::2] if axis == 1 else x[..., i::2] for i in range(2)]
            return torch.cat([fn(every[1]), every[0]], axis)
        if style == "drop":
            return fn(b)
        if style == "double":
            return torch.cat([a, fn(x)], axis)
        if style == "three":
            return torch.cat([fn(x.narrow(axis, n - 1, 1)), x.narrow(axis, 1, n - 2), x.narrow(axis, 0, 1)], axis)
        if style == "overlap":
            return x.narrow(axis, 0, n - 1) + fn(x.narrow(axis, 1, n - 1))
        if style == "cross":
            pieces = x.split(2, axis)
            return torch.cat([fn(pieces[0]), *pieces[::-1]], axis)
        if style == "mirror":
            return torch.cat([x.narrow(axis, 0, n // 2) + fn(x.narrow(axis, n - n // 2, n // 2)), x], axis)
        return torch.cat([b, fn(a)], axis)

    return Fn(forward)


@hazard("image")
def channel_shuffle(pick: Pick, x: Tensor) -> nn.Module:
    groups = pick.divisor(width_of(x))
    if pick(True, False):
        return nn.ChannelShuffle(groups)
    return Fn(lambda m, x: x.view(x.shape[0], groups, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape))


@hazard("image")
def pixel_shuffle(pick: Pick, x: Tensor) -> nn.Module:
    if pick(True, False) and x.shape[2] * x.shape[3] <= 25:
        width = 4 * max(1, width_of(x) // 4)
        return fitted(x, width, nn.PixelShuffle(2))
    if x.shape[2] % 2 or x.shape[3] % 2:
        return nn.Sequential(nn.ZeroPad2d((0, x.shape[3] % 2, 0, x.shape[2] % 2)), fitted(x, 3, nn.PixelUnshuffle(2)))
    return fitted(x, 3, nn.PixelUnshuffle(2))


@hazard("image")
def space_to_depth(pick: Pick, x: Tensor) -> nn.Module:
    """Patches gathered by slices, as in patch merging, or by unfold."""
    even = nn.AdaptiveAvgPool2d(4) if x.shape[2] % 2 or x.shape[3] % 2 else nn.Identity()
    if pick(True, False):
        merge = Fn(lambda m, x: torch.cat([x[:, :, i::2, j::2] for j in range(2) for i in range(2)], 1))
    else:
        merge = Fn(lambda m, x: F.unfold(x, 2, stride=2).unflatten(2, (x.shape[2] // 2, x.shape[3] // 2)))
    return nn.Sequential(even, merge, nn.Conv2d(4 * width_of(x), pick.width(), 1))


@hazard("any")
def stack_unbind(pick: Pick, x: Tensor) -> nn.Module:
    axis = axis_of(x)
    fn, at = pick(torch.relu, torch.tanh, torch.abs), pick(1, axis + 1)
    style = pick("sum", "unbind", "flatten", "max", "mean", "weighted")

    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.stack([m.a(x), fn(x)], at)
        if style == "unbind":
            a, b = y.unbind(at)
            return a * b
        if style == "flatten":
            return y.flatten(1, 2) if at == 1 else y.flatten(axis, axis + 1)
        if style == "max":
            return y.amax(at)
        if style == "weighted":
            return torch.tensordot(y, m.w.softmax(0), dims=([at], [0]))
        return y.mean(at) if style == "mean" else y.sum(at)

    return Fn(forward, a=mix(x, width_of(x)), **({"w": param(2)} if style == "weighted" else {}))


@hazard("any")
def repeat(pick: Pick, x: Tensor) -> nn.Module:
    axis = axis_of(x)
    if width_of(x) > 12:
        return mix(x, 6)
    counts = [1] * x.ndim
    counts[axis] = 2
    fn = pick(
        lambda m, x: x.repeat(counts),
        lambda m, x: x.repeat_interleave(2, axis),
        lambda m, x: x.unsqueeze(axis).expand(*x.shape[:axis], 2, *x.shape[axis:]).flatten(axis, axis + 1),
        lambda m, x: x + x.mean(axis, keepdim=True).expand_as(x),
        lambda m, x: x + x.narrow(axis, 0, 1).expand_as(x),
        lambda m, x: torch.cat([x, x], axis),
        lambda m, x: F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (1, 2)),
        lambda m, x: F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (1, 0), value=0.5),
        lambda m, x: torch.cat([x, torch.ones_like(x).narrow(axis, 0, 1)], axis),
        lambda m, x: torch.cat([x, x.new_zeros(x.shape)], axis),
        lambda m, x: torch.cat([torch.sin(x * 2**k) for k in range(2)], axis),
        lambda m, x: torch.stack([x.sin(), x.cos()], axis + 1).flatten(axis, axis + 1),
    )
    return Fn(fn)


@hazard("image")
def flatten_linear(pick: Pick, x: Tensor) -> nn.Module:
    """Channels and positions in one axis, a linear map, and an image (or tokens) again."""
    out, side = pick(4, 6, 8), pick(2, 1, 3)
    flat = x[0].numel()
    lead: list[nn.Module] = [nn.AdaptiveAvgPool2d(2)] if flat > 150 else []
    flat = width_of(x) * 4 if lead else flat
    if pick(True, False):
        return nn.Sequential(
            *lead, nn.Flatten(), nn.Linear(flat, out * side * side), nn.Unflatten(1, (out, side, side))
        )
    if pick(True, False):
        return nn.Sequential(*lead, nn.Flatten(), nn.Linear(flat, out * side), nn.Unflatten(1, (side, out)))
    back = nn.Sequential(*lead, Fn(lambda m, x: x.permute(0, 2, 3, 1).flatten(1)), nn.Linear(flat, out * side * side))
    return nn.Sequential(back, nn.Unflatten(1, (side, side, out)), Fn(lambda m, x: x.permute(0, 3, 1, 2)))


@hazard("any")
def einsum_mix(pick: Pick, x: Tensor) -> nn.Module:
    n, out = width_of(x), pick.width()
    letters = "bnc" if x.ndim == 3 else "bcnm"
    heads = pick.divisor(n)
    style = pick("plain", "heads", "stacked", "outer", "gram", "diagonal", "kron", "trace")
    if style == "plain":
        result = letters.replace("c", "d")
        return Fn(lambda m, x: torch.einsum(f"{letters},cd->{result}", x, m.w), w=param(n, out))
    if style == "heads":
        axis, split = axis_of(x), letters.replace("c", "hc")
        result = split.replace("c", "d")
        w = param(heads, n // heads, pick(2, 3))
        return Fn(
            lambda m, x: torch.einsum(f"{split},hcd->{result}", x.unflatten(axis, (heads, -1)), m.w).flatten(
                axis, axis + 1
            ),
            w=w,
        )
    if style == "stacked":
        return Fn(
            lambda m, x: torch.einsum(f"{letters},ecd,e->{letters.replace('c', 'd')}", x, m.w, m.e),
            w=param(3, n, out),
            e=param(3),
        )
    if style == "outer":
        result, axis = letters.replace("c", "ck"), axis_of(x)
        return Fn(lambda m, x: torch.einsum(f"{letters},k->{result}", x, m.w).flatten(axis, axis + 1), w=param(2))
    if style == "diagonal":
        return Fn(lambda m, x: torch.einsum(f"{letters},cc->{letters}", x, m.w), w=param(n, n))
    if style == "trace":
        return Fn(lambda m, x: x * torch.einsum("cc->", m.w) + torch.diagonal(m.w).view(per_channel(x)), w=param(n, n))
    if style == "kron":
        a, b = param(2, heads), param(3, n // heads)
        result = letters.replace("c", "d")
        return Fn(lambda m, x: torch.einsum(f"{letters},dc->{result}", x, torch.kron(m.a, m.b)), a=a, b=b)
    return Fn(lambda m, x: torch.einsum(f"{letters},{letters.replace('c', 'd')}->bcd", x, x) / x[0, 0].numel())


@hazard("tokens")
def bilinear(pick: Pick, x: Tensor) -> nn.Module:
    n, out = width_of(x), pick.width()
    style = pick("bilinear", "square", "self", "outer", "hyper")
    if style == "bilinear":
        return Fn(lambda m, x: m.form(x, m.other(x)), form=nn.Bilinear(n, 3, out), other=nn.Linear(n, 3))
    if style == "square":
        return Fn(lambda m, x: m.a(x) * m.b(x), a=nn.Linear(n, out), b=nn.Linear(n, out))
    if style == "self":
        return Fn(lambda m, x: m.form(x, x), form=nn.Bilinear(n, n, out))
    small = min(n, 5)
    if style == "outer":
        parts = {"down": nn.Linear(n, small), "up": nn.Linear(small * small, out)}
        return Fn(lambda m, x: m.up(torch.einsum("bnc,bnd->bncd", m.down(x), m.down(x)).flatten(2)), **parts)
    maker = nn.Linear(n, small * n)
    return Fn(lambda m, x: x @ m.make(x.mean(1)).view(x.shape[0], n, small), make=maker)


@hazard("tokens")
def along_tokens(pick: Pick, x: Tensor) -> nn.Module:
    """Operations along the tokens, which are an axis like any other where they come from parameters."""
    n = x.shape[1]
    fn = pick(
        lambda m, x: x.flip(1),
        lambda m, x: x.roll(1, 1),
        lambda m, x: x.cumsum(1),
        lambda m, x: x.softmax(1),
        lambda m, x: x - x.mean(1, keepdim=True),
        lambda m, x: x + x.amax(1, keepdim=True),
        lambda m, x: torch.cat([x[:, 1:], x[:, :1]], 1),
        lambda m, x: x[:, ::2],
        lambda m, x: x.repeat(1, 2, 1),
        lambda m, x: x * torch.arange(n, dtype=x.dtype)[:, None],
        lambda m, x: x + x.transpose(1, 2) if x.shape[1] == x.shape[2] else x.transpose(1, 2),
        lambda m, x: x.sort(1)[0],
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5j, n=n, dim=1),
        lambda m, x: x.gather(1, torch.arange(n - 1, -1, -1).view(1, n, 1).expand(x.shape)),
        lambda m, x: x.reshape(x.shape[0], x.shape[2], x.shape[1]),
        lambda m, x: x.unsqueeze(2).expand(-1, -1, 2, -1).flatten(1, 2),
        lambda m, x: x[:, torch.arange(n) % max(1, n - 1)],
    )
    return Fn(fn)


@hazard("tokens")
def views(pick: Pick, x: Tensor) -> nn.Module:
    """A random walk of views: split, swap and join axes, slice them, and now and then meet a parameter."""
    steps: list[tuple[str, int, int]] = []
    parts: dict[str, Any] = {}
    y = x
    for k in range(pick(2, 3, 4, 5)):
        step = _view_step(pick, y, k, parts)
        steps.append(step)
        y = _take(step, y, parts)

    def forward(m: Any, x: Tensor) -> Tensor:
        for step in steps:
            x = _take(step, x, m)
        return x.reshape(x.shape[0], -1, x.shape[-1])

    return Fn(forward, **parts)


def _view_step(pick: Pick, y: Tensor, k: int, parts: dict[str, Any]) -> tuple[str, int, int]:
    kind = pick("split", "swap", "join", "narrow", "add", "mul", "relu", "tanh", "mean", "mix", "flatten", "stack")
    axis = 1 + pick(1, 0, 2, 3) % (y.ndim - 1)
    size = y.shape[axis]
    if kind == "split":
        return kind, axis, pick.divisor(size)
    if kind == "swap":
        return kind, axis, 1 + pick(0, 1, 2, 3) % (y.ndim - 1)
    if kind == "narrow":
        return kind, axis, pick(size - size // 2, 1, max(1, size - 1))
    if kind in ("add", "mul"):
        parts[f"p{k}"] = param(size, *[1] * (y.ndim - 1 - axis))
    if kind == "mix":
        parts[f"p{k}"] = param(size, pick(2, 3, 4, 6))
    return kind, axis, k


def _take(step: tuple[str, int, int], x: Tensor, parts: Any) -> Tensor:
    kind, axis, k = step
    p = (parts.get if isinstance(parts, dict) else lambda name: getattr(parts, name, None))(f"p{k}")
    if kind == "split":
        return x.unflatten(axis, (k, -1)) if x.ndim < 6 else x
    if kind == "swap":
        return x.transpose(axis, k)
    if kind == "join":
        return (
            x.flatten(
                axis - 1 if axis == x.ndim - 1 and axis > 1 else axis, min(axis + (axis < x.ndim - 1), x.ndim - 1)
            )
            if x.ndim > 3
            else x
        )
    if kind == "narrow":
        return x.narrow(axis, x.shape[axis] - k, k)
    if kind in ("add", "mul") and p is not None:
        return x + p if kind == "add" else x * p
    if kind in ("relu", "tanh"):
        return getattr(torch, kind)(x)
    if kind == "mean":
        return x.mean(axis) if x.ndim > 3 else x - x.mean(axis, keepdim=True)
    if kind == "mix" and p is not None:
        return (x.movedim(axis, -1) @ p).movedim(-1, axis)
    if kind == "flatten":
        return x.reshape(x.shape[0], -1, x.shape[-1])
    return torch.stack([x, x.flip(1)], axis).flatten(axis, axis + 1) if x.shape[axis] < 13 else x


@hazard("any")
def spellings(pick: Pick, x: Tensor) -> nn.Module:
    """Other names of what has a rule: ops that PyTorch makes of simpler ones, and neighbours of well known ones."""
    axis, c = axis_of(x), width_of(x)
    other = 1 if axis != 1 else 2
    every = [i for i in range(1, x.ndim) if i != axis]
    style = pick(
        "stack", "split", "inner", "norm", "whole", "take", "vecdot", "scan", "running", "extrema", "loss", "kron"
    )
    if style == "inner":
        return Fn(lambda m, x: torch.inner(x.movedim(axis, -1), m.w).movedim(-1, axis), w=param(pick.width(), c))
    if style == "loss":
        loss = pick(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
        return Fn(lambda m, x: loss(x, m.aim.expand_as(x), reduction="none"), aim=param(*per_channel(x)))
    if style == "vecdot":
        return Fn(lambda m, x: x + torch.linalg.vecdot(x, m.v, dim=axis).unsqueeze(axis), v=param(*per_channel(x)))
    if style == "kron":
        return Fn(
            lambda m, x: F.linear(x.movedim(axis, -1), torch.kron(m.a, m.b)).movedim(-1, axis),
            a=param(2, 1),
            b=param(3, c),
        )
    act, turn = pick(torch.relu, torch.tanh, F.rrelu_), pick(torch.neg, torch.tanh)
    table = torch.arange(x.shape[other]).flip(0).reshape(*[-1 if i == other else 1 for i in range(x.ndim)])
    scan = pick(
        torch.cumprod, torch.logcumsumexp, lambda x, d: torch.cummax(x, d)[0], lambda x, d: torch.cummin(x, d)[0]
    )
    front = lambda x: x.transpose(1, axis)  # noqa: E731
    fns: dict[str, Any] = {
        "stack": lambda m, x: front(torch.hstack([front(act(x + 0)), front(turn(x))])),
        "split": lambda m, x: front(torch.cat([act(v + 0) for v in torch.hsplit(front(x), [(c + 1) // 2])][::-1], 1)),
        "norm": lambda m, x: x / (1 + torch.linalg.norm(x, dim=axis, keepdim=True)),
        "whole": lambda m, x: x * torch.linalg.matrix_norm(act(x + 0), dim=(axis, other), keepdim=True),
        "take": lambda m, x: torch.take_along_dim(act(x + 0), m.table, other),
        "scan": lambda m, x: scan(0.5 * turn(x), other),
        "running": lambda m, x: scan(0.5 * turn(x), axis) + x,
        "extrema": lambda m, x: x * (torch.aminmax(act(x + 0), dim=every[0], keepdim=True)[1]),
    }
    return Fn(fns[style], table=table)
