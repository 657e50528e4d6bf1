"""Task: one alignment to be solved, and how solvers are known to `align`.

A solver is a function of a task and its own options that gives an element and the steps it took. Add one by writing
that function and naming it in `align.SOLVERS`; `intertwine.testing.check_aligner` says whether it keeps its promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from torch import nn

from intertwine.align.descent import Step
from intertwine.align.pair import Pair
from intertwine.align.starts import Problem
from intertwine.errors import InputError, did_you_mean
from intertwine.symmetry.element import Element

Found = tuple[Element, list[Step]]
#: Kinds of options that are checked, in words; others (a loss function) are the solver's own affair.
KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a word", NoneType: "None"}


@dataclass(frozen=True)
class Task:
    """Two networks of one architecture, and what the user asked for.

    `problem`: their weights and the wires that may move. `pair`: the same weights on the way to each other. `data`:
    batches of (inputs, targets), for the solvers that look at features or losses.
    """

    a: nn.Module
    b: nn.Module
    problem: Problem
    pair: Pair
    data: Any = None
    seed: int = 0
    starts: int = 3
    sweeps: int = 100


@dataclass(frozen=True)
class NoOptions:
    """For solvers without settings of their own."""


@dataclass(frozen=True)
class Solver:
    """A way to align. `options` is a dataclass of its settings; `needs_data` says whether it cannot do without data.

    `moves`: which parts of an element it may use, of "permutation", "sign", "scale" and "matrix".
    """

    solve: Callable[[Task, Any], Found]
    moves: frozenset[str]
    needs_data: bool = False
    options: type = NoOptions

    def settings(self, name: str, given: Mapping[str, Any] | None) -> Any:
        """The options of the solver with the user's entries."""
        known = [f.name for f in fields(self.options)]
        for key in given or {}:
            if key not in known:
                raise InputError(
                    f"The method {name!r} has no option {key!r}. {did_you_mean(key, known)}"
                    f"Its options: {', '.join(known) or 'none'}."
                )
        self._check_kinds(name, given or {})
        return self.options(**(given or {}))

    def _check_kinds(self, name: str, given: Mapping[str, Any]) -> None:
        """Exact types: True would pass for a whole number, and "false" for True."""
        hints = get_type_hints(self.options)
        for key, value in given.items():
            allowed = get_args(hints[key]) or (hints[key],)
            kinds = [kind for kind in KINDS if kind in allowed]
            others = any(kind not in KINDS for kind in allowed)  # such as a function
            if kinds and type(value) not in kinds and (type(value) in KINDS or not others):
                wanted = " or ".join(KINDS[kind] for kind in kinds if not (kind is int and float in kinds))
                raise InputError(
                    f"The option {key} of the method {name!r} was given as {value!r}; it must be {wanted}. Leave it "
                    "out for the default."
                )
