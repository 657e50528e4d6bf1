"""Standard output of the program: it takes any text, and its failures are told from those of other files and pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any


class OutputLost(Exception):
    """Standard output takes nothing more, for the reason in `args[0]`. No OSError, which others handle."""


class Output:
    """A stream whose writes raise `OutputLost` where they fail; in all else the stream itself."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            raise OutputLost(error) from error

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            raise OutputLost(error) from error


@contextmanager
def ready_streams() -> Iterator[None]:
    """Within it, standard output and error are there and take any text; what they cannot show is a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the program
            setattr(sys, name, nowhere())
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    before = sys.stdout
    watched: Any = Output(before)
    sys.stdout = watched
    try:
        yield
    finally:
        if sys.stdout is watched:
            sys.stdout = before


def nowhere() -> TextIOWrapper:
    """A stream that takes everything, until the program ends."""
    return open(os.devnull, "w", encoding="utf-8")
