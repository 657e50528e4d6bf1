"""Hazards: what sequences meet: positions, token mixing, attention in its many spellings, recurrence, experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fuzz_pieces import ACTIVATIONS, Fn, Pick, hazard, param, width_of
from torch import Tensor, nn


@hazard("tokens")
def position(pick: Pick, x: Tensor) -> nn.Module:
    """Positional embeddings, learned, looked up or constant, with or without class tokens."""
    style = pick("learned", "class", "table", "constant", "registers", "product", "grid", "only")
    n, c = x.shape[1], x.shape[2]
    if style == "class":
        parts = {"token": param(1, 1, c), "place": param(1, n + 1, c)}
        return Fn(lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1) + m.place, **parts)
    if style == "table":
        return Fn(lambda m, x: x + m.table(m.index), table=nn.Embedding(n + 2, c), index=torch.arange(n))
    if style == "constant":
        wave = torch.sin(torch.arange(n)[:, None] * torch.linspace(0.1, 1, c))
        return Fn(lambda m, x: x + m.wave, wave=wave)
    if style == "registers":
        return Fn(lambda m, x: torch.cat([x, m.extra.repeat(x.shape[0], 1, 1)], 1), extra=param(1, 2, c))
    if style == "product":
        return Fn(lambda m, x: x * m.row[:, None] + m.column, row=param(n), column=param(c))
    if style == "grid":
        return Fn(lambda m, x: x + m.row[:, None] + m.column, row=param(n), column=param(c))
    if style == "only":
        return Fn(lambda m, x: x.mean(1, keepdim=True) * m.extra, extra=param(3, c))
    return Fn(lambda m, x: x + m.place, place=param(1, n, c))


@hazard("tokens")
def pooled(pick: Pick, x: Tensor) -> nn.Module:
    """One vector per example for a while: dense layers and batch norm over it, outer sums with the tokens."""
    c, hidden = width_of(x), pick.width()
    fn = pick(*ACTIVATIONS)
    read = pick(lambda x: x.mean(1), lambda x: x.amax(1), lambda x: x[:, 0], lambda x: x[:, -1] - x.mean(1))
    style = pick("alone", "norm", "add", "scale", "film")
    out = {"alone": hidden, "norm": hidden, "film": 2 * c}.get(style, c)
    body = nn.Sequential(
        nn.Linear(c, hidden),
        *([nn.BatchNorm1d(hidden)] if style == "norm" else []),
        Fn(lambda m, x: fn(x)),
        nn.Linear(hidden, out),
    )

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.body(read(x)).unsqueeze(1)
        if style == "film":
            scale, shift = y.chunk(2, -1)
            return x * (1 + scale) + shift
        return x + y if style == "add" else x * y if style == "scale" else y

    return Fn(forward, body=body)


@hazard("tokens")
def token_mixing(pick: Pick, x: Tensor) -> nn.Module:
    n, hidden, fn = x.shape[1], pick.width(), pick(F.gelu, torch.relu)
    style = pick("mixer", "linear", "gmlp", "pool")
    if style == "mixer":
        parts = {"a": nn.Linear(n, hidden), "b": nn.Linear(hidden, n)}
        return Fn(lambda m, x: m.b(fn(m.a(x.transpose(1, 2)))).transpose(1, 2), **parts)
    if style == "linear":
        return Fn(lambda m, x: torch.einsum("bnc,mn->bmc", x, m.w), w=param(hidden, n))
    if style == "gmlp":
        up = nn.Linear(x.shape[2], 2 * hidden)
        parts = {"up": up, "norm": nn.LayerNorm(hidden), "along": nn.Conv1d(n, n, 1)}
        return Fn(lambda m, x: (lambda u, v: u * m.along(m.norm(v)))(*m.up(x).chunk(2, -1)), **parts)
    return Fn(lambda m, x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2) - x)


@hazard("tokens")
def attention(pick: Pick, x: Tensor) -> nn.Module:
    return Attention(pick, x)


class Attention(nn.Module):
    """Self-attention in its many spellings: how q, k and v are made, positions enter, heads are grouped and scored."""

    def __init__(self, pick: Pick, x: Tensor) -> None:
        super().__init__()
        n, width = x.shape[1], x.shape[2]
        self.heads, self.dim = pick(2, 1, 3, 4), pick(4, 2, 3, 6)
        self.made = pick("apart", "fused", "three_heads", "per_head", "heads_three", "grouped")
        self.score = pick("sdpa", "hand", "einsum", "causal", "linear", "cosine")
        self.rope = pick("none", "none", "half", "interleaved")
        self.bias = pick("none", "none", "table", "slope", "learned", "mask")
        self.norm = pick("none", "none", "layer", "rms")
        self.out = pick("linear", "gated", "none")
        if self.rope != "none":
            self.dim += self.dim % 2
        self.kv = self.heads
        if self.made == "grouped":
            self.heads, self.kv = 2 * self.heads if self.heads < 3 else self.heads, 2 if self.heads % 2 == 0 else 1
            self.heads = max(self.heads, 2)
            self.kv = 2 if self.heads % 2 == 0 and pick(True, False) else 1
        inner = self.heads * self.dim
        has_bias = pick(True, False)
        if self.made in ("apart", "grouped"):
            self.q = nn.Linear(width, inner, bias=has_bias)
            self.k = nn.Linear(width, self.kv * self.dim, bias=has_bias)
            self.v = nn.Linear(width, self.kv * self.dim, bias=has_bias)
        else:
            self.qkv = nn.Linear(width, 3 * inner, bias=has_bias)
        if self.norm != "none":
            kind = nn.LayerNorm if self.norm == "layer" else nn.RMSNorm
            self.q_norm, self.k_norm = kind(self.dim), kind(self.dim)
        if self.rope != "none":
            self.register_buffer("angle", torch.outer(torch.arange(n), 0.5 ** torch.arange(self.dim // 2)))
        if self.bias == "table":
            self.table = param(2 * n - 1, self.heads)
            self.register_buffer("where", torch.arange(n)[:, None] - torch.arange(n) + n - 1)
        elif self.bias == "learned":
            self.table = param(self.heads, n, n)
        if self.score == "cosine":
            self.temperature = param(self.heads, 1, 1)
        if self.out != "none":
            self.proj = nn.Linear(inner, width)
        if self.out == "gated":
            self.gate = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._qkv(x)
        if self.norm != "none":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope != "none":
            q, k = self._rotate(q), self._rotate(k)
        y = self._attend(q, k, v, self._position(x)).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
        if self.out == "gated":
            y = y * torch.sigmoid(self.gate(x))
        return y if self.out == "none" else self.proj(y)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, h, d = x.shape[0], x.shape[1], self.heads, self.dim
        if self.made in ("apart", "grouped"):
            q = self.q(x).view(b, n, h, d).transpose(1, 2)
            k, v = (layer(x).view(b, n, self.kv, d).transpose(1, 2) for layer in (self.k, self.v))
            return q, k, v
        y = self.qkv(x)
        if self.made == "fused":
            q, k, v = (t.view(b, n, h, d).transpose(1, 2) for t in y.chunk(3, -1))
        elif self.made == "three_heads":
            q, k, v = y.reshape(b, n, 3, h, d).permute(2, 0, 3, 1, 4)
        elif self.made == "per_head":
            q, k, v = y.view(b, n, h, 3 * d).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = y.view(b, n, h, 3, d).permute(0, 2, 1, 3, 4).unbind(3)
        return q, k, v

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.angle.cos(), self.angle.sin()
        if self.rope == "half":
            a, b = x.chunk(2, -1)
            return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def _position(self, x: Tensor) -> Tensor | None:
        if self.bias == "table":
            return self.table[self.where].permute(2, 0, 1)
        if self.bias == "learned":
            return self.table
        if self.bias == "mask":
            return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril().to(x.dtype).log()
        if self.bias == "slope":
            place = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
            slope = 0.5 ** torch.arange(self.heads, dtype=x.dtype, device=x.device)
            return -slope[:, None, None] * (place[:, None] - place).abs()
        return None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        if self.score in ("sdpa", "causal"):
            causal = self.score == "causal" and bias is None
            return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, enable_gqa=self.kv != self.heads)
        if self.kv != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        if self.score == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
            return q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(-2).unsqueeze(-1) + 1)
        if self.score == "cosine":
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature
        elif self.score == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / self.dim**0.5
        else:
            scores = q * self.dim**-0.5 @ k.transpose(-2, -1)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v) if self.score == "einsum" else weights @ v


@hazard("tokens")
def other_attention(pick: Pick, x: Tensor) -> nn.Module:
    """torch's own attention layers, attention over channels, learned queries, talking heads."""
    c = width_of(x)
    style = pick("torch", "encoder", "channels", "queries", "talking", "cross")
    heads = pick.divisor(c)
    if style == "torch":
        layer = nn.MultiheadAttention(c, heads, batch_first=True, bias=pick(True, False), add_bias_kv=pick(False, True))
        return Fn(lambda m, x: m.layer(x, x, x, need_weights=False)[0], layer=layer)
    if style == "encoder":
        return nn.TransformerEncoderLayer(
            c, heads, pick.width(), batch_first=True, norm_first=pick(True, False), activation=pick("relu", "gelu")
        )
    if style == "cross":
        return _cross(x, heads, pick)
    if style == "channels":
        parts = {"qkv": nn.Linear(c, 3 * c), "heat": param(heads, 1, 1), "proj": nn.Linear(c, c)}
        return Fn(lambda m, x: _over_channels(m, x, heads), **parts)
    if style == "queries":
        parts = {"query": param(1, pick(3, 1, 5), c), "key": nn.Linear(c, c), "value": nn.Linear(c, c)}
        return Fn(lambda m, x: (m.query @ m.key(x).transpose(1, 2)).softmax(-1) @ m.value(x), **parts)
    parts = {"qkv": nn.Linear(c, 3 * c), "before": nn.Linear(heads, heads), "after": nn.Linear(heads, heads)}
    return Fn(lambda m, x: _talking(m, x, heads), **parts)


