"""Networks without skip connections: MLP, LeNet-5, Myrtle CNN, Tiny-10 and VGG."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from intertwine.errors import InputError
from intertwine.lab.zoo.networks.options import Activation, listed, maker, one_of, positive, scaled


def mlp(widths: Sequence[int] = (784, 512, 10), activation: Activation = "relu", bias: bool = True) -> nn.Sequential:
    """A multilayer perceptron; the input is flattened first. Initialised as in torch.

    Args:
        widths: inputs, hidden layers, outputs. (784, 512, 10) has 407,050 parameters; (784, 512, 512, 512, 10) is the
            network of Zhou et al. (2023).
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.
        bias: whether the linear layers add one.

    >>> mlp((4, 3, 2))
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=4, out_features=3, bias=True)
      (2): ReLU()
      (3): Linear(in_features=3, out_features=2, bias=True)
    )
    """
    listed("widths", widths, "(784, 512, 10)")
    if len(widths) < 2:
        raise InputError(f"widths must be two sizes or more, such as (784, 512, 10), but is {tuple(widths)}.")
    for width in widths:
        positive(widths=width)
    act = maker(activation)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias), act()]
    return nn.Sequential(*layers[:-1])


def lenet(
    in_channels: int = 1, side: int = 28, classes: int = 10, widths: Sequence[int] = (6, 16, 120, 84),
    padding: int = 2, activation: Activation = "relu",
) -> nn.Sequential:  # fmt: skip
    """LeNet-5 with ReLUs. By default it reads MNIST and has 61,706 parameters. Initialised as in torch.

    Args:
        in_channels, side: the images are in_channels × side × side.
        classes: number of logits.
        widths: of the two convolutions and the two hidden linear layers.
        padding: of the first convolution. With 2, images of 28 × 28 pass through the sizes of the original network;
            with padding=0, in_channels=3, side=32 it has 62,006 parameters.
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.

    >>> import torch
    >>> lenet()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    if len(widths) != 4:
        raise InputError(
            f"widths must be four sizes such as (6, 16, 120, 84), but is {tuple(widths)}: two convolutions and two "
            "hidden linear layers."
        )
    c1, c2, f1, f2 = widths
    positive(in_channels=in_channels, side=side, classes=classes)
    for width in widths:
        positive(widths=width)
    last = ((side + 2 * padding - 4) // 2 - 4) // 2  # the side of the images at the first linear layer
    if last < 1:
        raise InputError(
            f"Images of side={side} with padding={padding} are too small for two 5×5 convolutions and two poolings. "
            "Give larger images or more padding."
        )
    act = maker(activation)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, c1, 5, padding=padding), relu1=act(), pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(c1, c2, 5), relu2=act(), pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(c2 * last**2, f1), relu3=act(),
            fc2=nn.Linear(f1, f2), relu4=act(),
            fc3=nn.Linear(f2, classes),
        )
    )  # fmt: skip


MYRTLE_STAGES = 4


def myrtle(
    widths: Sequence[int] = (64, 128, 256, 512), width: int | None = None, norm: bool = True,
    bias: bool | str = True, head_bias: bool = True, in_channels: int = 3, classes: int = 10,
    activation: Activation = "relu",
) -> nn.Sequential:  # fmt: skip
    """The Myrtle CNN (Page 2018) for 32 × 32 images, as Godfrey et al. (2022) use it. Initialised as in torch.

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
        bias: whether the convolutions have a bias; "first": only the first one.
        head_bias: whether the linear layer has a bias.
        in_channels, classes: of the images, and of the logits.
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.

    >>> sum(p.numel() for p in myrtle().parameters())
    1558026
    """
    if width is None:
        listed("widths", widths, "(64, 128, 256, 512)")
    else:
        positive(width=width)
    channels = tuple(widths) if width is None else (width,) * MYRTLE_STAGES
    if len(channels) != MYRTLE_STAGES:
        raise InputError(
            f"widths must be four sizes such as (64, 128, 256, 512), but is {channels}. Pass width=512 for equal ones."
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


TINY10_WIDTHS = (16, 16, 32, 32, 32, 64, 64, 64)
TINY10_STRIDES = (1, 1, 2, 1, 1, 2, 1, 1)
TINY10_KERNELS = (3, 3, 3, 3, 3, 3, 3, 1)


def tiny10(
    width: int | float = 1, in_channels: int = 3, classes: int = 10, activation: Activation = "relu"
) -> nn.Sequential:
    """Tiny-10 of Csiszárik et al. (2021) for 32 × 32 images, with the names of its published checkpoints.

    By default it has 86,778 parameters. Layer i has the modules conv{i}, bn{i}, relu{i}. Initialised as in torch.

    Args:
        width: multiplies the channels of every layer.
        in_channels, classes: of the images, and of the logits.
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.

    >>> sum(p.numel() for p in tiny10().parameters())
    86778
    """
    positive(in_channels=in_channels, classes=classes)
    channels = [scaled(base, width) for base in TINY10_WIDTHS]
    act = maker(activation)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    shapes = zip([in_channels, *channels], channels, TINY10_KERNELS, TINY10_STRIDES, strict=False)
    for i, (inputs, outputs, kernel, stride) in enumerate(shapes, 1):
        layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, kernel, stride)
        layers[f"bn{i}"] = nn.BatchNorm2d(outputs)
        layers[f"relu{i}"] = act()
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels[-1], classes)
    return nn.Sequential(layers)


#: Depth → number of convolutions in each stage.
VGG_STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
VGG_WIDTHS = (64, 128, 256, 512, 512)
VGG_HIDDEN = 4096


def vgg(
    depth: int = 16, norm: bool = False, classifier: str = "linear", width: int | float = 1, hidden: int = VGG_HIDDEN,
    dropout: float = 0.5, in_channels: int = 3, classes: int = 10, activation: Activation = "relu",
) -> nn.Sequential:  # fmt: skip
    """A VGG (Simonyan and Zisserman 2015) for 32 × 32 images: `features` and `classifier`. Initialised as in torch.

    Args:
        depth: 11, 13, 16 or 19.
        norm: BatchNorm between each convolution and its activation.
        classifier: "linear", one layer (Chen et al. 2024); "mlp", two hidden layers with dropout (Zhou et al. 2023).
        width: multiplies the channels of every convolution.
        hidden, dropout: of the classifier "mlp"; dropout acts in training mode only.
        in_channels, classes: of the images, and of the logits.
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.

    >>> sum(p.numel() for p in vgg(16, norm=True).parameters())
    14728266
    """
    one_of("depth", depth, VGG_STAGES)
    one_of("classifier", classifier, ("linear", "mlp"))
    positive(hidden=hidden, in_channels=in_channels, classes=classes)
    act, last = maker(activation), scaled(VGG_WIDTHS[-1], width)
    if classifier == "linear":  # built first: a seed gives the weights in this order
        head: nn.Module = nn.Linear(last, classes)
    else:
        head = nn.Sequential(
            *(nn.Linear(last, hidden), act(), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), act(), nn.Dropout(dropout)),
            nn.Linear(hidden, classes),
        )
    layers: list[nn.Module] = []
    inputs = in_channels
    for count, base in zip(VGG_STAGES[depth], VGG_WIDTHS, strict=True):
        outputs = scaled(base, width)
        for _ in range(count):
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            layers += [nn.BatchNorm2d(outputs), act()] if norm else [act()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(OrderedDict(features=nn.Sequential(*layers), flatten=nn.Flatten(), classifier=head))
