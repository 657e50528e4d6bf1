"""Layer: what is known of one captured layer, and how a list of them is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """One captured layer: its name, the class of its module, the shape without samples, the layout of its axes."""

    name: str
    module: str
    shape: tuple[int, ...]
    layout: str
    dtype: str

    @property
    def axis(self) -> int:
        """The axis that holds the samples."""
        return self.layout.index("n")

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return getattr(torch, self.dtype).itemsize

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        plain = {"name": self.name, "module": self.module, "shape": list(self.shape)}
        return plain | {"layout": self.layout, "dtype": self.dtype}


def no_samples(x: Tensor, layout: str, samples: int) -> str:
    """Why a tensor does not hold one entry per sample."""
    if not x.dim():
        return "gives one number for all samples together. Name a layer that gives something for each of them."
    axis = layout.index("n")
    if x.dim() == len(layout) and x.shape[axis] == samples:
        return ""
    return (
        f"gives a tensor {tuple(x.shape)} for {samples} samples, but samples should lie along its axis {axis}, as the "
        f"layout {layout!r} says. Say which axis it is, such as layouts={{path: 'tnc'}} for time first; a module that "
        "mixes samples with positions has none."
    )


def table(layers: tuple[Layer, ...], most: int = 30) -> list[str]:
    """One line per layer, in columns."""
    rows = [
        (layer.name or "(model)", layer.module, "×".join(map(str, layer.shape)) or "1", layer.layout, layer.dtype)
        for layer in layers[:most]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [f"  … and {len(layers) - most} more"] * (len(layers) > most)
