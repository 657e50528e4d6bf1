"""Multilayer perceptrons of any widths, from one pixel row to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from intertwine.errors import InputError
from intertwine.zoo.networks.activations import Activation, maker
from intertwine.zoo.networks.options import listed, positive


def mlp(widths: Sequence[int] = (784, 512, 10), activation: Activation = "relu", bias: bool = True) -> nn.Sequential:
    """Linear layers with an activation between them; the input is flattened first. Initialised as torch does.

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
        raise InputError(
            f"The option widths={tuple(widths)} was asked for, but a network has an input and an output. Give two "
            "widths or more, such as (784, 512, 10)."
        )
    for width in widths:
        positive(widths=width)
    act = maker(activation)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias), act()]
    return nn.Sequential(*layers[:-1])
