"""The hazards a network can be made of: small random blocks, each built to fit the tensor that reaches it.

A block is written as a function of `pick` (its choices, 0 being the plainest of each), of the tensor `x` that arrives
and of the networks inside it; it returns a module. `HAZARDS` lists them from plain to intricate, so that a failing
network shrinks towards plain ones. `grow` in `fuzz_networks` puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

#: Widths with and without common factors, so that axes of one size by accident and accidental factors both occur.
WIDTHS = (6, 4, 8, 12, 9, 10, 5, 7, 6, 8, 2, 1)


class Pick:
    """Choices read off one whole number, digit by digit: 0 takes the first option everywhere."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *options: Any) -> Any:
        self.number, index = divmod(self.number, len(options))
        return options[index]

    def width(self) -> int:
        return self(*WIDTHS)

    def divisor(self, n: int, proper: bool = True) -> int:
        """A divisor of n above 1 (and below n, if there is one)."""
        found = [d for d in range(2, n + 1) if n % d == 0 and (d < n or not proper)]
        return self(*(found or [n]))


class Fn(nn.Module):
    """A module made of a function of (itself, x) and the modules, parameters and buffers it uses."""

    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


Grow = Callable[[Tensor], tuple[nn.Module, Tensor]]
Build = Callable[[Pick, Tensor, Sequence[Grow]], nn.Module]


@dataclass(frozen=True)
class Hazard:
    """A kind of block: what it takes ("image" (B, C, H, W), "tokens" (B, N, C) or "any") and how many lists it nests."""

    name: str
    takes: str
    nests: int
    build: Build


HAZARDS: dict[str, Hazard] = {}


def hazard(takes: str, nests: int = 0) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    def register(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        name = build.__name__.strip("_")
        made: Build = build if nests else lambda pick, x, _: build(pick, x)
        HAZARDS[name] = Hazard(name, takes, nests, made)
        return build

    return register


# -- helpers -----------------------------------------------------------------------------------------------------------


def axis_of(x: Tensor) -> int:
    """The channel axis: 1 of an image, the last of tokens."""
    return 1 if x.ndim == 4 else x.ndim - 1


def width_of(x: Tensor) -> int:
    return x.shape[axis_of(x)]


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def mix(x: Tensor, out: int, bias: bool = True, width: int | None = None) -> nn.Module:
    """A linear map of the channels, position by position."""
    width = width_of(x) if width is None else width
    return nn.Conv2d(width, out, 1, bias=bias) if x.ndim == 4 else nn.Linear(width, out, bias=bias)


def per_channel(x: Tensor) -> tuple[int, ...]:
    """The shape of a parameter with one entry per channel that broadcasts against x."""
    return (width_of(x), 1, 1) if x.ndim == 4 else (width_of(x),)


def fitted(x: Tensor, width: int, rest: nn.Module) -> nn.Module:
    """A block that needs a certain width, behind a map to that width where x has another."""
    return rest if width_of(x) == width else nn.Sequential(mix(x, width), rest)


def same_size(shortcut: Tensor, y: Tensor) -> nn.Module:
    """A projection that brings the shortcut of a residual block to the size of its body."""
    if shortcut.ndim == 4:
        pool = nn.Identity() if shortcut.shape[2:] == y.shape[2:] else nn.AdaptiveAvgPool2d(tuple(y.shape[2:]))
        return nn.Sequential(pool, nn.Conv2d(shortcut.shape[1], y.shape[1], 1))
    tokens = nn.Identity()
    if shortcut.shape[1] != y.shape[1]:
        tokens = Fn(
            lambda m, x: m.along(x.transpose(1, 2)).transpose(1, 2), along=nn.Linear(shortcut.shape[1], y.shape[1])
        )
    return nn.Sequential(tokens, nn.Linear(shortcut.shape[2], y.shape[2]))


def like(x: Tensor, y: Tensor) -> nn.Module:
    """A module after which y is of the same kind (image or tokens) as x was."""
    if x.ndim == y.ndim:
        return nn.Identity()
    return to_tokens() if x.ndim == 3 else to_image(y)


def to_tokens() -> nn.Module:
    return Fn(lambda m, x: x.flatten(2).transpose(1, 2))


def to_image(x: Tensor) -> nn.Module:
    count = x.shape[1]
    rows = max(d for d in range(1, math.isqrt(count) + 1) if count % d == 0)
    return Fn(lambda m, x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], rows, count // rows))


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    torch.tanh,
    F.gelu,
    F.silu,
    F.leaky_relu,
    torch.abs,
    torch.square,
    torch.sin,
    F.hardtanh,
    lambda x: x * torch.sigmoid(x),
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: F.relu(x) ** 2,
    F.softplus,
    F.elu,
    F.relu6,
    F.hardswish,
    lambda x: x.clamp(min=0),
    lambda x: x.sign() * x.abs().sqrt(),
    lambda x: torch.maximum(x, -0.5 * x),
    lambda x: x / (1 + x.abs()),
    lambda x: x + x.sin() ** 2,
    lambda x: x.pow(3) - x,
    lambda x: torch.exp(-x * x),
    lambda x: 2.0 * x - 1.0,
    F.softsign,
    F.tanhshrink,
    lambda x: x.masked_fill(x < 0, 0.0),
    lambda x: F.softshrink(x, 0.1),
    lambda x: (x > 0).to(x.dtype) * x,
    torch.erf,
    torch.neg,
)


