"""Empty matplotlib figures, panels, legends and heat-map labels. matplotlib is an extra, imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_COLUMNS = 4  # more panels side by side are too small to read on a page
PAGE_WIDTH = 8.3  # inches; a page shrinks wider figures
LEGEND_SIZE = 8  # font size in points
LETTERS_PER_INCH, LINE_SAMPLE = 15, 7  # of a legend; the sample of the line takes the room of so many letters
TICK_LETTERS = 24  # names under an axis are all shown if they have no more letters than this
MIDDLE_LUMINANCE = 0.179  # from here on black is more readable than white (WCAG 2.1: equal contrast)


def new_figure(width: float | int, height: float | int) -> Figure:
    """An empty figure of a size in inches, with automatic layout.

    >>> new_figure(4, 3).get_size_inches().tolist()
    [4.0, 3.0]
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("Plots need matplotlib, which is not installed: pip install 'intertwine[plot]'.") from error
    return Figure(figsize=(float(width), float(height)), layout="constrained")


def panels_in_rows(
    count: int, width: float | int, height: float | int, across: int = MAX_COLUMNS
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """A figure of `count` panels of a size in inches, in rows of at most `across`.

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


def wrapped_title(figure: Figure, words: str, size: float | int = 11) -> None:
    """A title over all panels, wrapped to the width of the figure.

    >>> figure = new_figure(2, 1)
    >>> wrapped_title(figure, "what a narrow figure shows")
    >>> figure.get_suptitle().count("\\n") > 0
    True
    """

    def lines(letters: int) -> list[str]:
        return wrap(words, letters, break_long_words=False)

    text, letters = figure.suptitle(words, fontsize=size), len(words)
    while letters > 1 and text.get_window_extent().width > 0.98 * figure.bbox.width:
        letters -= 1
        text.set_text("\n".join(lines(letters)))
    count = text.get_text().count("\n") + 1
    while count > 1 and len(lines(letters - 1)) == count:  # balanced lines, no single word in the last one
        letters -= 1
    text.set_text("\n".join(lines(letters)) if count > 1 else words)


def legend_below(figure: Figure, panels: Sequence[Axes] | None = None) -> None:
    """One legend of all panels, below them, without duplicates; the figure grows to make room for it.

    >>> figure, (left, right) = panels_in_rows(2, 3, 2)
    >>> lines = [axes.plot([0, 1], label="the same") for axes in (left, right)]
    >>> legend_below(figure)
    >>> [text.get_text() for text in figure.legends[0].get_texts()], round(float(figure.get_figheight()), 2)
    (['the same'], 2.27)
    """
    found: dict[str, Any] = {}
    for axes in panels or figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if not found:
        return
    longest = max(map(len, found)) + LINE_SAMPLE
    columns = max(1, min(len(found), int(figure.get_figwidth() * LETTERS_PER_INCH / longest)))
    columns = ceil(len(found) / ceil(len(found) / columns))  # the same number in each row
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.17 * ceil(len(found) / columns))
    layout: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(list(found.values()), list(found), fontsize=LEGEND_SIZE, **layout)


def name_ticks(axes: Axes, names: Sequence[str], size: float | int = 7) -> None:
    """Names under an axis; if there is no room, the number of every few, and the names of the first and the last.

    >>> axes = new_figure(2, 2).subplots()
    >>> name_ticks(axes, [f"features.{i}" for i in range(10)])
    >>> [text.get_text() for text in axes.get_xticklabels()]
    ['1\\nfeatures.0', '3', '5', '7', '10\\nfeatures.9']
    """
    if sum(map(len, names)) <= TICK_LETTERS:
        axes.set_xticks(range(len(names)), names, fontsize=size)
        return
    last = len(names) - 1
    every = max(1, round(last / 4))
    shown = [0, *(i for i in range(every, last, every) if last - i > every / 2), last]
    labels = [f"{i + 1}\n{names[i]}" if i in (0, last) else f"{i + 1}" for i in shown]
    axes.set_xticks(shown, labels, fontsize=size)
    for text, side in ((axes.get_xticklabels()[0], "left"), (axes.get_xticklabels()[-1], "right")):
        text.set_horizontalalignment(side)


def ink_on(colour: Sequence[float]) -> str:
    """Black or white, whichever is more readable on a colour (red, green, blue from 0 to 1).

    >>> ink_on((0.99, 0.91, 0.14)), ink_on((0.27, 0.0, 0.33))
    ('black', 'white')
    """
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour[:3]]
    luminance = sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if luminance > MIDDLE_LUMINANCE else "white"


def write_cells(axes: Axes, form: str = "{:.2f}", size: float | int = 7) -> None:
    """Write the values of a heat map into its cells, in black or white.

    >>> axes = new_figure(2, 2).subplots()
    >>> picture = axes.imshow([[0.0, 1.0]], cmap="viridis")
    >>> write_cells(axes)
    >>> [(text.get_text(), text.get_color()) for text in axes.texts]
    [('0.00', 'white'), ('1.00', 'black')]
    """
    import numpy as np

    picture = axes.images[0]
    for (i, j), value in np.ndenumerate(np.ma.array(picture.get_array(), dtype=float).filled(np.nan)):
        if np.isfinite(value):
            ink = ink_on(picture.to_rgba(np.array([value]))[0].tolist())
            axes.text(j, i, form.format(value), ha="center", va="center", fontsize=size, color=ink)
