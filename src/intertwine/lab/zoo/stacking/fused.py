"""Chains of layers in a stack on a GPU: the Triton kernels as differentiable functions, and their runner.

The kernels use images (networks, images, height, width, channels). Outside, images have torch's order (networks,
images, channels, height, width); only their strides differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intertwine.lab.zoo.stacking import conv_kernels as kernels
from intertwine.lab.zoo.stacking import layers
from intertwine.lab.zoo.stacking.norm_kernels import affine_unit, affine_unit_gradient, moments, unit_sums
from intertwine.lab.zoo.stacking.program import Chain

#: The kernels read channels in blocks of this size.
STEP = 16


def _inner(x: Tensor) -> Tensor:
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _outer(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)


class Convolution(torch.autograd.Function):
    """Images (K, N, C, H, W) under weights (K, O, C, R, S)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
        inner, kernel = _inner(x), weight.permute(0, 3, 4, 2, 1).to(x.dtype).contiguous()
        short = -kernel.shape[3] % STEP if kernel.shape[3] % 8 else 0
        if short:  # padded with zero channels
            inner, kernel = F.pad(inner, (0, short)), F.pad(kernel, (0, 0, 0, short))
        ctx.save_for_backward(inner, kernel)
        ctx.geometry = stride, pad, weight.shape[2]
        return _outer(kernels.convolve(inner, kernel, stride, pad))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        stride, pad, channels = ctx.geometry
        dy = _inner(grads[0])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            full = kernels.image_gradient(dy, kernel, tuple(x.shape[2:4]), stride, pad)
            dx = _outer(full[..., :channels])
        if ctx.needs_input_grad[1]:
            full = kernels.weight_gradient(x, dy, tuple(kernel.shape[1:3]), stride, pad)
            dw = full[:, :, :, :channels].permute(0, 4, 3, 1, 2)
        return dx, dw, None, None


class NormUnit(torch.autograd.Function):
    """unit(norm(x) + skip), pooled, with the statistics of the batch: `mean` and `rstd` are (K, C)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None,
        slope: float, pool: bool,
    ) -> Tensor:  # fmt: skip
        inner, scale = _inner(x), weight * rstd
        shift = bias - mean * scale
        y = affine_unit(inner, scale, shift, slope, None if skip is None else _inner(skip), pool)
        ctx.save_for_backward(inner, mean, rstd, scale, shift, y if skip is not None else inner)
        ctx.how = slope, skip is not None, pool
        return _outer(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, scale, shift, y = ctx.saved_tensors
        slope, skip, pool = ctx.how
        dy, count = _inner(grads[0]), x[0].numel() // x.shape[-1]
        sums = unit_sums(x, y, dy, scale, shift, mean, slope, skip, pool)
        first, second = sums[:, 0].contiguous(), sums[:, 1] * rstd
        linear = -scale * rstd * second / count
        constant = -scale * first / count - linear * mean
        dx, dskip = affine_unit_gradient(x, y, dy, scale, shift, slope, skip, pool, scale, linear, constant)
        return _outer(dx), None, None, second, first, _outer(dskip) if dskip is not None else None, None, None


class BiasUnit(torch.autograd.Function):
    """unit(scale · x + bias), pooled, where the scale is a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, bias: Tensor, slope: float, pool: bool) -> Tensor:
        inner = _inner(x)
        ctx.save_for_backward(inner, scale, bias)
        ctx.how = slope, pool
        return _outer(affine_unit(inner, scale, bias, slope, None, pool))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, bias = ctx.saved_tensors
        slope, pool = ctx.how
        dy, none = _inner(grads[0]), torch.zeros_like(scale)
        dx, _ = affine_unit_gradient(x, x, dy, scale, bias, slope, False, pool, scale, none, none)
        dbias = None
        if ctx.needs_input_grad[2]:
            dbias = unit_sums(x, x, dy, scale, bias, none, slope, False, pool)[:, 0]
        return _outer(dx), None, dbias, None, None