# -- plain layers ------------------------------------------------------------------------------------------------------


@hazard("any")
def activation(pick: Pick, x: Tensor) -> nn.Module:
    fn = pick(*ACTIVATIONS)
    return Fn(lambda m, x: fn(x))


@hazard("tokens")
def linear(pick: Pick, x: Tensor) -> nn.Module:
    return nn.Linear(width_of(x), pick.width(), bias=pick(True, False))


@hazard("image")
def conv(pick: Pick, x: Tensor) -> nn.Module:
    kernel, bias, mode = pick(1, 3), pick(True, False), pick("zeros", "zeros", "reflect", "circular")
    stride = pick(1, 2) if min(x.shape[2:]) > 3 else 1
    if kernel == 1 or min(x.shape[2:]) < 2:
        mode = "zeros"
    return nn.Conv2d(width_of(x), pick.width(), kernel, stride, padding=kernel // 2, bias=bias, padding_mode=mode)


@hazard("any")
def prelu(pick: Pick, x: Tensor) -> nn.Module:
    if x.ndim == 3:  # over tokens the second axis is not the channels
        return Fn(lambda m, x: m.act(x.transpose(1, 2)).transpose(1, 2), act=nn.PReLU(pick(width_of(x), 1)))
    return nn.PReLU(pick(width_of(x), 1))


class AlwaysTraining(nn.BatchNorm2d):
    """Batch norm with the statistics of the batch, which writes its running statistics in every forward."""

    def train(self, mode: bool = True) -> AlwaysTraining:
        return super().train(True)


@hazard("any")
def batch_norm(pick: Pick, x: Tensor) -> nn.Module:
    options = {"affine": pick(True, True, False), "eps": pick(1e-5, 1e-2)}
    if x.ndim == 4:
        kind = pick(nn.BatchNorm2d, nn.BatchNorm2d, nn.BatchNorm2d, AlwaysTraining)
        return kind(width_of(x), track_running_stats=pick(True, True, True, False), **options)
    norm = nn.BatchNorm1d(width_of(x), **options)
    if pick(True, False):
        return Fn(lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2), norm=norm)
    return Fn(lambda m, x: m.norm(x.flatten(0, 1)).view(x.shape), norm=norm)


