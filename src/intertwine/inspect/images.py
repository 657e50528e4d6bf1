"""Grids of images: photographs, signed maps, and labelled rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError
from intertwine.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


GREY = 0.5  # where a signed map is zero


def scaled_image(image: Tensor) -> Float[Tensor, "height width colours"]:
    """An image scaled to 0 to 1; channels are averaged unless there are one or three.

    >>> scaled_image(torch.tensor([[[-1.0, 3.0]]])).flatten()
    tensor([0., 1.])
    """
    shown = _pixels(image)
    low, high = shown.min(), shown.max()
    return (shown - low) / (high - low) if high > low else torch.full_like(shown, GREY)


def scaled_map(values: Tensor) -> Float[Tensor, "height width colours"]:
    """A signed map as colours: zero is grey, and the largest entry by size is 0 or 1.

    >>> scaled_map(torch.tensor([[[0.0, 2.0, -1.0]]])).flatten()
    tensor([0.5000, 1.0000, 0.2500])
    """
    shown = _pixels(values)
    largest = shown.abs().max()
    return GREY + GREY * shown / largest if largest > 0 else torch.full_like(shown, GREY)


def _pixels(image: Tensor) -> Tensor:
    """Height × width × one or three colours."""
    if image.dim() != 3 or not image.numel():
        raise InputError(
            f"An image must be (channels, height, width), but is {tuple(image.shape)}. Only maps of images can be "
            "drawn; the values of others are in the result."
        )
    shown = image.detach().float().cpu()
    if len(shown) not in (1, 3):
        shown = shown.mean(0, keepdim=True)
    return shown.movedim(0, -1)


def draw_images(
    rows: Sequence[Sequence[Tensor]], names: Sequence[str] = (), captions: Sequence[Sequence[str]] = (), title: str = ""
) -> Figure:
    """A grid of images, height × width × colours with values from 0 to 1.

    Args:
        rows: the images of each row; rows may differ in length. names: of the rows. captions: one per image.
        title: above the grid.

    >>> figure = draw_images([[torch.zeros(4, 4, 1)] * 3], ["zeros"])
    >>> len(figure.axes), figure.axes[0].get_ylabel()
    (3, 'zeros')
    """
    if not rows or not all(rows):
        raise InputError("A row has no images. Give at least one image per row.")
    width = max(len(row) for row in rows)
    figure = new_figure(1.2 * width + 0.8, 1.25 * len(rows) + 0.4)
    grid: Any = figure.subplots(len(rows), width, squeeze=False)
    for i, row in enumerate(rows):
        for j in range(width):
            if j >= len(row):
                grid[i, j].remove()
                continue
            colours = {"cmap": "gray", "vmin": 0, "vmax": 1} if row[j].shape[-1] == 1 else {}
            grid[i, j].imshow(row[j].squeeze(-1).numpy(), **colours)
            grid[i, j].set_xticks([])
            grid[i, j].set_yticks([])
            if captions:
                grid[i, j].set_xlabel(captions[i][j], fontsize=6)
        if names:
            grid[i, 0].set_ylabel(names[i], fontsize=8)
    if title:
        figure.suptitle(title, fontsize=9)
    return figure
