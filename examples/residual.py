"""A small residual network as an example of a model file for the command line.

intertwine inspect examples/residual.py:net --svg wires.svg
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n)
        self.conv2, self.bn2 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(y)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 32, 3), Block(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.relu(self.stem(x))).mean((2, 3)))


def net() -> nn.Module:
    return Net().eval()


def example_inputs() -> Tensor:
    return torch.randn(2, 3, 16, 16)
