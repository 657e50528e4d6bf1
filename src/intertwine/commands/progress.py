"""The bar of a long command: what is being done and how much is behind. Only the command line owns the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

Tell = Callable[[str, float], None]


def bar(*columns: ProgressColumn) -> Bar:
    """A bar on standard error that goes when the work is done; in a file or pipe nothing, not even an empty line."""
    console = Console(stderr=True)
    return Bar(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def progress(first: str) -> Iterator[Tell]:
    """A bar on standard error that goes when the work is done; gives what to call with (doing, part behind)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with bar(*columns, TimeElapsedColumn()) as shown:
        task = shown.add_task(first, total=1.0)
        yield lambda doing, part: shown.update(task, description=doing, completed=part)


def within(tell: Tell, start: float, end: float) -> Tell:
    """The same bar for a part of the work that has its own 0 to 1.

    >>> within(print, 0.2, 0.6)("folding", 0.5)
    folding 0.4
    """
    return lambda doing, part: tell(doing, start + (end - start) * part)