@hazard("any")
def layer_norm(pick: Pick, x: Tensor) -> nn.Module:
    norm = nn.LayerNorm(width_of(x), elementwise_affine=pick(True, True, False), bias=pick(True, False))
    if x.ndim == 3:
        return norm
    if pick(True, False):
        return Fn(lambda m, x: m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=norm)
    return nn.LayerNorm(list(x.shape[1:]))


@hazard("any")
def rms_norm(pick: Pick, x: Tensor) -> nn.Module:
    if pick(True, False):
        norm = nn.RMSNorm(width_of(x))
        return norm if x.ndim == 3 else Fn(lambda m, x: m.norm(x.movedim(1, -1)).movedim(-1, 1), norm=norm)
    axis, offset = axis_of(x), pick(0.0, 1.0)
    by_hand = Fn(
        lambda m, x: x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + 1e-5) * (offset + m.weight),
        weight=param(*per_channel(x)),
    )
    return by_hand


@hazard("any")
def norm_by_hand(pick: Pick, x: Tensor) -> nn.Module:
    axis = pick(axis_of(x), 1, tuple(range(1, x.ndim)))
    scale, shift = param(*per_channel(x)), param(*per_channel(x))
    style = pick("var", "std", "var_mean", "l2", "l1", "max")

    def forward(m: Any, x: Tensor) -> Tensor:
        if style == "var":
            x = (x - x.mean(axis, keepdim=True)) / (x.var(axis, keepdim=True, unbiased=False) + 1e-3).sqrt()
        elif style == "std":
            x = (x - x.mean(axis, keepdim=True)) / (x.std(axis, keepdim=True, unbiased=False) + 1e-2)
        elif style == "var_mean":
            var, mean = torch.var_mean(x, axis, correction=0, keepdim=True)
            x = (x - mean) * torch.rsqrt(var + 1e-3)
        elif style == "l2":
            x = (
                F.normalize(x, dim=axis)
                if isinstance(axis, int)
                else x / (1e-3 + torch.linalg.vector_norm(x, dim=axis, keepdim=True))
            )
        elif style == "l1":
            x = x / (1e-3 + x.abs().sum(axis, keepdim=True))
        else:
            x = x / (1e-3 + x.abs().amax(axis, keepdim=True))
        return x * m.scale + m.shift

    return Fn(forward, scale=scale, shift=shift)


@hazard("image")
def group_norm(pick: Pick, x: Tensor) -> nn.Module:
    if x[0].numel() == width_of(x):
        return nn.GroupNorm(1, width_of(x))
    return nn.GroupNorm(pick(pick.divisor(width_of(x)), 1), width_of(x), affine=pick(True, True, False))


@hazard("image")
def instance_norm(pick: Pick, x: Tensor) -> nn.Module:
    if x.shape[2] * x.shape[3] == 1:
        return batch_norm(pick, x)
    return nn.InstanceNorm2d(width_of(x), affine=pick(True, False), track_running_stats=pick(False, True))


@hazard("image")
def grouped_conv(pick: Pick, x: Tensor) -> nn.Module:
    groups = pick.divisor(width_of(x))
    kernel = pick(1, 3)
    return nn.Conv2d(
        width_of(x), groups * pick(1, 2, 3), kernel, padding=kernel // 2, groups=groups, bias=pick(True, False)
    )


@hazard("image")
def depthwise_conv(pick: Pick, x: Tensor) -> nn.Module:
    groups, multiple = width_of(x), pick(1, 2) if width_of(x) < 10 else 1
    return nn.Conv2d(groups, groups * multiple, 3, padding=1, groups=groups, bias=pick(True, False))


@hazard("image")
def conv_transpose(pick: Pick, x: Tensor) -> nn.Module:
    stride = pick(1, 2) if x.shape[2] * x.shape[3] <= 36 else 1
    groups = pick(1, pick.divisor(width_of(x)))
    out = groups * pick(1, 2, 3) if groups > 1 else pick.width()
    return nn.ConvTranspose2d(width_of(x), out, pick(1, 2, 3), stride, groups=groups, bias=pick(True, False))


