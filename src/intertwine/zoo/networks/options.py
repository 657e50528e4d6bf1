"""Checks of the options of an architecture: an error names the option, its value and what it may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from intertwine.errors import InputError


def one_of(option: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a value that is not among a few.

    >>> one_of("pool", "mean", ("token", "mean"))
    """
    known = list(allowed)
    # `True == 1` must not let a number pass for a switch, nor the other way round.
    if not any(type(value) is type(item) and value == item for item in known):
        words = ", ".join(map(repr, known))
        raise InputError(
            f"The option {option}={value!r} was asked for, but {option} is one of {words}. Pick one of them."
        )


def positive(**sizes: int) -> None:
    """Refuse sizes below 1, and sizes that are no whole numbers.

    >>> positive(dim=64, depth=2)
    """
    for option, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"The option {option}={value!r} was asked for, but {option} counts something: give a whole number of 1 "
                "or more."
            )


def listed(option: str, value: object, example: str) -> None:
    """Refuse what is no list: a word would be taken for the list of its letters.

    >>> listed("widths", (4, 2), "(784, 512, 10)")
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InputError(
            f"The option {option}={value!r} was asked for, but {option} is a list of whole numbers. Give one such as "
            f"{example}; on the command line {option}={example.replace(' ', '').replace('(', '[').replace(')', ']')}."
        )


def scaled(channels: int, width: int | float) -> int:
    """A number of channels times the width multiplier, and at least one.

    >>> scaled(64, 0.25), scaled(16, 4)
    (16, 64)
    """
    if not isinstance(width, (int, float)) or not 0 < width < float("inf"):
        raise InputError(
            f"The option width={width!r} was asked for, but width multiplies the channels of every layer: give a "
            "positive number such as 0.5 or 4."
        )
    return max(1, round(channels * width))
