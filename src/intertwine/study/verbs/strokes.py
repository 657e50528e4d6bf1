"""Concepts of handwriting, read off the ink itself: strokes by direction, their edges and tips, and holes.

Images of digits come without labels of pixels. What a pixel of a stroke is can be said by its neighbours alone, so
these masks need nobody to draw them.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from scipy.ndimage import binary_fill_holes
from torch import Tensor
from torch.nn import functional

from intertwine.inspect.concepts import ConceptData

#: Concept → the step (down, right) along which the ink goes on. Rising and falling as one writes, from the left.
DIRECTIONS = {"level": (0, 1), "upright": (1, 0), "falling": (1, 1), "rising": (-1, 1)}
#: Concept → the step to the neighbour that is no ink.
EDGES = {"top edge": (-1, 0), "bottom edge": (1, 0), "left edge": (0, -1), "right edge": (0, 1)}
LONGEST = 4  # steps that are looked at; longer strokes are equally clear
ROUND = [(down, right) for down, right in product((-1, 0, 1), repeat=2) if (down, right) != (0, 0)]


def stroke_concepts(ink: Tensor) -> ConceptData:
    """The masks of ten concepts. `ink`: (images, height, width) of bool.

    >>> ink = torch.zeros(1, 5, 5, dtype=torch.bool)
    >>> ink[0, 1:4, 1:4] = True
    >>> ink[0, 2, 2] = False                                       # a ring
    >>> found = stroke_concepts(ink)
    >>> found
    ConceptData(10 concepts of 3 categories: stroke, edge, form)
    >>> masks = dict(zip(found.names, next(iter(found.batches))[0]))
    >>> masks["hole"].nonzero().tolist(), masks["level stroke"][1].tolist()
    ([[2, 2]], [False, False, True, False, False])
    """
    lengths = {name: _run(ink, step) for name, step in DIRECTIONS.items()}
    masks = {f"{name} stroke": _longest(name, lengths) & ink for name in lengths}
    masks |= {name: ink & ~_shifted(ink, step) for name, step in EDGES.items()}
    masks["tip"] = ink & (torch.stack([_shifted(ink, step) for step in ROUND]).sum(0) <= 1)
    holes = [np.asarray(binary_fill_holes(one)) & ~one for one in ink.numpy()]
    masks["hole"] = torch.from_numpy(np.stack(holes))
    kinds = ("stroke",) * len(DIRECTIONS) + ("edge",) * len(EDGES) + ("form",) * 2
    return ConceptData(tuple(masks), kinds, [torch.stack(list(masks.values()), 1)])


def _shifted(ink: Tensor, step: tuple[int, int]) -> Tensor:
    """At every pixel, whether the pixel one step away is ink; beyond the border nothing is."""
    (down, right), (height, width) = step, ink.shape[1:]
    room = max(abs(down), abs(right))
    padded = functional.pad(ink, (room,) * 4)
    return padded[:, room + down : room + down + height, room + right : room + right + width]


def _run(ink: Tensor, step: tuple[int, int]) -> Tensor:
    """How many pixels of ink follow each other through every pixel, both ways along a step."""
    total = ink.long()
    for sign in (1, -1):
        on = ink
        for far in range(1, LONGEST + 1):
            on = on & _shifted(ink, (sign * far * step[0], sign * far * step[1]))
            total = total + on
    return total


def _longest(name: str, lengths: dict[str, Tensor]) -> Tensor:
    """Where the ink goes further in this direction than in every other."""
    others = torch.stack([length for other, length in lengths.items() if other != name]).amax(0)
    return lengths[name] > others
