"""The errors intertwine raises. Every message says what was asked, what was found and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

#: Names that are suggested at most.
SUGGESTED = 5


class IntertwineError(Exception):
    """Root of every error raised on purpose by intertwine."""


class InputError(IntertwineError, ValueError):
    """An argument is not what the call needs (wrong type, wrong model, wrong example inputs)."""


class CaptureError(IntertwineError, RuntimeError):
    """The model's forward could not be turned into a graph."""


class MismatchError(IntertwineError, ValueError):
    """Two things that must belong together do not: an element and a model, a checkpoint and an architecture."""


class RuleError(IntertwineError, RuntimeError):
    """A rule for an op broke one of the promises a rule makes."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The sentence that names what was probably meant, with a space behind it; empty where nothing is near.

    Names that hold what was written come first, the shortest before the others.

    >>> did_you_mean("mirtle", ["mlp", "myrtle"]), did_you_mean("cka", ["cca", "linear_cka", "rbf_cka"])
    ('Did you mean myrtle? ', 'Did you mean rbf_cka, linear_cka, cca? ')
    """
    names = list(dict.fromkeys(known))
    holding = sorted((one for one in names if len(name) > 1 and name in one), key=len)
    near = list(dict.fromkeys([*holding, *get_close_matches(name, names, n=4, cutoff=0.5)]))[:SUGGESTED]
    return f"Did you mean {', '.join(near)}? " if near else ""
