"""Small networks of the zoo with their symmetry, by name."""

from functools import cache

import torch
from torch import nn

import intertwine as it
from intertwine.lab.zoo.networks.registry import architecture, build
from intertwine.symmetry.symmetry import Symmetry

ZOO = {
    "mlp": {"widths": (784, 40, 30, 10)},
    "myrtle": {"width": 16},
    "resnet20": {},
    "resnet18": {"width": 0.125},
    "vgg16": {"width": 0.125},
    "vgg16_bn": {"width": 0.125},
    "vit": {"dim": 24, "depth": 2},
    "gpt": {"dim": 24, "depth": 2},
    "tiny10": {},
}


@cache
def network(name: str) -> tuple[nn.Module, Symmetry]:
    torch.manual_seed(0)
    model = build(name, **ZOO[name]).eval()
    return model, it.symmetry(model, architecture(name).example())
