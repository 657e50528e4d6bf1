"""Shape annotations: jaxtyping's where it is installed, otherwise names that mean nothing.

The library itself needs only torch, numpy, scipy and safetensors. The test run has jaxtyping and checks every annotated
shape; a plain install skips them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
