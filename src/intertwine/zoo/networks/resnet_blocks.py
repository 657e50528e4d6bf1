"""Residual blocks: the basic one, the bottleneck, and the two kinds of shortcut around them."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import nn

from intertwine.zoo.networks.traced import Traced

#: Makes an activation module; every place of a network gets its own.
Maker = Callable[[], nn.Module]


class PadShortcut(nn.Module):
    """Option A: every second pixel, and zeros for the channels that are new, half of them on either side.

    >>> import torch
    >>> PadShortcut(2, 4, stride=2)(torch.ones(1, 2, 4, 4))[0, :, 0, 0]
    tensor([0., 1., 1., 0.])
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        before = (outputs - inputs) // 2
        self.padding = (0, 0, 0, 0, before, outputs - inputs - before)

    def forward(self, x: Traced) -> Traced:
        return F.pad(x[:, :, :: self.stride, :: self.stride], self.padding)

    def extra_repr(self) -> str:
        return f"stride={self.stride}, padding={self.padding[4:]}"


def shortcut(kind: str, inputs: int, outputs: int, stride: int) -> nn.Module:
    """The way around a block: nothing where the shapes agree, else option "A" (zeros) or "B" (1×1 convolution and BN).

    >>> shortcut("B", 16, 16, 1)
    Identity()
    """
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if kind == "A":
        return PadShortcut(inputs, outputs, stride)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions. `relu1` is inside the block, `relu2` follows the sum; each is a module of its own."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, kind: str, act: Maker, last: Maker) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = act()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = last()
        self.shortcut = shortcut(kind, inputs, width, stride)  # registered last, as in the papers' numbering of modules

    def forward(self, x: Traced) -> Traced:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu2(out + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, four times wider outside. `relu1`, `relu2` are inside, `relu3` follows the sum."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, kind: str, act: Maker, last: Maker) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = act()
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = act()
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu3 = last()
        self.shortcut = shortcut(kind, inputs, outputs, stride)

    def forward(self, x: Traced) -> Traced:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.relu2(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu3(out + self.shortcut(x))
