"""Real numbers as users write them: those of Python and numpy, and tensors of one number."""

from __future__ import annotations

from math import isfinite
from typing import Any


def real(value: Any) -> float | None:
    """The finite number that a value stands for; None where it is something else, such as a text or a list.

    >>> real(3), real("3"), real([3]), real(float("nan"))
    (3.0, None, None, None)
    """
    if isinstance(value, (str, bytes)) or getattr(value, "ndim", 0):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isfinite(number) else None
