"""What commands write: tables in the terminal, progress on standard error, one JSON document, pictures, and an output
folder held for one run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn, TextColumn
    from rich.table import Table
    from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ----------------------------------------------------------------------------------------------------
# The one JSON document that a command prints when it is asked to by --json.


def print_json(value: Any) -> None:
    """Write the document to standard output, on one line.

    >>> print_json({"values": (0.5, float("nan"))})
    {"values": [0.5, "nan"]}
    """
    sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """The value with numbers that JSON has no word for written as text."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------------------
# What a long command shows while it works: what is being done, as a bar or a spinner. Words are shown as they are.
#
# Only the command line owns the terminal. Names and paths of the user may hold what rich would read as markup: [x], [/x].


ReportProgress = Callable[[str, float], None]
ReportStatus = Callable[[str], None]


def error_console() -> Console:
    """Standard error, for what is no result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def status(first: str) -> Iterator[ReportStatus]:
    """A spinner on standard error that goes when the work is done; gives what to call with what is being done."""
    from rich.text import Text

    with error_console().status(Text(first)) as shown:
        yield lambda doing: shown.update(Text(doing))


def progress_bar(*columns: ProgressColumn) -> Bar:
    """A bar on standard error that goes when the work is done; in a file or pipe nothing, not even an empty line."""
    from rich.progress import Progress as Bar

    console = error_console()
    return Bar(*columns, console=console, transient=True, disable=not console.is_terminal)


def text_column(form: str) -> TextColumn:
    """A column of a bar, such as `{task.description}`."""
    from rich.progress import TextColumn

    return TextColumn(form, markup=False)


@contextmanager
def progress(first: str) -> Iterator[ReportProgress]:
    """A bar on standard error that goes when the work is done; gives what to call with (doing, part behind)."""
    from rich.progress import BarColumn, TimeElapsedColumn

    columns = (text_column("{task.description}"), BarColumn(), text_column("{task.percentage:>3.0f}%"))
    with progress_bar(*columns, TimeElapsedColumn()) as shown:
        task = shown.add_task(first, total=1.0)
        yield lambda doing, part: shown.update(task, description=doing, completed=part)


def subprogress(tell: ReportProgress, start: float, end: float) -> ReportProgress:
    """The same bar for a part of the work that has its own 0 to 1.

    >>> subprogress(print, 0.2, 0.6)("folding", 0.5)
    folding 0.4
    """
    return lambda doing, part: tell(doing, start + (end - start) * part)


# ----------------------------------------------------------------------------------------------------
# Pictures that commands write: which kinds there are, and the file itself.


KINDS = (".svg", ".png")
#: What --svg takes.
SVG = (".svg",)


def check_picture(path: str | None, kinds: Sequence[str] = KINDS) -> None:
    """Refuse a name whose ending is no picture of these kinds, before any work is done."""
    if path is not None and Path(path).suffix.lower() not in kinds:
        raise InputError(f"A picture was to be written to {path}. Choose a name that ends in {' or '.join(kinds)}.")


def save_picture(figure: Figure, path: str) -> None:
    """Write a picture, with the folders it lies in."""
    from intertwine.files import atomic_write

    with atomic_write(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:].lower(), dpi=150)


# ----------------------------------------------------------------------------------------------------
# The folder that a command writes into: held for its run alone, and refused before any work where it cannot be.


@contextmanager
def exclusive_folder(out: str | None) -> Iterator[None]:
    """The folder for this run alone; what would fail behind all the work is refused now."""
    from intertwine.figures import new_figure
    from intertwine.files import folder_lock

    if out is None:
        yield
        return
    new_figure(1, 1)
    with folder_lock(Path(out)):
        yield


def terminal() -> Console:
    """Standard output, words as they are: a path may hold [x]. Lines stay whole when it goes into a file or a pipe."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 1000)


def duration(seconds: float) -> str:
    """Time left, as short as it can be said.

    >>> duration(42.0), duration(600.0), duration(9000.0)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def human_count(count: int) -> str:
    """11689512 → 11.7 M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return str(count)


def spaced(*parts: Text | Group | Table) -> Group:
    """Parts with an empty line between them."""
    from rich.console import Group
    from rich.text import Text

    lines = [line for part in parts for line in (part, Text(""))]
    return Group(*lines[:-1])
