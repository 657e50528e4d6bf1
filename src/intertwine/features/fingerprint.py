"""A fingerprint of the data behind some features: which samples, in which order, however they were cut into batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from intertwine.errors import InputError, MismatchError

WIDTH = 16  # bytes of the digest of one sample


@dataclass(frozen=True)
class Fingerprint:
    """How many samples, a digest of them in their order, and one of the same samples in any order."""

    samples: int
    digest: str
    unordered: str

    def check(self, other: Fingerprint, first: str = "the first", second: str = "the second") -> None:
        """Refuse two sets of features that do not belong together sample by sample.

        >>> a, b = (Hasher().add(((torch.arange(n),), {})).fingerprint for n in (3, 4))
        >>> a.check(a)
        >>> a.check(b)
        Traceback (most recent call last):
        intertwine.errors.MismatchError: Features are compared sample by sample, but the first has 3 samples and ...
        """
        if self == other:
            return
        if self.samples != other.samples:
            raise MismatchError(
                f"Features are compared sample by sample, but {first} has {self.samples} samples and {second} "
                f"{other.samples}. Give both the same inputs."
            )
        if self.unordered == other.unordered:
            raise MismatchError(
                f"Features are compared sample by sample, but {first} and {second} have the same {self.samples} "
                "samples in another order. Turn shuffling off, or collect both from one list of batches."
            )
        raise MismatchError(
            f"Features are compared sample by sample, but the {self.samples} samples of {first} are not those of "
            f"{second}: their inputs differ. Random augmentation, another normalisation or another type of numbers is "
            "enough; give both the same inputs."
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"samples": self.samples, "digest": self.digest, "unordered": self.unordered}

    def __repr__(self) -> str:
        return f"Fingerprint({self.samples} samples, {self.digest[:8]})"


@dataclass
class Hasher:
    """A running fingerprint: give it the arguments of each call of the model."""

    axis: int = 0  # of the inputs, along which the samples lie
    samples: int = 0
    _ordered: Any = field(default_factory=hashlib.sha256)
    _total: int = 0

    @property
    def fingerprint(self) -> Fingerprint:
        """Of all samples until now."""
        total = self._total.to_bytes(WIDTH, "big").hex()
        return Fingerprint(self.samples, self._ordered.hexdigest()[: 2 * WIDTH], total)

    def add(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Hasher:
        """Take in one batch, sample by sample, so that the size of batches does not matter."""
        count = samples_of(call, self.axis)
        head = hashlib.blake2b(digest_size=WIDTH)
        rows: list[Any] = []
        for path, leaf in sorted(_leaves(call), key=itemgetter(0)):  # keywords have no order
            if isinstance(leaf, Tensor) and leaf.dim() > self.axis and leaf.shape[self.axis] == count:
                by_sample = leaf.movedim(self.axis, 0)
                head.update(f"{path}:{leaf.dtype}{tuple(by_sample.shape[1:])};".encode())
                rows.append(_bytes(by_sample, count))
            elif isinstance(leaf, Tensor):  # not one entry per sample: part of every sample
                head.update(f"{path}:{leaf.dtype}{tuple(leaf.shape)};".encode() + _bytes(leaf, 1).tobytes())
            else:
                plain = leaf if isinstance(leaf, (str, int, float, type(None))) else type(leaf).__name__
                head.update(f"{path}={plain!r};".encode())
        for i in range(count):
            one = head.copy()
            for row in rows:
                one.update(row[i])
            digest = one.digest()
            self._ordered.update(digest)
            self._total = (self._total + int.from_bytes(digest, "big")) % (1 << 8 * WIDTH)
        self.samples += count
        return self

    def watch(self, batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> Iterator[Any]:
        """The same calls, each taken in as it passes."""
        for call in batches:
            self.add(call)
            yield call


def samples_of(call: tuple[tuple[Any, ...], dict[str, Any]], axis: int = 0) -> int:
    """The number of samples of a batch: the size of the first tensor among the inputs along the axis of samples.

    >>> samples_of(((torch.zeros(5, 2),), {}))
    5
    """
    leaves = [leaf for _, leaf in _leaves(call) if isinstance(leaf, Tensor) and leaf.dim() > axis]
    if not leaves:
        raise InputError(
            "The inputs of a batch hold no tensor with an axis of samples. Inputs are a tensor, a tuple of tensors or "
            "a mapping of keyword arguments; turn arrays into tensors first."
        )
    return leaves[0].shape[axis]


def _leaves(call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(call)[0]]


def _bytes(tensor: Tensor, rows: int) -> Any:
    """The raw bytes of a tensor, cut into rows."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(rows, -1 if plain.numel() else 0).view(torch.uint8).numpy()