class ChainRunner:
    """Runs one chain of a stack on images and the input of its skip connection."""

    def __init__(
        self,
        chain: Chain,
        conv: nn.Conv2d | None,
        norm: nn.BatchNorm2d | None,
        conv_tensors: Mapping[str, Tensor],
        norm_tensors: Mapping[str, Tensor],
    ) -> None:
        self.chain, self.conv, self.norm = chain, conv, norm
        self.conv_tensors, self.norm_tensors = conv_tensors, norm_tensors

    def __call__(self, x: Tensor, skip: Tensor | None, training: bool) -> Tensor:
        bias = self.conv_tensors.get("bias")
        batch = self.norm is not None and (training or "running_mean" not in self.norm_tensors)
        if self.conv is not None:
            weight, pad = self.conv_tensors["weight"], self.conv.padding[0]
            x = Convolution.apply(x, weight, self.conv.stride[0], int(pad))  # pyrefly: ignore
        if self.norm is None:
            return self._without_norm(x, bias)
        if batch:
            return self._with_batch(x, bias, skip, training)
        mean, var = self.norm_tensors["running_mean"], self.norm_tensors["running_var"]
        if bias is not None:
            mean = mean - bias  # the running mean includes the bias
        return self._normalised(x, mean, (var + self.norm.eps).rsqrt(), skip)

    def _with_batch(self, x: Tensor, bias: Tensor | None, skip: Tensor | None, training: bool) -> Tensor:
        """Normalise by batch statistics; a bias before the norm affects the running mean only, and has no gradient."""
        assert self.norm is not None
        count = x[0].numel() // x.shape[2]
        mean, square = (t.contiguous() for t in (moments(_inner(x)) / count).unbind(1))
        var = (square - mean.square()).clamp_min(0)
        if training and "running_mean" in self.norm_tensors:
            self._update_running(mean if bias is None else mean + bias.detach(), var * (count / (count - 1)))
        y = self._normalised(x, mean, (var + self.norm.eps).rsqrt(), skip)
        return y if bias is None else ZeroGradient.apply(y, bias)  # pyrefly: ignore

    def _update_running(self, mean: Tensor, var: Tensor) -> None:
        momentum = self.norm.momentum if self.norm is not None else None
        with torch.no_grad():
            self.norm_tensors["running_mean"].lerp_(mean, momentum or 0.0)
            self.norm_tensors["running_var"].lerp_(var, momentum or 0.0)
            self.norm_tensors["num_batches_tracked"].add_(1)

    def _normalised(self, x: Tensor, mean: Tensor, rstd: Tensor, skip: Tensor | None) -> Tensor:
        weight = self.norm_tensors.get("weight", torch.ones_like(mean))
        bias = self.norm_tensors.get("bias", torch.zeros_like(mean))
        if skip is not None:  # broadcast as in torch
            skip = skip.reshape(len(x), *(1,) * (x.dim() - skip.dim()), *skip.shape[1:]).to(x.dtype).expand_as(x)
        pool = self._pools(x)
        return self._rest(NormUnit.apply(x, mean, rstd, weight, bias, skip, self.chain.slope, pool), pool)

    def _without_norm(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None and self.chain.slope == 1.0 and not self.chain.pool:
            return x
        scale = torch.ones(len(x), x.shape[2], device=x.device)
        shift, pool = torch.zeros_like(scale) if bias is None else bias, self._pools(x)
        return self._rest(BiasUnit.apply(x, scale, shift, self.chain.slope, pool), pool)

    def _pools(self, x: Tensor) -> bool:
        """Whether the kernel pools, which needs images of even height and width."""
        return self.chain.pool and x.shape[-2] % 2 == x.shape[-1] % 2 == 0

    def _rest(self, y: Tensor, pooled: bool) -> Tensor:
        return y if pooled == self.chain.pool else layers.pooled(nn.MaxPool2d(2), y)


class ZeroGradient(torch.autograd.Function):
    """Returns y and gives an unused parameter the gradient zero instead of None."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, parameter: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = parameter.shape, parameter.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros(ctx.shape, dtype=ctx.dtype, device=grads[0].device)
