"""Where features come from: a model, its data and the places to listen at; and one pass over them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.errors import InputError, MismatchError
from intertwine.features.batches import Call, calls
from intertwine.features.capture import record
from intertwine.features.fingerprint import Fingerprint, Hasher, samples_of
from intertwine.features.layer import Layer, no_samples
from intertwine.features.padding import mask_of
from intertwine.features.places import Site

Batch = tuple[dict[str, Tensor], Tensor | None]  # layer → tensor, and which tokens are not padding


class Stream:
    """One pass over the features: batches of layer → tensor, and the fingerprint of the data until now.

    `mask` is that of the batch handed out last: samples × tokens, False where a token is padding; None without one.
    """

    def __init__(
        self, batches: Iterator[Batch], hasher: Hasher | None = None, known: Fingerprint | None = None
    ) -> None:
        self._batches, self._hasher, self._known = batches, hasher or Hasher(), known
        self.mask: Tensor | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> dict[str, Tensor]:
        batch, self.mask = next(self._batches)
        return batch

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the samples that have been handed out."""
        return self._known or self._hasher.fingerprint


@dataclass(eq=False)
class Source:
    """A model, its data and the places to listen at; walks the data as often as the data allows."""

    model: nn.Module
    data: Any
    places: tuple[Site, ...]
    device: str | torch.device | None
    axis: int = 0  # of the inputs, along which the samples lie
    ahead: list[Call] = field(default_factory=list)  # what was read of data that can be read only once
    rest: Iterator[Call] | None = None
    spent: bool = False
    count: int = 0  # samples of the first batch

    def first(self) -> Call:
        """The first batch with samples in it."""
        batches = _with_samples(calls(self.data), self.axis)
        call = next(batches, None)
        if call is None:
            raise InputError(
                "The data holds no samples, so there are no features. Pass at least one batch; a generator can be used "
                "only once."
            )
        self.count = samples_of(call, self.axis)
        if isinstance(self.data, Iterator):
            self.ahead, self.rest = [call], batches
        return call

    def samples(self) -> int | None:
        """About how many samples the data holds, where it tells how many batches there are."""
        return len(self.data) * self.count if isinstance(self.data, Sized) else None

    def batches(self) -> Iterator[Call]:
        """All batches."""
        if self.rest is None:
            return _with_samples(calls(self.data), self.axis)
        if self.spent:
            raise InputError(
                "These features were streamed once, and their data is a generator that cannot be read again. Pass a "
                "list or a DataLoader, or call .collect() instead of iterating."
            )
        self.spent = True
        return _chain(self.ahead, self.rest)

    def walk(self, layers: tuple[Layer, ...], hasher: Hasher) -> Iterator[Batch]:
        """The features of every batch."""
        return self._walk(self.batches(), layers, hasher)

    def _walk(self, batches: Iterator[Call], layers: tuple[Layer, ...], hasher: Hasher) -> Iterator[Batch]:
        for call in batches:
            found, _ = record(self.model, call, self.places, self.device)
            for layer, (site, x) in zip(layers, found.items(), strict=True):
                if problem := no_samples(x, layer.layout, samples_of(call, self.axis)):
                    raise MismatchError(f"The layer {str(site)!r} {problem}")
            hasher.add(call)
            yield {str(site): x for site, x in found.items()}, mask_of(call)


def _chain(ahead: list[Call], rest: Iterator[Call]) -> Iterator[Call]:
    while ahead:
        yield ahead.pop()
    yield from rest


def _with_samples(batches: Iterator[Call], axis: int) -> Iterator[Call]:
    return (call for call in batches if samples_of(call, axis))
