"""The demo's networks: a small CNN with BatchNorm on scikit-learn's 1,797 real handwritten digits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from intertwine.shapes import Float, Int

TEST_SIZE, EPOCHS, BATCH, RATE = 360, 30, 64, 3e-3


@dataclass(frozen=True)
class Digits:
    """Images of 8 × 8 pixels between 0 and 1 with their digits, cut into a part to learn from and a part to test on."""

    images: Float[Tensor, "train 1 8 8"]
    labels: Int[Tensor, " train"]
    test_images: Float[Tensor, "test 1 8 8"]
    test_labels: Int[Tensor, " test"]


def digits() -> Digits:
    """The data set that scikit-learn carries with it, in an order that is shuffled once and for all."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return Digits(images[train], labels[train], images[test], labels[test])


def network() -> nn.Module:
    """Two convolutions with BatchNorm and two linear layers."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in [
        *(("conv1", nn.Conv2d(1, 16, 3, padding=1)), ("norm1", nn.BatchNorm2d(16)), ("relu1", nn.ReLU())),
        *(("conv2", nn.Conv2d(16, 32, 3, 2, padding=1)), ("norm2", nn.BatchNorm2d(32)), ("relu2", nn.ReLU())),
        *(("flatten", nn.Flatten()), ("hidden", nn.Linear(512, 64)), ("relu3", nn.ReLU())),
        ("output", nn.Linear(64, 10)),
    ]:
        layers[name] = layer
    return nn.Sequential(layers)


def train(data: Digits, seed: int, advance: Callable[[], None], epochs: int = EPOCHS) -> nn.Module:
    """A network trained from one seed; `advance` is called after every epoch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network().train()
        optimizer = torch.optim.Adam(model.parameters(), RATE)
        for _ in range(epochs):
            for batch in torch.randperm(len(data.labels)).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(model(data.images[batch]), data.labels[batch]).backward()
                optimizer.step()
            advance()
    return model.eval()


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small run fastest on one core, and many times slower when several threads wait for a busy one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def predictions(model: nn.Module, images: Float[Tensor, "n 1 8 8"]) -> Int[Tensor, " n"]:
    """The digit a network sees in each image."""
    with torch.no_grad():
        return model(images).argmax(1)


def accuracy(model: nn.Module, data: Digits) -> float:
    """The fraction of test images a network gets right."""
    return float((predictions(model, data.test_images) == data.test_labels).float().mean())
