"""Options of an alignment method, as written on the command line: read, and refused where their kind is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

from intertwine.align.align import SOLVERS
from intertwine.commands.words import option
from intertwine.errors import InputError

KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a word", NoneType: "None"}


def settings(method: str, texts: Sequence[str]) -> dict[str, Any]:
    """The options by name. What no method knows is left for the method itself to refuse.

    >>> settings("weights", ["relative=True"])
    {'relative': True}
    """
    given = dict(map(option, texts))
    hints = get_type_hints(SOLVERS[method].options) if method in SOLVERS else {}
    for name, value in given.items():
        kinds = [kind for kind in KINDS if kind in (get_args(hints[name]) or (hints[name],))] if name in hints else []
        # exact types: True would pass for a whole number, and "false" for True
        if kinds and type(value) not in kinds:
            wanted = " or ".join(KINDS[kind] for kind in kinds if not (kind is int and float in kinds))
            raise InputError(
                f"The option {name} of the method {method!r} was given as {value!r}; it must be {wanted}. Leave it out "
                "for the default."
            )
    return given
