"""Hazards: pieces of recent networks: made kernels, selective kernels, state spaces, splines, codebooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fuzz_pieces import Fn, Pick, axis_of, hazard, mix, param, per_channel, width_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations


@hazard("image")
def kernels(pick: Pick, x: Tensor) -> nn.Module:
    """Convolution kernels that are turned, shared, masked, fixed or factored, and channels of coordinates."""
    c, out = width_of(x), pick.width()
    style = pick(
        "turned", "shared", "masked", "blur", "blur_repeat", "factored", "coordinates", "dilated", "row", "unfold"
    )
    if style == "turned":
        turn = pick(
            lambda w: torch.cat([torch.rot90(w, k, (2, 3)) for k in range(2)]),
            lambda w: torch.stack([w, w.flip(3)], 1).flatten(0, 1),
            lambda w: w + w.transpose(2, 3),
            lambda w: torch.cat([w, w.roll(1, 1)]),
        )
        return Fn(lambda m, x: F.conv2d(x, turn(m.w), padding=1), w=param(min(out, 6), c, 3, 3))
    if style == "shared":
        return Fn(lambda m, x: F.conv2d(x, m.w.expand(c, 1, 3, 3), padding=1, groups=c), w=param(1, 1, 3, 3))
    if style == "masked":
        mask = torch.ones(1, 1, 3, 3).flatten().cumsum(0).lt(5).float().view(1, 1, 3, 3)
        return Fn(
            lambda m, x: F.conv2d(x, m.w * m.mask, m.b, padding=1), w=param(out, c, 3, 3), b=param(out), mask=mask
        )
    if style == "blur":
        return Fn(lambda m, x: F.conv2d(x, m.k.expand(c, -1, -1, -1), padding=1, groups=c), k=torch.rand(1, 1, 3, 3))
    if style == "blur_repeat":
        return Fn(lambda m, x: F.conv2d(x, m.k, padding=1, groups=c), k=torch.rand(1, 1, 3, 3).repeat(c, 1, 1, 1))
    if style == "factored":
        return Fn(
            lambda m, x: F.conv2d(x, torch.einsum("oi,ihw->oihw", m.a, m.b), padding=1),
            a=param(out, c),
            b=param(c, 3, 3),
        )
    if style == "coordinates":
        layer = nn.Conv2d(c + 1, out, 1)
        return Fn(lambda m, x: m.layer(torch.cat([x, _ramp(x)], 1)), layer=layer)
    if style == "dilated":
        return nn.Conv2d(c, out, 3, padding=2, dilation=2)
    if style == "row":
        return nn.Sequential(
            nn.Conv2d(c, out, (1, 3), padding=(0, 1)), nn.Conv2d(out, out, (3, 1), padding=(1, 0), groups=out)
        )
    return Fn(lambda m, x: _involution(m, x, c), make=nn.Conv2d(c, 9, 1))


def _ramp(x: Tensor) -> Tensor:
    row = torch.linspace(-1, 1, x.shape[3], dtype=x.dtype, device=x.device)
    return row.expand(x.shape[0], 1, x.shape[2], -1)


def _involution(m: Any, x: Tensor, c: int) -> Tensor:
    b, _, h, w = x.shape
    patches = F.unfold(x, 3, padding=1).view(b, c, 9, h, w)
    return (patches * m.make(x).unsqueeze(1)).sum(2)


@hazard("any")
def selective(pick: Pick, x: Tensor) -> nn.Module:
    """Branches weighed against each other channel by channel, and responses compared across channels."""
    c, axis, hidden = width_of(x), axis_of(x), pick.width()
    space = tuple(i for i in range(1, x.ndim) if i != axis)
    style = pick("kernels", "response", "dynamic", "split", "tanh", "scale_norm")
    if style == "kernels":
        parts = {"a": mix(x, c), "b": mix(x, c), "down": nn.Linear(c, hidden), "up": nn.Linear(hidden, 2 * c)}

        def forward(m: Any, x: Tensor) -> Tensor:
            both = torch.stack([m.a(x), torch.relu(m.b(x))], 1)
            share = m.up(torch.relu(m.down(both.sum(1).mean(space)))).view(-1, 2, c).softmax(1)
            return (both * share.view(-1, 2, *((c, 1, 1) if x.ndim == 4 else (1, c)))).sum(1)

        return Fn(forward, **parts)
    if style == "response":
        shape = per_channel(x)
        return Fn(lambda m, x: _response(m, x, space, axis), gain=param(*shape), shift=param(*shape))
    if style == "dynamic":
        parts = {"make": nn.Linear(c, 2 * c)}
        shape = (2, *((c, 1, 1) if x.ndim == 4 else (1, c)))
        return Fn(
            lambda m, x: (lambda k: torch.maximum(x * k[:, 0], x * k[:, 1]))(m.make(x.mean(space)).view(-1, *shape)),
            **parts,
        )
    if style == "split":
        parts = {"both": mix(x, 2 * c), "score": nn.Linear(c, 2 * c)}
        return Fn(lambda m, x: _split(m, x, c, axis, space), **parts)
    if style == "tanh":
        return Fn(
            lambda m, x: torch.tanh(m.a * x) * m.w + m.b, a=param(), w=param(*per_channel(x)), b=param(*per_channel(x))
        )
    return Fn(lambda m, x: m.g * x / x.norm(dim=axis, keepdim=True).clamp(min=1e-3), g=param())


def _response(m: Any, x: Tensor, space: tuple[int, ...], axis: int) -> Tensor:
    size = torch.linalg.vector_norm(x, dim=space, keepdim=True)
    return m.gain * (x * (size / (size.mean(axis, keepdim=True) + 1e-3))) + m.shift + x


def _split(m: Any, x: Tensor, c: int, axis: int, space: tuple[int, ...]) -> Tensor:
    halves = m.both(x).unflatten(axis, (2, c))
    share = m.score(halves.sum(axis).mean(space)).view(-1, 2, c).softmax(1)
    return (halves * (share[..., None, None] if x.ndim == 4 else share[:, None])).sum(axis)


@hazard("tokens")
def state_space(pick: Pick, x: Tensor) -> nn.Module:
    """A selective state space, step by step, after a causal depthwise convolution."""
    c, width, state = width_of(x), pick(4, 6), pick(3, 2, 4)
    parts = {
        "inward": nn.Linear(c, 2 * width, bias=False),
        "conv": nn.Conv1d(width, width, 3, padding=2, groups=width),
        "select": nn.Linear(width, 2 + 2 * state, bias=False),
        "step": nn.Linear(2, width),
        "decay": param(width, state),
        "skip": param(width),
        "outward": nn.Linear(width, c),
    }

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x[:, :5]
        u, gate = m.inward(x).chunk(2, -1)
        u = F.silu(m.conv(u.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        rate, write, read = m.select(u).split([2, state, state], -1)
        rate = F.softplus(m.step(rate))
        keep = torch.exp(rate.unsqueeze(-1) * -torch.exp(m.decay))
        add = rate.unsqueeze(-1) * write.unsqueeze(2) * u.unsqueeze(-1)
        h, ys = torch.zeros_like(keep[:, 0]), []
        for i in range(x.shape[1]):
            h = keep[:, i] * h + add[:, i]
            ys.append((h * read[:, i].unsqueeze(1)).sum(-1))
        return m.outward((torch.stack(ys, 1) + m.skip * u) * F.silu(gate))

    return Fn(forward, **parts)


@hazard("tokens")
def shifted(pick: Pick, x: Tensor) -> nn.Module:
    """Each token mixed with the one before it, by a learned share per channel."""
    c = width_of(x)
    back = pick(
        lambda x: F.pad(x, (0, 0, 1, -1)),
        lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
        lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
    )
    style = pick("lerp", "mul", "channels")
    if style == "channels":
        half = c // 2
        return Fn(lambda m, x: torch.cat([back(x)[..., :half], x[..., half:]], -1))
    if style == "lerp":
        return Fn(lambda m, x: torch.lerp(x, back(x), m.mu), mu=param(c))
    return Fn(lambda m, x: m.a(x * m.mu + back(x) * (1 - m.mu)), mu=param(c), a=nn.Linear(c, c))


@hazard("tokens")
def splines(pick: Pick, x: Tensor) -> nn.Module:
    """Learned functions on the edges: a basis of each channel, and one coefficient per output, channel and bump."""
    c, out = width_of(x), pick.width()
    style = pick("bumps", "powers", "waves")
    basis = {
        "bumps": lambda m, x: torch.exp(-((x.unsqueeze(-1) - m.grid) ** 2)),
        "powers": lambda m, x: torch.stack([x, x**2, x**3], -1) * 0.3,
        "waves": lambda m, x: torch.stack([torch.sin(x * k) for k in (1, 2, 4)], -1),
    }[style]
    parts: dict[str, Any] = {"w": param(out, c, 3)}
    if style == "bumps":
        parts["grid"] = torch.linspace(-1, 1, 3)
    if pick(True, False):
        return Fn(lambda m, x: torch.einsum("bncg,ocg->bno", basis(m, x), m.w) / 2, **parts)
    return Fn(lambda m, x: F.linear(basis(m, x).flatten(2), m.w.flatten(1)) / 2, **parts)


@hazard("tokens")
def codebook(pick: Pick, x: Tensor) -> nn.Module:
    """Integers that name the positions of an axis: nearest entries, best experts, sorted orders."""
    c, count = width_of(x), pick(4, 6)
    style = pick("nearest", "one_hot", "experts", "sorted", "best", "ranks", "scatter")
    book = param(count, c)
    if style == "nearest":
        return Fn(lambda m, x: x + F.embedding(_nearest(x, m.book), m.book), book=book)
    if style == "one_hot":
        return Fn(
            lambda m, x: F.one_hot(_nearest(x, m.book), count).to(x.dtype) @ m.value, book=book, value=param(count, c)
        )
    if style == "experts":
        parts = {"route": nn.Linear(c, count), "bank": param(count, 3, c)}
        return Fn(
            lambda m, x: torch.einsum("bnkhc,bnc->bnkh", m.bank[m.route(x).topk(2, -1)[1]], x).flatten(2), **parts
        )
    if style == "sorted":
        return Fn(lambda m, x: torch.take_along_dim(x, m.a(x).argsort(-1), -1), a=nn.Linear(c, c))
    if style == "best":
        return Fn(lambda m, x: x.gather(1, m.a(x).topk(1, 1)[1].expand(-1, -1, c)), a=nn.Linear(c, 1))
    if style == "ranks":
        return Fn(lambda m, x: x * (1 + m.a(x).argsort(-1).argsort(-1)).to(x.dtype) / c, a=nn.Linear(c, c))
    parts = {"route": nn.Linear(c, count), "value": param(count, c)}
    return Fn(
        lambda m, x: torch.zeros_like(m.route(x)).scatter(-1, m.route(x).argmax(-1, True), 1.0) @ m.value, **parts
    )


def _nearest(x: Tensor, book: Tensor) -> Tensor:
    return (x.pow(2).sum(-1, keepdim=True) - 2 * x @ book.t() + book.pow(2).sum(-1)).argmin(-1)


@hazard("any")
def square_weight(pick: Pick, x: Tensor) -> nn.Module:
    """Square matrices from a Cayley map, an exponential, a Householder product, an inverse, a power."""
    n, axis = width_of(x), axis_of(x)
    style = pick("cayley", "exponential", "orthogonal", "inverse", "power", "householder", "circulant")
    if style == "orthogonal":
        layer = parametrizations.orthogonal(nn.Linear(n, n), use_trivialization=False)
        return Fn(lambda m, x: m.layer(x.movedim(axis, -1)).movedim(-1, axis), layer=layer)
    if style == "householder":
        return Fn(
            lambda m, x: (
                x
                - (2 / (m.v @ m.v)) * torch.tensordot(x, m.v, ([axis], [0])).unsqueeze(axis) * m.v.view(per_channel(x))
            ),
            v=param(n),
        )
    make = {
        "cayley": lambda w: torch.linalg.solve(_eye(w) + (w - w.t()), _eye(w) - (w - w.t())),
        "exponential": lambda w: torch.linalg.matrix_exp(w - w.t()),
        "inverse": lambda w: torch.linalg.inv(w + 3 * _eye(w)),
        "power": lambda w: w @ w @ w,
        "circulant": lambda w: torch.stack([w[0].roll(k) for k in range(w.shape[0])]),
    }[style]
    return Fn(lambda m, x: F.linear(x.movedim(axis, -1), make(m.w)).movedim(-1, axis), w=param(n, n))


def _eye(w: Tensor) -> Tensor:
    return torch.eye(w.shape[0], dtype=w.dtype, device=w.device)
