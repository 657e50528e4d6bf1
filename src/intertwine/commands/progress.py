"""What a long command shows while it works: what is being done, as a bar or a spinner. Words are shown as they are.

Only the command line owns the terminal. Names and paths of the user may hold what rich would read as markup: [x], [/x].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

Tell = Callable[[str, float], None]
Say = Callable[[str], None]


def aside() -> Console:
    """Standard error, for what is no result."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def status(first: str) -> Iterator[Say]:
    """A spinner on standard error that goes when the work is done; gives what to call with what is being done."""
    with aside().status(Text(first)) as shown:
        yield lambda doing: shown.update(Text(doing))


def bar(*columns: ProgressColumn) -> Bar:
    """A bar on standard error that goes when the work is done; in a file or pipe nothing, not even an empty line."""
    console = aside()
    return Bar(*columns, console=console, transient=True, disable=not console.is_terminal)


def column(form: str) -> TextColumn:
    """A column of a bar, such as `{task.description}`."""
    return TextColumn(form, markup=False)


@contextmanager
def progress(first: str) -> Iterator[Tell]:
    """A bar on standard error that goes when the work is done; gives what to call with (doing, part behind)."""
    columns = (column("{task.description}"), BarColumn(), column("{task.percentage:>3.0f}%"))
    with bar(*columns, TimeElapsedColumn()) as shown:
        task = shown.add_task(first, total=1.0)
        yield lambda doing, part: shown.update(task, description=doing, completed=part)


def within(tell: Tell, start: float, end: float) -> Tell:
    """The same bar for a part of the work that has its own 0 to 1.

    >>> within(print, 0.2, 0.6)("folding", 0.5)
    folding 0.4
    """
    return lambda doing, part: tell(doing, start + (end - start) * part)
