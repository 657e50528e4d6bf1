"""Pictures inside rows: bytes from 0 to 255 as text, so that a result file can be drawn without the network."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def pack(values: Tensor | NDArray[Any]) -> dict[str, Any]:
    """An array of numbers from 0 to 1, rounded to 256 levels.

    >>> unpack(pack(np.array([[0.0, 1.0], [0.5, 2.0]]))).tolist()
    [[0.0, 1.0], [0.50..., 1.0]]
    """
    table = np.asarray(torch.as_tensor(values).detach().cpu(), np.float64)
    levels = np.round(255 * table.clip(0, 1)).astype(np.uint8)
    return {"shape": list(levels.shape), "bytes": b64encode(levels.tobytes()).decode()}


def unpack(packed: dict[str, Any]) -> NDArray[np.float64]:
    """The array again."""
    return np.frombuffer(b64decode(packed["bytes"]), np.uint8).reshape(packed["shape"]) / 255


def coarse(table: NDArray[np.float64], most: int = 96) -> NDArray[np.float64]:
    """A square table with at most so many rows: means of blocks where it has more.

    >>> coarse(np.arange(16.0).reshape(4, 4), 2).tolist()
    [[2.5, 4.5], [10.5, 12.5]]
    """
    if len(table) <= most:
        return table
    edges = np.linspace(0, len(table), most + 1).astype(int)[:-1]
    sizes = np.diff([*edges, len(table)])
    return np.add.reduceat(np.add.reduceat(table, edges, 0), edges, 1) / np.outer(sizes, sizes)
