"""Seeds as users write them, on the command line and in plans."""

from __future__ import annotations

from intertwine.errors import InputError

#: Seeds in one list: more networks than anybody trains, and few enough to write down.
MOST = 1_000_000


def seeds(text: str) -> list[int]:
    """`0:32` (32 is not among them), `7`, or several of these with commas.

    >>> seeds("0:3,7")
    [0, 1, 2, 7]
    """
    found: list[int] = []
    try:
        for part in text.split(","):
            first, colon, last = part.partition(":")
            new = range(int(first or 0), int(last)) if colon else [int(part)]
            if len(new) + len(found) > MOST:
                raise ValueError(f"more than {MOST:,}")
            found += new
    except ValueError as error:
        many = f" ({error})" if "more than" in str(error) else ""
        raise InputError(
            f"The seeds {text!r} were asked for{many}. Write 0:32 for 32 seeds from 0, or 3,5,8."
        ) from error
    if not found:
        raise InputError(
            f"The seeds {text!r} were asked for, but there is none: A:B is from A to below B. Write 0:32 for 32 seeds "
            "from 0, or 3,5,8."
        )
    return found
