"""Tiny-10, the small CIFAR-10 network of Csiszárik et al. (2021): eight unpadded convolutions and one linear layer."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from intertwine.zoo.networks.activations import Activation, maker
from intertwine.zoo.networks.options import positive, scaled

WIDTHS = (16, 16, 32, 32, 32, 64, 64, 64)
STRIDES = (1, 1, 2, 1, 1, 2, 1, 1)
KERNELS = (3, 3, 3, 3, 3, 3, 3, 1)


def tiny10(
    width: int | float = 1, in_channels: int = 3, classes: int = 10, activation: Activation = "relu"
) -> nn.Sequential:
    """Tiny-10 for 32 × 32 images, with the names of its published checkpoints. Initialised as torch does.

    As it stands it has 86,778 parameters. Layer i is the modules conv{i}, bn{i}, relu{i}.

    Args:
        width: multiplies the channels of every layer.
        in_channels, classes: of the images, and of the logits.
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.

    >>> sum(p.numel() for p in tiny10().parameters())
    86778
    """
    positive(in_channels=in_channels, classes=classes)
    channels = [scaled(base, width) for base in WIDTHS]
    act = maker(activation)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    shapes = zip([in_channels, *channels], channels, KERNELS, STRIDES, strict=False)
    for i, (inputs, outputs, kernel, stride) in enumerate(shapes, 1):
        layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, kernel, stride)
        layers[f"bn{i}"] = nn.BatchNorm2d(outputs)
        layers[f"relu{i}"] = act()
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels[-1], classes)
    return nn.Sequential(layers)