@hazard("image")
def conv1d(pick: Pick, x: Tensor) -> nn.Module:
    """A one-dimensional convolution over the flattened positions, or over channels as positions (efficient attention)."""
    if pick(True, False):
        return Fn(
            lambda m, x: m.conv(x.flatten(2)).unflatten(2, x.shape[2:]),
            conv=nn.Conv1d(width_of(x), pick.width(), 3, padding=1),
        )
    gate = nn.Conv1d(1, 1, 3, padding=1)
    return Fn(lambda m, x: x * m.gate(x.mean((2, 3)).unsqueeze(1)).sigmoid().squeeze(1)[:, :, None, None], gate=gate)


@hazard("image")
def pool(pick: Pick, x: Tensor) -> nn.Module:
    if min(x.shape[2:]) < 2:
        return nn.AdaptiveAvgPool2d(2)
    down = pick(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2))
    same = pick(
        None,
        nn.MaxPool2d(3, 1, 1),
        nn.AvgPool2d(3, 1, 1),
        nn.Upsample(scale_factor=2),
        nn.Upsample((3, 3), mode="bilinear"),
    )
    if isinstance(same, nn.Upsample) and x.shape[2] * x.shape[3] > 36:
        same = None
    return down if same is None else same


@hazard("image")
def dynamic_conv(pick: Pick, x: Tensor) -> nn.Module:
    """Kernels made from the image itself, applied as one grouped convolution with the batch folded into the channels."""
    c, out = width_of(x), pick.width()
    style = pick("bank", "depthwise")
    if style == "bank":
        parts = {"route": nn.Linear(c, 3), "bank": param(3, out * c)}
    else:
        out, parts = c, {"make": nn.Linear(c, c * 9)}

    def forward(m: Any, x: Tensor) -> Tensor:
        b, h, w = x.shape[0], x.shape[2], x.shape[3]
        mean = x.mean((2, 3))
        if style == "bank":
            kernel = (m.route(mean).sigmoid() @ m.bank).view(b * out, c, 1, 1)
            return F.conv2d(x.reshape(1, b * c, h, w), kernel, groups=b).view(b, out, h, w)
        return F.conv2d(x.reshape(1, b * c, h, w), m.make(mean).view(b * c, 1, 3, 3), padding=1, groups=b * c).view(
            b, c, h, w
        )

    return Fn(forward, **parts)


@hazard("any")
def scale(pick: Pick, x: Tensor) -> nn.Module:
    """Layer scale, a learned shift, a learned temperature, a learned exponent."""
    parts = {"w": param(*per_channel(x)), "one": param(1), "zero": param()}
    names, fn = pick(
        ("w", lambda m, x: x * m.w),
        ("w", lambda m, x: x + m.w),
        ("w one", lambda m, x: x * m.one + m.w),
        ("w", lambda m, x: x / (1 + m.w.abs())),
        ("one", lambda m, x: x * m.one.exp()),
        ("w one", lambda m, x: torch.addcmul(m.w, x, m.one)),
        ("w one", lambda m, x: torch.lerp(x, m.w.expand_as(x), m.one)),
        ("w", lambda m, x: x.abs() ** (1 + m.w.abs())),
        ("w one", lambda m, x: x * m.one),  # w is never used
        ("w", lambda m, x: torch.maximum(x, m.w)),
        ("one", lambda m, x: torch.minimum(x, m.one)),
        ("w", lambda m, x: F.relu(x - m.w) - F.relu(-x - m.w)),
        ("w", lambda m, x: x.sign() * F.relu(x.abs() - m.w.abs())),
        ("w", lambda m, x: x + (m.w * x).sin() ** 2 / m.w),
        ("w", lambda m, x: x * torch.sigmoid(m.w * x)),
        ("w one", lambda m, x: torch.tanh(m.w * x) * m.one),
        ("w", lambda m, x: torch.where(x > m.w, x, torch.zeros_like(x))),
        ("w", lambda m, x: torch.clamp(x, min=m.w)),
        ("w", lambda m, x: m.w / (1 + x.abs())),
        ("zero", lambda m, x: x * m.zero),
        ("w zero", lambda m, x: torch.hypot(x, m.w) * m.zero.exp()),
        ("w", lambda m, x: torch.atan2(x, m.w)),
        ("w", lambda m, x: x * m.w / m.w.norm()),
        ("w", lambda m, x: x * m.w.softmax(0)),
        ("w", lambda m, x: x * (m.w - m.w.mean())),
        ("w", lambda m, x: x * m.w * m.w + m.w),
    )
    return Fn(fn, **{name: parts[name] for name in names.split()})


