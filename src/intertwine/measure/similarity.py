"""`measure` and `measures`: compare two representations by name, and list what can be asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from intertwine.measure.measure import Measure, every, find
from intertwine.measure.result import Result


def measure(x: Tensor, y: Tensor, name: str = "linear_cka", **options: Any) -> Result:
    """How similar two representations of the same samples are.

    Args:
        x, y: features (samples, features) of the same samples in the same order; widths may differ. Measures that tell
            channels from positions also take (samples, channels, positions).
        name: one of `measures()`. options: of that measure.

    Returns:
        A `Result`: `.value`, or `.degenerate` with the reason why there is none; `.alignment` where the measure finds
        one.

    Raises:
        InputError: no such measure or option, or what is not a tensor of finite numbers. MismatchError: the numbers of
            samples differ.

    Example:
        >>> import torch, intertwine
        >>> x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
        >>> rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0]
        >>> round(intertwine.measure(x, 3 * x @ rotation + 5, "linear_cka").value, 4)
        1.0
        >>> intertwine.measure(x, torch.ones(100, 3))
        Result(linear_cka: degenerate, y is constant: no feature varies over the samples)
    """
    return find(name, **options)(x, y)


def measures() -> tuple[Measure, ...]:
    """Every measure with its kind, range, value at identity, invariances and reference.

    Example:
        >>> import intertwine
        >>> {m.name: m.range for m in intertwine.measures()}["linear_cka"]
        (-1.0, 1.0)
    """
    return tuple(every())
