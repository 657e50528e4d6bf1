"""The data sets of the zoo: every layout gives the same tensors; errors name a bad file and the reason; downloads."""

import gzip
import hashlib
import io
import os
import pickle
import shutil
import socket
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets import cifar10
from intertwine.lab.zoo.datasets.cifar10 import BATCHES, BINARY, PYTHON, to_records
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.downloads import SOURCES, UNPACKED, DownloadFile, cache_folder, download, places
from intertwine.lab.zoo.datasets.formats import read_pickle
from intertwine.lab.zoo.datasets.loading import data
from intertwine.lab.zoo.datasets.mnist import idx_bytes

REAL = [Path(place) for place in os.environ.get("INTERTWINE_DATA", "").split(os.pathsep) if place]


@pytest.fixture(autouse=True)
def no_data_but_the_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test finds data of the machine it runs on, or writes into its user's cache."""
    monkeypatch.delenv("INTERTWINE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def md5(contents: bytes) -> str:
    return hashlib.md5(contents, usedforsecurity=False).hexdigest()


def put(file: Path, contents: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(contents)
    return file


def same(a: Dataset, b: Dataset) -> bool:
    tensors = ("images", "labels", "test_images", "test_labels")
    return a.checksum == b.checksum and all(torch.equal(getattr(a, name), getattr(b, name)) for name in tensors)


# -- the data set ------------------------------------------------------------------------------------------------------


def small(n: int = 7, test: int = 5) -> Dataset:
    random = np.random.default_rng(0)
    parts = [(random.integers(0, 256, (k, 4, 6, 3), np.uint8), random.integers(0, 3, k)) for k in (n, test)]
    return Dataset.of("small", parts[0], parts[1], (10, 20, 30), (1, 2, 4), "abc")


def test_a_network_sees_pixels_less_the_mean_over_the_deviation() -> None:
    data = small()
    inputs = data.inputs(data.images)
    assert data.shape == (3, 4, 6)
    assert inputs.shape == (7, 3, 4, 6)
    assert inputs.is_contiguous()
    pixel = int(data.images[2, 1, 5, 2])
    assert float(inputs[2, 2, 1, 5]) == (pixel - 30) / 4
    assert data.inputs(data.images, torch.float64).dtype == torch.float64
    assert torch.equal(data.inputs(data.images, torch.bfloat16), inputs.to(torch.bfloat16))
    other = data.normalised((0, 0, 0), (255, 255, 255))
    assert float(other.inputs(other.images)[2, 2, 1, 5]) == pytest.approx(pixel / 255)
    assert other.checksum == data.checksum


def test_batches_can_be_walked_again_in_the_same_order() -> None:
    data = small()
    batches = data.batches("train", size=3)
    first, second = list(batches), list(batches)
    assert len(batches) == len(first) == 3
    assert all(torch.equal(a, b) and torch.equal(s, t) for (a, s), (b, t) in zip(first, second, strict=True))
    assert torch.equal(torch.cat([x for x, _ in first]), data.inputs(data.images))
    assert torch.equal(torch.cat([y for _, y in first]), data.labels)
    assert torch.equal(next(iter(data.batches()))[1], data.test_labels)
    with pytest.raises(InputError, match='unknown split \'valid\'; choose "train" or "test"'):
        data.batches("valid")
    with pytest.raises(InputError, match="batch size must be at least 1, but is 0"):
        data.batches(size=0)


def test_a_subset_is_a_data_set_of_its_own() -> None:
    data = small()
    part = data.subset(train=4, test=2)
    assert (part.name, len(part.images), len(part.test_labels)) == ("small[:4, :2]", 4, 2)
    assert data.subset(train=4).name == "small[:4]"
    assert data.subset(test=4).name == "small[:, :4]"
    assert same(data.subset(), data)
    assert part.checksum != data.checksum
    assert same(data.subset(4, 2).subset(2), data.subset(2, 2))
    with pytest.raises(InputError, match="small: the number of images must be from 1 to 7, but is 8"):
        data.subset(8)


def test_few_images_are_of_all_classes() -> None:
    """Folders of images are sorted by class."""
    labels = np.arange(10).repeat(37)
    images = labels.astype(np.uint8)[:, None, None, None]
    data = Dataset.of("sorted", (images, labels), (images[:7], labels[:7]), [0], [1], list("0123456789"))
    few = data.spread(20)
    assert few.labels.bincount().tolist() == [2] * 10
    assert torch.equal(few.images.flatten().long(), few.labels)
    assert torch.equal(few.test_images, data.test_images)
    assert same(data.spread(1000), data)


@pytest.mark.parametrize("name", ["images", "labels", "test_images", "test_labels"])
def test_the_checksum_sees_every_value(name: str) -> None:
    data = small()
    changed = getattr(data, name).clone()
    changed.view(-1)[-1] = 2 if int(changed.view(-1)[-1]) != 2 else 1
    other = replace(data, **{name: changed}).subset()
    assert other.checksum != data.checksum
    assert data.subset().checksum == data.checksum


def test_moving_keeps_everything() -> None:
    data = small()
    assert same(data.to("cpu"), data)
    assert repr(data).startswith("Dataset(small: 7 training and 5 test images, 3×4×6, 3 classes, checksum ")


def test_a_data_set_that_does_not_fit_together_is_refused() -> None:
    data = small()
    with pytest.raises(InputError, match="the training split has 7 images but 6 labels"):
        replace(data, labels=data.labels[:6])
    with pytest.raises(InputError, match=r"test images must be uint8 .* found float32"):
        replace(data, test_images=data.test_images.float())
    with pytest.raises(InputError, match="labels run from 0 to 2, but there are 2 classes"):
        replace(data, classes=("a", "b"))
    with pytest.raises(InputError, match="3 channels, so mean and std need 3 numbers each"):
        data.normalised([0.0], [1.0])
    with pytest.raises(InputError, match="std positive ones"):
        data.normalised([0, 0, 0], [1, 0, 1])
    with pytest.raises(InputError, match="training and test images differ"):
        replace(data, test_images=data.test_images[:, :2])


def test_the_digits_are_all_of_them_in_an_order_drawn_once() -> None:
    pixels, targets = load_digits(return_X_y=True)
    found = data("digits")
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).numpy()
    inputs = torch.tensor(pixels[order], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    assert (len(found.labels), len(found.test_labels), found.shape) == (1437, 360, (1, 8, 8))
    assert torch.equal(torch.cat([found.inputs(found.test_images), found.inputs(found.images)]), inputs)
    assert torch.cat([found.test_labels, found.labels]).tolist() == targets[order].tolist()
    assert same(found, data("Digits"))


# -- names and places --------------------------------------------------------------------------------------------------


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(InputError, match=r"Unknown data set 'cifar11'\. Did you mean 'cifar10"):
        data("cifar11")
    with pytest.raises(InputError, match="Choose one of: digits, mnist, fashion-mnist, cifar10, imagefolder"):
        data("?")
    with pytest.raises(InputError, match="resizes a folder of images only; digits has a fixed size"):
        data("digits", size=16)


@pytest.mark.parametrize(
    ("name", "files", "address"),
    [
        ("mnist", "mnist.npz or train-images-idx3-ubyte", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
        ("fashion-mnist", "for train-images-idx3-ubyte", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
        ("cifar10", "cifar-10-batches-bin", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),
    ],
)
def test_what_is_not_found_is_asked_for(name: str, files: str, address: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        data(name, tmp_path)
    for part in (str(tmp_path), files, address, f"`intertwine zoo download {name}`", "INTERTWINE_DATA"):
        assert part in str(caught.value)
    with pytest.raises(InputError, match="nowhere does not exist"):
        data(name, tmp_path / "nowhere")


def test_places_are_searched_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache" / "intertwine"
    assert places() == [cache_folder()]
    monkeypatch.setenv("INTERTWINE_DATA", os.pathsep.join(["/one", "", "/two"]))
    assert places() == [Path("/one"), Path("/two"), cache_folder()]
    assert places(tmp_path) == [tmp_path]
    with pytest.raises(InputError, match=r"Searched: /one \(no such folder\), /two"):
        data("cifar10")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/intertwine")


def test_data_is_found_through_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_idx(tmp_path / "second" / "mnist", digit_arrays())
    monkeypatch.setenv("INTERTWINE_DATA", os.pathsep.join([str(tmp_path / "first"), str(tmp_path / "second")]))
    assert len(data("mnist", check=False).labels) == 6
    monkeypatch.delenv("INTERTWINE_DATA")
    put_idx(cache_folder() / "mnist", digit_arrays(seed=1))
    assert not same(data("mnist", check=False), data("mnist", tmp_path / "second", check=False))


# -- MNIST and Fashion-MNIST -------------------------------------------------------------------------------------------

PARTS = ("train-images", "train-labels", "t10k-images", "t10k-labels")
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def digit_arrays(seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    sizes = ((6, 28, 28), 10), ((6,), 10), ((4, 28, 28), 10), ((4,), 10)
    return [random.integers(0, 256 if len(shape) == 3 else top, shape, np.uint8) for shape, top in sizes]


def put_idx(
    folder: Path, arrays: list[np.ndarray], spell: Callable[[str], str] = str, pack: Callable[[bytes], bytes] = bytes
) -> Path:
    for name, array in zip(IDX, arrays, strict=True):
        put(folder / spell(name), pack(idx_bytes(array)))
    return folder


def test_every_layout_of_mnist_gives_the_same_tensors(tmp_path: Path) -> None:
    arrays = digit_arrays()
    put_idx(tmp_path / "plain", arrays)
    put_idx(tmp_path / "dots", arrays, lambda name: name.replace("-idx", ".idx"))
    put_idx(tmp_path / "gzipped", arrays, lambda name: f"{name}.gz", gzip.compress)
    put_idx(tmp_path / "torchvision" / "MNIST" / "raw", arrays)
    put_idx(tmp_path / "named" / "mnist", arrays, lambda name: f"{name}.gz", gzip.compress)
    (tmp_path / "npz").mkdir()
    (tmp_path / "keras").mkdir()
    a, b, c, d = arrays
    np.savez(tmp_path / "npz" / "mnist.npz", train_images=a, train_labels=b, test_images=c, test_labels=d)
    np.savez(tmp_path / "keras" / "mnist.npz", x_train=a, y_train=b.astype(np.int64), x_test=c, y_test=d)
    layouts = [data("mnist", folder, check=False) for folder in sorted(tmp_path.iterdir()) if folder.is_dir()]
    assert len(layouts) == 7
    assert all(same(layout, layouts[0]) for layout in layouts)
    first = layouts[0]
    assert torch.equal(first.images[..., 0], torch.tensor(arrays[0]))
    assert torch.equal(first.test_labels, torch.tensor(arrays[3]).long())
    assert first.mean == (pytest.approx(33.3285),)
    assert first.std == (pytest.approx(78.5655),)


def test_fashion_mnist_is_looked_for_by_its_own_name(tmp_path: Path) -> None:
    put_idx(tmp_path, digit_arrays(0))  # in the folder itself, where either set may lie
    put_idx(tmp_path / "FashionMNIST" / "raw", digit_arrays(1))
    put_idx(tmp_path / "other" / "fashion-mnist", digit_arrays(1))
    found = data("FashionMNIST", tmp_path, check=False)
    assert found.name == "fashion-mnist"
    assert found.classes[9] == "Ankle boot"
    assert found.mean == (pytest.approx(0.286 * 255),)
    assert torch.equal(found.images[..., 0], torch.tensor(digit_arrays(1)[0]))
    assert same(found, data("fashion-mnist", tmp_path / "other", check=False))


def test_the_published_sums_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arrays = digit_arrays()
    put_idx(tmp_path / "plain", arrays)
    put_idx(tmp_path / "gzipped", arrays, lambda name: f"{name}.gz", gzip.compress)
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "mnist.npz", x_train=arrays[0], y_train=arrays[1], x_test=arrays[2], y_test=arrays[3])
    sums = {part: md5(idx_bytes(array)) for part, array in zip(PARTS, arrays, strict=True)}
    for name, place in (("plain", "train-images"), ("gzipped", "train-images"), ("npz", "x_train")):
        with pytest.raises(InputError) as caught:
            data("mnist", tmp_path / name)
        expected = (place, UNPACKED["mnist"]["train-images"], sums["train-images"], "https://ossci", "check=False")
        assert all(part in str(caught.value) for part in expected)
    monkeypatch.setitem(UNPACKED, "mnist", sums)
    assert same(data("mnist", tmp_path / "plain"), data("mnist", tmp_path / "npz"))
    assert same(data("mnist", tmp_path / "plain"), data("mnist", tmp_path / "gzipped"))
    with pytest.raises(InputError, match=r"not the file that was published for fashion-mnist.*\(it belongs to mnist\)"):
        data("fashion-mnist", tmp_path / "plain")


def test_a_bad_idx_file_is_named_with_its_reason(tmp_path: Path) -> None:
    def refused(part: int, contents: bytes, ending: str = "") -> str:
        put_idx(tmp_path, digit_arrays())
        file = tmp_path / IDX[part]
        file.unlink()
        packed = put(file.with_name(file.name + ending), contents)
        with pytest.raises(InputError) as caught:
            data("mnist", tmp_path, check=False)
        packed.unlink()
        assert packed.name in str(caught.value)
        return str(caught.value)

    images, labels = (idx_bytes(array) for array in digit_arrays()[:2])
    assert "its magic number should be 0x00000803 but is 0x00000801" in refused(0, labels)
    assert "its magic number should be 0x00000801 but is 0x00000803" in refused(1, images)
    assert "magic number" in refused(0, b"")
    assert "is truncated: it should hold 4720 bytes but holds 4000" in refused(0, images[:4000])
    assert "is truncated" in refused(0, images[:9])
    assert "it should hold 4720 bytes but holds" in refused(0, gzip.compress(images)[:-900], ".gz")
    assert "not a gzip file, or a damaged one" in refused(0, images, ".gz")
    assert "should hold 4720 bytes according to its header, but holds 4721" in refused(0, images + b"?")


def test_images_and_labels_of_different_length_are_refused(tmp_path: Path) -> None:
    images, labels, test_images, test_labels = digit_arrays()
    put_idx(tmp_path, [images, labels, test_images, test_labels[:3]])
    with pytest.raises(InputError, match="mnist: the test split has 4 images but 3 labels"):
        data("mnist", tmp_path, check=False)


def test_missing_and_damaged_mnist(tmp_path: Path) -> None:
    put_idx(tmp_path / "a", digit_arrays())
    (tmp_path / "a" / IDX[3]).unlink()
    with pytest.raises(InputError, match="holds only a part of mnist: missing t10k-labels-idx1-ubyte"):
        data("mnist", tmp_path / "a")
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for contents in (b"nothing", b"", b"PK\x03\x04?", array.getvalue(), pickle.dumps([1])):
        put(tmp_path / "b" / "mnist.npz", contents)
        with pytest.raises(InputError, match=r"mnist\.npz could not be read as an \.npz archive"):
            data("mnist", tmp_path / "b")
    np.savez(tmp_path / "b" / "mnist.npz", x=np.zeros(3))
    with pytest.raises(InputError, match=r"holds the arrays x; expected train_images, .* or x_train"):
        data("mnist", tmp_path / "b")
    images, labels, test_images, test_labels = digit_arrays()
    np.savez(tmp_path / "b" / "mnist.npz", x_train=images / 2, y_train=labels, x_test=test_images, y_test=test_labels)
    with pytest.raises(InputError, match="x_train should hold whole numbers from 0 to 255, but holds float64"):
        data("mnist", tmp_path / "b")
    np.savez(tmp_path / "b" / "mnist.npz", x_train=images[0], y_train=labels, x_test=test_images, y_test=test_labels)
    with pytest.raises(InputError, match="x_train should have 3 axes"):
        data("mnist", tmp_path / "b")


# -- CIFAR-10 ----------------------------------------------------------------------------------------------------------

Batch = tuple[np.ndarray, np.ndarray]


def colour_batches(images: int = 4) -> dict[str, Batch]:
    random = np.random.default_rng(0)
    return {
        batch: (random.integers(0, 256, (images, 32, 32, 3), np.uint8), random.integers(0, 10, images, np.uint8))
        for batch in BATCHES
    }


def planes(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2).reshape(len(images), -1))


def pickled(images: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch as Python 3 pickles it."""
    entries = {b"data": planes(images), b"labels": [int(label) for label in labels], b"batch_label": b"one of five"}
    return pickle.dumps(entries, protocol=2)


def pickled_by_python_2(images: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch as the official files have it, opcode by opcode: byte strings, and numpy under its old name."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    raw = planes(images).tobytes()
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    shape = number(len(images)) + number(3072) + b"\x86"
    state = b"(K\x01" + shape + dtype + b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    names = b"](" + b"".join(text(b"frog.png") for _ in labels) + b"e"
    entries = [(b"data", empty + state), (b"labels", listed), (b"filenames", names), (b"batch_label", text(b"one"))]
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in entries) + b"u."


def put_bin(folder: Path, batches: dict[str, Batch]) -> Path:
    for batch, pair in batches.items():
        put(folder / f"{batch}.bin", to_records(*pair))
    return folder


def put_py(folder: Path, batches: dict[str, Batch], spell: Callable[..., bytes] = pickled) -> Path:
    for batch, pair in batches.items():
        put(folder / batch, spell(*pair))
    return folder


def put_grids(folder: Path, batches: dict[str, Batch]) -> Path:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for batch, (images, _) in batches.items():
        side = round(len(images) ** 0.5)
        grid = images.reshape(side, side, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(32 * side, 32 * side, 3)
        Image.fromarray(grid).save(folder / f"{batch}.webp", lossless=True, exact=True)
    labels = [labels for _, labels in batches.values()]
    np.savez(folder / "labels.npz", train_labels=np.concatenate(labels[:5]), test_labels=labels[5])
    return folder


def put_archive(folder: Path, version: str, name: str) -> Path:
    with tarfile.open(folder / name, "w:gz") as archive:
        archive.add(folder / version, version)
    for file in (folder / version).iterdir():
        file.unlink()
    (folder / version).rmdir()
    return folder / name


def put_all(folder: Path, batches: dict[str, Batch]) -> None:
    """Every layout, each in a folder of its own."""
    put_bin(folder / "bin" / "cifar-10-batches-bin", batches)
    put_bin(folder / "itself", batches)
    put_py(folder / "py" / "cifar-10-batches-py", batches)
    put_py(folder / "py2" / "cifar10" / "cifar-10-batches-py", batches, pickled_by_python_2)
    put_bin(folder / "tar" / BINARY.folder, batches)
    put_archive(folder / "tar", BINARY.folder, BINARY.archive)
    put_py(folder / "pytar" / PYTHON.folder, batches)
    put_archive(folder / "pytar", PYTHON.folder, PYTHON.archive)
    put_grids(folder / "grid" / "cifar10", batches)


def test_every_layout_of_cifar10_gives_the_same_tensors(tmp_path: Path) -> None:
    batches = colour_batches()
    put_all(tmp_path / "all", batches)
    layouts = [data("cifar10", folder, check=False) for folder in sorted((tmp_path / "all").iterdir())]
    assert len(layouts) == 7
    assert all(same(layout, layouts[0]) for layout in layouts)
    first = layouts[0]
    assert torch.equal(first.images, torch.tensor(np.concatenate([batches[batch][0] for batch in BATCHES[:5]])))
    assert torch.equal(first.test_images, torch.tensor(batches["test_batch"][0]))
    assert torch.equal(first.test_labels, torch.tensor(batches["test_batch"][1]).long())
    assert (first.shape, first.classes[6]) == ((3, 32, 32), "frog")


def test_the_sums_of_cifar10_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    batches = colour_batches()
    put_all(tmp_path, batches)
    monkeypatch.setattr(cifar10, "IMAGES", 4)
    monkeypatch.setattr(cifar10, "PICKLED", dict.fromkeys(BATCHES, 12_000))
    for layout in ("bin", "py", "tar", "pytar", "grid"):
        with pytest.raises(InputError, match=r"its md5 sum should be .* but is .* zoo download cifar10"):
            data("cifar10", tmp_path / layout)
    sums = {f"{batch}.bin": md5(to_records(*pair)) for batch, pair in batches.items()}
    sums |= {batch: md5(pickled(*pair)) for batch, pair in batches.items()}
    monkeypatch.setitem(UNPACKED, "cifar10", sums)
    layouts = [data("cifar10", tmp_path / layout) for layout in ("bin", "py", "tar", "pytar", "grid")]
    assert all(same(layout, layouts[0]) for layout in layouts)
    changed = {**batches, "data_batch_3": (batches["data_batch_3"][0] ^ 1, batches["data_batch_3"][1])}
    put_grids(tmp_path / "grid" / "cifar10", changed)
    put_bin(tmp_path / "bin" / "cifar-10-batches-bin", changed)
    for layout, file in (("grid", "data_batch_3.webp"), ("bin", "data_batch_3.bin")):
        with pytest.raises(InputError, match=f"{file}.* its md5 sum should be {sums['data_batch_3.bin']} but is "):
            data("cifar10", tmp_path / layout)
    for file in ("data_batch_2.bin", "data_batch_3.bin"):  # one that is truncated says so
        path = tmp_path / "bin" / "cifar-10-batches-bin" / file
        path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(InputError, match=r"data_batch_2.bin is truncated: it should hold 12292 bytes but holds 5000"):
        data("cifar10", tmp_path / "bin")


def test_damaged_cifar10(tmp_path: Path) -> None:
    batches = colour_batches()
    put_all(tmp_path, batches)

    def refused(layout: str, text: str) -> None:
        with pytest.raises(InputError, match=text):
            data("cifar10", tmp_path / layout, check=False)

    file = tmp_path / "bin" / "cifar-10-batches-bin" / "test_batch.bin"
    file.write_bytes(file.read_bytes()[:-1])
    refused("bin", r"test_batch.bin is truncated: it should hold 12292 bytes but holds 12291")
    file.unlink()
    refused("bin", r"cifar-10-batches-bin holds only a part of cifar10: missing test_batch.bin\. Get it with")
    archive = tmp_path / "tar" / "cifar-10-binary.tar.gz"
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    refused("tar", "tar.gz is truncated: it should hold 170052171 bytes but holds ")
    archive.write_bytes(b"")
    refused("tar", "tar.gz is truncated: it should hold 170052171 bytes but holds 0")
    put_py(tmp_path / "tar" / BINARY.folder, batches)
    put_archive(tmp_path / "tar", BINARY.folder, BINARY.archive)
    refused("tar", r"binary.tar.gz holds only a part of cifar10: missing cifar-10-batches-bin/data_batch_1.bin")
    grid = tmp_path / "grid" / "cifar10" / "data_batch_2.webp"
    held = grid.read_bytes()
    grid.write_bytes(held[:1000])
    refused("grid", rf"data_batch_2.webp is truncated: it should hold {len(held)} bytes but holds 1000")
    grid.write_bytes(b"GIF?" + held[4:])
    refused("grid", "data_batch_2.webp could not be read as an image")


def test_labels_and_grids_must_fit(tmp_path: Path) -> None:
    folder = put_grids(tmp_path / "cifar10", colour_batches())
    np.savez(folder / "labels.npz", train_labels=np.zeros(19, np.uint8), test_labels=np.zeros(4, np.uint8))
    with pytest.raises(InputError, match=r"data_batch_5.webp has 4 images but 3 labels"):
        data("cifar10", tmp_path, check=False)
    with pytest.raises(InputError, match=r"10000 in all \(3200 × 3200 pixels\); found 64 × 64 pixels"):
        data("cifar10", tmp_path)
    (folder / "labels.npz").unlink()
    with pytest.raises(InputError, match=r"labels.npz could not be read"):
        data("cifar10", tmp_path)


# -- pickles -----------------------------------------------------------------------------------------------------------


class Trap:
    """Runs a command of the shell when it is unpickled the usual way."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.file}",)


def test_a_pickle_that_could_run_code_is_refused(tmp_path: Path) -> None:
    batches = colour_batches()
    put_py(tmp_path / "cifar-10-batches-py", batches)
    trap = pickle.dumps({b"data": Trap(tmp_path / "trapped"), b"labels": []}, protocol=2)
    put(tmp_path / "cifar-10-batches-py" / "data_batch_4", trap)
    with pytest.raises(InputError, match=r"data_batch_4 is a pickle that names posix\.system"):
        data("cifar10", tmp_path, check=False)
    assert not (tmp_path / "trapped").exists()
    pickle.loads(trap)  # the trap is a real one
    assert (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", r"names builtins\.eval"),
        (b"\x80\x02c__builtin__\ngetattr\n.", r"names __builtin__\.getattr"),
        (b"cnumpy\nload\n.", r"names numpy\.load"),
        (b"cnumpy.core.multiarray\nfromfile\n.", r"names numpy\.core\.multiarray\.fromfile"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.", r"names numpy\.ndarray\.dumps"),
        (b"Pfile\n.", "names an object from outside the file"),
        (b"c_codecs\nencode\n(Vx\nS'zip'\ntR.", r"names the encoding b'zip'"),
        (b"\x80\x02cnumpy\ndtype\n}U\x01xK\x01sb.", "could not be read as a pickle"),  # writes onto the class
        (b"", "could not be read as a pickle"),
        (b"\x80\x02]q", "could not be read as a pickle"),
        (b"\x80\x02].", "should hold a dict, but holds a list"),
    ],
)
def test_bad_pickles(contents: bytes, text: str) -> None:
    with pytest.raises(InputError, match=f"batch.*{text}"):
        read_pickle(contents, "batch")


def test_pickled_arrays_are_bytes_only() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for each in (array, np.asfortranarray(array)):
        assert np.array_equal(read_pickle(pickle.dumps({"a": each}, protocol=2), "batch")["a"], array)
    with pytest.raises(InputError, match="its elements are 'f8', not bytes"):
        read_pickle(pickle.dumps({"a": np.zeros(3)}, protocol=2), "batch")
    with pytest.raises(InputError, match="its elements are 'O8', not bytes"):
        read_pickle(pickle.dumps({"a": np.array([None])}, protocol=2), "batch")
    images, labels = colour_batches()["test_batch"]
    for entries in (
        {},
        {"data": planes(images)},
        {"data": planes(images), "labels": [300]},
        {"data": [], "labels": []},
    ):
        with pytest.raises(InputError, match=r"should hold `data`, an array of bytes \(images, 3072\), and `labels`"):
            cifar10.from_pickle(pickle.dumps(entries, protocol=2), "batch", "test_batch", check=False)
    with pytest.raises(InputError, match="batch has 4 images but 3 labels"):
        cifar10.from_pickle(pickled(images, labels[:3]), "batch", "test_batch", check=False)


# -- folders of images -------------------------------------------------------------------------------------------------


def put_image(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 6)) -> None:
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


def test_a_folder_of_images(tmp_path: Path) -> None:
    put_image(tmp_path / "train" / "cat" / "b.png", (0, 10, 255))
    put_image(tmp_path / "train" / "cat" / "a.PNG", (200, 10, 255))
    put_image(tmp_path / "train" / "ant" / "x.jpg", (100, 10, 255))
    put_image(tmp_path / "val" / "cat" / "c.png", (7, 8, 9))
    put(tmp_path / "train" / "cat" / "notes.txt", b"not an image")
    found = data("imagefolder", tmp_path)
    assert found.classes == ("ant", "cat")
    assert found.shape == (3, 6, 8)
    assert found.labels.tolist() == [0, 1, 1]
    assert found.images[1:, 0, 0, 0].tolist() == [200, 0]
    assert found.test_images[0, 5, 7].tolist() == [7, 8, 9]
    assert found.mean[0] == pytest.approx(100, abs=1)
    assert found.inputs(found.images)[:, 0].mean().item() == pytest.approx(0, abs=1e-6)
    small = data(f"folder:{tmp_path}", size=4)
    assert small.shape == (3, 4, 4)
    assert small.name == f"folder:{tmp_path}"


def test_bad_folders_of_images(tmp_path: Path) -> None:
    def refused(text: str, size: int | None = None) -> None:
        with pytest.raises(InputError, match=text):
            data("imagefolder", tmp_path, size=size)

    refused("should hold train/ and test/ or val/, but holds neither")
    put_image(tmp_path / "train" / "cat" / "a.png", (0, 0, 0))
    refused(r"but holds only train/\. Expected train/CLASS")
    (tmp_path / "test" / "cat").mkdir(parents=True)
    refused("test holds no images")
    put_image(tmp_path / "test" / "dog" / "a.png", (0, 0, 0))
    refused("test holds classes that .*train does not: dog")
    put_image(tmp_path / "train" / "dog" / "a.png", (0, 0, 0), (9, 9))
    refused(r"a.png has 8 × 6 pixels and .*dog.a.png has 9 × 9. Pass a size, such as size=32")
    refused("size must be at least 1, but is 0", size=0)
    put(tmp_path / "train" / "dog" / "b.png", b"?")
    refused("b.png could not be read as an image", size=4)
    with pytest.raises(InputError, match="Name it as folder:PATH"):
        data("imagefolder")
    with pytest.raises(InputError, match="already names a folder"):
        data(f"folder:{tmp_path}", tmp_path)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_image(tmp_path / "train" / "cat" / "a.png", (0, 0, 0))
    put_image(tmp_path / "test" / "cat" / "a.png", (0, 0, 0))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"needs Pillow, .*pip install 'intertwine\[data\]'"):
        data("imagefolder", tmp_path)
    with pytest.raises(InputError, match=r"needs scikit-learn, .*pip install 'intertwine\[data\]'"):
        data("digits")


# -- downloads ---------------------------------------------------------------------------------------------------------


class Web:
    """A real server on this machine: files by path, some of which break off, and the requests it got."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.address = f"http://127.0.0.1:{self.server.server_port}/"


def handler(web: Web) -> type[BaseHTTPRequestHandler]:
    """What answers the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            web.asked.append((self.path, wanted))
            contents = web.files.get(self.path)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and web.ranges else 0
            if contents is None or (start and start >= len(contents)):
                self.send_error(404 if contents is None else 416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(contents) - start))
            self.end_headers()
            self.wfile.write(contents[start : web.cut.pop(self.path, len(contents))])

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    web = Web()
    thread = Thread(target=web.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield web
    web.server.shutdown()
    thread.join()
    web.server.server_close()


CONTENTS = bytes(range(256)) * 40


@pytest.fixture
def offered(web: Web, monkeypatch: pytest.MonkeyPatch) -> DownloadFile:
    """One small file, offered by the server in place of CIFAR-10."""
    source = DownloadFile("deep/file.bin", md5(CONTENTS), len(CONTENTS), (web.address + "file.bin",))
    monkeypatch.setitem(SOURCES, "cifar10", (source,))
    web.files["/file.bin"] = CONTENTS
    return source


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_a_download_is_checked_and_then_named(web: Web, offered: DownloadFile, tmp_path: Path) -> None:
    lines: list[str] = []
    assert download("CIFAR-10", tmp_path / "new", lines.append) == tmp_path / "new"
    assert (tmp_path / "new" / offered.file).read_bytes() == CONTENTS
    assert files_in(tmp_path / "new") == ["deep/file.bin"]
    assert lines[-1] == "file.bin is complete"
    download("cifar10", tmp_path / "new", lines.append)
    assert lines[-1] == "file.bin is there already"
    assert len(web.asked) == 1
    (tmp_path / "new" / offered.file).write_bytes(b"spoilt")
    download("cifar10", tmp_path / "new")
    assert (tmp_path / "new" / offered.file).read_bytes() == CONTENTS
    assert download("cifar10") == cache_folder()
    assert files_in(cache_folder()) == ["deep/file.bin"]


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_fetched(
    web: Web, offered: DownloadFile, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    lines: list[str] = []
    with pytest.raises(InputError, match=r"file.bin cannot be saved: .*deep is not writable \(Not a dir"):
        download("cifar10", tmp_path / "file", lines.append)
    assert lines == []


def test_a_download_with_a_wrong_sum_is_removed(web: Web, offered: DownloadFile, tmp_path: Path) -> None:
    web.files["/file.bin"] = b"<html>please log in</html>"
    with pytest.raises(InputError) as caught:
        download("cifar10", tmp_path / "new")
    for part in ("file.bin", offered.md5, md5(b"<html>please log in</html>"), offered.urls[0], "deleted"):
        assert part in str(caught.value)
    assert files_in(tmp_path / "new") == []


def test_a_transfer_that_breaks_off_goes_on_from_there(web: Web, offered: DownloadFile, tmp_path: Path) -> None:
    web.cut["/file.bin"] = 3000
    with pytest.raises(InputError, match=r"interrupted: expected 10240 bytes, got 3000; call again to resume"):
        download("cifar10", tmp_path / "new")
    assert files_in(tmp_path / "new") == ["deep/file.bin.part"]
    download("cifar10", tmp_path / "new")
    assert web.asked[-1] == ("/file.bin", "bytes=3000-")
    assert files_in(tmp_path / "new") == ["deep/file.bin"]
    assert (tmp_path / "new" / offered.file).read_bytes() == CONTENTS


@pytest.mark.parametrize("beginning", [b"another file", CONTENTS + b"and more", CONTENTS[:50], CONTENTS])
@pytest.mark.parametrize("ranges", [True, False])
def test_whatever_was_left_over_the_file_is_right(
    web: Web, offered: DownloadFile, tmp_path: Path, beginning: bytes, ranges: bool
) -> None:
    web.ranges = ranges
    put(tmp_path / "deep" / "file.bin.part", beginning)
    download("cifar10", tmp_path)
    assert (tmp_path / offered.file).read_bytes() == CONTENTS
    assert files_in(tmp_path / "deep") == ["file.bin"]
    misled = ranges and not CONTENTS.startswith(beginning)  # the rest was fetched for nothing
    assert len(web.asked) == (0 if beginning == CONTENTS else 2 if misled else 1)


def test_a_host_that_does_not_answer(
    web: Web, offered: DownloadFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/file.bin"
    monkeypatch.setitem(SOURCES, "cifar10", (replace(offered, urls=(dead, web.address + "gone.bin")),))
    with pytest.raises(InputError) as caught:
        download("cifar10", tmp_path / "new")
    for part in (f"{dead}: not reachable", f"{web.address}gone.bin: the server answered 404", "by hand", offered.md5):
        assert part in str(caught.value)
    monkeypatch.setitem(SOURCES, "cifar10", (replace(offered, urls=(dead, *offered.urls)),))
    download("cifar10", tmp_path / "new")  # the second address helps out
    assert files_in(tmp_path / "new") == ["deep/file.bin"]


def test_what_was_downloaded_is_found(web: Web, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arrays = digit_arrays()
    sources = []
    for source, array in zip(SOURCES["mnist"], arrays, strict=True):
        name = source.file.rpartition("/")[2]
        contents = web.files[f"/{name}"] = gzip.compress(idx_bytes(array))
        sources.append(replace(source, md5=md5(contents), urls=(web.address + name,)))
    monkeypatch.setitem(SOURCES, "mnist", tuple(sources))
    sums = {part: md5(idx_bytes(array)) for part, array in zip(PARTS, arrays, strict=True)}
    monkeypatch.setitem(UNPACKED, "mnist", sums)
    download("mnist")
    assert torch.equal(data("mnist").images[..., 0], torch.tensor(arrays[0]))


def test_what_cannot_be_downloaded() -> None:
    with pytest.raises(InputError, match="digits cannot be downloaded: it comes with scikit-learn"):
        download("digits")
    with pytest.raises(InputError, match="Did you mean 'mnist"):
        download("nmist")


def test_the_table_of_sources_is_whole() -> None:
    for name, sources in SOURCES.items():
        for source in sources:
            assert len(source.md5) == 32
            assert all(url.rpartition("/")[2] == source.file.rpartition("/")[2] for url in source.urls), name
    sums = [md5 for sums in UNPACKED.values() for md5 in sums.values()]
    assert len(set(sums)) == len(sums) == 20
    assert all(len(md5) == 32 for md5 in sums)


# -- the real files ----------------------------------------------------------------------------------------------------


def real(name: str) -> Dataset:
    for place in REAL:
        try:
            return data(name, place)
        except InputError as error:
            if "was not found" not in str(error) and "does not exist" not in str(error):
                raise
    pytest.skip(f"INTERTWINE_DATA names no folder with {name}")


def test_the_real_cifar10_in_every_layout(tmp_path: Path) -> None:
    found = real("cifar10")
    assert (found.images.shape, found.test_images.shape) == ((50_000, 32, 32, 3), (10_000, 32, 32, 3))
    assert found.labels.bincount().tolist() == [5000] * 10
    images, labels = (torch.cat(pair).numpy() for pair in zip(*_both(found), strict=True))
    rows = [slice(10_000 * k, 10_000 * (k + 1)) for k in range(6)]
    batches = {batch: (images[row], labels[row].astype(np.uint8)) for batch, row in zip(BATCHES, rows, strict=True)}
    put_bin(tmp_path / "bin" / BINARY.folder, batches)
    sums = {batch: md5((tmp_path / "bin" / BINARY.folder / f"{batch}.bin").read_bytes()) for batch in BATCHES}
    assert sums["data_batch_1"] == "5dd7e06a14cb22eb9f671a540d1b7c25"
    assert sums["test_batch"] == "803d5f7f4d78ea53de84dbe85f74fb6d"
    assert same(data("cifar10", tmp_path / "bin"), found)
    put_py(tmp_path / "py" / PYTHON.folder, batches, pickled_by_python_2)
    assert same(data("cifar10", tmp_path / "py", check=False), found)
    shutil.rmtree(tmp_path)  # pytest would keep these hundreds of megabytes for a while


def _both(found: Dataset) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(found.images, found.labels), (found.test_images, found.test_labels)]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_real_mnist_in_every_layout(name: str, tmp_path: Path) -> None:
    found = real(name)
    arrays = [tensor.numpy().astype(np.uint8) for pair in _both(found) for tensor in pair]
    put_idx(tmp_path / "plain", [array.squeeze() for array in arrays])
    assert same(data(name, tmp_path / "plain"), found)
    pixels = found.inputs(found.images)
    assert float(pixels.mean()) == pytest.approx(0, abs=1e-3)
    assert float(pixels.std()) == pytest.approx(1, abs=1e-3)


def test_the_real_archive_of_cifar10(tmp_path: Path) -> None:
    """The six members out of an archive are the same as the files; written without compression, which takes minutes."""
    found = real("cifar10")
    images, labels = (torch.cat(pair).numpy() for pair in zip(*_both(found), strict=True))
    with tarfile.open(tmp_path / BINARY.archive, "w:gz", compresslevel=0) as archive:
        for k, batch in enumerate(BATCHES):
            row = slice(10_000 * k, 10_000 * (k + 1))
            contents = to_records(images[row], labels[row])
            entry = tarfile.TarInfo(f"{BINARY.folder}/{batch}.bin")
            entry.size = len(contents)
            archive.addfile(entry, io.BytesIO(contents))
    assert same(data("cifar10", tmp_path), found)
    (tmp_path / BINARY.archive).unlink()
