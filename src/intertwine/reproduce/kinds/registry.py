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

#: Each is the module or package of its name beside this one, which defines KIND.
KINDS = (
    "stitching", "similarity", "accuracy", "rotation", "connectivity", "folding", "distances", "dissection",
    "activation", "ordering", "corrections",
)  # fmt: skip


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
        settings: the dataclass of the plan's table of this name; `check(plan, where)` is called where it has one.
        run: does the work and gives the rows; it is handed a `intertwine.reproduce.work.Work`.
        numbers: what the rows say, in the form of the printed numbers.
        draw: the figure in the paper's form, from the plan as plain data and the rows.
    """

    settings: type
    run: Callable[[Any], list[Row]]
    numbers: Callable[[Mapping[str, Any], Sequence[Row]], Numbers]
    draw: Callable[[Mapping[str, Any], Sequence[Row]], Any]


def kind(name: str) -> Kind:
    """A kind by name.

    Raises:
        InputError: there is none of that name.
    """
    if name not in KINDS:
        raise InputError(
            f"There is no kind of experiment {name!r}. {did_you_mean(name, KINDS)}Kinds: {', '.join(KINDS)}."
        )
    return import_module(f"intertwine.reproduce.kinds.{name}").KIND
