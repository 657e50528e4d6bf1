"""The one JSON document that a command prints when it is asked to by --json."""

from __future__ import annotations

import json
import math
import sys
from typing import Any


def print_json(value: Any) -> None:
    """Write the document to standard output, on one line.

    >>> print_json({"values": (0.5, float("nan"))})
    {"values": [0.5, "nan"]}
    """
    sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """The value with numbers that JSON has no word for written as text."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
