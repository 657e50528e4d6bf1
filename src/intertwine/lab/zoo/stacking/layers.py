"""The layers of a stack on any device: one layer of all K networks at once, on tensors with a first axis of networks.

Linear layers are batched matrix products, convolutions are grouped, BatchNorm treats the channels of all networks as
those of one. Every other layer or function runs under `torch.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from intertwine.errors import InputError
from intertwine.lab.zoo.randomness import keyed, uniform

Tensors = Mapping[str, Tensor]
#: Elementwise layers without tensors, which run on the whole stack.
ENTRYWISE = (
    nn.ReLU, nn.LeakyReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Mish,
    nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Identity,
)  # fmt: skip
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


def linear(module: nn.Linear, tensors: Tensors, x: Tensor) -> Tensor:
    """(K, …, in) to (K, …, out)."""
    rows = x.flatten(1, -2) if x.dim() > 3 else x
    weight, bias = tensors["weight"], tensors.get("bias")
    if rows.dim() == 2:  # one sample without a batch
        return torch.einsum("ki,koi->ko", rows, weight) + (0 if bias is None else bias)
    if bias is None:
        y = torch.bmm(rows, weight.mT)
    elif x.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
        y = Affine.apply(rows, weight, bias)  # pyrefly: ignore
    else:
        y = torch.baddbmm(bias[:, None], rows, weight.mT)
    return y.unflatten(1, x.shape[1:-1]) if x.dim() > 3 else y


class Affine(torch.autograd.Function):
    """x Wᵀ + b of every network; torch computes the gradient of Wᵀ instead, up to five times slower on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = torch.bmm(grads[0], weight) if ctx.needs_input_grad[0] else None
        return dx, torch.bmm(grads[0].mT, x), grads[0].sum(1)


def convolution(module: nn.Conv2d, tensors: Tensors, x: Tensor) -> Tensor:
    """(K, N, C, H, W) as one grouped convolution. Under `torch.vmap`, autocast would not apply to it."""
    y, padding = x.movedim(0, 1).flatten(1, 2), module.padding
    if module.padding_mode != "zeros":
        y, padding = F.pad(y, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0
    weight, bias = tensors["weight"].flatten(0, 1), tensors["bias"].flatten() if "bias" in tensors else None
    y = F.conv2d(y, weight, bias, module.stride, padding, module.dilation, len(x) * module.groups)
    return y.unflatten(1, (len(x), -1)).movedim(1, 0)


def batch_norm(module: nn.modules.batchnorm._BatchNorm, tensors: Tensors, x: Tensor, training: bool) -> Tensor:
    """BatchNorm of (K, N, C, …), on the channels of all networks."""
    merged = x.movedim(0, 1).flatten(1, 2)
    mean, var, weight, bias = (
        tensors[name].flatten() if name in tensors else None
        for name in ("running_mean", "running_var", "weight", "bias")
    )
    if training and "num_batches_tracked" in tensors:
        tensors["num_batches_tracked"].add_(1)
    if module.momentum is None:
        raise InputError(
            "A stack cannot train a BatchNorm with momentum=None (a cumulative average). Give the layer a momentum, "
            "such as 0.1."
        )
    batch = training or mean is None
    y = F.batch_norm(merged, mean, var, weight, bias, batch, module.momentum, module.eps)
    return y.unflatten(1, (len(x), -1)).movedim(1, 0)


def pooled(module: nn.Module, x: Tensor) -> Tensor:
    """Pooling: networks are merged with the images or the channels, whichever needs no copy."""
    if x.dim() == 5 and x.stride(0) < x.stride(1):
        return module(x.movedim(0, 1).flatten(1, 2)).unflatten(1, (len(x), -1)).movedim(1, 0)
    return module(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def dropout(module: nn.Dropout, x: Tensor, keys: Tensor | None, step: int) -> Tensor:
    """Dropout by a hash of the network's key, the layer and the entry, independent of the other networks."""
    if keys is None or module.p == 0:
        return x
    entries = torch.arange(x[0].numel(), device=x.device)
    kept = uniform(keyed(keyed(keys, step)[:, None], entries)) >= module.p
    return x * kept.view(x.shape).to(x.dtype) / (1 - module.p)


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention of (K, N, heads, tokens, width): networks are merged with the samples."""
    if query.dim() == 3:  # no samples: the networks are the samples
        return F.scaled_dot_product_attention(query, key, value, **options)
    networks = len(query)
    query, key, value = (t.flatten(0, 1) for t in (query, key, value))
    y = F.scaled_dot_product_attention(query, key, value, **options)
    return y.unflatten(0, (networks, -1))


def vmapped(
    call: Callable[..., Any], tensors: Tensors, args: tuple[Any, ...], kwargs: Mapping[str, Any], networks: int
) -> Any:
    """Any other layer or function under `torch.vmap`; arguments that are not tensors are shared by all networks."""
    flat, tree = tree_flatten((args, dict(kwargs)))
    stacked = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
    if not stacked and not tensors:  # arithmetic on shapes; a tensor made of them is shared
        return tree_map(lambda y: y.expand(networks, *y.shape) if isinstance(y, Tensor) else y, call(*args, **kwargs))
    constants: list[Any] = []  # outputs that are not tensors, such as a size

    def one(tensors: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
        own = list(flat)
        for i, value in zip(stacked, inputs, strict=True):
            own[i] = value
        given, named = tree_unflatten(own, tree)
        y = functional_call(call, tensors, given, named) if isinstance(call, nn.Module) else call(*given, **named)
        out, form = tree_flatten(y)
        constants[:] = [form, [None if isinstance(value, Tensor) else value for value in out]]
        return [value for value in out if isinstance(value, Tensor)]

    results = iter(torch.vmap(one)(dict(tensors), *(flat[i] for i in stacked)))
    return tree_unflatten([next(results) if value is None else value for value in constants[1]], constants[0])
