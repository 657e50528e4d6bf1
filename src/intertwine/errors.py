"""The errors of intertwine. Every message names the problem first, then what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

#: How many names are suggested at most.
SUGGESTED = 5


class IntertwineError(Exception):
    """Root of every error raised on purpose by intertwine."""


class InputError(IntertwineError, ValueError):
    """An argument is not what the call needs (wrong type, wrong model, wrong example inputs)."""


class CaptureError(IntertwineError, RuntimeError):
    """The model's forward could not be turned into a graph."""


class MismatchError(IntertwineError, ValueError):
    """Two things do not belong together: an element and a model, a checkpoint and an architecture."""


class RuleError(IntertwineError, RuntimeError):
    """A rule for an op is wrong, or an op has two."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest known names and a space after it; empty if none is near.

    Names that contain `name` come first, the shortest before the others.

    >>> did_you_mean("mirtle", ["mlp", "myrtle"]), did_you_mean("cka", ["cca", "linear_cka", "rbf_cka"])
    ("Did you mean 'myrtle'? ", "Did you mean 'rbf_cka', 'linear_cka', 'cca'? ")
    """
    names = list(dict.fromkeys(known))
    containing = sorted((one for one in names if len(name) > 1 and name in one), key=len)
    near = list(dict.fromkeys([*containing, *get_close_matches(name, names, n=4, cutoff=0.5)]))[:SUGGESTED]
    return f"Did you mean {', '.join(map(repr, near))}? " if near else ""


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """The message for a name that is not among the known ones.

    >>> unknown_name("method", "wieghts", ["weights", "activations"])
    "Unknown method 'wieghts'. Did you mean 'weights'? Choose one of: weights, activations."
    """
    names = list(known)
    return f"Unknown {what} {name!r}. {did_you_mean(str(name), names)}Choose one of: {', '.join(names)}."
