"""What a user writes on the command line, read: seeds and options."""

from __future__ import annotations

import ast
from typing import Any

from intertwine.errors import InputError


def seeds(text: str) -> list[int]:
    """`0:32` (32 is not among them), `7`, or several of these with commas.

    >>> seeds("0:3,7")
    [0, 1, 2, 7]
    """
    found: list[int] = []
    try:
        for part in text.split(","):
            first, colon, last = part.partition(":")
            found += range(int(first or 0), int(last)) if colon else [int(part)]
    except ValueError as error:
        raise InputError(f"The seeds {text!r} were asked for. Write 0:32 for 32 seeds from 0, or 3,5,8.") from error
    return found


def option(text: str) -> tuple[str, Any]:
    """`width=64`, `norm=False`, `widths=[8,16]`, `activation=tanh`.

    >>> option("width=64"), option("activation=tanh")
    (('width', 64), ('activation', 'tanh'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"The option {text!r} was given. Write NAME=VALUE, such as width=64.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