# -- blocks of several layers ------------------------------------------------------------------------------------------


@hazard("any")
def mlp(pick: Pick, x: Tensor) -> nn.Module:
    hidden, fn = pick.width(), pick(*ACTIVATIONS)
    return nn.Sequential(mix(x, hidden, pick(True, False)), Fn(lambda m, x: fn(x)), mix(x, width_of(x), width=hidden))


@hazard("any")
def gated(pick: Pick, x: Tensor) -> nn.Module:
    """GLU and its kin, the two halves fused into one map or apart."""
    out, axis = pick.width(), axis_of(x)
    gate = pick(torch.sigmoid, F.silu, F.gelu, torch.relu, lambda v: v)
    if pick(True, False):
        both = mix(x, 2 * out)
        if pick(True, False):
            return Fn(lambda m, x: F.glu(m.both(x), dim=axis), both=both)
        first = pick(0, 1)

        def forward(m: Any, x: Tensor) -> Tensor:
            halves = m.both(x).chunk(2, dim=axis)
            return gate(halves[first]) * halves[1 - first]

        return Fn(forward, both=both)
    return Fn(
        lambda m, x: m.down(gate(m.gate(x)) * m.up(x)),
        gate=mix(x, out),
        up=mix(x, out),
        down=mix(x, width_of(x), width=out),
    )


@hazard("image")
def squeeze_excite(pick: Pick, x: Tensor) -> nn.Module:
    hidden, fn, gate = pick.width(), pick(torch.relu, F.silu), pick(torch.sigmoid, F.hardsigmoid, torch.tanh)
    if pick(True, False):
        parts = {"down": nn.Conv2d(width_of(x), hidden, 1), "up": nn.Conv2d(hidden, width_of(x), 1)}
        return Fn(lambda m, x: x * gate(m.up(fn(m.down(x.mean((2, 3), keepdim=True))))), **parts)
    parts = {"down": nn.Linear(width_of(x), hidden), "up": nn.Linear(hidden, width_of(x))}
    return Fn(lambda m, x: x * gate(m.up(fn(m.down(x.amax((2, 3))))))[:, :, None, None], **parts)


@hazard("image")
def spatial_gate(pick: Pick, x: Tensor) -> nn.Module:
    """A gate over positions from the mean and the maximum of the channels."""
    conv = nn.Conv2d(2, 1, 3, padding=1)
    return Fn(lambda m, x: x * m.conv(torch.cat([x.mean(1, True), x.amax(1, True)], 1)).sigmoid(), conv=conv)


