"""Pictures that commands write: which kinds there are, and the file itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from intertwine.errors import InputError
from intertwine.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".svg", ".png")
#: What --svg takes.
SVG = (".svg",)


def check_picture(path: str | None, kinds: Sequence[str] = KINDS) -> None:
    """Refuse a name whose ending is no picture of these kinds, before any work is done."""
    if path is not None and Path(path).suffix.lower() not in kinds:
        raise InputError(f"A picture was to be written to {path}. Choose a name that ends in {' or '.join(kinds)}.")


def save_picture(figure: Figure, path: str) -> None:
    """Write a picture, with the folders it lies in."""
    with writing(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:].lower(), dpi=150)
