"""What the distances are measured on: images with pixels from 0 to 1, and the trained networks, kept in chunks.

The folder of the networks is named after everything that made them; the next run reads what it finds there and trains
the rest. A run that is killed leaves whole files only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from intertwine.files import write_tensors
from intertwine.reproduce.kinds.distances.settings import Distances
from intertwine.reproduce.kinds.distances.stacked_mlp import Recipe, Stack, concatenated, train
from intertwine.zoo.datasets.dataset import Dataset

#: Networks trained at once. A GPU wants many; on a CPU small chunks cost nothing and lose less when stopped.
CHUNKS = {"cuda": 250, "cpu": 2}


@dataclass(frozen=True)
class Images:
    """Images (samples, pixels) with values in [0, 1] and their labels, for training and for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    checksum: str
    classes: int


def read_images(data: Dataset, device: torch.device) -> Images:
    """The images of a data set on the device, the brightest pixel of its training part being 1."""
    # divided on the CPU, since a GPU would multiply by the rounded 1/255
    brightest = float(data.images.max())
    parts = (data.images.flatten(1).float() / brightest, data.labels)
    test = (data.test_images.flatten(1).float() / brightest, data.test_labels)
    train_x, train_y, test_x, test_y = (tensor.to(device) for tensor in (*parts, *test))
    return Images(train_x, train_y, test_x, test_y, data.checksum, len(data.classes))


def recipe_of(plan: Distances, images: Images) -> Recipe:
    """How one network is built and trained, as wide as the images and their classes ask for."""
    return Recipe(
        images.train_x.shape[1], plan.hidden, images.classes, plan.activation, plan.learning_rate, plan.epsilon,
        plan.epochs, plan.batch_size,
    )  # fmt: skip


def trained(plan: Distances, images: Images, place: Path, tell: Callable[[str], None]) -> Stack:
    """All networks of the plan, on the device of the images; every chunk is kept as soon as it is trained."""
    recipe, device = recipe_of(plan, images), images.train_x.device
    chunk, folder = CHUNKS.get(device.type, CHUNKS["cpu"]), place / _digest(recipe, plan.first_seed, images)
    stacks = []
    for start in range(0, plan.nets, chunk):
        stop = min(start + chunk, plan.nets)
        file = folder / f"nets-{start:05d}-{stop - 1:05d}.safetensors"
        if not file.is_file():
            seeds = range(plan.first_seed + start, plan.first_seed + stop)
            write_tensors(file, train(recipe, seeds, images.train_x, images.train_y, tell).tensors)
        stacks.append(Stack(**load_file(file), activation=plan.activation))
    return concatenated(stacks).each(lambda tensor: tensor.to(device))


def _digest(recipe: Recipe, first_seed: int, images: Images) -> str:
    """A short name for everything the trained networks depend on."""
    made_of = {"recipe": asdict(recipe), "first_seed": first_seed, "images": images.checksum}
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
