"""Residual networks for 32 × 32 images (He et al. 2016): ResNet-20 to 110 of three stages, and 18, 34, 50 of four."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import nn

from intertwine.lab.zoo.networks.options import Activation, Traced, maker, one_of, positive, scaled

#: Makes a new activation module at every call.
Maker = Callable[[], nn.Module]


class PadShortcut(nn.Module):
    """Option A: every second pixel, and zeros for the new channels, half of them on either side.

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
    """The shortcut of a block: the identity if the shapes agree, else option "A" (zeros) or "B" (1×1 convolution, BN).

    >>> shortcut("B", 16, 16, 1)
    Identity()
    """
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if kind == "A":
        return PadShortcut(inputs, outputs, stride)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions; `relu1` is inside the block, `relu2` follows the sum."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, kind: str, act: Maker, last: Maker) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = act()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = last()
        self.shortcut = shortcut(kind, inputs, width, stride)  # last, as in the papers' numbering of modules

    def forward(self, x: Traced) -> Traced:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu2(out + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, four times wider outside; `relu1`, `relu2` are inside, `relu3` follows the sum."""

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


#: Depth → kind of block, channels of the first stage, blocks of each stage, shortcut.
RESNET_STAGES: dict[int, tuple[type[BasicBlock] | type[Bottleneck], int, tuple[int, ...], str]] = {
    **{6 * n + 2: (BasicBlock, 16, (n, n, n), "A") for n in (3, 5, 7, 9, 18)},
    18: (BasicBlock, 64, (2, 2, 2, 2), "B"),
    34: (BasicBlock, 64, (3, 4, 6, 3), "B"),
    50: (Bottleneck, 64, (3, 4, 6, 3), "B"),
}


class ResNet(nn.Module):
    """A stem `conv1, bn1, relu`, the stages `layer1, layer2, …`, a global average `pool` and a linear layer `fc`.

    Modules are registered in the order in which they run, see `registry.figure_numbers`.
    """

    def __init__(
        self, stem: tuple[nn.Module, nn.Module, nn.Module], stages: list[nn.Sequential], fc: nn.Linear
    ) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = stem
        self.stages = len(stages)
        for i, stage in enumerate(stages, 1):
            self.add_module(f"layer{i}", stage)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = fc

    def forward(self, x: Traced) -> Traced:
        x = self.relu(self.bn1(self.conv1(x)))
        for i in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(self.pool(x).flatten(1))


def resnet(
    depth: int = 20, shortcut: str | None = None, width: int | float = 1, residual_relu: bool = True,
    init: str = "kaiming", in_channels: int = 3, classes: int = 10, activation: Activation = "relu",
) -> ResNet:  # fmt: skip
    """A residual network for 32 × 32 images: no pooling in the stem, stride 2 from the second stage on.

    Args:
        depth: 20, 32, 44, 56, 110 (stages of 16, 32, 64 channels) or 18, 34, 50 (64, 128, 256, 512; 50: bottlenecks).
        shortcut: where a block changes shape, "A" (every second pixel, zeros for new channels) or "B" (1×1 convolution
            and BatchNorm). By default, "A" for the depths 6n + 2 as in Godfrey et al. (2022), whose ResNet20 has
            269,722 parameters, and "B" for the others. Csiszárik et al. (2021) use ResNet-20 with "B": 272,474.
        width: multiplies the channels of every layer.
        residual_relu: False replaces the ReLU after each sum by an nn.Identity, as in the "ResNet-50 without residual
            ReLU" of Godfrey et al.
        init: "kaiming", normal with variance 2 / fan-in for every convolution and for the linear weights, as in the
            published code of Godfrey et al.; "torch", the defaults of torch.
        in_channels, classes: of the images, and of the logits.
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.

    >>> sum(p.numel() for p in resnet(20).parameters())
    269722
    """
    one_of("depth", depth, RESNET_STAGES)
    block, base, counts, usual = RESNET_STAGES[depth]
    one_of("shortcut", shortcut, (None, "A", "B"))
    one_of("init", init, ("kaiming", "torch"))
    positive(in_channels=in_channels, classes=classes)
    act = maker(activation)
    inputs = scaled(base, width)
    stem = (nn.Conv2d(in_channels, inputs, 3, padding=1, bias=False), nn.BatchNorm2d(inputs), act())
    stages = []
    for i, count in enumerate(counts):
        channels, blocks = scaled(base * 2**i, width), []
        for j in range(count):
            stride, last = 2 if i and not j else 1, act if residual_relu else nn.Identity
            blocks.append(block(inputs, channels, stride, shortcut or usual, act, last))
            inputs = channels * block.expansion
        stages.append(nn.Sequential(*blocks))
    model = ResNet(stem, stages, nn.Linear(inputs, classes))
    if init == "kaiming":
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)
    return model
