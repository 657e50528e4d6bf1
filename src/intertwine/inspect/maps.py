"""Maps: the activations at one place of a network as channels × height × width, read again as often as needed.

They are kept in memory up to a limit; above it the network runs again for every pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from intertwine.errors import InputError, MismatchError
from intertwine.features.batches import calls
from intertwine.features.features import features
from intertwine.features.fingerprint import samples_of
from intertwine.features.layer import Layer
from intertwine.shapes import Float

#: Images that pass at once where one tensor holds them all.
BATCH = 32
#: Bytes of activations that are kept.
MEMORY = 2**30


class Maps:
    """What one place computes on some images: batches (images, channels, height, width), always in the same order.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    >>> maps = Maps(model, "1", torch.randn(40, 3, 8, 8))
    >>> maps.units, maps.size, maps.images, [len(batch) for batch in maps]
    (4, (8, 8), 40, [32, 8])
    """

    def __init__(self, model: nn.Module, at: str, images: Any, memory: int = MEMORY) -> None:
        self.at = at
        self.data = image_batches(images)
        known = getattr(self.data, "samples", None)  # of data that would have to be decoded to be counted
        self.images = known if isinstance(known, int) else sum(samples_of(call) for call in calls(self.data))
        self.source = features(model, self.data, [at])
        (self.layer,) = self.source.layers
        self.order = _order(self.layer)
        shape = [self.layer.shape[axis - (axis > self.layer.axis)] for axis in self.order[1:]]
        self.units, self.size = shape[0], (shape[1], shape[2])
        self.seen = image_size(self.data)
        self.keeps = 4 * self.images * self.units * self.size[0] * self.size[1] <= memory
        self._kept: list[Tensor] | None = None

    def __iter__(self) -> Iterator[Float[Tensor, "images units height width"]]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Tensor] = []
        for batch in self.source:
            maps = batch[self.layer.name].permute(self.order).float()
            if tuple(maps.shape[1:]) != (self.units, *self.size):
                raise MismatchError(
                    f"The maps at {self.at!r} are {(self.units, *self.size)} for the first images and "
                    f"{tuple(maps.shape[1:])} for later ones. Give all images one size."
                )
            if self.keeps:
                kept.append(maps)
            yield maps
        if self.keeps:
            self._kept = kept


def image_batches(images: Any) -> Any:
    """Images as batches (inputs, targets) that can be read several times.

    Images come as one tensor, as batches of (inputs, targets), or as batches of inputs alone.

    >>> import torch
    >>> [len(inputs) for inputs, _ in image_batches(torch.zeros(40, 3, 8, 8))]
    [32, 8]
    """
    if isinstance(images, Tensor):
        return [(part, None) for part in images.split(BATCH)]
    if isinstance(images, (list, tuple)) and all(isinstance(one, Tensor) and one.dim() == 4 for one in images):
        return [(part, None) for part in images]
    if isinstance(images, Iterator):
        raise InputError(
            "The images are a generator, which can be read once, but dissection reads them at least twice: first for "
            "the thresholds. Pass a tensor, a list of batches or a DataLoader without shuffling."
        )
    return images


def image_size(data: Iterable[Any]) -> tuple[int, int] | None:
    """Height and width of the images, where the network takes one tensor of images."""
    (args, _) = next(iter(calls(data)))
    first = args[0] if args else None
    return (first.shape[-2], first.shape[-1]) if isinstance(first, Tensor) and first.dim() == 4 else None


def _order(layer: Layer) -> tuple[int, ...]:
    """The axes as samples, channels, height, width."""
    if layer.layout.count("p") != 2 or layer.layout.count("c") != 1 or len(layer.layout) != 4:
        raise InputError(
            f"Dissection needs maps of channels over two axes of positions, but {layer.name!r} ({layer.module}) gives "
            f"{'×'.join(map(str, layer.shape)) or 'one number'} per image, layout {layer.layout!r}. Choose a place "
            "before the positions are pooled or flattened, such as the last convolution."
        )
    rows = [axis for axis, letter in enumerate(layer.layout) if letter == "p"]
    return layer.layout.index("n"), layer.layout.index("c"), *rows
