"""Networks trained on the handwritten digits for the tests of merging: perceptrons, and small convolution networks."""

import tempfile
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

import intertwine as it

Batches = list[tuple[Tensor, Tensor]]
IMAGE = torch.zeros(2, 1, 8, 8)


@cache
def digits() -> tuple[Batches, Batches]:
    """Training and test part, each as one batch, as networks see them."""
    found = it.zoo.data("digits")

    def seen(images: Tensor) -> Tensor:
        return (images.movedim(-1, 1).float() - torch.tensor(found.mean)) / torch.tensor(found.std)

    return [(seen(found.images), found.labels)], [(seen(found.test_images), found.test_labels)]


@cache
def perceptrons(*widths: int, count: int = 4) -> tuple[nn.Module, ...]:
    """ReLU perceptrons of different seeds, 95 to 97 % of the test digits right."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"widths": widths}
        zoo = it.zoo.train("mlp", seeds=range(count), data="digits", out=folder, epochs=20, options=options)
        return tuple(zoo[i].eval().requires_grad_(False) for i in range(count))


@cache
def normed_convolutions(count: int = 4) -> tuple[nn.Module, ...]:
    """Small convolution networks with BatchNorm, of different seeds."""
    images, labels = digits()[0][0]
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), 5e-3)
        for _ in range(6):
            for some in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                functional.cross_entropy(model(images[some]), labels[some]).backward()
                optimizer.step()
        found.append(model.eval().requires_grad_(False))
    return tuple(found)


def accuracy(model: nn.Module) -> float:
    """On the test digits."""
    ((images, labels),) = digits()[1]
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def loss(model: nn.Module) -> float:
    """Cross-entropy on the test digits."""
    ((images, labels),) = digits()[1]
    with torch.no_grad():
        return float(functional.cross_entropy(model(images), labels))
