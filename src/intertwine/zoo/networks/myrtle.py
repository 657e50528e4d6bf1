"""The Myrtle CNN of Page (2018), as Godfrey et al. (2022) use it: four 3×3 convolutions and one linear layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from intertwine.errors import InputError
from intertwine.zoo.networks.activations import Activation, maker
from intertwine.zoo.networks.options import listed, one_of, positive

STAGES = 4


def myrtle(
    widths: Sequence[int] = (64, 128, 256, 512),
    width: int | None = None,
    norm: bool = True,
    bias: bool | str = True,
    head_bias: bool = True,
    in_channels: int = 3,
    classes: int = 10,
    activation: Activation = "relu",
) -> nn.Sequential:
    """The Myrtle CNN for 32 × 32 images. Initialised as torch does.

    Path n of this Sequential is number n + 1 in figure 26 of the paper: its ReLUs 3, 6, 10, 14 (with BatchNorm) are the
    paths 2, 5, 9, 13, and 2, 4, 7, 10 (without) are 1, 3, 6, 9.

    The paper's figures and its published code disagree on the biases. Parameters, with the default widths:

        figure 26a    norm=True                                      1,558,026   (all biases; the default here)
        code, BN      norm=True, bias=False                          1,557,066   (no convolution has a bias)
        figure 26b    norm=False, bias="first", head_bias=False      1,555,200   (only the first convolution has one)
        code, no BN   norm=False                                     1,556,106   (all biases)

    Args:
        widths: channels of the four convolutions.
        width: channels of all four, instead of `widths`: 512 is the constant-width network of the paper's appendix.
        norm: BatchNorm between each convolution and its activation.
        bias: whether the convolutions add a bias; "first": only the first one does.
        head_bias: whether the linear layer adds a bias.
        in_channels, classes: of the images, and of the logits.
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.

    >>> sum(p.numel() for p in myrtle().parameters())
    1558026
    """
    if width is None:
        listed("widths", widths, "(64, 128, 256, 512)")
    else:
        positive(width=width)
    channels = tuple(widths) if width is None else (width,) * STAGES
    if len(channels) != STAGES:
        raise InputError(
            f"The option widths={channels} was asked for, but the Myrtle CNN has four convolutions. Give four widths, "
            "such as (64, 128, 256, 512), or width=512 for all of them."
        )
    one_of("bias", bias, (True, False, "first"))
    for size in channels:
        positive(widths=size)
    positive(in_channels=in_channels, classes=classes)
    act = maker(activation)
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(zip((in_channels, *channels), channels, strict=False)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias is True or (bias == "first" and i == 0)))
        layers += [nn.BatchNorm2d(outputs)] if norm else []
        layers += [act(), nn.MaxPool2d(2)] if i else [act()]
    return nn.Sequential(*layers, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(channels[-1], classes, head_bias))
