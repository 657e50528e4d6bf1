"""Where the official files of each data set come from, and the sums that were published for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from intertwine.errors import InputError, did_you_mean

#: The names `data` understands.
NAMES = ("digits", "mnist", "fashion-mnist", "cifar10", "imagefolder")


@dataclass(frozen=True)
class Source:
    """One file to download: its place under the data folder, its md5 sum, its size, and where it is offered."""

    file: str
    md5: str
    size: int
    urls: tuple[str, ...]


def _idx(folder: str, mirrors: tuple[str, ...], files: tuple[tuple[str, str, int], ...]) -> tuple[Source, ...]:
    return tuple(
        Source(f"{folder}/{file}.gz", md5, size, tuple(f"{mirror}{file}.gz" for mirror in mirrors))
        for file, md5, size in files
    )


SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": _idx(
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            ("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            ("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
            ("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            ("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        ),
    ),
    "fashion-mnist": _idx(
        "fashion-mnist",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        (
            ("train-images-idx3-ubyte", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            ("train-labels-idx1-ubyte", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
            ("t10k-images-idx3-ubyte", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            ("t10k-labels-idx1-ubyte", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
    ),
    "cifar10": (
        Source(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            170_052_171,
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        ),
    ),
}

#: md5 sums of the single files once they are unpacked, by data set.
UNPACKED: dict[str, dict[str, str]] = {
    "mnist": {
        "train-images": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels": "a25bea736e30d166cdddb491f175f624",
        "t10k-images": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion-mnist": {
        "train-images": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    "cifar10": {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
}


def known_name(name: str, offered: Sequence[str] = NAMES) -> str:
    """The usual spelling of a data set's name; capitals, hyphens and underscores do not matter.

    `offered` are those that an error names.

    >>> known_name("CIFAR-10"), known_name("FashionMNIST")
    ('cifar10', 'fashion-mnist')
    """
    plain = {_plain(known): known for known in NAMES}
    if _plain(name) in plain:
        return plain[_plain(name)]
    folder = "; folder:PATH reads a folder of images" if "imagefolder" in offered else ""
    raise InputError(
        f"No data set is called {name!r}. {did_you_mean(name.lower(), offered)}There are {', '.join(offered)}{folder}."
    )


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def owner(md5: str) -> str | None:
    """The data set that a published sum belongs to."""
    return next((name for name, sums in UNPACKED.items() if md5 in sums.values()), None)


def remedy(name: str) -> str:
    """How to get a data set's files."""
    folder = SOURCES[name][0].urls[0].rpartition("/")
    address = SOURCES[name][0].urls[0] if len(SOURCES[name]) == 1 else folder[0] + folder[1]
    return f"Get it with `intertwine zoo download {name}`, or from {address}"
