"""What commands on several networks work with: the networks and the images, as the user named them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

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
    """The networks, ready to be called with the inputs the user wrote, else with an image, else with their own."""
    from intertwine.checkpoints import load

    if images is None or inputs:
        return [load(name, file, inputs) for name, file in zip(names, weights, strict=True)]
    shape = "x".join(map(str, (1, *images.shape)))
    return [load(name, file, [shape], _other_data(name, images)) for name, file in zip(names, weights, strict=True)]


def _other_data(name: str, images: ImageSplits | Dataset) -> str:
    """What to do where a network cannot read the images."""
    learnt = zoo_data(name)
    known = "" if learnt is None else f", such as {learnt['name']}, which it learnt on"
    return f"That is the shape of an image of {images.name}: choose a data set that it can read by --data{known}."


def require_batch_norm(loaded: Loaded) -> None:
    """Refuse a reset of statistics that there are none of."""
    from intertwine.data.batchnorm import batch_norms

    if not batch_norms(loaded.model):
        raise InputError(
            f"--reset was given, but {loaded.name} has no BatchNorm with running statistics. Leave it out."
        )


def read_images(options: Namespace, names: Sequence[str]) -> ImageSplits | None:
    """The images that were asked for, seen as the networks saw them where these come from a zoo that learnt on them."""
    from intertwine.lab.zoo.datasets.loading import data as find_data

    if options.data is None:
        if options.data_folder is not None:
            raise InputError(f"--data-folder {options.data_folder} was given without a data set. Add --data NAME.")
        return None
    data = find_data(options.data, options.data_folder)
    seen = _normalisations(names, data.checksum)
    if len(seen) > 1:
        words = " and ".join(f"mean {mean}, std {std}" for mean, std in sorted(seen))
        raise InputError(
            f"The networks learnt {data.name} under different normalisations ({words}), so no image is the same to all "
            "of them. Take networks of one zoo."
        )
    for mean, std in seen:
        data = data.normalised(mean, std)
    few = data.spread(options.samples)
    return ImageSplits(data.name, data.shape, *(_even(few, part, options.batch) for part in ("train", "test")))


def split_training_images(images: ImageSplits) -> tuple[Batches, Batches]:
    """The training images in two parts that share none: those to look at, and as many to choose by. No test image."""
    from intertwine.lab.zoo.datasets.dataset import Dataset

    data, most = images.train.dataset, images.train.size
    even, odd = ((data.images[k::2], data.labels[k::2]) for k in (0, 1))
    if not len(odd[1]):
        raise InputError(f"One training image of {data.name} cannot be set apart from itself. Allow more by --samples.")
    parts = Dataset.of(data.name, even, odd, data.mean, data.std, data.classes)
    return _even(parts, "train", most), _even(parts, "test", most)


def require_data(what: str) -> NoReturn:
    """Refuse what cannot be done without images."""
    raise InputError(f"{what}, and no data was given. Add --data NAME, such as --data digits.")


def zoo_data(name: str) -> Mapping[str, Any] | None:
    """The data that a network learnt, by its manifest, where it is named by a zoo's folder; None for other names."""
    from intertwine.checkpoints.sources import SOURCES
    from intertwine.lab.zoo.manifest import MANIFEST_FILE as MANIFEST
    from intertwine.lab.zoo.manifest import read_manifest

    source, _, _ = name.partition(":")
    folder = Path(name.rpartition(":")[0])
    return read_manifest(folder).plan.data if source not in SOURCES and (folder / MANIFEST).is_file() else None


def _normalisations(names: Sequence[str], checksum: str) -> set[tuple[tuple[float, ...], tuple[float, ...]]]:
    """(mean, std) under which the networks of zoos learnt the data with this checksum."""
    learnt = [data for name in names if (data := zoo_data(name)) is not None]
    return {
        (tuple(map(float, data["mean"])), tuple(map(float, data["std"])))
        for data in learnt
        if data["checksum"] == checksum
    }


def _even(data: Dataset, split: str, most: int) -> Batches:
    """Batches of nearly one size: a last one of a single image would have no variance."""
    total = len(data.labels if split == "train" else data.test_labels)
    return data.batches(split, -(-total // -(-total // most)))
