"""The folder that a command writes into: held for its run alone, and refused before any work where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from intertwine.features.pictures import new_figure
from intertwine.files import only_writer


@contextmanager
def held(out: str | None) -> Iterator[None]:
    """The folder for this run alone; what would fail behind all the work is refused now."""
    if out is None:
        yield
        return
    new_figure(1, 1)
    with only_writer(Path(out)):
        yield
