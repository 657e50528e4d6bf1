"""The errors intertwine raises. Every message says what was asked, what was found and what to do next."""


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
