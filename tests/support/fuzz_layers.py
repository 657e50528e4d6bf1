"""Hazards: layers and the small blocks of convolutional and dense networks, and weights that are computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fuzz_pieces import ACTIVATIONS, Fn, Pick, axis_of, hazard, mix, param, per_channel, width_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


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
    return Fn(
        lambda m, x: x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + 1e-5) * (offset + m.weight),
        weight=param(*per_channel(x)),
    )


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
    """A convolution over the flattened positions, or over channels as if they were positions."""
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
    """Kernels made from the image itself: one grouped convolution with the batch folded into the channels."""
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
            g=param(out, 1, *[1] * (2 if x.ndim == 4 else 0)),
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
        inside = pick.divisor(n)
        bank = {"a": param(2, inside), "b": param(3, n // inside)}
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
