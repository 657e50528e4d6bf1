"""`data`: a data set by its name; scikit-learn's digits and folders of images are read here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets.cifar10 import read_cifar10
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.downloads import known_name, places
from intertwine.lab.zoo.datasets.formats import import_extra
from intertwine.lab.zoo.datasets.mnist import MNIST_VARIANTS, read_mnist

#: The prefix of the name of a folder of images.
FOLDER = "folder:"
TEST_SIZE = 360  # of the 1,797 digits
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
LAYOUT = "Expected train/CLASS/*.png and test/CLASS/*.png (val/ may replace test/, and .jpg or others .png)."


def data(name: str, folder: str | Path | None = None, *, size: int | None = None, check: bool = True) -> Dataset:
    """A data set by its name.

    `digits` comes with scikit-learn. `mnist`, `fashion-mnist` and `cifar10` are read from `folder`; without one, from
    the folders in the environment variable INTERTWINE_DATA or the user's cache folder, where `download` puts files;
    Fashion-MNIST also from Debian's package dataset-fashion-mnist. `imagefolder` with a folder, or `folder:PATH`, reads
    images in folders named after classes.

    Args:
        name: `digits`, `mnist`, `fashion-mnist`, `cifar10`, `imagefolder` or `folder:PATH`.
        folder: the only folder to search.
        size: for a folder of images, the height and width to resize them to.
        check: whether to verify the files by their published sums.

    >>> digits = data("digits")
    >>> digits
    Dataset(digits: 1,437 training and 360 test images, 1×8×8, 10 classes, checksum ...)
    >>> inputs, targets = next(iter(digits.batches("test", size=100)))
    >>> inputs.shape, float(inputs.max())
    (torch.Size([100, 1, 8, 8]), 1.0)

    Raises:
        InputError: an unknown name, no files, or files that are damaged or not the published ones.
    """
    if name.startswith(FOLDER):
        if folder is not None:
            raise InputError(f"{name} already names a folder, but folder={str(folder)!r} is given too. Leave one out.")
        name, folder = "imagefolder", name.removeprefix(FOLDER)
    known = known_name(name)
    if known == "imagefolder":
        if folder is None:
            raise InputError(
                f"The data set {name!r} is a folder of your own, but no folder is given. Name it as folder:PATH, where "
                "PATH holds a folder of images for each class."
            )
        return read_image_folder(places(folder)[0], size, f"{FOLDER}{folder}")
    if size is not None:
        raise InputError(f"size={size} resizes a folder of images only; {known} has a fixed size.")
    if known == "digits":
        return read_digits()
    folders = places(folder)
    if known == "cifar10":
        return read_cifar10(folders, check)
    system = MNIST_VARIANTS[known].system if folder is None else ()
    return read_mnist(known, [*folders, *map(Path, system)], check)


def read_digits() -> Dataset:
    """The 1,797 handwritten digits of 8 × 8 pixels in scikit-learn, in a fixed random order."""
    bunch = import_extra("sklearn.datasets", "scikit-learn", "the data set digits").load_digits()
    images, labels = bunch.images.astype(np.uint8)[..., None], bunch.target
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    first, second = (images[train], labels[train]), (images[test], labels[test])
    return Dataset.of("digits", first, second, [0], [16], tuple("0123456789"))  # pixels run from 0 to 16


def read_image_folder(folder: Path, size: int | None = None, name: str | None = None) -> Dataset:
    """The images of a folder as a data set, in RGB, with classes and files in the order of their names.

    The normalisation is the mean and the standard deviation of the training pixels.

    Args:
        folder: holds `train/` and `test/` or `val/`, and these one folder per class.
        size: every image is resized to size × size pixels; None keeps the size, which must be the same for all.
        name: of the data set.
    """
    if size is not None and size < 1:
        raise InputError(f"The image size must be at least 1, but is {size}.")
    found = {split: folder / split for split in ("train", "test", "val") if (folder / split).is_dir()}
    if "train" not in found or len(found) < 2:
        present = f"only {', '.join(f'{split}/' for split in found)}" if found else "neither"
        raise InputError(f"{folder} should hold train/ and test/ or val/, but holds {present}. {LAYOUT}")
    train, test = found["train"], found.get("test") or found["val"]
    classes = _classes(train)
    unknown = sorted(set(_classes(test)) - set(classes))
    if unknown:
        raise InputError(f"{test} holds classes that {train} does not: {', '.join(unknown)}. {LAYOUT}")
    first, second = _read_split(train, classes, size), _read_split(test, classes, size)
    pixels = first[0].reshape(-1, 3)
    mean = [float(value) for value in pixels.mean(0, dtype=np.float64)]
    std = [float(value) or 1.0 for value in pixels.std(0, dtype=np.float64)]  # 1 for a constant channel
    return Dataset.of(name or f"folder:{folder}", first, second, mean, std, classes)


def _classes(split: Path) -> list[str]:
    return sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _read_split(split: Path, classes: list[str], size: int | None) -> tuple[np.ndarray, np.ndarray]:
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((split / name).glob("*"))
        if file.suffix.lower() in ENDINGS
    ]
    if not files:
        raise InputError(f"{split} holds no images ({', '.join(ENDINGS)}) in folders of classes. {LAYOUT}")
    first, *rest = images = [_pixels(file, size) for file, _ in files]
    for (file, _), image in zip(files[1:], rest, strict=True):
        if image.shape != first.shape:
            raise InputError(
                f"{files[0][0]} has {first.shape[1]} × {first.shape[0]} pixels and {file} has {image.shape[1]} × "
                f"{image.shape[0]}. Pass a size, such as size=32, to resize all images."
            )
    return np.stack(images), np.array([label for _, label in files])


def _pixels(file: Path, size: int | None) -> np.ndarray:
    image = import_extra("PIL.Image", "Pillow", "a folder of images")
    try:
        with image.open(file) as opened:
            picture = opened.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise InputError(f"{file} could not be read as an image ({error}). Remove it or replace it.") from error
    return np.asarray(picture if size is None else picture.resize((size, size), image.Resampling.BILINEAR))