def _cross(x: Tensor, heads: int, pick: Pick) -> nn.Module:
    c, other = x.shape[2], pick.width()
    layer = nn.MultiheadAttention(c, heads, batch_first=True, kdim=other, vdim=other)
    return Fn(
        lambda m, x: m.layer(x, m.memory.expand(x.shape[0], -1, -1), m.memory.expand(x.shape[0], -1, -1))[0],
        layer=layer,
        memory=param(1, 5, other),
    )


def _over_channels(m: Any, x: Tensor, heads: int) -> Tensor:
    b, n, c = x.shape
    q, k, v = m.qkv(x).reshape(b, n, 3, heads, c // heads).permute(2, 0, 3, 4, 1).unbind(0)
    weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * m.heat).softmax(-1)
    return m.proj((weights @ v).permute(0, 3, 1, 2).reshape(b, n, c))


def _talking(m: Any, x: Tensor, heads: int) -> Tensor:
    b, n, c = x.shape
    q, k, v = m.qkv(x).reshape(b, n, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
    scores = m.before((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).softmax(2)
    return (m.after(scores).permute(0, 3, 1, 2) @ v).transpose(1, 2).reshape(b, n, c)


@hazard("tokens")
def recurrent(pick: Pick, x: Tensor) -> nn.Module:
    kind, hidden = pick("rnn", "lstm", "gru", "relu"), pick(4, 6, 5)
    options = {
        "batch_first": True,
        "num_layers": pick(1, 2),
        "bidirectional": pick(False, True),
        "bias": pick(True, False),
    }
    if kind == "lstm":
        layer: nn.Module = nn.LSTM(width_of(x), hidden, proj_size=pick(0, 0, 3), **options)
    elif kind == "gru":
        layer = nn.GRU(width_of(x), hidden, **options)
    else:
        layer = nn.RNN(width_of(x), hidden, nonlinearity="tanh" if kind == "rnn" else "relu", **options)
    what = pick("all", "last", "state", "start")
    starts = options["num_layers"] * (2 if options["bidirectional"] else 1)
    if what == "start" and kind != "lstm":
        start = param(starts, 1, hidden)
        return Fn(lambda m, x: m.layer(x, m.start.expand(-1, x.shape[0], -1).contiguous())[0], layer=layer, start=start)

    def forward(m: Any, x: Tensor) -> Tensor:
        y, state = m.layer(x)
        if what == "last":
            return y[:, -1:]
        if what == "state":
            return (state[0] if kind == "lstm" else state).transpose(0, 1)
        return y

    return Fn(forward, layer=layer)


@hazard("tokens")
def scan(pick: Pick, x: Tensor) -> nn.Module:
    """A recurrence written out by hand, step by step, with a learned start."""
    c, hidden = width_of(x), pick(4, 6, 5)
    fn = pick(torch.tanh, torch.relu, torch.sin)
    kind = pick("plain", "plain", "lstm", "gru")
    if kind == "gru":
        return (
            Fn(lambda m, x: m.cell(x[:, 1], m.cell(x[:, 0])).unsqueeze(1), cell=nn.GRUCell(c, hidden))
            if x.shape[1] > 1
            else nn.Linear(c, hidden)
        )
    if kind == "lstm":
        return Fn(lambda m, x: torch.stack(m.cell(x[:, -1], m.cell(x[:, 0])), 1), cell=nn.LSTMCell(c, hidden))

    def forward(m: Any, x: Tensor) -> Tensor:
        state, states = m.start.expand(x.shape[0], -1), []
        for i in range(min(x.shape[1], 4)):
            state = fn(m.read(x[:, i]) + m.keep(state)) * m.decay.sigmoid()
            states.append(state)
        return torch.stack(states, 1)

    return Fn(
        forward,
        start=param(1, hidden),
        read=nn.Linear(c, hidden),
        keep=nn.Linear(hidden, hidden, bias=False),
        decay=param(hidden),
    )


@hazard("tokens")
def experts(pick: Pick, x: Tensor) -> nn.Module:
    """A mixture of experts with stacked weights, dense routing."""
    c, hidden, count = width_of(x), pick.width(), pick(3, 2, 4)
    fn = pick(F.gelu, torch.relu, torch.tanh)
    top = pick(False, False, True)
    parts = {
        "route": nn.Linear(c, count),
        "up": param(count, hidden, c),
        "down": param(count, c, hidden),
        "shift": param(count, hidden),
    }

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = fn(torch.einsum("bnc,ehc->bneh", x, m.up) + m.shift)
        share = m.route(x).softmax(-1)
        if top:
            best, index = share.topk(2, -1)
            share = torch.zeros_like(share).scatter(-1, index, best)
        return torch.einsum("bneh,ech,bne->bnc", hidden, m.down, share)

    return Fn(forward, **parts)
