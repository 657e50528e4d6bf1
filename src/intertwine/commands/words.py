"""What a user writes on the command line, read: options."""

from __future__ import annotations

import ast
from typing import Any

from intertwine.errors import InputError


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