@hazard("any")
def classic(pick: Pick, x: Tensor) -> nn.Module:
    """Ready-made operations along the channels, some with a rule, some without."""
    axis = axis_of(x)
    fn = pick(
        lambda m, x: x.softmax(axis),
        lambda m, x: x.flip(axis),
        lambda m, x: x.roll(1, axis),
        lambda m, x: x.cumsum(axis),
        lambda m, x: x.sort(axis)[0],
        lambda m, x: x - x.logsumexp(axis, keepdim=True),
        lambda m, x: x.diff(dim=axis, prepend=x.narrow(axis, 0, 1)),
        lambda m, x: x.topk(min(3, width_of(x)), axis)[0],
        lambda m, x: F.local_response_norm(x, 3) if x.ndim == 4 else F.layer_norm(x, x.shape[1:]),
        lambda m, x: x.index_select(axis, torch.arange(width_of(x) - 1, -1, -1, device=x.device)),
        lambda m, x: x + x.prod(axis, keepdim=True),
        lambda m, x: x.max(axis, keepdim=True)[0] - x,
        lambda m, x: x - x.mean(0, keepdim=True),
        lambda m, x: torch.cat([torch.relu(x), torch.relu(-x)], axis),
        lambda m, x: (
            x * torch.tensor([0.5, 2.0, 1.5], dtype=x.dtype).repeat(width_of(x))[: width_of(x)].view(per_channel(x))
        ),
        lambda m, x: x * (x.argmax(axis, keepdim=True) + 1),
        lambda m, x: x * (x >= x.median(axis, keepdim=True)[0]),
        lambda m, x: x.kthvalue(1, axis, keepdim=True)[0] + x,
        lambda m, x: torch.fft.fft(x, dim=axis).real,
        lambda m, x: x.cummax(axis)[0],
        lambda m, x: torch.cdist(x.flatten(2), x.flatten(2)).unsqueeze(1) if x.ndim == 4 else torch.cdist(x, x),
        lambda m, x: x @ x.transpose(-2, -1) / x.shape[-1],
        lambda m, x: x.tril() if x.ndim == 3 else x.triu(1) + x,
        lambda m, x: x / (1 + x.var()),
    )
    return Fn(fn)


# -- rearrangements ----------------------------------------------------------------------------------------------------


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


# -- blocks around sub-networks ----------------------------------------------------------------------------------------


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
    if y.ndim == 4 and y.shape[2:] != z.shape[2:] or y.ndim == 3 and y.shape[1] != z.shape[1]:
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


