"""The output of commands: text and tables in the terminal, progress on standard error, one JSON document, pictures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, RenderableType
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn, TextColumn
    from rich.table import Table
    from rich.text import Text

#: What the name of a picture may end in.
PICTURES = (".svg", ".png")
#: The same for --svg.
SVG = (".svg",)
ProgressCallback = Callable[[str, float], None]  # what is being done, and the share of all work that is finished
StatusCallback = Callable[[str], None]


# -- Standard output ---------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Write the document to standard output, on one line.

    >>> print_json({"values": (0.5, float("nan"))})
    {"values": [0.5, "nan"]}
    """
    sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """The value with NaN and infinities, which JSON lacks, written as text."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def terminal() -> Console:
    """Standard output without markup, since a path may hold `[x]`; lines are not wrapped in a file or a pipe."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 1000)


def show(*parts: RenderableType | None) -> None:
    """Print the parts that are not None, with an empty line between them."""
    from rich.console import Group

    shown = [item for part in parts if part is not None for item in (part, text(""))]
    terminal().print(Group(*shown[:-1]))


def text(*parts: str | Text | tuple[str, str], style: str = "") -> Text:
    """A text of parts, each plain or with a style of its own."""
    from rich.text import Text

    return Text.assemble(*parts, style=style)


def lines(parts: Iterable[str | Text], style: str = "") -> Text | None:
    """The parts as lines; None where there are none."""
    from rich.text import Text

    found = [Text(part, style=style) if isinstance(part, str) else part for part in parts]
    return Text("\n").join(found) if found else None


def wrote(*paths: str | Path | None) -> Text | None:
    """A line for each file that was written; None where there is none."""
    return lines(f"wrote {path}" for path in paths if path)


def table(*heads: str, left: Collection[str] = (), header: bool = True, **options: Any) -> Table:
    """A table without borders, its columns aligned to the right but for those named in `left`."""
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="dim", show_header=header)
    for head in heads:
        found.add_column(head, justify="left" if head in left else "right", **options)
    return found


def duration(seconds: float) -> str:
    """Seconds in a short form.

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


def percent(share: float | None, digits: int = 2) -> str:
    """A share in percent; a dash where there is none.

    >>> percent(0.9), percent(None)
    ('90.00%', '–')
    """
    return "–" if share is None else f"{share:.{digits}%}"


def count_of(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count_of(1, "wire"), count_of(2, "wire")
    ('1 wire', '2 wires')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


# -- Progress on standard error ----------------------------------------------------------------------------------------


def error_console() -> Console:
    """Standard error without markup."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def status(first: str) -> Iterator[StatusCallback]:
    """A spinner that disappears when the work is done; yields the callback for the current step."""
    with error_console().status(text(first)) as shown:
        yield lambda doing: shown.update(text(doing))


def progress_bar(*columns: ProgressColumn) -> Bar:
    """A bar that disappears when the work is done; nothing at all in a file or a pipe."""
    from rich.progress import Progress as Bar

    console = error_console()
    return Bar(*columns, console=console, transient=True, disable=not console.is_terminal)


def text_column(form: str) -> TextColumn:
    """A column of a bar, such as `{task.description}`."""
    from rich.progress import TextColumn

    return TextColumn(form, markup=False)


@contextmanager
def progress(first: str) -> Iterator[ProgressCallback]:
    """A bar that disappears when the work is done; yields the callback for the current step and the finished share."""
    from rich.progress import BarColumn, TimeElapsedColumn

    columns = (text_column("{task.description}"), BarColumn(), text_column("{task.percentage:>3.0f}%"))
    with progress_bar(*columns, TimeElapsedColumn()) as shown:
        task = shown.add_task(first, total=1.0)
        yield lambda doing, part: shown.update(task, description=doing, completed=part)


def subprogress(progress: ProgressCallback, start: float, end: float) -> ProgressCallback:
    """The callback for a part of the work that counts from 0 to 1 itself.

    >>> subprogress(print, 0.2, 0.6)("folding", 0.5)
    folding 0.4
    """
    return lambda doing, part: progress(doing, start + (end - start) * part)


# -- Files -------------------------------------------------------------------------------------------------------------


def check_picture(path: str | None, kinds: Sequence[str] = PICTURES) -> None:
    """Refuse a picture of an unknown kind before any work is done."""
    if path is not None and Path(path).suffix.lower() not in kinds:
        raise InputError(f"Unknown kind of picture {path}. Choose a name that ends in {' or '.join(kinds)}.")


def save_picture(figure: Figure, path: str | Path) -> None:
    """Write a picture, with its folders."""
    from intertwine.files import atomic_write

    with atomic_write(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:].lower(), dpi=150)


@contextmanager
def exclusive_folder(out: str | None) -> Iterator[None]:
    """Locks the output folder for this run, and fails before the work where it could not be written or drawn."""
    from intertwine.figures import new_figure
    from intertwine.files import folder_lock

    if out is None:
        yield
        return
    new_figure(1, 1)
    with folder_lock(Path(out)):
        yield
