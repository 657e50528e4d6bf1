"""`data`: a data set by its name; scikit-learn's digits and folders of images are read here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets.cifar10 import read_cifar10
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.downloads import known_name, places
from intertwine.lab.zoo.datasets.formats import extra
from intertwine.lab.zoo.datasets.mnist import MNIST_VARIANTS, read_mnist

# ----------------------------------------------------------------------------------------------------
# The 1,797 handwritten digits of 8 × 8 pixels that scikit-learn carries with it.


TEST_SIZE = 360


def read_digits() -> Dataset:
    """The digits, shuffled once and for all; pixels are 0 to 16."""
    bunch = extra("sklearn.datasets", "scikit-learn", "the data set digits").load_digits()
    images, labels = bunch.images.astype(np.uint8)[..., None], bunch.target
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    # The largest pixel is 16, so a network sees numbers between 0 and 1.
    return Dataset.of(
        "digits", (images[train], labels[train]), (images[test], labels[test]), [0], [16], tuple("0123456789")
    )


# ----------------------------------------------------------------------------------------------------
# A folder of images, one folder per class: `train/CLASS/*.png` and `test/CLASS/*.png` (or `val/`).


ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
LAYOUT = "Expected train/CLASS/*.png and test/CLASS/*.png (val/ is as good as test/, and .jpg as .png)."


def read_image_folder(folder: Path, size: int | None = None, name: str | None = None) -> Dataset:
    """The images of a folder as a data set, in RGB, classes and files in the order of their names.

    Args:
        folder: holds `train/` and `test/` or `val/`, and these a folder per class.
        size: every image is stretched to size × size pixels; None takes them as they are, if all are equal.
        name: what to call the data set.

    The normalisation is the mean and the standard deviation of the training pixels.
    """
    if size is not None and size < 1:
        raise InputError(f"images of {size} × {size} pixels were asked for; the size is at least 1.")
    train, test = _splits(folder)
    classes = _classes(train)
    unknown = sorted(set(_classes(test)) - set(classes))
    if unknown:
        raise InputError(f"{test} holds classes that {train} does not: {', '.join(unknown)}. {LAYOUT}")
    learned, tested = _part(train, classes, size), _part(test, classes, size)
    pixels = learned[0].reshape(-1, 3)
    mean = [float(value) for value in pixels.mean(0, dtype=np.float64)]
    std = [float(value) or 1.0 for value in pixels.std(0, dtype=np.float64)]  # a channel that never changes is kept
    return Dataset.of(name or f"folder:{folder}", learned, tested, mean, std, classes)


def _splits(folder: Path) -> tuple[Path, Path]:
    names = ("train", "test", "val")
    found = {name: folder / name for name in names if (folder / name).is_dir()}
    if "train" not in found or len(found) < 2:
        held = f"only {', '.join(f'{name}/' for name in found)}" if found else "neither"
        raise InputError(f"{folder} should hold train/ and test/ or val/, but holds {held}. {LAYOUT}")
    return found["train"], found.get("test") or found["val"]


def _classes(split: Path) -> list[str]:
    return sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _part(split: Path, classes: list[str], size: int | None) -> tuple[np.ndarray, np.ndarray]:
    files = [(file, label) for label, name in enumerate(classes) for file in _images(split / name)]
    if not files:
        raise InputError(f"{split} holds no images ({', '.join(ENDINGS)}) in folders of classes. {LAYOUT}")
    first, *rest = images = [_pixels(file, size) for file, _ in files]
    for (file, _), image in zip(files[1:], rest, strict=True):
        if image.shape != first.shape:
            raise InputError(
                f"{files[0][0]} has {first.shape[1]} × {first.shape[0]} pixels and {file} has {image.shape[1]} × "
                f"{image.shape[0]}; pass size=32, say, to bring all of them to one size."
            )
    return np.stack(images), np.array([label for _, label in files])


def _images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.suffix.lower() in ENDINGS)


def _pixels(file: Path, size: int | None) -> np.ndarray:
    image = extra("PIL.Image", "Pillow", "a folder of images")
    try:
        with image.open(file) as opened:
            picture = opened.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise InputError(f"{file} could not be read as an image ({error}). Remove it or replace it.") from error
    return np.asarray(picture if size is None else picture.resize((size, size), image.Resampling.BILINEAR))


# ----------------------------------------------------------------------------------------------------
# `data`: a data set by its name.


FOLDER = "folder:"


def data(name: str, folder: str | Path | None = None, *, size: int | None = None, check: bool = True) -> Dataset:
    """A data set by its name.

    `digits` comes with scikit-learn. `mnist`, `fashion-mnist` and `cifar10` are read from the folder, or where none is
    given from the folders in the environment variable INTERTWINE_DATA, or else from the user's cache folder, where
    `download` puts things; Fashion-MNIST also from Debian's package dataset-fashion-mnist. `imagefolder` with a folder,
    or `folder:PATH`, reads images in folders named after classes.

    Args:
        name: `digits`, `mnist`, `fashion-mnist`, `cifar10`, `imagefolder` or `folder:PATH`.
        folder: where to look; other places are then not searched.
        size: for a folder of images, the height and width they are brought to.
        check: whether the files must be the published ones, by their sums.

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
            raise InputError(f"{name} names a folder already, but the folder {folder} was given too; leave one out.")
        name, folder = "imagefolder", name.removeprefix(FOLDER)
    known = known_name(name)
    if known == "imagefolder":
        if folder is None:
            raise InputError(
                f"The data set {name!r} was asked for, which is a folder of your own, and no folder was given. Name it "
                "as folder:PATH, where PATH holds a folder of images for each class."
            )
        return read_image_folder(places(folder)[0], size, f"{FOLDER}{folder}")
    if size is not None:
        raise InputError(f"size={size} was given, but only a folder of images can be resized; {known} cannot.")
    if known == "digits":
        return read_digits()
    searched = places(folder)
    if known == "cifar10":
        return read_cifar10(searched, check)
    system = MNIST_VARIANTS[known].system if folder is None else ()
    return read_mnist(known, [*searched, *(Path(place) for place in system)], check)
