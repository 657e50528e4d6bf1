"""Types at the API boundary: tensor shape annotations (jaxtyping if installed), and numeric arguments converted to
finite floats.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

# ----------------------------------------------------------------------------------------------------
# Shape annotations: jaxtyping's where it is installed, otherwise names that mean nothing.
#
# The library itself needs only torch, numpy, scipy and safetensors. The test run has jaxtyping and checks every annotated
# shape; a plain install skips them.


if TYPE_CHECKING:
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
else:
    try:
        from jaxtyping import Float, Int
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: Any) -> Any:
                return Any

        Float = Int = _Unchecked


# ----------------------------------------------------------------------------------------------------
# Real numbers as users write them: those of Python and numpy, and tensors of one number.


def finite_float(value: Any) -> float | None:
    """The finite number that a value stands for; None where it is something else, such as a text or a list.

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
