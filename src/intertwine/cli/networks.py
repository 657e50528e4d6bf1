"""The networks and images that commands on several networks work on, as the user named them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from intertwine.errors import InputError

if TYPE_CHECKING:
    from intertwine.checkpoints.load import Loaded
    from intertwine.lab.zoo.datasets.dataset import Batches, Dataset


@dataclass(frozen=True, eq=False)
class ImageSplits:
    """Images of a data set: those to align and to estimate statistics on, and those to score on."""

    name: str
    shape: tuple[int, int, int]
    train: Batches
    test: Batches


def load_networks(
    names: Sequence[str], weights: Sequence[str | None], inputs: Sequence[str], images: ImageSplits | Dataset | None
) -> list[Loaded]:
    """The networks, to be called with the inputs that the user wrote, else with an image, else with their own."""
    from intertwine.checkpoints import load
    from intertwine.lab.zoo.sources import training_data

    if images is None or inputs:
        return [load(name, file, inputs) for name, file in zip(names, weights, strict=True)]
    shape = "x".join(map(str, (1, *images.shape)))
    loaded = []
    for name, file in zip(names, weights, strict=True):
        data = training_data(name)
        known = "" if data is None else f", such as {data['name']}, which it was trained on"
        advice = f"That is the shape of an image of {images.name}: choose a data set that fits it by --data{known}."
        loaded.append(load(name, file, [shape], advice))
    return loaded


def require_batch_norm(loaded: Loaded) -> None:
    """Refuse --reset where there are no BatchNorm statistics."""
    from intertwine.data.batchnorm import batch_norms

    if not batch_norms(loaded.model):
        raise InputError(
            f"--reset needs a BatchNorm with running statistics, and {loaded.name} has none. Leave it out."
        )


def read_images(options: Namespace, names: Sequence[str]) -> ImageSplits | None:
    """The images of --data, normalised as in the training of those networks that come from a zoo trained on them."""
    from intertwine.lab.zoo.datasets.loading import data as find_data
    from intertwine.lab.zoo.sources import training_data

    if options.data is None:
        if options.data_folder is not None:
            raise InputError(f"--data-folder {options.data_folder} is given without a data set. Add --data NAME.")
        return None
    data = find_data(options.data, options.data_folder)
    trained_on = [found for name in names if (found := training_data(name)) and found["checksum"] == data.checksum]
    normalisations = {(tuple(map(float, found["mean"])), tuple(map(float, found["std"]))) for found in trained_on}
    if len(normalisations) > 1:
        words = " and ".join(f"mean {mean}, std {std}" for mean, std in sorted(normalisations))
        raise InputError(
            f"The networks were trained on {data.name} under different normalisations ({words}), so no image is the "
            "same to all of them. Take networks of one zoo."
        )
    for mean, std in normalisations:
        data = data.normalised(mean, std)
    few = data.spread(options.samples)
    return ImageSplits(data.name, data.shape, *(_even(few, part, options.batch) for part in ("train", "test")))


def split_training_images(images: ImageSplits) -> tuple[Batches, Batches]:
    """The training images in two disjoint halves: to fold with, and to measure accuracy on. No test image."""
    from intertwine.lab.zoo.datasets.dataset import Dataset

    data, most = images.train.dataset, images.train.size
    even, odd = ((data.images[k::2], data.labels[k::2]) for k in (0, 1))
    if not len(odd[1]):
        raise InputError(f"One training image of {data.name} cannot be split into two halves. Allow more by --samples.")
    parts = Dataset.of(data.name, even, odd, data.mean, data.std, data.classes)
    return _even(parts, "train", most), _even(parts, "test", most)


def _even(data: Dataset, split: str, most: int) -> Batches:
    """Batches of nearly one size: a last one of a single image would have no variance."""
    total = len(data.labels if split == "train" else data.test_labels)
    return data.batches(split, -(-total // -(-total // most)))
