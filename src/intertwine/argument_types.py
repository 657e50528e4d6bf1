"""Types of arguments: shape annotations (jaxtyping, if it is installed), and numbers converted to finite floats."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
else:
    try:  # the test run has jaxtyping and checks every annotated shape
        from jaxtyping import Float, Int
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: Any) -> Any:
                return Any

        Float = Int = _Unchecked


def finite_float(value: Any) -> float | None:
    """The finite number that a value (of Python, numpy or torch) stands for; None for anything else, such as text.

    >>> finite_float(3), finite_float("3"), finite_float([3]), finite_float(float("nan"))
    (3.0, None, None, None)
    """
    if isinstance(value, (str, bytes)) or getattr(value, "ndim", 0):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isfinite(number) else None
