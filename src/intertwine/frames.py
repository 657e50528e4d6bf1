"""Rows of plain data as a data frame, for those who have the extra `frames`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from intertwine.errors import InputError


def frame(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows as a polars data frame.

    >>> frame([{"layer": "2", "penalty": 0.1}]).shape
    (1, 2)
    """
    try:
        polars = import_module("polars")
    except ImportError as error:
        raise InputError(
            "A data frame was asked for, but polars is not installed: pip install 'intertwine[frames]'. Or use "
            ".to_rows(), which any data frame library reads."
        ) from error
    return polars.DataFrame(rows, infer_schema_length=None)