@hazard("any")
def tied(pick: Pick, x: Tensor) -> nn.Module:
    """One parameter in two places: an autoencoder's transpose, two layers of one size, a bias that is also a scale."""
    n, hidden, axis = width_of(x), pick.width(), axis_of(x)
    fn = pick(torch.relu, torch.tanh, torch.sin)
    style = pick("transpose", "layers", "bias", "scale", "square", "sum", "rows", "product", "both", "plus")

    def apply(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.linear(x.movedim(axis, -1), w, b).movedim(-1, axis)

    if style == "transpose":
        return Fn(lambda m, x: apply(fn(apply(x, m.w)), m.w.t()), w=param(hidden, n))
    if style == "layers":
        first, second = mix(x, n), mix(x, n)
        second.weight = first.weight
        return nn.Sequential(first, Fn(lambda m, x: fn(x)), second)
    if style == "bias":
        first, second = mix(x, hidden), mix(x, hidden, width=hidden)
        second.bias = first.bias
        return nn.Sequential(first, Fn(lambda m, x: fn(x)), second)
    if style == "scale":
        shape = (hidden, 1, 1) if x.ndim == 4 else (hidden,)
        scaled = {"w": param(hidden, n), "b": param(hidden), "v": param(n, hidden)}
        return Fn(lambda m, x: apply(fn(apply(x, m.w, m.b)) * m.b.view(shape), m.v), **scaled)
    if style == "square":
        return Fn(lambda m, x: apply(x, m.w @ m.w.t()), w=param(n, hidden))
    if style == "sum":
        return Fn(lambda m, x: apply(fn(apply(x, m.w, m.w.sum(1))), m.v), w=param(hidden, n), v=param(n, hidden))
    if style == "rows" and n > 1:
        return Fn(lambda m, x: apply(x, m.w[: n // 2]) * apply(x, m.w[n - n // 2 :]), w=param(n, n))
    if style == "both":
        return Fn(lambda m, x: apply(fn(apply(x, m.w)), m.w.t()) + apply(x, m.w.t() @ m.w), w=param(n, n))
    if style == "plus":
        return Fn(lambda m, x: apply(fn(apply(x, m.w + m.w.t())), m.v), w=param(n, n), v=param(hidden, n))
    return Fn(
        lambda m, x: apply(fn(apply(x, m.u @ m.w)), m.v) + apply(x, m.v @ m.u @ m.w),
        u=param(hidden, 3),
        w=param(3, n),
        v=param(n, hidden),
    )


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


# -- weights that are computed -----------------------------------------------------------------------------------------


class _Symmetric(nn.Module):
    """A parametrisation: a square matrix plus its transpose, others as they are."""

    def forward(self, w: Tensor) -> Tensor:
        return w + w.transpose(0, 1) if w.shape[0] == w.shape[1] else 2.0 * w


@hazard("any")
def made_weight(pick: Pick, x: Tensor) -> nn.Module:
    """Weight standardisation, weight norm, spectral norm, a parametrisation, masks, low rank, hyper-convolution."""
    n, out, axis = width_of(x), pick.width(), axis_of(x)
    layer = mix(x, out)
    style = pick(
        "standard",
        "weight_norm",
        "old_norm",
        "spectral",
        "symmetric",
        "mask",
        "softmax",
        "lora",
        "routed",
        "normal",
        "outer",
        "kron",
        "slow",
        "list",
        "joined",
        "flip",
        "tril",
        "repeat",
        "padded",
        "gathered",
        "sorted",
    )

    def apply(m: Any, x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.movedim(axis, -1), w.flatten(1), m.layer.bias).movedim(-1, axis)

    if style == "weight_norm":
        return parametrizations.weight_norm(layer, dim=pick(0, 1))
    if style == "old_norm":
        return Fn(
            lambda m, x: apply(m, x, torch._weight_norm(m.layer.weight, m.g, 0)),
            layer=layer,
            g=param(*layer.weight[:, :1].shape),
        )
    if style == "spectral":
        return parametrizations.spectral_norm(layer)
    if style == "symmetric":
        parametrize.register_parametrization(layer, "weight", _Symmetric())
        return layer
    if style == "mask":
        mask = (torch.arange(n * out).reshape(out, n) % 3 > 0).float()
        return Fn(lambda m, x: apply(m, x, m.layer.weight.flatten(1) * m.mask), layer=layer, mask=mask)
    if style == "softmax":
        dim = pick(0, 1)
        return Fn(lambda m, x: apply(m, x, m.layer.weight.softmax(dim)), layer=layer)
    if style == "lora":
        return Fn(
            lambda m, x: apply(m, x, m.layer.weight.flatten(1) + 0.5 * m.b @ m.a),
            layer=layer,
            a=param(3, n),
            b=param(out, 3),
        )
    if style == "routed":
        bank = param(3, out, n)
        mean = tuple(i for i in range(1, x.ndim) if i != axis)
        return Fn(lambda m, x: _routed(m, x, mean, axis), route=nn.Linear(n, 3), bank=bank)
    if style == "outer":
        return Fn(
            lambda m, x: apply(m, x, m.layer.weight.flatten(1) * m.a[:, None] + m.b),
            layer=layer,
            a=param(out),
            b=param(n),
        )
    if style == "kron":
        bank = {"a": param(2, pick.divisor(n)), "b": None}
        bank["b"] = param(3, n // bank["a"].shape[1])
        return Fn(lambda m, x: F.linear(x.movedim(axis, -1), torch.kron(m.a, m.b)).movedim(-1, axis), **bank)
    if style == "list":
        bank = nn.ParameterList([param(n) for _ in range(out)])
        return Fn(lambda m, x: apply(m, x, torch.stack(list(m.bank))), layer=_bias_only(out), bank=bank)
    if style == "joined":
        return Fn(lambda m, x: apply(m, x, torch.cat([m.a, m.layer.weight.flatten(1)[1:]])), layer=layer, a=param(1, n))
    if style in ("flip", "tril", "sorted"):
        fn = {"flip": lambda w: w.flip(0), "tril": torch.tril, "sorted": lambda w: w.sort(1)[0]}[style]
        return Fn(lambda m, x: apply(m, x, fn(m.layer.weight.flatten(1))), layer=layer)
    if style == "repeat":
        return Fn(lambda m, x: apply(m, x, m.row.repeat(out, 1)), layer=_bias_only(out), row=param(1, n))
    if style == "padded" and n > 1:
        return Fn(lambda m, x: apply(m, x, F.pad(m.w, (0, 1))), layer=_bias_only(out), w=param(out, n - 1))
    if style == "gathered":
        return Fn(
            lambda m, x: apply(m, x, m.bank[m.index]),
            layer=_bias_only(out),
            bank=param(4, n),
            index=torch.arange(out) % 4,
        )
    if style == "slow":
        made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out * n))
        return (
            Fn(lambda m, x: apply(m, x, m.made(m.code).view(out, n)), layer=mix(x, out), made=made, code=param(3))
            if out > 1
            else layer
        )
    if style == "normal":
        return Fn(
            lambda m, x: apply(m, F.normalize(x, dim=axis), F.normalize(m.layer.weight.flatten(1), dim=1)), layer=layer
        )
    return Fn(
        lambda m, x: apply(m, x, _standardised(m.layer.weight.flatten(1)) * m.gain), layer=layer, gain=param(out, 1)
    )


def _bias_only(out: int) -> nn.Module:
    return Fn(lambda m, x: x, bias=param(out))


def _standardised(w: Tensor) -> Tensor:
    return (w - w.mean(1, keepdim=True)) / (w.var(1, keepdim=True, unbiased=False) + 1e-4).sqrt()


def _routed(m: Any, x: Tensor, mean: tuple[int, ...], axis: int) -> Tensor:
    share = m.route(x.mean(mean)).softmax(-1)
    weights = torch.einsum("be,eoi->boi", share, m.bank)
    flat = x.movedim(axis, -1)
    return (flat.flatten(1, -2) @ weights.transpose(1, 2)).unflatten(1, flat.shape[1:-1]).movedim(-1, axis)


# -- tokens ------------------------------------------------------------------------------------------------------------


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
    n, c = x.shape[1], x.shape[2]
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


# -- windows -----------------------------------------------------------------------------------------------------------


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
    )
    return Fn(fn, drop=nn.Dropout(0.3), drop2=nn.Dropout2d(0.3))


# -- heads -------------------------------------------------------------------------------------------------------------


def head(pick: Pick, x: Tensor) -> nn.Module:
    """From the last tensor to the output."""
    classes = pick(3, 5)
    if x.ndim == 3:
        part, read = pick(
            ("last", lambda m, x: m.last(x.mean(1))),
            ("last", lambda m, x: m.last(x[:, 0])),
            ("last", lambda m, x: m.last(x.amax(1))),
            ("last", lambda m, x: m.last(x)),
            ("flat", lambda m, x: m.flat(x.flatten(1))),
            ("last", lambda m, x: m.last(x).softmax(-1)),
        )
    else:
        part, read = pick(
            ("last", lambda m, x: m.last(x.mean((2, 3)))),
            ("last", lambda m, x: m.last(F.adaptive_avg_pool2d(x, 1).flatten(1))),
            ("flat", lambda m, x: m.flat(x.flatten(1))),
            ("last", lambda m, x: m.last(x.amax((-2, -1)))),
            ("map", lambda m, x: m.map(x)),
            ("last", lambda m, x: m.last(F.relu(x).flatten(2).sum(2))),
        )
    layers = {
        "last": lambda: nn.Linear(width_of(x), classes),
        "flat": lambda: nn.Linear(x[0].numel(), classes),
        "map": lambda: nn.Conv2d(width_of(x), classes, 1),
    }
    return Fn(read, **{part: layers[part]()})
