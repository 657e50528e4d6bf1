"""How like the stitched features are to the back network's own: CKA with positions or whole images as samples."""

from __future__ import annotations

import torch

from intertwine.measure.measure import find
from intertwine.reproduce.kinds.registry import Row
from intertwine.stitch.outcome import Stitch
from intertwine.stitch.stitched import StitchedNetwork
from intertwine.zoo.datasets.dataset import Dataset


def likeness(stitch: Stitch, data: Dataset, images: int) -> Row:
    """Biased linear CKA of the features behind the map and those they stand for, on the first test images.

    The baselines of paper 1 take an image as one sample, with all channels at all positions as its features; least
    squares takes every position as a sample.
    """
    if not isinstance(stitch.model, StitchedNetwork):
        raise TypeError(f"A stitched network was expected; found {type(stitch.model).__name__}.")
    splice, cut = stitch.model.splice, stitch.model.number
    call = (data.inputs(data.test_images[:images]),), {}
    with splice.running(), torch.no_grad():
        (arrived,) = splice.front(call, [cut])
        moved, own = stitch.map(arrived.rows), splice.targets(call)[cut]
    cka = find("linear_cka_biased")
    return {
        "cka_images": cka(moved.flatten(1), own.flatten(1)).value,
        "cka_positions": cka(moved.flatten(0, -2), own.flatten(0, -2)).value,
    }
