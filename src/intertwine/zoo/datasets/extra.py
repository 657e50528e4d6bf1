"""Packages that only some data sets need, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from intertwine.errors import InputError


def extra(module: str, package: str, purpose: str) -> Any:
    """A module of an optional package.

    >>> extra("zlib", "zlib", "squeezing").crc32(b"")
    0
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"Reading {purpose} needs {package}, which is not installed ({error}). "
            "Install it with: pip install 'intertwine[data]'"
        ) from error
