"""The networks of `benchmark_measure`: small perceptrons on handwritten digits, their features and probes.

Five hidden layers of one width. One zoo is trained on the true labels; the others on labels of which a share is random.
Features are those after each activation, on test images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from intertwine.argument_types import Float, Int
from intertwine.data.features import features
from intertwine.errors import InputError
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.downloads import cache_folder
from intertwine.lab.zoo.datasets.loading import read_digits
from intertwine.lab.zoo.folder import Zoo
from intertwine.lab.zoo.recipe import Recipe
from intertwine.lab.zoo.recipe import recipe as changed
from intertwine.lab.zoo.training import train

DEPTH, WIDTH, TRAINING, SAMPLES = 5, 128, 1000, 500
LAYERS = tuple(str(2 + 2 * i) for i in range(DEPTH))
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of random labels
#: Numbers of kept principal components, with smaller steps where each component matters more.
RANKS = (64, 32, 16, 10, 8, 7, 6, 5, 4, 3, 2, 1)
RECIPE = Recipe("benchmark", "adam", 1e-3, epochs=60, batch=50, schedule="one-cycle", warmup=12.0)


@dataclass(frozen=True, eq=False)
class BenchmarkFeatures:
    """Features of one layer of one network on training and test images, in double precision."""

    train: Float[Tensor, "seen features"]
    test: Float[Tensor, "unseen features"]

    @property
    def samples(self) -> Float[Tensor, "samples features"]:
        """The input of a measure."""
        return self.test[:SAMPLES]

    def leading(self, rank: int) -> BenchmarkFeatures:
        """Without its principal components of least variance, those of the training images."""
        mean = self.train.mean(0)
        directions = torch.linalg.svd(self.train - mean, full_matrices=False)[2][:rank]
        onto = directions.T @ directions
        return BenchmarkFeatures((self.train - mean) @ onto + mean, (self.test - mean) @ onto + mean)


@dataclass(frozen=True, eq=False)
class ReducedLayer:
    """The first layer of a network without its principal components of least variance; None as rank for the whole."""

    owner: int
    rank: int | None
    samples: Float[Tensor, "samples features"]
    accuracy: float


@dataclass(frozen=True, eq=False)
class BenchmarkNetworks:
    """The networks of the benchmark.

    Attributes:
        trained: network → layer → features. randomised: share of random labels → the last layers of some networks.
        labels, test_labels: of the images.
    """

    folder: Path
    trained: tuple[tuple[BenchmarkFeatures, ...], ...]
    randomised: dict[float, tuple[BenchmarkFeatures, ...]]
    labels: Int[Tensor, " seen"]
    test_labels: Int[Tensor, " unseen"]

    @cached_property
    def cuts(self) -> tuple[ReducedLayer, ...]:
        """First layers, whole and with components deleted, with their accuracies; the same for any measure."""
        found = []
        for owner, layers in enumerate(self.trained):
            for rank in (None, *RANKS):
                layer = layers[0] if rank is None else layers[0].leading(rank)
                found.append(ReducedLayer(owner, rank, layer.samples, self.many_shot(layer)))
        return tuple(found)

    @cached_property
    def accuracies(self) -> Float[Tensor, "networks layers"]:
        """The few-shot accuracies, layer by layer."""
        rows = [[self.few_shot(layer) for layer in layers] for layers in self.trained]
        return torch.tensor(rows, dtype=torch.float64)

    def few_shot(self, layer: BenchmarkFeatures) -> float:
        """The accuracy of a linear probe on five images of each class."""
        rows = [torch.nonzero(self.labels == c)[:5, 0] for c in range(10)]
        return self._probe(layer, torch.cat(rows), 1e-3)

    def many_shot(self, layer: BenchmarkFeatures) -> float:
        """The accuracy of a linear probe on all training images."""
        return self._probe(layer, torch.arange(len(self.labels)), 1e-1)

    def _probe(self, layer: BenchmarkFeatures, rows: Tensor, ridge: float) -> float:
        """The accuracy of ridge regression on some rows; the penalty is a share of the features' mean square."""
        x, mean = layer.train[rows], layer.train[rows].mean(0)
        targets = one_hot(self.labels[rows], 10).double()
        x, rest = x - mean, layer.test - mean
        penalty = ridge * x.square().sum() / x.shape[1]
        if not penalty > 0:  # a layer that is the same for all images
            return float((self.test_labels == targets.sum(0).argmax()).double().mean())
        products = x.T @ x + penalty * torch.eye(x.shape[1], dtype=torch.float64)
        lines = torch.linalg.solve(products, x.T @ (targets - targets.mean(0)))
        scores = rest @ lines + targets.mean(0)
        return float((scores.argmax(1) == self.test_labels).double().mean())


def benchmark_networks(folder: str | Path | None, networks: int, epochs: int | None) -> BenchmarkNetworks:
    """Train missing networks, and collect the features."""
    if networks < 3:
        raise InputError(
            f"networks must be at least 3, but is {networks}: tests compare two of a kind with another. Use 10 or so."
        )
    recipe = changed(RECIPE, epochs=epochs)
    place = (cache_folder() / "benchmark_measure" if folder is None else Path(folder).expanduser()) / (
        f"digits-{DEPTH}x{WIDTH}-{recipe.epochs}-epochs"
    )
    true = digits_with_random_labels(0.0)
    some = max(2, networks // 2)
    zoos = {share: _zoo(place, share, networks if share == 0 else some, recipe) for share in SHARES}
    trained = tuple(_layers(zoos[0.0], seed, true) for seed in range(networks))
    last = {share: tuple(_layers(zoos[share], seed, true)[-1] for seed in range(some)) for share in SHARES}
    return BenchmarkNetworks(place, trained, last, true.labels, true.test_labels)


def digits_with_random_labels(share: float) -> Dataset:
    """The digits, 1,000 for training and 797 for testing, with a share of random training labels."""
    digits = read_digits()
    images = torch.cat([digits.images, digits.test_images])
    labels = torch.cat([digits.labels, digits.test_labels])
    train, test = (images[:TRAINING], labels[:TRAINING].clone()), (images[TRAINING:], labels[TRAINING:])
    g = torch.Generator().manual_seed(1)
    chosen = torch.randperm(TRAINING, generator=g)[: round(share * TRAINING)]
    train[1][chosen] = torch.randint(10, (len(chosen),), generator=g)
    name = f"digits, {share:.0%} of the labels random"
    return Dataset.of(name, train, test, digits.mean, digits.std, digits.classes)


def _zoo(place: Path, share: float, networks: int, recipe: Recipe) -> Zoo:
    widths = {"widths": (64, *[WIDTH] * DEPTH, 10)}
    return train(
        "mlp", seeds=range(networks), data=digits_with_random_labels(share),
        out=place / f"random-{share:.0%}".rstrip("%"),
        recipe=recipe, options=widths, device="cpu", precision="float32", score_every=recipe.epochs,
        save_every=recipe.epochs, together=10,
    )  # fmt: skip


def _layers(zoo: Zoo, seed: int, data: Dataset) -> tuple[BenchmarkFeatures, ...]:
    model = zoo.seed(seed)
    parts = [features(model, data.batches(split, TRAINING), LAYERS).collect() for split in ("train", "test")]
    return tuple(BenchmarkFeatures(parts[0][name].double(), parts[1][name].double()) for name in LAYERS)
