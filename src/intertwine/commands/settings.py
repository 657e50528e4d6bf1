"""Options of an alignment method, as written on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intertwine.align.align import SOLVERS
from intertwine.commands.words import option


def settings(method: str, texts: Sequence[str]) -> dict[str, Any]:
    """The options by name, refused at once where the method would refuse them.

    >>> settings("weights", ["relative=True"])
    {'relative': True}
    """
    given = dict(map(option, texts))
    if method in SOLVERS:
        SOLVERS[method].settings(method, given)
    return given
