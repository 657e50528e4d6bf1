"""Noise: inputs drawn at random that look like an example, for what would need data where there is none.

Images are drawn with the power spectrum of photographs, whose amplitude falls with the frequency, and with channels
that vary together. They say little about classes and much about which features of a network go together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from intertwine.errors import InputError
from intertwine.features.batches import Call
from intertwine.shapes import Float

#: Shorter sides than this are no picture.
SIDE = 8
#: How much the channels of a picture have in common: of its variance.
COMMON = 0.8


def noise_like(example: Call, batches: int = 4, size: int = 128, seed: int = 0) -> list[Call]:
    """Batches of random inputs of the example's shapes, of mean 0 and variance 1.

    Args:
        example: positional and keyword arguments; the first axis of every tensor holds the samples.

    Raises:
        InputError: the example holds tensors of whole numbers, such as tokens, or none at all.

    Example:
        >>> import torch
        >>> from intertwine.fold.noise import noise_like
        >>> [args[0].shape for args, _ in noise_like(((torch.zeros(1, 3, 16, 16),), {}), batches=2, size=5)]
        [torch.Size([5, 3, 16, 16]), torch.Size([5, 3, 16, 16])]
    """
    leaves, structure = tree_flatten(example)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or not all(tensor.is_floating_point() and tensor.ndim > 1 for tensor in tensors):
        found = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors) or "no tensor"
        raise InputError(
            f"Random inputs were to be drawn for a network whose example inputs are {found}. They can be drawn for "
            "real-valued tensors whose first axis holds the samples; pass batches of real inputs as data instead."
        )
    generator = torch.Generator().manual_seed(seed)

    def drawn(leaf: Any) -> Any:
        return _draw((size, *leaf.shape[1:]), generator).to(leaf) if isinstance(leaf, Tensor) else leaf

    return [tree_unflatten([drawn(leaf) for leaf in leaves], structure) for _ in range(batches)]


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) < 4 or min(shape[-2:]) < SIDE:
        return torch.randn(shape, generator=generator)
    own, common = (torch.randn(s, generator=generator) for s in (shape, (shape[0], 1, *shape[2:])))
    return pink(COMMON**0.5 * common + (1 - COMMON) ** 0.5 * own)


def pink(x: Float[Tensor, "*batch height width"]) -> Float[Tensor, "*batch height width"]:
    """White noise filtered so that its amplitude falls with the frequency, and of variance 1 again."""
    sides = (torch.fft.fftfreq(n).to(x) for n in x.shape[-2:])
    across, down = torch.meshgrid(*sides, indexing="ij")
    frequency = (across.square() + down.square()).sqrt()
    lowest = 0.5 / max(x.shape[-2:])  # the mean of a picture varies too, twice as much as its slowest wave
    y = torch.fft.ifft2(torch.fft.fft2(x) / frequency.clamp(min=lowest)).real
    return y / y.std()
