"""Pictures: where results get an empty figure to draw on. matplotlib is an extra, so it is imported when asked for."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More panels side by side than these are too small to read on a page.
ACROSS = 4


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


def panels_in_rows(
    count: int, width: float | int, height: float | int, across: int = ACROSS
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """A figure of so many panels of a size in inches, in rows of `across` at most.

    >>> figure, panels = panels_in_rows(6, 2, 1)
    >>> figure.get_size_inches().tolist(), len(panels)
    ([8.0, 2.0], 6)
    """
    columns, rows = min(count, across), ceil(count / across)
    figure = new_figure(width * columns, height * rows)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in grid[count:]:
        spare.set_visible(False)
    return figure, grid[:count]
