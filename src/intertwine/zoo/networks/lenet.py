"""LeNet-5 with ReLUs and max-pooling: two 5×5 convolutions and three linear layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from intertwine.errors import InputError
from intertwine.zoo.networks.activations import Activation, maker
from intertwine.zoo.networks.options import positive


def lenet(
    in_channels: int = 1,
    side: int = 28,
    classes: int = 10,
    widths: Sequence[int] = (6, 16, 120, 84),
    padding: int = 2,
    activation: Activation = "relu",
) -> nn.Sequential:
    """LeNet-5. As it stands it reads MNIST and has 61,706 parameters. Initialised as torch does.

    Args:
        in_channels, side: the images are in_channels × side × side.
        classes: how many logits.
        widths: of the two convolutions and the two hidden linear layers.
        padding: of the first convolution. 2 takes 28 × 28 images through the sizes of the original network; with
            padding=0, in_channels=3, side=32 it has 62,006 parameters.
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.

    >>> import torch
    >>> lenet()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    if len(widths) != 4:
        raise InputError(
            f"The option widths={tuple(widths)} was asked for, but LeNet has two convolutions and two hidden linear "
            "layers. Give four widths, such as (6, 16, 120, 84)."
        )
    c1, c2, f1, f2 = widths
    positive(in_channels=in_channels, side=side, classes=classes)
    for width in widths:
        positive(widths=width)
    last = _last_side(side, padding)
    act = maker(activation)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, c1, 5, padding=padding),
            relu1=act(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(c1, c2, 5),
            relu2=act(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(c2 * last**2, f1),
            relu3=act(),
            fc2=nn.Linear(f1, f2),
            relu4=act(),
            fc3=nn.Linear(f2, classes),
        )
    )


def _last_side(side: int, padding: int) -> int:
    """The side of the images that reach the first linear layer."""
    last = ((side + 2 * padding - 4) // 2 - 4) // 2
    if last < 1:
        raise InputError(
            f"Images of side={side} with padding={padding} were asked for, but after the two 5×5 convolutions and the "
            "two poolings nothing is left of them. Give larger images or more padding."
        )
    return last
