"""Dataset: images and labels of a training and a test split, their normalisation, and batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError

#: The fields of a `Dataset` that hold tensors.
TENSORS = ("images", "labels", "test_images", "test_labels")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as bytes and labels as integers, in a training and a test split.

    Attributes:
        images: (n, height, width, channels) of uint8, the training split; `test_images` likewise.
        labels: (n,) of int64; `test_labels` likewise.
        mean, std: per channel, in pixel units; a network gets (pixel - mean) / std.
        checksum: sha256 of the decoded contents, the same for every file layout.
    """

    name: str
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    checksum: str

    def __post_init__(self) -> None:
        for part, images, labels in self._splits():
            if images.dtype != torch.uint8 or images.ndim != 4 or not images.numel():
                found = f"{str(images.dtype).removeprefix('torch.')} {tuple(images.shape)}"
                raise InputError(
                    f"{self.name}: {part} images must be uint8 (n, height, width, channels); found {found}."
                )
            if len(images) != len(labels):
                raise InputError(
                    f"{self.name}: the {part} split has {len(images)} images but {len(labels)} labels. "
                    "Images and labels come in separate files or arrays; take both from one source."
                )
            if labels.min() < 0 or labels.max() >= len(self.classes):
                raise InputError(
                    f"{self.name}: the {part} labels run from {int(labels.min())} to {int(labels.max())}, but there "
                    f"are {len(self.classes)} classes, counted from 0."
                )
        if self.images.shape[1:] != self.test_images.shape[1:]:
            sizes = f"{tuple(self.images.shape[1:])} and {tuple(self.test_images.shape[1:])}"
            raise InputError(f"{self.name}: training and test images differ in (height, width, channels): {sizes}.")
        channels = self.images.shape[3]
        if len(self.mean) != channels or len(self.std) != channels or not all(value > 0 for value in self.std):
            raise InputError(
                f"{self.name}: the images have {channels} channels, so mean and std need {channels} numbers each, and "
                f"std positive ones; found mean {self.mean}, std {self.std}."
            )

    @classmethod
    def of(
        cls, name: str, train: tuple[np.ndarray | Tensor, np.ndarray | Tensor],
        test: tuple[np.ndarray | Tensor, np.ndarray | Tensor], mean: Sequence[float | int],
        std: Sequence[float | int], classes: Sequence[str],
    ) -> Dataset:  # fmt: skip
        """A data set from two (images, labels) pairs; computes the checksum.

        >>> import numpy as np
        >>> pair = np.zeros((5, 2, 2, 1), np.uint8), np.zeros(5, np.int64)
        >>> Dataset.of("blank", pair, pair, [0], [255], ["nothing"])
        Dataset(blank: 5 training and 5 test images, 1×2×2, 1 class, checksum 9dba7d8a)
        """
        images, test_images = (torch.as_tensor(pair[0]).contiguous() for pair in (train, test))
        labels, test_labels = (torch.as_tensor(pair[1]).long() for pair in (train, test))
        digest = hashlib.sha256()
        for tensor in (images, labels, test_images, test_labels):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
        centre, spread = (tuple(float(value) for value in values) for values in (mean, std))
        return cls(name, images, labels, test_images, test_labels, centre, spread, tuple(classes), digest.hexdigest())

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        height, width, channels = self.images.shape[1:]
        return channels, height, width

    def to(self, device: str | torch.device) -> Dataset:
        """The same data set on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSORS})  # pyrefly: ignore

    def normalised(self, mean: Sequence[float | int], std: Sequence[float | int]) -> Dataset:
        """The same images with another normalisation, given per channel and in pixel units (0 to 255)."""
        return replace(self, mean=tuple(float(m) for m in mean), std=tuple(float(s) for s in std))

    def inputs(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Float[Tensor, "n c h w"]:
        """The network input for images (n, height, width, channels) of this data set."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32  # half precision rounds the result only
        mean, std = (torch.tensor(values, dtype=exact, device=images.device) for values in (self.mean, self.std))
        pixels = images.permute(0, 3, 1, 2).to(exact, memory_format=torch.contiguous_format)
        return ((pixels - mean[:, None, None]) / std[:, None, None]).to(dtype)

    def batches(self, split: str = "test", size: int = 500, dtype: torch.dtype = torch.float32) -> Batches:
        """The (inputs, targets) pairs of one split in their stored order; can be iterated any number of times.

        >>> import numpy as np
        >>> pair = np.zeros((5, 2, 2, 1), np.uint8), np.zeros(5, np.int64)
        >>> batches = Dataset.of("blank", pair, pair, [0], [255], ["nothing"]).batches(size=2)
        >>> len(batches), [tuple(inputs.shape) for inputs, targets in batches]
        (3, [(2, 1, 2, 2), (2, 1, 2, 2), (1, 1, 2, 2)])
        """
        if split not in ("train", "test"):
            raise InputError(f'{self.name}: unknown split {split!r}; choose "train" or "test".')
        if size < 1:
            raise InputError(f"The batch size must be at least 1, but is {size}.")
        return Batches(self, split, size, dtype)

    def subset(self, train: int | None = None, test: int | None = None) -> Dataset:
        """The first images of each split; None keeps all of them."""
        for count, available in ((train, len(self.labels)), (test, len(self.test_labels))):
            if count is not None and not 0 < count <= available:
                raise InputError(f"{self.name}: the number of images must be from 1 to {available}, but is {count}.")
        ends = "[:{}{}]".format("" if train is None else train, "" if test is None else f", :{test}")
        name = self.name if (train, test) == (None, None) else self.name + ends
        first = self.images[:train].clone(), self.labels[:train].clone()
        second = self.test_images[:test].clone(), self.test_labels[:test].clone()
        return self.of(name, first, second, self.mean, self.std, self.classes)

    def spread(self, count: int) -> Dataset:
        """At most `count` images of each split, evenly spaced, because folders of images are sorted by class.

        >>> import numpy as np
        >>> pair = np.zeros((6, 2, 2, 1), np.uint8), np.arange(6)
        >>> Dataset.of("blank", pair, pair, [0], [255], list("abcdef")).spread(3).labels
        tensor([0, 2, 4])
        """
        if count >= max(len(self.labels), len(self.test_labels)):
            return self
        pairs = []
        for _, images, labels in self._splits():
            n = len(labels)
            rows = slice(None) if count >= n else torch.arange(count, device=labels.device) * n // count
            pairs.append((images[rows], labels[rows]))
        return self.of(self.name, pairs[0], pairs[1], self.mean, self.std, self.classes)

    def _splits(self) -> tuple[tuple[str, Tensor, Tensor], tuple[str, Tensor, Tensor]]:
        return ("training", self.images, self.labels), ("test", self.test_images, self.test_labels)

    def __repr__(self) -> str:
        size = "×".join(str(number) for number in self.shape)
        classes = "1 class" if len(self.classes) == 1 else f"{len(self.classes)} classes"
        device = "" if self.images.device.type == "cpu" else f", on {self.images.device}"
        return (
            f"Dataset({self.name}: {len(self.labels):,} training and {len(self.test_labels):,} test images, {size}, "
            f"{classes}, checksum {self.checksum[:8]}{device})"
        )


@dataclass(frozen=True, eq=False)
class Batches:
    """One split of a data set, batch by batch and always in the same order."""

    dataset: Dataset
    split: str
    size: int
    dtype: torch.dtype

    def __len__(self) -> int:
        return -(-len(self._tensors()[1]) // self.size)

    def __iter__(self) -> Iterator[tuple[Float[Tensor, "n c h w"], Int[Tensor, " n"]]]:
        images, labels = self._tensors()
        for start in range(0, len(labels), self.size):
            rows = slice(start, start + self.size)
            yield self.dataset.inputs(images[rows], self.dtype), labels[rows]

    def _tensors(self) -> tuple[Tensor, Tensor]:
        data = self.dataset
        return (data.images, data.labels) if self.split == "train" else (data.test_images, data.test_labels)
