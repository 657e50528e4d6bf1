"""Tiny-10, the small CIFAR-10 network of Csiszárik et al. (2021): eight convolutions and one linear layer.

intertwine canonicalize examples/tiny10.py:net --weights seed0.safetensors --out canonical.safetensors
intertwine canonicalize examples/tiny10.py:net --dedupe FOLDER_OF_CHECKPOINTS
"""

import torch
from torch import Tensor, nn

WIDTHS = (16, 16, 32, 32, 32, 64, 64, 64)
STRIDES = (1, 1, 2, 1, 1, 2, 1, 1)


class Tiny10(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, (n, m, stride) in enumerate(zip((3, *WIDTHS), WIDTHS, STRIDES, strict=False), 1):
            self.add_module(f"conv{i}", nn.Conv2d(n, m, 1 if i == 8 else 3, stride))
            self.add_module(f"bn{i}", nn.BatchNorm2d(m))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, 9):
            x = torch.relu(self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x)))
        return self.fc(x.mean((2, 3)))


def net() -> nn.Module:
    return Tiny10().eval()


def example_inputs() -> Tensor:
    return torch.randn(2, 3, 32, 32)
