"""`data`: a data set by its name."""

from __future__ import annotations

from pathlib import Path

from intertwine.errors import InputError
from intertwine.zoo.datasets.cifar10 import read_cifar10
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.datasets.digits import read_digits
from intertwine.zoo.datasets.image_folder import read_image_folder
from intertwine.zoo.datasets.mnist import FAMILIES, read_mnist
from intertwine.zoo.datasets.places import places
from intertwine.zoo.datasets.sources import known_name

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
    system = FAMILIES[known].system if folder is None else ()
    return read_mnist(known, [*searched, *(Path(place) for place in system)], check)
