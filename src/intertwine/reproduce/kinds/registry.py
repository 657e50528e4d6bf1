"""The kinds of experiment by name; each is loaded when a plan of it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from intertwine.errors import InputError, did_you_mean

Row = dict[str, Any]
#: Series → place → one value per pair or network, in the unit of the printed numbers.
Numbers = dict[str, dict[str, list[float]]]

#: Kind → the module that defines it, as KIND.
HOMES: Mapping[str, str] = {
    "stitching": "stitching",
    "similarity": "similarity",
    "accuracy": "accuracy",
    "rotation": "rotation",
    "connectivity": "connectivity",
    "folding": "folding",
    "distances": "distances",
    "dissection": "dissection",
    "activation": "activation",
    "corrections": "corrections",
}


class Kept(list[float]):
    """In `Numbers`, one value in the place of many, of which only it, their deviation and their number were kept.

    >>> kept = Kept(82.7, 0.3, 499_500)
    >>> kept, kept.deviation, kept.many
    ([82.7], 0.3, 499500)
    """

    def __init__(self, value: float, deviation: float | None, many: int) -> None:
        super().__init__([value])
        self.deviation, self.many = deviation, many


@dataclass(frozen=True)
class Kind:
    """One way to experiment.

    Attributes:
        settings: the dataclass of the plan's table of this name; `check(plan)` is called where it has one.
        run: does the work and gives the rows; it is handed a `intertwine.reproduce.work.Work`.
        numbers: what the rows say, in the form of the printed numbers.
        draw: the figure in the paper's form, from the plan as plain data and the rows.
    """

    settings: type
    run: Callable[[Any], list[Row]]
    numbers: Callable[[Mapping[str, Any], Sequence[Row]], Numbers]
    draw: Callable[[Mapping[str, Any], Sequence[Row]], Any]


def names() -> tuple[str, ...]:
    """All kinds."""
    return tuple(HOMES)


def kind(name: str) -> Kind:
    """A kind by name.

    Raises:
        InputError: there is none of that name.
    """
    if name not in HOMES:
        raise InputError(
            f"There is no kind of experiment {name!r}. {did_you_mean(name, HOMES)}Kinds: {', '.join(HOMES)}."
        )
    return import_module(f"intertwine.reproduce.kinds.{HOMES[name]}").KIND
