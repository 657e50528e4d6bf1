"""The demo's networks: a small CNN with BatchNorm on scikit-learn's digits, and how two of them are trained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.group import initial
from intertwine.zoo.precision import Precision
from intertwine.zoo.recipe import Recipe
from intertwine.zoo.trainer import Trainer

RECIPE = Recipe("demo", "adam", 3e-3, epochs=15, batch=64, schedule="one-cycle", warmup=3.0)
#: Networks this small gain nothing from a GPU, and two machines tell the same story.
PRECISION = Precision("float32", torch.device("cpu"))


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


def train(data: Dataset, seeds: Sequence[int], recipe: Recipe, advance: Callable[[], None]) -> list[nn.Module]:
    """A network per seed, trained together; `advance` is called after every epoch."""
    trainer = Trainer([initial(network, seed) for seed in seeds], seeds, data, recipe, PRECISION)
    for _ in range(recipe.epochs):
        trainer.run_epoch()
        advance()
    return [trainer.stack.module(i) for i in range(len(seeds))]


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small run fastest on one core, and many times slower when several threads wait for a busy one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
