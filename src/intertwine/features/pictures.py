"""Pictures: where results get an empty figure to draw on. matplotlib is an extra, so it is imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float | int, height: float | int) -> Figure:
    """An empty figure of a size in inches, which lays itself out.

    >>> new_figure(4, 3).get_size_inches().tolist()
    [4.0, 3.0]
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "A plot was asked for, but matplotlib is not installed: pip install 'intertwine[plot]'."
        ) from error
    options: dict[str, Any] = {"figsize": (width, height), "layout": "constrained"}
    return Figure(**options)
